//! What can happen to a running Postgres server.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::Postgres;
use crate::Error;

/// A smart shutdown waits for clients, a fast one writes a checkpoint.
const STOP_DEADLINE: Duration = Duration::from_secs(60);

/// How a server is stopped, as in `pg_ctl stop -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Waits until all clients have left.
    Smart,
    /// Ends all sessions, then writes a checkpoint.
    Fast,
    /// Ends at once without a checkpoint: the next start recovers from WAL.
    Immediate,
}

impl Postgres {
    /// Kills (SIGKILL) the postmaster and all its children; returns when they are gone. What was only in the
    /// WAL buffers is lost.
    ///
    /// # Errors
    ///
    /// Refused on the shared server.
    pub async fn kill9(&self) -> Result<(), Error> {
        self.may_fault()?;
        self.server.kill9();
        Ok(())
    }

    /// Stops the server; returns when it has ended. A paused server is resumed first.
    ///
    /// # Errors
    ///
    /// It is still there after 60 s (with [`Shutdown::Smart`]: clients are still connected), or it is the
    /// shared server.
    pub async fn stop(&self, mode: Shutdown) -> Result<(), Error> {
        self.may_fault()?;
        self.server.resume();
        self.server.signal(match mode {
            Shutdown::Smart => Signal::SIGTERM,
            Shutdown::Fast => Signal::SIGINT,
            Shutdown::Immediate => Signal::SIGQUIT,
        });
        self.server
            .ended("the Postgres server to stop", STOP_DEADLINE)
            .await
    }

    /// Starts a stopped or killed server again on the same port and data; returns when it takes connections.
    ///
    /// # Errors
    ///
    /// It runs already, or does not start; the message ends with its log.
    pub async fn start_again(&self) -> Result<(), Error> {
        self.launch().await
    }

    /// [`stop`](Self::stop), then [`start_again`](Self::start_again).
    ///
    /// # Errors
    ///
    /// As those two.
    pub async fn restart(&self, mode: Shutdown) -> Result<(), Error> {
        self.stop(mode).await?;
        self.start_again().await
    }

    /// Stops (SIGSTOP) every process of the server: connections stay open and nothing answers.
    ///
    /// # Errors
    ///
    /// Refused on the shared server.
    pub async fn pause(&self) -> Result<(), Error> {
        self.may_fault()?;
        self.server.pause();
        Ok(())
    }

    /// Lets a paused server go on.
    ///
    /// # Errors
    ///
    /// Refused on the shared server.
    pub async fn resume(&self) -> Result<(), Error> {
        self.may_fault()?;
        self.server.resume();
        Ok(())
    }

    /// Whether the server process is there, also when it is paused.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.server.is_running()
    }

    pub(super) fn may_fault(&self) -> Result<(), Error> {
        if self.shared {
            return Err(Error::misuse(
                "the shared Postgres serves other tests too: start one of your own to fault it",
            ));
        }
        Ok(())
    }
}
