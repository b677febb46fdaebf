//! `outbox-relay trace`: where one message is: committed, published, given to a group, applied; and if not, why.
//!
//! `trace/search.rs` finds its entry in a stream without reading the whole of it; `trace/report.rs` says what was found.

mod report;
mod search;

use std::time::{Duration, SystemTime};

use clap::Args;
use tokio_postgres::Row;

pub use report::{GroupTrace, Trace, TracedEntry, TracedMessage};

use crate::dead_letters::{self, InboxFlags};
use crate::error::{Error, Result};
use crate::pause;
use crate::postgres::{PostgresTarget, Session, operator_sql, sql};
use crate::publisher::{Publisher, RedisTarget};
use crate::verify::EntryId;
use crate::verify::sent::{Passed, Sent};
use crate::verify::streams::Reader;

const LIMIT: Duration = Duration::from_secs(5);

/// Clocks of Redis and of the consumer's Postgres may differ by this much, in milliseconds.
const CLOCK_SKEW_MS: f64 = 60_000.0;

/// What `trace` is asked to show.
#[derive(Args, Clone)]
pub struct TraceFlags {
    /// The message's key
    #[arg(value_name = "MESSAGE_KEY")]
    pub message_key: String,

    /// Also what this consumer group has made of it
    #[arg(long, value_name = "GROUP")]
    pub group: Option<String>,

    /// Where its inbox is
    #[command(flatten)]
    pub inbox: InboxFlags,

    /// Its topic, to ask the inbox about a message that the outbox has no longer
    #[arg(long, value_name = "TOPIC", requires = "group")]
    pub topic: Option<String>,

    /// Read its stream for as long as it takes, from the time of the message on, if the quick search does not find it
    #[arg(long)]
    pub scan: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A message as the outbox has it.
struct Found {
    message: TracedMessage,
    ordering_key: Option<String>,
    created_ms: u64,
    /// It was published by then, if it was.
    published_by_ms: Option<u64>,
}

/// Follows one message through both servers, and to a group if one is named. Writes nothing.
///
/// # Errors
///
/// No message has that key, or a server is out of reach or has no outbox, or no inbox where a group is named.
pub async fn trace(
    postgres: &PostgresTarget,
    redis: &RedisTarget,
    prefix: &str,
    flags: &TraceFlags,
) -> Result<Trace> {
    let session = Session::open(postgres, "outbox-relay trace", LIMIT).await?;
    let found = session
        .at_most_one(
            "look for the message",
            operator_sql::MESSAGE,
            &[&flags.message_key],
        )
        .await?
        .map(|row| found(&row));
    let mut publisher = Publisher::connect(redis, prefix, LIMIT).await?;
    let mut reader = Reader::connect(redis, prefix).await?;
    let mut trace = Trace {
        message_key: flags.message_key.clone(),
        ..Trace::default()
    };
    match &found {
        Some(found) => {
            let stream = publication(
                &session,
                &mut publisher,
                &mut reader,
                prefix,
                flags,
                found,
                &mut trace,
            );
            stream.await?;
        }
        None => {
            let purged_to = session
                .one("read the purge's reach", sql::PURGED_TO, &[])
                .await?
                .get(0);
            if flags.topic.is_none() {
                return Err(unknown(&flags.message_key, purged_to));
            }
            trace.not_published = Some(format!(
                "the outbox has no such message: it was never committed, or it was purged (ids up to {purged_to} were)"
            ));
        }
    }
    let topic = found.as_ref().map(|found| found.message.topic.as_str());
    if let (Some(group), Some(topic)) = (&flags.group, topic.or(flags.topic.as_deref())) {
        let inbox = flags.inbox.postgres()?;
        let inbox = inbox.as_ref().unwrap_or(postgres);
        let mut of = of_inbox(inbox, group, topic, &trace).await?;
        if let Some(entry) = &trace.entry {
            of_stream(redis, &mut reader, entry, &mut of).await?;
        }
        of.judge();
        trace.group = Some(of);
    }
    trace.message = found.map(|found| found.message);
    Ok(trace)
}

fn found(row: &Row) -> Found {
    let ms = |column| {
        row.get::<_, Option<i64>>(column)
            .and_then(|ms| u64::try_from(ms).ok())
    };
    Found {
        message: TracedMessage {
            id: row.get(0),
            topic: row.get(1),
            event_type: row.get(3),
            created_at: row.get(4),
            set_aside_because: row.get(6),
            set_aside_at: row.get(7),
        },
        ordering_key: row.get(2),
        created_ms: ms(5).unwrap_or(0),
        published_by_ms: ms(8),
    }
}

fn unknown(message_key: &str, purged_to: i64) -> Error {
    Error::Setup {
        problem: format!(
            "no message has the key {message_key:?}: it was never committed, or it was purged (ids up to {purged_to} were)"
        ),
        remedy: "check the key; with --group and --topic the inbox of a group is asked about it"
            .into(),
    }
}

/// Where its entry is, or why there is none.
async fn publication(
    session: &Session,
    publisher: &mut Publisher,
    reader: &mut Reader,
    prefix: &str,
    flags: &TraceFlags,
    found: &Found,
    trace: &mut Trace,
) -> Result<()> {
    let outbox_id = session
        .one("read the facts of this database", sql::FACTS, &[&0_i64])
        .await?
        .get(0);
    let sent = Sent::read(publisher, session, outbox_id).await?;
    let (message, key) = (&found.message, &flags.message_key);
    let streams = sent.streams(prefix, &message.topic, found.ordering_key.as_deref(), key);
    let own = streams.first().map_or("", String::as_str);
    if let Some(reason) = &message.set_aside_because {
        trace.not_published = Some(format!("set aside, since Redis refuses it: {reason}"));
        return Ok(());
    }
    if sent.passed(message.id) != Passed::Yes {
        let why = waits(session, sent.passed(message.id)).await?;
        trace.not_published = Some(why);
        return Ok(());
    }
    if let Some(reason) = sent.held_back(message.id, &message.topic, own) {
        trace.not_published = Some(format!("{own} is held back: {reason}"));
        return Ok(());
    }
    let wanted = search::Wanted {
        id: message.id,
        message_key: key.as_bytes(),
        from_ms: found.created_ms,
        to_ms: found.published_by_ms,
        to_the_end: flags.scan,
    };
    let mut notes = Vec::new();
    for stream in streams {
        match search::find(reader, &stream, &wanted).await? {
            search::Outcome::Found(entry) => {
                trace.entry = Some(traced(stream, entry, found.created_ms));
                return Ok(());
            }
            search::Outcome::NoStream => notes.push(format!("{stream} is empty or gone")),
            search::Outcome::Not { read, whole } => notes.push(format!(
                "not among {read} entries of {stream} that were read{}",
                if whole {
                    ": trimmed or deleted, or in another stream"
                } else {
                    "; --scan reads on"
                }
            )),
        }
    }
    trace.entry_unknown = Some(notes.join("; "));
    Ok(())
}

/// Why a message that was committed is not published.
async fn waits(session: &Session, passed: Passed) -> Result<String> {
    if let Some(pause) = pause::read(session).await? {
        return Ok(format!("publishing is paused {pause}"));
    }
    let leader = session
        .at_most_one("look for the leader", sql::LEADER, &[])
        .await?;
    Ok(match (leader, passed) {
        (None, _) => "no relay leads".to_owned(),
        (Some(_), Passed::Gap) => {
            "its id is in a gap of the cursor, which a relay reads again all the time".to_owned()
        }
        (Some(_), _) => "the relay has not come to it yet; see outbox-relay status".to_owned(),
    })
}

fn traced(stream: String, entry: EntryId, created_ms: u64) -> TracedEntry {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(entry.0);
    TracedEntry {
        stream,
        entry_id: entry.to_string(),
        published_at: humantime::format_rfc3339_millis(at).to_string(),
        after_seconds: (entry.0 as f64 - created_ms as f64) / 1_000.0,
    }
}

async fn of_inbox(
    target: &PostgresTarget,
    group: &str,
    topic: &str,
    trace: &Trace,
) -> Result<GroupTrace> {
    let client = dead_letters::inbox(target, "outbox-relay trace").await?;
    let stream = trace.entry.as_ref().map(|entry| &entry.stream);
    let entry = trace.entry.as_ref().map(|entry| &entry.entry_id);
    let params: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
        [&group, &topic, &trace.message_key, &stream, &entry];
    let row = client
        .query_one(operator_sql::OF_GROUP, &params)
        .await
        .map_err(|source| Error::Postgres {
            doing: "ask the inbox",
            source,
        })?;
    // What was published after that cannot have been applied before.
    let entry_ms = entry.map(|entry| EntryId::parse(entry).0 as f64);
    let forgot = entry_ms.is_none_or(|ms| ms <= row.get::<_, f64>(8) + CLOCK_SKEW_MS);
    Ok(GroupTrace {
        group: group.to_owned(),
        applied_at: row.get(0),
        attempts: row.get(1),
        last_error: row.get(2),
        dead_letter: row.get(3),
        dead_letter_state: row.get(4),
        dead_letter_reason: row.get(5),
        set_aside_at: row.get(6),
        inbox_forgot_until: row.get::<_, Option<String>>(7).filter(|_| forgot),
        ..GroupTrace::default()
    })
}

/// How far the group has got with the entry.
async fn of_stream(
    redis: &RedisTarget,
    reader: &mut Reader,
    entry: &TracedEntry,
    of: &mut GroupTrace,
) -> Result<()> {
    let at = &entry.entry_id;
    let (given, seen) = reader.page(&entry.stream, at, at, 1, &of.group).await?;
    of.reads_stream = Some(given.is_some());
    of.given = given.map(|last| EntryId::parse(at) <= last);
    if !seen.first().is_some_and(|seen| seen.pending) {
        return Ok(());
    }
    let mut connection = redis.connect(LIMIT).await?;
    let pending: redis::streams::StreamPendingCountReply = redis::cmd("XPENDING")
        .arg(&entry.stream)
        .arg(&of.group)
        .arg(&[at, at])
        .arg(1)
        .query_async(&mut connection)
        .await
        .map_err(|source| Error::Redis {
            doing: "look at what is pending",
            source,
        })?;
    // It may have been acknowledged meanwhile.
    if let Some(pending) = pending.ids.first() {
        of.pending_with = Some(pending.consumer.clone());
        of.deliveries = Some(pending.times_delivered as u64);
        of.idle_seconds = Some(pending.last_delivered_ms as f64 / 1_000.0);
    }
    Ok(())
}
