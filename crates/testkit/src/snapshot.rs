//! A copy of a server's directory, to put back later.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{Error, identity::Identity, sandbox, supervised::run_tool};

/// A copy of a server's data directory. Dropped, it is removed.
///
/// It can be put back any number of times, into the server it came from.
#[derive(Debug)]
pub struct Snapshot {
    dir: PathBuf,
}

impl Snapshot {
    pub(crate) async fn take(data_dir: &Path) -> Result<Self, Error> {
        let snapshot = Self {
            dir: sandbox::new_dir("snapshot")?,
        };
        copy_dir(data_dir, &snapshot.data()).await?;
        Ok(snapshot)
    }

    /// Puts the copy where `data_dir` is. Nothing may use it at this time.
    pub(crate) async fn put_back(&self, data_dir: &Path) -> Result<(), Error> {
        fs::remove_dir_all(data_dir)
            .map_err(|e| Error::io(format!("remove {}", data_dir.display()), e))?;
        copy_dir(&self.data(), data_dir).await
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the watchdog.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Copies a directory with owners, modes and times.
pub(crate) async fn copy_dir(from: &Path, to: &Path) -> Result<(), Error> {
    // As ourselves: the server's account may not be able to enter the parent of `to`.
    let args = ["-a".as_ref(), from.as_os_str(), to.as_os_str()];
    run_tool(&Identity::Ourselves, "cp".as_ref(), args)
        .await
        .map(drop)
}
