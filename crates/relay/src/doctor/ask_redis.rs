//! Asks Redis for the facts; `judge_redis.rs` says what they mean.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::streams::{StreamInfoConsumersReply, StreamInfoGroupsReply};
use redis::{Cmd, FromRedisValue, RedisError, Script};

use super::ask_postgres::{Clock, compare_clock};
use super::finding::Seen;
use crate::error::{Error, Result, redis_fault};
use crate::protocol::failure::{RedisFault, ReplyCode};
use crate::publisher::RELAY_COMMANDS;
use crate::rewind::streams_step;

const RIGHTS_LUA: &str = include_str!("rights.lua");

/// Time after which no further keys are looked through, and no further streams asked about.
const SEARCH_TIME_MAX: Duration = Duration::from_millis(500);
const ASK_TIME_MAX: Duration = Duration::from_millis(500);

/// Settings that INFO does not tell.
const SETTINGS: [&str; 3] = ["save", "appendfsync", "min-replicas-to-write"];

/// What this user may do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Rights {
    /// It may run scripts, and lacks these rules of its ACL.
    Lacks(Vec<String>),
    /// It may not even run scripts, by which the others are found out.
    NoScripts,
}

/// A stream and its groups.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) name: String,
    pub(super) entries: u64,
    pub(super) groups: Vec<Group>,
}

/// A group on a stream. The members are looked at only where it has something to do.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) pending: u64,
    pub(super) lag: u64,
    pub(super) members: Vec<Member>,
}

/// A member of a group: what it holds, and since when it has been silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) pending: u64,
    pub(super) idle: Duration,
}

/// The streams below the prefix.
#[derive(Debug, Default)]
pub(super) struct Streams {
    pub(super) streams: Vec<Stream>,
    /// Whether there was time for all of them.
    pub(super) is_complete: bool,
}

/// All that Redis says.
#[derive(Debug)]
pub(super) struct RedisFacts {
    pub(super) prefix: String,
    pub(super) info: Seen<HashMap<String, String>>,
    pub(super) settings: Seen<HashMap<String, String>>,
    pub(super) rights: Seen<Rights>,
    pub(super) clock: Seen<Clock>,
    pub(super) streams: Seen<Streams>,
}

/// Asks everything, one question after the other.
///
/// # Errors
///
/// That the connection is lost. What this user may not ask is a fact of its own.
pub(super) async fn ask(
    connection: &mut MultiplexedConnection,
    prefix: &str,
) -> Result<RedisFacts> {
    let info = seen(call::<String>(connection, &redis::cmd("INFO")).await)?;
    let mut settings = redis::cmd("CONFIG");
    settings.arg("GET").arg(&SETTINGS);
    Ok(RedisFacts {
        prefix: prefix.to_owned(),
        info: info.map(|text| {
            text.lines()
                .filter_map(|line| line.trim_end().split_once(':'))
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect()
        }),
        settings: seen(call(connection, &settings).await)?,
        rights: rights(connection, prefix).await?,
        clock: clock(connection).await?,
        streams: match streams(connection, prefix).await {
            Ok(streams) => Ok(streams),
            Err(error) => seen(Err(error))?,
        },
    })
}

async fn call<T: FromRedisValue>(
    connection: &mut MultiplexedConnection,
    command: &Cmd,
) -> Result<T> {
    command
        .query_async(connection)
        .await
        .map_err(|source| Error::Redis {
            doing: "look",
            source,
        })
}

/// What Redis answers with an error is not to be seen; everything else is the end of the questions.
fn seen<T>(answer: Result<T>) -> Result<Seen<T>> {
    match answer {
        Ok(value) => Ok(Ok(value)),
        Err(Error::Redis { source, .. })
            if matches!(redis_fault(&source), RedisFault::Reply(_)) =>
        {
            Ok(Err(said(&source)))
        }
        Err(error) => Err(error),
    }
}

/// The error as Redis wrote it.
fn said(error: &RedisError) -> String {
    let code = error.code().unwrap_or_default();
    format!("{code} {}", error.detail().unwrap_or_default())
        .trim()
        .to_owned()
}

async fn rights(connection: &mut MultiplexedConnection, prefix: &str) -> Result<Seen<Rights>> {
    let script = Script::new(RIGHTS_LUA);
    let mut invocation = script.prepare_invoke();
    for command in RELAY_COMMANDS {
        let words = command.sample(prefix);
        invocation.arg(words.len()).arg(words);
    }
    let refused: Vec<usize> = match invocation.invoke_async(connection).await {
        Ok(refused) => refused,
        Err(error) if redis_fault(&error) == RedisFault::Reply(ReplyCode::NoPerm) => {
            return Ok(Ok(Rights::NoScripts));
        }
        Err(source) => {
            return seen(Err(Error::Redis {
                doing: "ask for the rights",
                source,
            }));
        }
    };
    let lacks = refused
        .into_iter()
        .filter_map(|call| RELAY_COMMANDS.get(call.checked_sub(1)?))
        .map(|command| format!("+{}", command.rule));
    Ok(Ok(Rights::Lacks(lacks.collect())))
}

async fn clock(connection: &mut MultiplexedConnection) -> Result<Seen<Clock>> {
    let asked = Instant::now();
    let time = seen(call::<(u64, u64)>(connection, &redis::cmd("TIME")).await)?;
    let took = asked.elapsed();
    Ok(time.map(|(seconds, micros)| compare_clock(seconds as f64 + micros as f64 / 1e6, took)))
}

async fn streams(connection: &mut MultiplexedConnection, prefix: &str) -> Result<Streams> {
    let (begun, mut cursor, mut names) = (Instant::now(), 0, Vec::new());
    let mut found = Streams {
        is_complete: true,
        ..Streams::default()
    };
    loop {
        cursor = streams_step(connection, prefix, &[], cursor, &mut names).await?;
        if cursor == 0 {
            break;
        }
        if begun.elapsed() > SEARCH_TIME_MAX {
            found.is_complete = false;
            break;
        }
    }
    names.sort_unstable();
    names.dedup();
    let begun = Instant::now();
    for name in names {
        if begun.elapsed() > ASK_TIME_MAX {
            found.is_complete = false;
            break;
        }
        // A stream that is gone by now, or that we may not read, is passed over.
        if let Ok(stream) = seen(stream(connection, name).await)? {
            found.streams.push(stream);
        }
    }
    Ok(found)
}

async fn stream(connection: &mut MultiplexedConnection, name: String) -> Result<Stream> {
    let entries = call(connection, redis::cmd("XLEN").arg(&name)).await?;
    let mut ask = redis::cmd("XINFO");
    let reply: StreamInfoGroupsReply = call(connection, ask.arg("GROUPS").arg(&name)).await?;
    let mut groups = Vec::new();
    for group in reply.groups {
        let (pending, lag) = (group.pending as u64, group.lag.unwrap_or(0) as u64);
        let members = if pending > 0 || lag > 0 {
            let mut ask = redis::cmd("XINFO");
            ask.arg("CONSUMERS").arg(&name).arg(&group.name);
            let reply: StreamInfoConsumersReply = call(connection, &ask).await?;
            let member = |consumer: &redis::streams::StreamInfoConsumer| Member {
                pending: consumer.pending as u64,
                idle: Duration::from_millis(consumer.idle as u64),
            };
            reply.consumers.iter().map(member).collect()
        } else {
            Vec::new()
        };
        groups.push(Group {
            name: group.name,
            pending,
            lag,
            members,
        });
    }
    Ok(Stream {
        name,
        entries,
        groups,
    })
}
