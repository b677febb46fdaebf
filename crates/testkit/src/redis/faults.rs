//! What can happen to a running Redis server.

use std::{fs, time::Duration};

use nix::sys::signal::Signal;

use super::{LISTENING, LOADED, Persistence, Redis};
use crate::Error;

/// A stop writes the dump first.
const STOP_DEADLINE: Duration = Duration::from_secs(30);

impl Redis {
    /// Kills (SIGKILL) the server and its children; returns when they are gone.
    ///
    /// # Errors
    ///
    /// None so far.
    pub async fn kill9(&self) -> Result<(), Error> {
        self.server.kill9();
        Ok(())
    }

    /// Stops the server (SIGTERM); returns when it has ended. With persistence it writes its file first. A
    /// paused server is resumed first.
    ///
    /// # Errors
    ///
    /// It is still there after 30 s.
    pub async fn stop(&self) -> Result<(), Error> {
        self.server.resume();
        self.server.signal(Signal::SIGTERM);
        self.server
            .ended("the Redis server to stop", STOP_DEADLINE)
            .await
    }

    /// Starts a stopped or killed server again on the same port and directory; returns when its data is loaded.
    /// With [`Persistence::None`] it comes back empty.
    ///
    /// # Errors
    ///
    /// It runs already, or does not start; the message ends with its log.
    pub async fn start_again(&self) -> Result<(), Error> {
        self.forget_unkept()?;
        self.launch(LOADED).await
    }

    /// As [`start_again`](Self::start_again), but returns as soon as the port is open, while the data is still
    /// being loaded and commands are answered with LOADING.
    ///
    /// # Errors
    ///
    /// As [`start_again`](Self::start_again).
    pub async fn start_again_loading(&self) -> Result<(), Error> {
        self.forget_unkept()?;
        self.launch(LISTENING).await
    }

    /// Stops (SIGSTOP) the server: connections stay open and nothing answers.
    ///
    /// # Errors
    ///
    /// None so far.
    pub async fn pause(&self) -> Result<(), Error> {
        self.server.pause();
        Ok(())
    }

    /// Lets a paused server go on.
    ///
    /// # Errors
    ///
    /// None so far.
    pub async fn resume(&self) -> Result<(), Error> {
        self.server.resume();
        Ok(())
    }

    /// Whether the server process is there, also when it is paused.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.server.is_running()
    }

    /// A replica or a test may have left a dump that this server does not promise to keep.
    fn forget_unkept(&self) -> Result<(), Error> {
        if self.options.persistence == Persistence::None && !self.server.is_running() {
            let dir = self.data_dir();
            fs::remove_dir_all(&dir)
                .and_then(|()| fs::create_dir(&dir))
                .map_err(|e| Error::io(format!("empty {}", dir.display()), e))?;
        }
        Ok(())
    }
}
