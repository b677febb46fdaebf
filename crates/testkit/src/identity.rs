//! As whom a server runs: Postgres refuses to run as root.

use std::{
    os::unix::{fs::chown, process::CommandExt},
    path::Path,
    process::Command,
};

use nix::unistd::{User, geteuid};

use crate::Error;

/// The account a server runs under.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Identity {
    /// The account that runs the tests.
    Ourselves,
    /// Another account, because we are root.
    Other { name: String, uid: u32, gid: u32 },
}

impl Identity {
    /// An account that Postgres accepts: ourselves, or as root `postgres`, or else `nobody`.
    pub(crate) fn for_postgres() -> Result<Self, Error> {
        if !geteuid().is_root() {
            return Ok(Self::Ourselves);
        }
        for name in ["postgres", "nobody"] {
            let user = User::from_name(name)
                .map_err(|e| Error::io(format!("look up the account {name}"), e.into()))?;
            if let Some(user) = user {
                let (uid, gid) = (user.uid.as_raw(), user.gid.as_raw());
                return Ok(Self::Other {
                    name: user.name,
                    uid,
                    gid,
                });
            }
        }
        Err(Error::misuse(
            "Postgres does not run as root, and there is neither an account `postgres` nor `nobody`",
        ))
    }

    /// A name for cache keys.
    pub(crate) fn label(&self) -> String {
        match self {
            Self::Ourselves => geteuid().to_string(),
            Self::Other { name, .. } => name.clone(),
        }
    }

    /// Makes `command` run under this account.
    pub(crate) fn apply(&self, command: &mut Command) {
        if let Self::Other { uid, gid, .. } = self {
            command.uid(*uid).gid(*gid);
        }
    }

    /// Gives `path` to this account.
    pub(crate) fn own(&self, path: &Path) -> Result<(), Error> {
        if let Self::Other { uid, gid, .. } = self {
            chown(path, Some(*uid), Some(*gid))
                .map_err(|e| Error::io(format!("give away {}", path.display()), e))?;
        }
        Ok(())
    }
}
