//! What `outbox-relay status` shows: the state of the outbox as both servers tell it.

use std::fmt::Write as _;
use std::time::Duration;

use crate::checkpoint;
use crate::error::Result;
use crate::postgres::{PostgresTarget, Session, sql};
use crate::protocol::place::Place;
use crate::protocol::start::MarkerFound;
use crate::publisher::{Publisher, RedisTarget};

/// Rows that are counted before the backlog is called "at least".
const BACKLOG_ROWS_MAX: i64 = 1_000_000;

const LIMIT: Duration = Duration::from_secs(5);

/// The state of an outbox.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Status {
    /// The leader's application name and backend process id.
    pub leader: Option<(String, i32)>,
    /// Relays that stand by and reach Redis.
    pub standbys: i64,
    /// The cursor in Postgres.
    pub checkpoint: Option<Place>,
    /// The cursor in Redis.
    pub marker: MarkerFound,
    /// Messages that the checkpoint has not passed; counted up to a million.
    pub backlog_rows: i64,
    /// Age of the oldest of them.
    pub oldest_unpublished: Option<Duration>,
    /// Transactions that may still fill gaps.
    pub holders: Vec<Holder>,
    /// Messages that Redis refused.
    pub dead_letters: i64,
}

/// A transaction that wrote messages and is open.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Holder {
    /// Its backend; none for a prepared transaction.
    pub pid: Option<i32>,
    /// The name that the application gave itself.
    pub application: String,
    /// How long it has been open.
    pub age: Duration,
    /// What it ran last.
    pub query: String,
    /// Its name, when it is prepared for two-phase commit.
    pub prepared: Option<String>,
}

/// Asks both servers. Takes no lock that a producer could feel.
///
/// # Errors
///
/// That one of the servers is out of reach, or has no outbox.
pub async fn status(
    postgres: &PostgresTarget,
    redis: &RedisTarget,
    prefix: &str,
) -> Result<Status> {
    let session = Session::open(postgres, "outbox-relay status", LIMIT).await?;
    let marker = Publisher::connect(redis, prefix, LIMIT)
        .await?
        .marker()
        .await?;
    let checkpoint = checkpoint::read(&session).await?;
    let leader = session
        .at_most_one("look for the leader", sql::LEADER, &[])
        .await?;
    let standbys = session
        .one("count the standbys", sql::STANDBYS, &[])
        .await?
        .get(0);
    let backlog = session
        .one("count the backlog", sql::BACKLOG, &[&BACKLOG_ROWS_MAX])
        .await?;
    let oldest: Option<f64> = backlog.get(1);
    let holders = session.all("list the writers", sql::HOLDERS, &[]).await?;
    let holders = holders.iter().map(|row| Holder {
        pid: row.get(1),
        application: row.get(2),
        age: seconds(row.get(3)),
        query: row.get(4),
        prepared: row.get(5),
    });
    Ok(Status {
        leader: leader.map(|row| {
            (
                row.get::<_, Option<String>>(1).unwrap_or_default(),
                row.get(0),
            )
        }),
        standbys,
        checkpoint,
        marker,
        backlog_rows: backlog.get(0),
        oldest_unpublished: oldest.map(seconds),
        holders: holders.collect(),
        dead_letters: session
            .one("count the dead letters", sql::DEAD_LETTERS, &[])
            .await?
            .get(0),
    })
}

pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

fn rounded(time: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_millis(
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX),
    ))
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = String::new();
        self.write(&mut out)?;
        f.write_str(out.trim_end())
    }
}

impl Status {
    fn write(&self, out: &mut String) -> std::fmt::Result {
        match &self.leader {
            Some((name, pid)) => writeln!(out, "leader              {name} (backend {pid})")?,
            None => writeln!(
                out,
                "leader              none: no relay runs, or none reaches both servers"
            )?,
        }
        writeln!(out, "standbys            {}", self.standbys)?;
        match &self.checkpoint {
            Some(place) => write_place(out, "checkpoint", place)?,
            None => writeln!(out, "checkpoint          none: nothing was published yet")?,
        }
        match &self.marker {
            MarkerFound::Marker { place, .. } => write_place(out, "marker", place)?,
            MarkerFound::Missing => writeln!(
                out,
                "marker              none in this Redis under this prefix"
            )?,
            MarkerFound::Foreign(what) => writeln!(
                out,
                "marker              the key holds something else: {what}"
            )?,
        }
        let at_least = if self.backlog_rows >= BACKLOG_ROWS_MAX {
            "at least "
        } else {
            ""
        };
        writeln!(
            out,
            "backlog             {at_least}{} messages",
            self.backlog_rows
        )?;
        match self.oldest_unpublished {
            Some(age) => writeln!(out, "oldest unpublished  {}", rounded(age))?,
            None => writeln!(out, "oldest unpublished  none")?,
        }
        writeln!(out, "dead letters        {}", self.dead_letters)?;
        for holder in &self.holders {
            let who = match (&holder.prepared, holder.pid) {
                (Some(name), _) => format!("prepared transaction {name:?}"),
                (None, Some(pid)) => format!("backend {pid} ({})", holder.application),
                (None, None) => "a prepared transaction".to_owned(),
            };
            writeln!(
                out,
                "open writer         {who}, for {}: {}",
                rounded(holder.age),
                holder.query.replace('\n', " ")
            )?;
        }
        let blocked = match &self.marker {
            MarkerFound::Marker { place, .. } => Some(&place.blocked),
            MarkerFound::Missing | MarkerFound::Foreign(_) => {
                self.checkpoint.as_ref().map(|place| &place.blocked)
            }
        };
        for (stream, blocked) in blocked.into_iter().flatten() {
            writeln!(
                out,
                "blocked stream      {stream} since id {}: {}",
                blocked.cursor.high, blocked.reason
            )?;
        }
        Ok(())
    }
}

fn write_place(out: &mut String, name: &str, place: &Place) -> std::fmt::Result {
    let gaps = &place.cursor.gaps;
    write!(
        out,
        "{name:<20}high {}, epoch {}, page {}",
        place.cursor.high, place.epoch, place.page
    )?;
    match gaps.first() {
        Some(first) if gaps.len() == 1 => writeln!(out, ", 1 gap at id {first}"),
        Some(first) => writeln!(out, ", {} gaps from id {first}", gaps.len()),
        None => writeln!(out, ", no gaps"),
    }
}
