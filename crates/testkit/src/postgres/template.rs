//! Data directories without waiting for `initdb`: made once for each set of options, then copied.

use std::{
    ffi::OsString,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io::ErrorKind,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::system_id;
use crate::{Error, identity::Identity, sandbox, snapshot::copy_dir, supervised::run_tool};

/// Makes `data_dir`: a fresh cluster with superuser `postgres`, which nobody needs a password for.
pub(super) async fn create_cluster(
    identity: &Identity,
    bin_dir: &Path,
    options: &[String],
    data_dir: &Path,
) -> Result<(), Error> {
    let template = template(identity, bin_dir, options).await?;
    copy_dir(&template, data_dir).await?;
    if !system_id::renew(identity, bin_dir, data_dir).await? {
        fs::remove_dir_all(data_dir)
            .map_err(|e| Error::io(format!("remove {}", data_dir.display()), e))?;
        init_cluster(identity, bin_dir, options, data_dir).await?;
    }
    Ok(())
}

async fn init_cluster(
    identity: &Identity,
    bin_dir: &Path,
    options: &[String],
    data_dir: &Path,
) -> Result<(), Error> {
    let mut args: Vec<OsString> = ["--username=postgres", "--auth=trust", "--no-sync", "-D"]
        .map(Into::into)
        .into();
    args.push(data_dir.into());
    args.extend(options.iter().map(Into::into));
    run_tool(identity, &bin_dir.join("initdb"), &args)
        .await
        .map(drop)
}

async fn template(
    identity: &Identity,
    bin_dir: &Path,
    options: &[String],
) -> Result<PathBuf, Error> {
    let root = cache_root()?;
    let version = run_tool(
        &Identity::Ourselves,
        &bin_dir.join("postgres"),
        ["--version"],
    )
    .await?;
    let mut hasher = DefaultHasher::new();
    (&version, bin_dir, options, identity.label()).hash(&mut hasher);
    let ready = root.join(format!("postgres-{:016x}", hasher.finish()));
    if ready.is_dir() {
        return Ok(ready);
    }

    // Made elsewhere and renamed: another process sees all of it or nothing.
    let scratch = sandbox::new_dir("template")?;
    identity.own(&scratch)?;
    let made = scratch.join("data");
    init_cluster(identity, bin_dir, options, &made).await?;
    let renamed = fs::rename(&made, &ready);
    // The watchdog removes what stays.
    let _ = fs::remove_dir_all(&scratch);
    match renamed {
        Ok(()) => Ok(ready),
        // Another process was first. Its copy is as good.
        Err(e)
            if matches!(
                e.kind(),
                ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists
            ) =>
        {
            Ok(ready)
        }
        Err(e) => Err(Error::io(format!("rename to {}", ready.display()), e)),
    }
}

/// A directory of our own below the temporary one, so that nobody else puts a cluster there.
fn cache_root() -> Result<PathBuf, Error> {
    let ourselves = nix::unistd::geteuid();
    let root = sandbox::base_dir().join(format!("outbox-testkit-templates-{ourselves}"));
    fs::create_dir_all(&root).map_err(|e| Error::io(format!("create {}", root.display()), e))?;
    let owner = root
        .symlink_metadata()
        .map_err(|e| Error::io(format!("look at {}", root.display()), e))?
        .uid();
    if owner != ourselves.as_raw() {
        return Err(Error::misuse(format!(
            "{} belongs to somebody else",
            root.display()
        )));
    }
    sandbox::set_mode(&root, 0o711)?;
    Ok(root)
}
