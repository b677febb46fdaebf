//! Asks Postgres for the facts; `judge_postgres.rs` says what they mean.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::finding::Seen;
use crate::error::{Error, Result};
use crate::postgres::{RELAY_SEQUENCE, RELAY_TABLES, Session, doctor_sql, sql};
use crate::status::Holder;

/// How long a notification may take to come back.
const NOTIFY_LIMIT: Duration = Duration::from_secs(1);

/// What this role is and may do.
#[derive(Clone, Debug, Default)]
pub(super) struct Rights {
    pub(super) role: String,
    pub(super) superuser: bool,
    pub(super) reads_stats: bool,
    pub(super) writes_messages: bool,
    pub(super) missing: Vec<String>,
}

/// A table of the outbox.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) name: String,
    pub(super) live: i64,
    pub(super) dead: i64,
    pub(super) autovacuum_off: bool,
}

/// A replication slot: its name, whether it is in use, and the bytes of WAL that it keeps.
pub(super) type Slot = (String, bool, i64);

/// How far a clock is ahead of this machine's, in seconds, give or take.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Clock {
    pub(super) ahead: f64,
    pub(super) give_or_take: f64,
}

/// All that Postgres says.
#[derive(Debug)]
pub(super) struct PostgresFacts {
    /// What a relay would refuse at its start: the problem and the remedy.
    pub(super) refusal: Option<(String, String)>,
    pub(super) rights: Seen<Rights>,
    pub(super) settings: Seen<HashMap<String, String>>,
    pub(super) asynchronous: Seen<Vec<String>>,
    pub(super) tables: Seen<Vec<Table>>,
    pub(super) writers: Seen<Vec<Holder>>,
    pub(super) wraparound: Seen<i64>,
    /// Of the database and of `outbox.messages` with its indexes.
    pub(super) sizes: Seen<(i64, i64)>,
    pub(super) wal: Seen<i64>,
    pub(super) slot: Seen<Option<Slot>>,
    /// Whether the trigger is on, and whether the table is the target of logical replication.
    pub(super) wiring: Seen<(bool, bool)>,
    /// Time from a notification to its arrival; none if it did not come.
    pub(super) notified: Seen<Option<Duration>>,
    pub(super) clock: Seen<Clock>,
}

/// Asks everything, one question after the other.
///
/// # Errors
///
/// That the connection is lost, or that there is no outbox. What this role may not ask is a fact of its own.
pub(super) async fn ask(session: &Session) -> Result<PostgresFacts> {
    let refusal = match session.check_schema().await {
        Ok(()) => None,
        Err(Error::Setup { problem, remedy }) if session.has_schema().await? => {
            Some((problem, remedy))
        }
        Err(error) => return Err(error),
    };
    Ok(PostgresFacts {
        refusal,
        rights: seen(rights(session).await)?,
        settings: seen(
            session
                .all("read the settings", doctor_sql::SETTINGS, &[])
                .await
                .map(|rows| rows.iter().map(|row| (row.get(0), row.get(1))).collect()),
        )?,
        asynchronous: seen(
            session
                .all("read the settings of roles", doctor_sql::ASYNCHRONOUS, &[])
                .await
                .map(|rows| rows.iter().map(|row| row.get(0)).collect()),
        )?,
        tables: seen(tables(session).await)?,
        writers: seen(writers(session).await)?,
        wraparound: seen(
            session
                .one("read the age", doctor_sql::WRAPAROUND, &[])
                .await
                .map(|row| row.get(0)),
        )?,
        sizes: seen(
            session
                .one("read the sizes", doctor_sql::SIZES, &[])
                .await
                .map(|row| (row.get(0), row.get(1))),
        )?,
        wal: seen(
            session
                .one("list the WAL", doctor_sql::WAL_SIZE, &[])
                .await
                .map(|row| row.get(0)),
        )?,
        slot: seen(
            session
                .at_most_one("read the slots", doctor_sql::SLOT, &[])
                .await
                .map(|row| row.map(|row| (row.get(0), row.get(1), row.get(2)))),
        )?,
        wiring: seen(
            session
                .one("read the trigger", doctor_sql::WIRING, &[])
                .await
                .map(|row| (row.get(0), row.get(1))),
        )?,
        notified: seen(notified(session).await)?,
        clock: seen(clock(session).await)?,
    })
}

/// What Postgres answers with an error is not to be seen; everything else is the end of the questions.
fn seen<T>(answer: Result<T>) -> Result<Seen<T>> {
    match answer {
        Ok(value) => Ok(Ok(value)),
        Err(Error::Postgres { source, .. }) if source.code().is_some() => {
            let said = source.as_db_error().map(|error| error.message().to_owned());
            Ok(Err(said.unwrap_or_default()))
        }
        Err(error) => Err(error),
    }
}

async fn rights(session: &Session) -> Result<Rights> {
    let (mut objects, mut privileges) = (Vec::new(), Vec::new());
    for right in RELAY_TABLES.iter().chain([&RELAY_SEQUENCE]) {
        for privilege in right.privileges {
            objects.push(right.object);
            privileges.push(*privilege);
        }
    }
    let row = session
        .one(
            "read the rights",
            doctor_sql::RIGHTS,
            &[&objects, &privileges],
        )
        .await?;
    Ok(Rights {
        role: row.get(0),
        superuser: row.get(1),
        reads_stats: row.get(2),
        writes_messages: row.get(3),
        missing: row.get(4),
    })
}

async fn tables(session: &Session) -> Result<Vec<Table>> {
    let rows = session
        .all("read the statistics", doctor_sql::TABLES, &[])
        .await?;
    let table = |row: &tokio_postgres::Row| Table {
        name: row.get(0),
        live: row.get(1),
        dead: row.get(2),
        autovacuum_off: row.get(3),
    };
    Ok(rows.iter().map(table).collect())
}

async fn writers(session: &Session) -> Result<Vec<Holder>> {
    let rows = session.all("list the writers", sql::HOLDERS, &[]).await?;
    let holder = |row: &tokio_postgres::Row| Holder {
        pid: row.get(1),
        application: row.get(2),
        age_seconds: row.get(3),
        query: row.get(4),
        prepared: row.get(5),
    };
    Ok(rows.iter().map(holder).collect())
}

async fn notified(session: &Session) -> Result<Option<Duration>> {
    session.batch("listen", doctor_sql::LISTEN).await?;
    let sent = Instant::now();
    session.batch("notify", doctor_sql::NOTIFY).await?;
    let came = tokio::time::timeout(NOTIFY_LIMIT, session.notified()).await;
    Ok(came.ok().map(|()| sent.elapsed()))
}

async fn clock(session: &Session) -> Result<Clock> {
    let asked = Instant::now();
    let row = session
        .one("read the clock", doctor_sql::CLOCK, &[])
        .await?;
    Ok(compare_clock(row.get(0), asked.elapsed()))
}

/// A clock that was read during the last `took`, compared with this machine's now.
pub(super) fn compare_clock(theirs: f64, took: Duration) -> Clock {
    let ours = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |time| time.as_secs_f64());
    let half = took.as_secs_f64() / 2.0;
    Clock {
        ahead: theirs - (ours - half),
        give_or_take: half,
    }
}
