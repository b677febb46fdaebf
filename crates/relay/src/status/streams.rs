//! What Redis says of the streams and their groups.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use redis::streams::{StreamInfoGroup, StreamInfoGroupsReply, StreamPendingReply};
use redis::{Cmd, FromRedisValue, RedisResult, Script};

use super::report::{Ends, GroupShown, StreamShown, StreamsShown, TrimmingShown};
use crate::error::{Error, Result, redis_fault};
use crate::protocol::failure::{RedisFault, ReplyCode};
use crate::rewind::{id_parts, streams_step};

/// Streams that are shown, and of each the groups.
const SHOWN_MAX: usize = 100;
const GROUPS_MAX: usize = 20;

/// Time after which no further keys are looked through, and no further streams asked about.
const SEARCH_TIME_MAX: Duration = Duration::from_millis(500);
const ASK_TIME_MAX: Duration = Duration::from_millis(500);

/// Commands that are on their way at once.
const CHUNK: usize = 500;

/// Nodes of a stream that MEMORY USAGE looks at; it takes the others for equal.
const SAMPLES: usize = 5;

const ENDS_LUA: &str = include_str!("ends.lua");

/// What is known before streams are looked at.
#[derive(Clone, Copy)]
pub(super) struct Known {
    /// Redis' clock.
    pub(super) now_ms: u64,
    /// How long entries stay at least: nothing without a marker, none inside where streams are never trimmed.
    pub(super) max_age: Option<Option<Duration>>,
}

/// Looks for the streams, and asks about the longest of them.
pub(super) async fn look(
    connection: &mut MultiplexedConnection,
    prefix: &str,
    topics: &[String],
    known: Known,
) -> Result<StreamsShown> {
    let mut shown = StreamsShown {
        is_complete: true,
        ..StreamsShown::default()
    };
    let (begun, mut cursor, mut names) = (Instant::now(), 0, Vec::new());
    loop {
        match streams_step(connection, prefix, topics, cursor, &mut names).await {
            Ok(next) => cursor = next,
            Err(error) => {
                shown.not_shown = Some(no_right(error)?);
                shown.is_complete = false;
                return Ok(shown);
            }
        }
        if cursor == 0 {
            break;
        }
        if begun.elapsed() > SEARCH_TIME_MAX {
            shown.is_complete = false;
            break;
        }
    }
    names.sort_unstable();
    names.dedup();
    shown.found = names.len();
    let (mut streams, whole) = lengths(connection, names).await?;
    shown.is_complete &= whole && streams.len() <= SHOWN_MAX;
    streams.sort_by(|(a, a_length), (b, b_length)| b_length.cmp(a_length).then(a.cmp(b)));
    streams.truncate(SHOWN_MAX);

    let begun = Instant::now();
    for (name, entries) in streams {
        if begun.elapsed() > ASK_TIME_MAX {
            shown.is_complete = false;
            break;
        }
        shown
            .streams
            .push(stream(connection, name, entries, known).await?);
    }
    Ok(shown)
}

/// The streams with their lengths, and whether there was time to ask about all of them.
async fn lengths(
    connection: &MultiplexedConnection,
    names: Vec<String>,
) -> Result<(Vec<(String, u64)>, bool)> {
    let begun = Instant::now();
    let mut streams = Vec::with_capacity(names.len());
    for chunk in names.chunks(CHUNK) {
        if begun.elapsed() > ASK_TIME_MAX {
            return Ok((streams, false));
        }
        let asked = chunk
            .iter()
            .map(|name| ask::<u64>(connection, redis::cmd("XLEN").arg(name).clone()));
        for (name, length) in chunk.iter().zip(join_all(asked).await) {
            // One that is no stream any more, or that we may not read, is passed over.
            if let Some(length) = unless_refused(length)? {
                streams.push((name.clone(), length));
            }
        }
    }
    Ok((streams, true))
}

async fn stream(
    connection: &MultiplexedConnection,
    name: String,
    entries: u64,
    known: Known,
) -> Result<StreamShown> {
    let mut memory = redis::cmd("MEMORY");
    memory.arg("USAGE").arg(&name).arg("SAMPLES").arg(SAMPLES);
    let mut groups = redis::cmd("XINFO");
    groups.arg("GROUPS").arg(&name);
    let (memory, groups, ends) = futures_util::future::join3(
        ask::<Option<u64>>(connection, memory),
        ask::<StreamInfoGroupsReply>(connection, groups),
        ends(connection, &name),
    )
    .await;
    // A user who may not ask for the groups must not be told that there are none.
    let groups = unless_refused(groups)?;
    let may_ask = groups.is_some();
    let groups = groups.unwrap_or_default().groups;
    let all = groups.len();
    let asked = groups.into_iter().take(GROUPS_MAX);
    let asked = asked.map(|group| shown_group(connection, &name, group, known.now_ms));
    let groups = join_all(asked)
        .await
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    let needs: Vec<(String, u64)> = groups
        .iter()
        .map(|(group, needs_ms)| (group.group.clone(), *needs_ms))
        .collect();
    let ends = ends?;
    let judge = |(ends, max_age): (Ends, Option<Duration>)| {
        let age_ms = max_age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
        TrimmingShown::judge(ends, &needs, age_ms, known.now_ms)
    };
    let age = |ends: Ends| known.now_ms.saturating_sub(ends.first_ms) as f64 / 1_000.0;
    Ok(StreamShown {
        entries,
        memory_bytes: unless_refused(memory)?.flatten(),
        oldest_entry_seconds: ends.map(age),
        // With more groups than were asked, another one may be further behind.
        trimming: ends
            .zip(known.max_age)
            .filter(|_| may_ask && all <= GROUPS_MAX)
            .map(judge),
        groups: groups.into_iter().map(|(group, _)| group).collect(),
        groups_not_shown: all.saturating_sub(GROUPS_MAX),
        stream: name,
    })
}

/// Where a stream begins and ends; none where it is empty, or this user may not ask.
async fn ends(connection: &MultiplexedConnection, stream: &str) -> Result<Option<Ends>> {
    let script = Script::new(ENDS_LUA);
    let reply = script
        .key(stream)
        .invoke_async::<Vec<String>>(&mut connection.clone())
        .await;
    let reply = unless_refused(reply)?.unwrap_or_default();
    let [first, last, is_ours] = reply.as_slice() else {
        return Ok(None);
    };
    Ok(Some(Ends {
        first_ms: id_parts(first).0,
        last_ms: id_parts(last).0,
        is_ours: is_ours == "1",
    }))
}

/// A group, and the time of the entry from which on it needs the stream.
async fn shown_group(
    connection: &MultiplexedConnection,
    stream: &str,
    group: StreamInfoGroup,
    now_ms: u64,
) -> Result<(GroupShown, u64)> {
    let mut oldest_pending_seconds = None;
    let (mut needs_ms, _) = id_parts(&group.last_delivered_id);
    if group.pending > 0 {
        let mut pending = redis::cmd("XPENDING");
        pending.arg(stream).arg(&group.name);
        let pending = ask::<StreamPendingReply>(connection, pending).await;
        if let Some(StreamPendingReply::Data(pending)) = unless_refused(pending)? {
            let (ms, _) = id_parts(&pending.start_id);
            oldest_pending_seconds = Some(now_ms.saturating_sub(ms) as f64 / 1_000.0);
            needs_ms = needs_ms.min(ms);
        }
    }
    let shown = GroupShown {
        group: group.name,
        consumers: group.consumers as u64,
        lag: group.lag.map(|lag| lag as u64),
        pending: group.pending as u64,
        oldest_pending_seconds,
        last_delivered: group.last_delivered_id,
    };
    Ok((shown, needs_ms))
}

/// Redis' clock, in milliseconds.
pub(super) async fn now_ms(connection: &MultiplexedConnection) -> Result<u64> {
    let (seconds, micros): (u64, u64) =
        ask(connection, redis::cmd("TIME"))
            .await
            .map_err(|source| Error::Redis {
                doing: "read the clock",
                source,
            })?;
    Ok(seconds * 1_000 + micros / 1_000)
}

async fn ask<T: FromRedisValue>(
    connection: &MultiplexedConnection,
    command: Cmd,
) -> RedisResult<T> {
    command.query_async(&mut connection.clone()).await
}

/// None where Redis answers that it will not: a right is missing, or the key is gone or another.
pub(super) fn unless_refused<T>(answer: RedisResult<T>) -> Result<Option<T>> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(redis_fault(&error), RedisFault::Reply(_)) => Ok(None),
        Err(source) => Err(Error::Redis {
            doing: "look at Redis",
            source,
        }),
    }
}

/// What is said where this user may not look for streams at all; any other error stays one.
fn no_right(error: Error) -> Result<String> {
    match &error {
        Error::Redis { source, .. }
            if redis_fault(source) == RedisFault::Reply(ReplyCode::NoPerm) =>
        {
            Ok(error.one_line())
        }
        _ => Err(error),
    }
}
