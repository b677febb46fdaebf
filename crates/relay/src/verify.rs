//! `outbox-relay verify`: holds the rows of the outbox against the entries of the streams, and against a group's inbox.
//!
//! It reads only, and with what runs beside it still sees nothing that is not so: first the range of ids and the
//! cursor are read, then the streams, then the rows, then the inbox. So a row that the cursor had passed has its entry
//! in what is read later, an entry has its row, and an acknowledged entry its effect. What still does not agree
//! is looked at again at the end.
//!
//! 1. `verify/streams.rs` reads each stream once (`survey.lua`) and writes a compact record for each entry into
//!    temporary files (`spill.rs`), parted by id, and by ordering key.
//! 2. `verify/order.rs` goes through the parts by ordering key.
//! 3. `verify/compare.rs` goes through the parts by id, side by side with the rows; `verify/group.rs` asks the inbox.
//! 4. `verify/recheck.rs` looks again; `verify/report.rs` says what was found.

mod compare;
mod group;
mod order;
mod range;
mod recheck;
mod report;
pub(crate) mod sent;
mod spill;
pub(crate) mod streams;
mod tally;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use clap::Args;
use uuid::Uuid;

pub use report::{Example, Findings, GroupReport, VerifyReport};

use self::compare::Comparison;
use self::group::Group;
use self::range::IdRange;
use self::recheck::Recheck;
use self::sent::Sent;
use self::spill::Hashes;
use self::streams::{Reader, Stream, Survey};
use self::tally::{KEPT_MAX, Tallies};
use crate::dead_letters::InboxFlags;
use crate::error::{Error, Result};
use crate::postgres::{PostgresTarget, Session, verify_sql};
use crate::publisher::{Publisher, RedisTarget};
use crate::rewind::{Since, parse_since};

/// How long a statement or a call may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Records that are in memory at a time, 48 bytes each; the rest waits on disk. With the rows of one page and what
/// is kept of the findings, a run takes less than 100 MB, however much there is to compare.
const LOADED_MAX: usize = 400_000;

/// Clocks of Redis and Postgres may differ by this much when `--since` says where the streams are read from.
const CLOCK_SKEW_MS: i64 = 60_000;

const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// What `verify` is asked to do.
#[derive(Args, Clone)]
pub struct VerifyFlags {
    /// Also what this consumer group has made of the messages
    #[arg(long, value_name = "GROUP")]
    pub group: Option<String>,

    /// Where its inbox is
    #[command(flatten)]
    pub inbox: InboxFlags,

    /// The first id to compare [default: the first that the outbox holds]
    #[arg(long, value_name = "ID", conflicts_with = "since")]
    pub from_id: Option<i64>,

    /// The last id to compare [default: the last that was committed at the start]
    #[arg(long, value_name = "ID")]
    pub to_id: Option<i64>,

    /// Only what was published since, to the minute: a time ago such as 2h, or a moment such as 2026-02-03T04:05:06Z
    #[arg(long, value_parser = parse_since, value_name = "TIME")]
    pub since: Option<Since>,

    /// Only this topic; may be given several times [default: all]
    #[arg(long = "topic", value_name = "TOPIC")]
    pub topics: Vec<String>,

    /// Examples of each finding, 0 to 1000
    #[arg(long, default_value_t = 20, value_name = "COUNT")]
    pub limit: usize,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// What is not published or not applied yet is a finding as well
    #[arg(long)]
    pub complete: bool,
}

/// Position of an entry in its stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EntryId(pub(crate) u64, pub(crate) u64);

impl EntryId {
    pub(crate) fn parse(text: &str) -> Self {
        let (ms, sequence) = crate::rewind::id_parts(text);
        EntryId(ms, sequence)
    }
}

impl std::fmt::Display for EntryId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.0, self.1)
    }
}

/// Which of `count` equal stripes of all hashes this one is in.
fn stripe(hash: u64, count: usize) -> usize {
    let stripe = (u128::from(hash) * count as u128) >> 64;
    usize::try_from(stripe).unwrap_or(0)
}

/// What the outbox holds.
struct Held {
    outbox_id: Uuid,
    /// All ids from here on are held, unless their transactions rolled back.
    floor: i64,
    high: i64,
}

/// Compares rows, entries and the inbox. Writes nothing in either server, and no producer waits for it.
///
/// `postgres` is the producer's database; without an inbox of its own the group's is there too.
///
/// # Errors
///
/// A flag is out of its bounds, a server is out of reach or has no outbox, the streams belong to another outbox, or no
/// stream has that group.
pub async fn verify(
    postgres: &PostgresTarget,
    redis: &RedisTarget,
    prefix: &str,
    flags: &VerifyFlags,
) -> Result<VerifyReport> {
    check(flags)?;
    let session = Session::open(postgres, "outbox-relay verify", LIMIT).await?;
    session
        .batch("set up the session", verify_sql::SESSION)
        .await?;
    let group = match &flags.group {
        Some(name) => {
            let inbox = flags.inbox.postgres()?;
            Some(Group::open(inbox.as_ref().unwrap_or(postgres), name).await?)
        }
        None => None,
    };
    let mut publisher = Publisher::connect(redis, prefix, LIMIT).await?;
    let mut reader = Reader::connect(redis, prefix).await?;

    let held = held(&session).await?;
    let (range, since) = range(&session, flags, &held).await?;
    let sent = Sent::read(&mut publisher, &session, held.outbox_id).await?;
    let mut streams = reader
        .list(prefix, &flags.topics, flags.group.as_deref())
        .await?;
    if let Some(group) = &flags.group
        && !streams.iter().any(|stream| stream.has_group)
    {
        return Err(crate::rewind::no_such_group(prefix, group));
    }

    let hashes = Hashes::default();
    let mut progress = Progress::new();
    let survey = Survey {
        range,
        since,
        group: flags.group.as_deref(),
        hashes: &hashes,
    };
    let mut surveyed = reader.survey(&mut streams, &survey, &mut progress).await?;
    let mut comparison = Comparison {
        rows: session.prepare("prepare to read", verify_sql::ROWS).await?,
        details: session
            .prepare("prepare to look up", verify_sql::DETAILS)
            .await?,
        session: &session,
        group: group.as_ref(),
        streams: &streams,
        sent: &sent,
        prefix,
        topics: &flags.topics,
        hashes: &hashes,
        floor: held.floor,
        found: Tallies {
            phantom: surveyed.malformed,
            ..Tallies::default()
        },
    };
    comparison
        .run(range, &mut surveyed.by_id, &mut progress)
        .await?;
    let mut found = comparison.found;
    progress.clear();

    let sent = Sent::read(&mut publisher, &session, held.outbox_id).await?;
    Recheck {
        session: &session,
        reader: &mut reader,
        streams: &streams,
        sent: &sent,
    }
    .run(&mut found)
    .await?;
    Ok(report(
        flags,
        range,
        &held,
        (surveyed.entries, surveyed.replayed),
        &streams,
        &found,
    ))
}

fn check(flags: &VerifyFlags) -> Result<()> {
    if flags.limit > KEPT_MAX {
        return Err(Error::Config {
            field: "--limit",
            problem: format!(
                "{} is out of bounds; it must be 0 to {KEPT_MAX}",
                flags.limit
            ),
        });
    }
    if let (Some(from), Some(to)) = (flags.from_id, flags.to_id)
        && from > to
    {
        return Err(Error::Config {
            field: "--from-id",
            problem: format!("{from} is above --to-id {to}"),
        });
    }
    Ok(())
}

async fn held(session: &Session) -> Result<Held> {
    let row = session
        .one("read what the outbox holds", verify_sql::HELD, &[])
        .await?;
    let (purged_to, first, last): (i64, Option<i64>, Option<i64>) =
        (row.get(1), row.get(2), row.get(3));
    Ok(Held {
        outbox_id: row.get(0),
        // Of an empty outbox it is not known what it held.
        floor: first.unwrap_or(i64::MAX),
        high: last.unwrap_or(purged_to),
    })
}

/// The ids to compare, and an entry before which no stream has any of them.
async fn range(
    session: &Session,
    flags: &VerifyFlags,
    held: &Held,
) -> Result<(IdRange, Option<EntryId>)> {
    let to = flags.to_id.map_or(held.high, |to| to.min(held.high));
    let mut from = flags.from_id.unwrap_or(held.floor);
    let mut since = None;
    if let Some(published) = flags.since {
        let (at, ago) = match published {
            Since::At(ms) => (Some(Duration::from_millis(ms).as_secs_f64()), None),
            // Postgres knows no time before the year -4713.
            Since::Ago(ago) => (None, Some(ago.as_secs_f64().min(1e11))),
        };
        let before = session
            .at_most_one(
                "look for what was published then",
                verify_sql::PUBLISHED_BEFORE,
                &[&at, &ago],
            )
            .await?;
        if let Some(row) = before {
            let (high, ms): (i64, i64) = (row.get(0), row.get(1));
            from = from.max(high.saturating_add(1));
            let ms = u64::try_from(ms - CLOCK_SKEW_MS).unwrap_or(0);
            since = Some(EntryId(ms, 0));
        }
    }
    Ok((IdRange { from, to }, since))
}

fn report(
    flags: &VerifyFlags,
    range: IdRange,
    held: &Held,
    (entries, replayed): (u64, u64),
    streams: &[Stream],
    found: &Tallies,
) -> VerifyReport {
    let findings = |tally| Findings::new(tally, streams, flags.limit);
    let group = flags.group.as_ref().map(|group| GroupReport {
        group: group.clone(),
        streams: streams.iter().filter(|stream| stream.has_group).count() as u64,
        applied: found.applied,
        dead_letters: found.dead_letters,
        not_yet_applied: findings(&found.not_yet_applied),
        pending: found.pending,
        not_given: found.not_given,
        beyond_inbox: found.beyond_inbox,
        lost_effect: findings(&found.lost_effect),
    });
    let mut report = VerifyReport {
        from_id: range.from,
        to_id: range.to,
        held_from_id: held.floor,
        streams: streams.len() as u64,
        rows: found.rows,
        entries,
        replayed,
        published: found.published,
        not_yet_published: findings(&found.not_yet_published),
        above_cursor: found.above_cursor,
        in_gaps: found.in_gaps,
        held_back: found.held_back,
        set_aside: found.set_aside,
        trimmed: findings(&found.trimmed),
        missing: findings(&found.missing),
        doubled: findings(&found.doubled),
        out_of_order: findings(&found.out_of_order),
        phantom: findings(&found.phantom),
        group,
        wrong: false,
    };
    report.judge(flags.complete);
    report
}

/// A line on standard error that says how far a run has got, where a person may be looking.
struct Progress {
    shown: bool,
    terminal: bool,
    last: Instant,
}

impl Progress {
    fn new() -> Self {
        Progress {
            shown: false,
            terminal: std::io::stderr().is_terminal(),
            last: Instant::now(),
        }
    }

    fn show(&mut self, what: &str, done: u64, of: u64) {
        if self.terminal && self.last.elapsed() >= PROGRESS_INTERVAL {
            self.shown = true;
            self.last = Instant::now();
            // Nothing depends on it.
            let _ = write!(std::io::stderr(), "\r{done} of {of} {what}\x1b[K");
        }
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
