//! The files of a Redis server copied and put back, and its keys set back without a disconnect.

use ::redis::{AsyncCommands, aio::MultiplexedConnection};

use super::{LOADED, Redis};
use crate::{Error, Snapshot};

/// The keys of database 0 as [`Redis::keys`] found them.
#[derive(Clone, Debug)]
pub struct Keys {
    /// Name, serialised value, remaining life in milliseconds (0 = for ever).
    entries: Vec<(Vec<u8>, Vec<u8>, i64)>,
}

impl Redis {
    /// Writes the dump file now (SAVE), whatever the persistence is.
    ///
    /// # Errors
    ///
    /// The server is down, or cannot write.
    pub async fn save(&self) -> Result<(), Error> {
        let mut connection = self.connect().await?;
        self.query(&mut connection, ::redis::cmd("SAVE")).await
    }

    /// Copies the server's directory at one moment. What is only in memory is not in it: [`save`](Self::save)
    /// first, where the persistence is not an append-only file.
    ///
    /// # Errors
    ///
    /// The copy failed.
    pub async fn snapshot(&self) -> Result<Snapshot, Error> {
        self.server.snapshot(&self.data_dir()).await
    }

    /// Puts a snapshot back and starts the server on the same port, also with persistence `None`: an old dump
    /// was put back. A running server is killed (SIGKILL) first, so clients notice a disconnect.
    ///
    /// # Errors
    ///
    /// The copy failed, or the server does not start.
    pub async fn restore(&self, snapshot: &Snapshot) -> Result<(), Error> {
        self.server.kill9();
        snapshot.put_back(&self.data_dir()).await?;
        self.launch(LOADED).await
    }

    /// Remembers all keys of database 0 with values, consumer groups and expiry.
    ///
    /// # Errors
    ///
    /// The server is down, or refuses.
    pub async fn keys(&self) -> Result<Keys, Error> {
        let mut connection = self.connect().await?;
        let mut entries = Vec::new();
        let names: Vec<Vec<u8>> = connection
            .keys("*")
            .await
            .map_err(|e| self.error("list all keys".to_owned(), e))?;
        for name in names {
            let mut dump = ::redis::pipe();
            dump.atomic().cmd("DUMP").arg(&name).cmd("PTTL").arg(&name);
            let (value, life): (Option<Vec<u8>>, i64) = dump
                .query_async(&mut connection)
                .await
                .map_err(|e| self.error("dump a key".to_owned(), e))?;
            // Without a value it expired in between.
            if let Some(value) = value {
                entries.push((name, value, life.max(0)));
            }
        }
        Ok(Keys { entries })
    }

    /// Sets database 0 back to what [`keys`](Self::keys) remembered, in one atomic step and without any client
    /// being disconnected. Blocked readers of a group are woken with an error, as after FLUSHALL.
    ///
    /// # Errors
    ///
    /// The server is down, or refuses.
    pub async fn set_back(&self, keys: &Keys) -> Result<(), Error> {
        let mut connection = self.connect().await?;
        let mut transaction = ::redis::pipe();
        transaction.atomic().cmd("FLUSHDB").ignore();
        for (name, value, life) in &keys.entries {
            transaction
                .cmd("RESTORE")
                .arg(name)
                .arg(life)
                .arg(value)
                .ignore();
        }
        transaction
            .query_async(&mut connection)
            .await
            .map_err(|e| self.error("set all keys back".to_owned(), e))
    }

    pub(super) async fn query<T: ::redis::FromRedisValue>(
        &self,
        connection: &mut MultiplexedConnection,
        command: ::redis::Cmd,
    ) -> Result<T, Error> {
        let name = command.args_iter().next().and_then(|arg| match arg {
            ::redis::Arg::Simple(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        });
        command
            .query_async(connection)
            .await
            .map_err(|e| self.error(format!("run {}", name.unwrap_or_default()), e))
    }
}
