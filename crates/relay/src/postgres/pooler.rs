//! Whether a connection keeps its backend, or leads to a pooler that changes it between transactions.
//!
//! Behind such a pooler the leader's lock, LISTEN and every setting would belong to whichever backend comes next. That shows
//! in nothing a single idle connection can ask: a pooler gives it the same backend again. So a second connection holds a
//! transaction open meanwhile, which takes that backend away.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio_postgres::{Client, SimpleQueryMessage};

use super::queries::sql;
use super::target::PostgresTarget;
use crate::error::{Error, Result};

/// A pool that others use too may give the same backend back by chance: one of three backends in a ninth of all rounds, one of
/// two in a fourth. Each round is four round trips to the server, once for a process.
const ROUNDS: usize = 6;

/// How long one answer may take.
const LIMIT: Duration = Duration::from_secs(5);

/// PgBouncer's code where it ends a connection because of `pool_mode=statement`.
const PROTOCOL_VIOLATION: &str = "08P01";

impl PostgresTarget {
    /// [`connect`](Self::connect), and refuses where a pooler changes the backend; looked at until it was seen once that
    /// none does.
    ///
    /// # Errors
    ///
    /// Those of the connection, and [`Error::Setup`] behind such a pooler.
    pub(crate) async fn connect_directly(
        &self,
        application_name: &str,
        limit: Duration,
    ) -> Result<(Client, Arc<Notify>)> {
        let connected = self.connect(application_name, limit).await?;
        // One at a time: two that look together can take the backends from each other in a way that hides the pooler.
        let mut is_direct = self.is_direct.lock().await;
        if *is_direct {
            return Ok(connected);
        }
        match keeps_backend(self, &connected.0).await? {
            Some(true) => *is_direct = true,
            Some(false) => return Err(behind_a_pooler(self.flag)),
            None => {
                tracing::debug!("no second connection to see whether a pooler is in between");
            }
        }
        Ok(connected)
    }
}

/// Postgres' code for a statement that this session has not prepared.
const INVALID_SQL_STATEMENT_NAME: &str = "26000";

/// What an error of a session means: that a statement is missing that it has just prepared is how a pooler shows that
/// the probe did not find out, since a busy one may have given the same backend each time.
pub(super) fn error_of(doing: &'static str, source: tokio_postgres::Error) -> Error {
    match source.code() {
        Some(code) if code.code() == INVALID_SQL_STATEMENT_NAME => {
            behind_a_pooler("--database-url")
        }
        _ => Error::Postgres { doing, source },
    }
}

/// That sessions of this target do not keep their backend.
fn behind_a_pooler(flag: &str) -> Error {
    Error::Setup {
        problem: "the connection to Postgres goes through a pooler that changes its backend between transactions \
                  (pool_mode=transaction), where locks, notifications and settings of a session are lost"
            .into(),
        remedy: format!("point {flag} at Postgres itself, or at a pool with pool_mode=session"),
    }
}

/// Whether the client's backend stays the same; none where no second connection could be had to find out. Changes
/// nothing on the server, which may be a backend that others use next.
///
/// # Errors
///
/// Those of the client's own connection.
pub(crate) async fn keeps_backend(
    target: &PostgresTarget,
    client: &Client,
) -> Result<Option<bool>> {
    let backend = pid(client, sql::BACKEND).await?;
    let Ok((other, _bell)) = target.connect("outbox-relay probe", LIMIT).await else {
        return Ok(None);
    };
    for _ in 0..ROUNDS {
        // In a pool that hands its backends out in turn this is another one; in one that hands out the latest first, ours is
        // now the next.
        if pid(client, sql::BACKEND).await? != backend {
            return Ok(Some(false));
        }
        let taken = match pid(&other, sql::HOLD_BACKEND).await {
            Ok(taken) => taken,
            Err(Error::Postgres { source, .. })
                if source
                    .code()
                    .is_some_and(|code| code.code() == PROTOCOL_VIOLATION) =>
            {
                return Ok(Some(false));
            }
            Err(_) => return Ok(None),
        };
        // Where the pool has one backend, asking now would wait for an answer that never comes.
        let same = taken != backend && pid(client, sql::BACKEND).await? == backend;
        if other.batch_execute(sql::LET_GO).await.is_err() {
            return Ok(None);
        }
        if !same {
            return Ok(Some(false));
        }
    }
    Ok(Some(true))
}

/// The backend of a connection, by the simple protocol: a prepared statement could meet one of the same name.
async fn pid(client: &Client, sql: &str) -> Result<String> {
    let doing = "ask for the backend";
    let answer = tokio::time::timeout(LIMIT, client.simple_query(sql))
        .await
        .map_err(|_| Error::Timeout {
            server: "Postgres",
            doing,
            limit: LIMIT,
        })?
        .map_err(|source| Error::Postgres { doing, source })?;
    let pid = answer.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    });
    pid.ok_or_else(|| Error::Invariant("a backend without a process id".into()))
}
