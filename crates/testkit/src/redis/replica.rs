//! Replicas of a Redis server: they lag, and are promoted without what they had not received.

use std::time::Duration;

use super::{Redis, RedisBuilder};
use crate::{Error, eventually};

/// A small data set is copied within a fraction of a second.
const SYNC_DEADLINE: Duration = Duration::from_secs(30);

impl Redis {
    /// Starts a replica of this server with the same options; returns when it is in sync.
    ///
    /// # Errors
    ///
    /// The replica does not start, or does not reach this server.
    pub async fn replica(&self) -> Result<Redis, Error> {
        let mut options: RedisBuilder = self.options.clone();
        if let Some(password) = &self.options.password {
            options = options.arg("--masterauth", password);
        }
        let replica = options.start().await?;
        replica.replica_of(self.peer_port()).await?;
        replica.in_sync().await?;
        Ok(replica)
    }

    /// Makes this server a replica of the one on another port (REPLICAOF): its own data is replaced. A proxy's
    /// port lets a test cut the replication off. Returns at once; see [`in_sync`](Self::in_sync).
    ///
    /// # Errors
    ///
    /// The server is down, or refuses.
    pub async fn replica_of(&self, port: u16) -> Result<(), Error> {
        let mut command = ::redis::cmd("REPLICAOF");
        command.arg("127.0.0.1").arg(port);
        self.query::<()>(&mut self.connect().await?, command)
            .await?;
        *self.lock_upstream() = Some(port);
        Ok(())
    }

    /// Waits until this replica has a copy of its master and follows it.
    ///
    /// # Errors
    ///
    /// It does not after 30 s.
    pub async fn in_sync(&self) -> Result<(), Error> {
        eventually(SYNC_DEADLINE, "the replica to be in sync", || async {
            let info = self.replication().await.map_err(|e| e.to_string())?;
            if info.contains("master_link_status:up") {
                Ok(())
            } else {
                Err(info)
            }
        })
        .await
    }

    /// Waits until this replica has everything that `master` has written by now.
    ///
    /// # Errors
    ///
    /// It has not after 30 s.
    pub async fn caught_up_with(&self, master: &Redis) -> Result<(), Error> {
        let written = offset(&master.replication().await?);
        eventually(SYNC_DEADLINE, "the replica to catch up", || async {
            let info = self.replication().await.map_err(|e| e.to_string())?;
            let got = offset(&info);
            if got >= written {
                Ok(())
            } else {
                Err(format!("offset {got:?} of {written:?}"))
            }
        })
        .await
    }

    /// Makes a replica a master (REPLICAOF NO ONE), whether or not it had received everything. The old master is
    /// left as it is.
    ///
    /// # Errors
    ///
    /// The server is down, or refuses.
    pub async fn promote(&self) -> Result<(), Error> {
        let mut command = ::redis::cmd("REPLICAOF");
        command.arg("NO").arg("ONE");
        self.query::<()>(&mut self.connect().await?, command)
            .await?;
        *self.lock_upstream() = None;
        Ok(())
    }

    async fn replication(&self) -> Result<String, Error> {
        let mut command = ::redis::cmd("INFO");
        command.arg("replication");
        self.query(&mut self.connect().await?, command).await
    }
}

/// How far a master has written, or a replica has read.
fn offset(info: &str) -> Option<u64> {
    let field = |name| info.lines().find_map(|line| line.strip_prefix(name));
    field("slave_repl_offset:")
        .or_else(|| field("master_repl_offset:"))?
        .trim()
        .parse()
        .ok()
}
