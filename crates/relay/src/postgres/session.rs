//! One session of Postgres: the leader's carries its locks, its notifications, its reads and its
//! checkpoint, so that all of them are lost together.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row, Statement};

use super::pooler;
use super::queries::{NEWEST_SCHEMA, OLDEST_SCHEMA, sql};
use super::target::PostgresTarget;
use crate::error::{Error, Result};

/// The oldest Postgres that has all that the relay uses (`idle_session_timeout`).
const SERVER_VERSION_MIN: i32 = 140_000;

/// A leader that says nothing for this long is taken for frozen; so it speaks well within it.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(1_200);

/// How long the answer to a heartbeat may take before the connection counts as lost.
const HEARTBEAT_LIMIT: Duration = Duration::from_secs(3);

/// A session with its limits.
#[derive(Debug)]
pub(crate) struct Session {
    client: Client,
    doorbell: Arc<Notify>,
    limit: Duration,
    opened: Instant,
    /// When the session last heard from Postgres, in milliseconds since it was opened.
    heard_ms: AtomicU64,
}

impl Session {
    /// Opens a session and sets it up.
    ///
    /// # Errors
    ///
    /// Those of the connection, or [`Error::Setup`] when server or schema are not as the relay needs them, or a pooler
    /// changes the backend.
    pub(crate) async fn open(
        target: &PostgresTarget,
        application_name: &str,
        limit: Duration,
    ) -> Result<Self> {
        let (client, doorbell) = target
            .connect_directly(application_name, limit.min(Duration::from_secs(10)))
            .await?;
        let session = Self::set_up(client, doorbell, limit).await?;
        session.check_schema().await?;
        Ok(session)
    }

    /// Makes a session of a connection, whatever the schema is. The connection must keep its backend: what is set here
    /// would stay with whoever has it next.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub(crate) async fn set_up(
        client: Client,
        doorbell: Arc<Notify>,
        limit: Duration,
    ) -> Result<Self> {
        let opened = Instant::now();
        let session = Session {
            client,
            doorbell,
            limit,
            opened,
            heard_ms: AtomicU64::new(0),
        };
        let settings = sql::SESSION.replace("$LIMIT", &limit.as_millis().to_string());
        session
            .call(
                "set up the session",
                pin!(session.client.batch_execute(&settings)),
            )
            .await?;
        Ok(session)
    }

    /// Whether the database has a schema `outbox` of ours, of whatever version.
    pub(crate) async fn has_schema(&self) -> Result<bool> {
        let row = self.one("look for the schema", sql::SCHEMA, &[]).await?;
        Ok(row.get(1))
    }

    /// Checks that server and schema are as the relay needs them.
    ///
    /// # Errors
    ///
    /// [`Error::Setup`] says what is not.
    pub(crate) async fn check_schema(&self) -> Result<()> {
        let row = self.one("look for the schema", sql::SCHEMA, &[]).await?;
        let (exists, ours): (bool, bool) = (row.get(0), row.get(1));
        let (version, in_recovery, encoding): (i32, bool, String) =
            (row.get(2), row.get(3), row.get(4));
        let setup = |problem: String, remedy: &str| {
            Err(Error::Setup {
                problem,
                remedy: remedy.to_owned(),
            })
        };
        if version < SERVER_VERSION_MIN {
            return setup(
                format!("Postgres {} is too old", version / 10_000),
                "use version 14 or later",
            );
        }
        if encoding != "UTF8" {
            return setup(
                format!(
                    "the database's encoding is {encoding}, where one odd byte would stop every read"
                ),
                "create the database with ENCODING 'UTF8'",
            );
        }
        if in_recovery {
            return setup(
                "this Postgres is a standby".into(),
                "point --database-url at the primary",
            );
        }
        if !exists {
            return setup(
                "the database has no schema \"outbox\"".into(),
                "run `outbox-relay migrate`",
            );
        }
        if !ours {
            return setup(
                "the schema \"outbox\" was not made by outbox-relay".into(),
                "rename it, or use another database",
            );
        }
        let row = self
            .one("read the schema version", sql::SCHEMA_VERSION, &[])
            .await?;
        let version: i32 = row.get::<_, Option<i32>>(0).unwrap_or(0);
        if version < OLDEST_SCHEMA {
            return setup(
                format!(
                    "the schema \"outbox\" is at version {version} and this relay needs {OLDEST_SCHEMA}"
                ),
                "run `outbox-relay migrate`",
            );
        }
        if version > NEWEST_SCHEMA {
            return setup(
                format!(
                    "the schema \"outbox\" is at version {version} and this relay knows up to {NEWEST_SCHEMA}"
                ),
                "upgrade outbox-relay",
            );
        }
        let row = self
            .one("read the sequence's settings", sql::SEQUENCE, &[])
            .await?;
        let (increment, cache, cycle): (i64, i64, bool) = (row.get(0), row.get(1), row.get(2));
        if (increment, cache, cycle) != (1, 1, false) {
            return setup(
                format!(
                    "outbox.messages.id has increment {increment}, cache {cache}, cycle {cycle}; the order of ids needs 1, 1, false"
                ),
                "run `ALTER TABLE outbox.messages ALTER COLUMN id SET INCREMENT 1 SET CACHE 1 SET NO CYCLE`",
            );
        }
        Ok(())
    }

    /// Runs a call with the session's limit. The call comes pinned, since it is a large future that would be copied
    /// whenever it is handed on.
    ///
    /// # Errors
    ///
    /// [`Error::Postgres`], or [`Error::Timeout`] when the answer does not come.
    async fn call<T>(
        &self,
        doing: &'static str,
        call: Pin<&mut impl Future<Output = Result<T, tokio_postgres::Error>>>,
    ) -> Result<T> {
        self.call_within(self.limit + HEARTBEAT, doing, call).await
    }

    async fn call_within<T>(
        &self,
        limit: Duration,
        doing: &'static str,
        call: Pin<&mut impl Future<Output = Result<T, tokio_postgres::Error>>>,
    ) -> Result<T> {
        let answer = match tokio::time::timeout(limit, call).await {
            Ok(answer) => answer.map_err(|source| pooler::error_of(doing, source)),
            Err(_) => {
                return Err(Error::Timeout {
                    server: "Postgres",
                    doing,
                    limit,
                });
            }
        };
        let heard = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard_ms.store(heard, Ordering::Relaxed);
        answer
    }

    /// Prepares a statement for this session.
    pub(crate) async fn prepare(&self, doing: &'static str, sql: &str) -> Result<Statement> {
        self.call(doing, pin!(self.client.prepare(sql))).await
    }

    /// All rows of a prepared statement.
    ///
    /// Several of these may be polled together: they are sent in the order in which they are first
    /// polled, and Postgres carries them out in that order.
    pub(crate) async fn rows(
        &self,
        doing: &'static str,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>> {
        self.call(doing, pin!(self.client.query(statement, params)))
            .await
    }

    /// All rows of a statement that is not worth preparing.
    pub(crate) async fn all(
        &self,
        doing: &'static str,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>> {
        self.call(doing, pin!(self.client.query(sql, params))).await
    }

    /// The only row of a statement.
    pub(crate) async fn one(
        &self,
        doing: &'static str,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Row> {
        self.call(doing, pin!(self.client.query_one(sql, params)))
            .await
    }

    /// The row of a statement that may have none.
    pub(crate) async fn at_most_one(
        &self,
        doing: &'static str,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Option<Row>> {
        self.call(doing, pin!(self.client.query_opt(sql, params)))
            .await
    }

    /// Runs a statement and returns how many rows it changed.
    pub(crate) async fn execute(
        &self,
        doing: &'static str,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<u64> {
        self.call(doing, pin!(self.client.execute(sql, params)))
            .await
    }

    /// Runs a statement without parameters.
    pub(crate) async fn batch(&self, doing: &'static str, sql: &str) -> Result<()> {
        self.call(doing, pin!(self.client.batch_execute(sql))).await
    }

    /// Waits for `work` on something else and meanwhile speaks to Postgres often enough that nobody
    /// takes this leader for frozen, and a dead connection is found.
    ///
    /// # Errors
    ///
    /// That the session is lost; `work` is dropped then.
    pub(crate) async fn speaking<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let mut work = pin!(work);
        loop {
            let silent = self.opened.elapsed()
                - Duration::from_millis(self.heard_ms.load(Ordering::Relaxed));
            match tokio::time::timeout(HEARTBEAT.saturating_sub(silent), &mut work).await {
                Ok(done) => return Ok(done),
                Err(_) => {
                    let beat = pin!(self.client.simple_query(sql::HEARTBEAT));
                    self.call_within(HEARTBEAT_LIMIT, "heartbeat", beat).await?;
                }
            }
        }
    }

    /// Waits until a notification comes, or the connection closes.
    ///
    /// # Cancel safety
    ///
    /// Safe: a notification that came before the call, or while nobody waited, ends the next call.
    pub(crate) async fn notified(&self) {
        self.doorbell.notified().await;
    }

    /// Whether the connection is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }
}
