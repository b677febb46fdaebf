//! The data directory copied and put back, as a storage snapshot would be.

use std::{fs, process::Command};

use super::Postgres;
use crate::{Error, Snapshot};

impl Postgres {
    /// Copies the data directory at one moment, like a storage snapshot. Sessions stay connected: the processes
    /// are stopped (SIGSTOP) for the fraction of a second that the copy takes. The copy is what a crash at that
    /// moment would have left, so a restore recovers from WAL.
    ///
    /// # Errors
    ///
    /// The copy failed, or this is the shared server.
    pub async fn snapshot(&self) -> Result<Snapshot, Error> {
        self.may_fault()?;
        self.server.snapshot(&self.data_dir()).await
    }

    /// Copies the data directory of a server that does not run. After [`stop`](Self::stop) with
    /// [`Shutdown::Fast`](crate::Shutdown::Fast) or `Smart` the copy is clean; after `Immediate` or
    /// [`kill9`](Self::kill9) it is what the crash left.
    ///
    /// # Errors
    ///
    /// The server runs, or the copy failed.
    pub async fn snapshot_stopped(&self) -> Result<Snapshot, Error> {
        if self.server.is_running() {
            return Err(Error::misuse(
                "Postgres runs: stop it before `snapshot_stopped`, or take a `snapshot`",
            ));
        }
        Snapshot::take(&self.data_dir()).await
    }

    /// Puts a snapshot back and starts the server on the same port, with the same system identifier and
    /// timeline as when it was taken. A running server is killed (SIGKILL) first.
    ///
    /// # Errors
    ///
    /// The copy failed, the server does not start, or it is the shared server.
    pub async fn restore(&self, snapshot: &Snapshot) -> Result<(), Error> {
        self.may_fault()?;
        self.server.kill9();
        self.release_shared_memory();
        snapshot.put_back(&self.data_dir()).await?;
        // It names a process that had these files open when they were copied.
        let lock = self.data_dir().join("postmaster.pid");
        if lock.exists() {
            fs::remove_file(&lock)
                .map_err(|e| Error::io(format!("remove {}", lock.display()), e))?;
        }
        self.launch().await
    }

    /// Frees the small System V segment that a killed server leaves behind, whose id is in its lock file: the
    /// machine has room for some thousands only.
    fn release_shared_memory(&self) {
        let lock = fs::read_to_string(self.data_dir().join("postmaster.pid")).unwrap_or_default();
        if let Some(id) = lock
            .lines()
            .nth(6)
            .and_then(|line| line.split_whitespace().nth(1))
        {
            // Where `ipcrm` is missing the segment stays until the machine restarts.
            let _ = Command::new("ipcrm").args(["-m", id]).output();
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Its parent kills it again, without effect, and removes the directory.
        self.server.kill9();
        self.release_shared_memory();
    }
}
