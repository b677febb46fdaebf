//! What is said to Redis to look after it: which streams there are, what of them may go, and how full it is.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;

use super::RedisTarget;
use crate::error::{Error, Result};
use crate::rewind::{streams_step, topic_of};

const TRIM_LUA: &str = include_str!("trim.lua");

/// Entries that one step of the trimming takes away: a few milliseconds in which Redis serves nobody else.
const TRIM_ENTRIES_MAX: usize = 10_000;

/// The key of the record of what was trimmed: a hash of stream to the entry below which entries may be gone. `verify`
/// goes by it.
pub(crate) fn trimmed_key(prefix: &str) -> String {
    format!("{prefix}relay:trimmed")
}

/// A connection apart from the one that publishes.
#[derive(Debug)]
pub(crate) struct Tending {
    connection: MultiplexedConnection,
    prefix: String,
}

/// What may be trimmed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trim {
    /// Entries younger than this stay; none: all stay.
    pub(crate) age: Option<Duration>,
    /// Entries from this time of Redis' clock on stay, in milliseconds.
    pub(crate) keep_from_ms: i64,
}

/// How far a group has got in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// There is no such group.
    Absent,
    /// The oldest entry that it has not acknowledged is of this millisecond.
    Behind(u64),
    /// It has acknowledged all.
    Done,
}

/// A stream that has entries, after a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tended {
    /// Entries that went in this step.
    pub(crate) trimmed: u64,
    /// There may be more to trim.
    pub(crate) has_more: bool,
    /// How many groups it has.
    pub(crate) groups: u64,
    /// Its first entry was past the age before the step.
    pub(crate) is_overdue: bool,
    /// The millisecond of its last entry.
    pub(crate) last_ms: u64,
    /// Where the groups stand that were asked about, in that order.
    pub(crate) standings: Vec<Standing>,
}

/// How full a Redis is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Bytes that count for `maxmemory`.
    pub(crate) used: u64,
    /// `maxmemory` in bytes; 0 is no limit.
    pub(crate) max: u64,
}

impl Memory {
    /// The part that is used; 0 where there is no limit.
    pub(crate) fn ratio(self) -> f64 {
        if self.max == 0 {
            return 0.0;
        }
        self.used as f64 / self.max as f64
    }

    /// Reads the answer of `INFO memory`.
    pub(crate) fn parse(info: &str) -> Self {
        let fields: HashMap<&str, &str> = info
            .lines()
            .filter_map(|line| line.trim_end().split_once(':'))
            .collect();
        let bytes = |name: &str| -> u64 {
            let value = fields.get(name).and_then(|value| value.parse().ok());
            value.unwrap_or(0)
        };
        // Redis leaves the buffers of replicas and of the append-only file out of account, too.
        Memory {
            used: bytes("used_memory").saturating_sub(bytes("mem_not_counted_for_evict")),
            max: bytes("maxmemory"),
        }
    }
}

impl Tending {
    /// Connects. `limit` is for each call.
    ///
    /// # Errors
    ///
    /// Those of the connection.
    pub(crate) async fn connect(
        target: &RedisTarget,
        prefix: &str,
        limit: Duration,
    ) -> Result<Self> {
        Ok(Tending {
            connection: target.connect(limit).await?,
            prefix: prefix.to_owned(),
        })
    }

    /// How full this Redis is.
    ///
    /// # Errors
    ///
    /// Those of Redis.
    pub(crate) async fn memory(&mut self) -> Result<Memory> {
        let info: String = self
            .ask("read the memory", redis::cmd("INFO").arg("memory"))
            .await?;
        Ok(Memory::parse(&info))
    }

    /// One step of the search for streams: where the next one begins, 0 for the end, and the streams found with
    /// their topics.
    ///
    /// # Errors
    ///
    /// Those of Redis.
    pub(crate) async fn scan(&mut self, from: u64) -> Result<(u64, Vec<(String, String)>)> {
        let mut keys = Vec::new();
        let next = streams_step(&mut self.connection, &self.prefix, &[], from, &mut keys).await?;
        let found = keys
            .into_iter()
            .filter_map(|key| {
                let topic = topic_of(&key, &self.prefix)?.to_owned();
                Some((key, topic))
            })
            .collect();
        Ok((next, found))
    }

    /// One step of looking after a stream; none where it has no entry.
    ///
    /// The script looks at the groups and trims in one atomic step. It is sent whole, since it is called about once a
    /// minute. A crash on either side leaves it done or not done, and the next round goes on.
    ///
    /// # Errors
    ///
    /// Those of Redis.
    pub(crate) async fn tend(
        &mut self,
        stream: &str,
        trim: Trim,
        groups: &[&str],
    ) -> Result<Option<Tended>> {
        let age_ms = trim.age.map_or(0, |age| age.as_millis());
        let mut call = redis::cmd("EVAL");
        call.arg(TRIM_LUA)
            .arg(2)
            .arg(stream)
            .arg(trimmed_key(&self.prefix));
        call.arg(age_ms.to_string())
            .arg(trim.keep_from_ms)
            .arg(TRIM_ENTRIES_MAX);
        call.arg(groups);
        let reply: Vec<String> = self.ask("tend a stream", &call).await?;
        let [trimmed, has_more, count, is_overdue, last, standings @ ..] = reply.as_slice() else {
            return Ok(None);
        };
        Ok(Some(Tended {
            trimmed: trimmed.parse().unwrap_or(0),
            has_more: has_more == "1",
            groups: count.parse().unwrap_or(0),
            is_overdue: is_overdue == "1",
            last_ms: milliseconds(last),
            standings: standings.iter().map(|entry| standing(entry)).collect(),
        }))
    }

    /// The prefix of all keys.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) async fn ask<T: redis::FromRedisValue>(
        &mut self,
        doing: &'static str,
        command: &redis::Cmd,
    ) -> Result<T> {
        command
            .query_async(&mut self.connection)
            .await
            .map_err(|source| Error::Redis { doing, source })
    }
}

fn standing(entry: &str) -> Standing {
    match entry {
        "absent" => Standing::Absent,
        "" => Standing::Done,
        entry => Standing::Behind(milliseconds(entry)),
    }
}

fn milliseconds(entry: &str) -> u64 {
    entry
        .split_once('-')
        .and_then(|(ms, _)| ms.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_for_maxmemory_is_what_redis_counts() {
        let info =
            "# Memory\r\nused_memory:900\r\nmaxmemory:1000\r\nmem_not_counted_for_evict:100\r\n";
        let memory = Memory::parse(info);
        assert_eq!(
            memory,
            Memory {
                used: 800,
                max: 1_000
            }
        );
        assert!((memory.ratio() - 0.8).abs() < 1e-9);
        assert_eq!(Memory::parse("used_memory:5\r\n").ratio(), 0.0);
    }

    #[test]
    fn standings_are_read_as_the_script_writes_them() {
        assert_eq!(standing("absent"), Standing::Absent);
        assert_eq!(standing(""), Standing::Done);
        assert_eq!(standing("17-3"), Standing::Behind(17));
    }
}
