//! `outbox-relay pause` and `resume`: publishing stops and goes on again, whoever leads.

use std::time::Duration;

use crate::dead_letters::printable;
use crate::error::{Error, Result};
use crate::postgres::{PostgresTarget, Session, operator_sql};

const LIMIT: Duration = Duration::from_secs(5);

/// Longest reason.
const REASON_BYTES_MAX: usize = 1_000;

/// A pause that holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pause {
    /// What was given as its reason; may be empty.
    pub reason: String,
    /// Since when, as RFC 3339 has it, in UTC.
    pub since: String,
    /// The role that asked for it.
    pub by: String,
    /// How long it has lasted.
    pub age: Duration,
}

impl std::fmt::Display for Pause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "since {} by {}", self.since, printable(&self.by))?;
        match self.reason.as_str() {
            "" => Ok(()),
            reason => write!(f, ": {}", printable(reason)),
        }
    }
}

/// The pause that holds now, if one does.
pub(crate) async fn read(session: &Session) -> Result<Option<Pause>> {
    let row = session
        .at_most_one("look whether it is paused", operator_sql::PAUSED, &[])
        .await?;
    Ok(row.map(|row| Pause {
        reason: row.get(0),
        since: row.get(1),
        by: row.get(2),
        age: crate::status::seconds(row.get(3)),
    }))
}

/// Pauses publishing: a leader that runs stops within its poll interval, and no later one begins. Producers notice
/// nothing; their messages wait in the outbox, and the purge takes none that is not published. Returns whether it was
/// not paused before; where it was, the reason is replaced.
///
/// # Errors
///
/// [`Error::Config`] for a reason of more than 1,000 bytes; or that Postgres is out of reach, or has no outbox.
pub async fn pause(postgres: &PostgresTarget, reason: &str) -> Result<bool> {
    if reason.len() > REASON_BYTES_MAX {
        return Err(Error::Config {
            field: "--reason",
            problem: format!(
                "has {} bytes; it must be up to {REASON_BYTES_MAX}",
                reason.len()
            ),
        });
    }
    let session = Session::open(postgres, "outbox-relay pause", LIMIT).await?;
    let row = session
        .one("pause", operator_sql::PAUSE, &[&reason])
        .await?;
    Ok(row.get(0))
}

/// Ends a pause: the leader goes on at once. Returns how long it lasted, none where there was none.
///
/// # Errors
///
/// That Postgres is out of reach, or has no outbox.
pub async fn resume(postgres: &PostgresTarget) -> Result<Option<Duration>> {
    let session = Session::open(postgres, "outbox-relay resume", LIMIT).await?;
    let row = session
        .at_most_one("resume", operator_sql::RESUME, &[])
        .await?;
    Ok(row.map(|row| crate::status::seconds(row.get(1))))
}
