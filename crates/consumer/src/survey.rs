//! How far a group has come on each of its streams, as Redis has it.

use std::{collections::BTreeMap, time::Duration};

use redis::{
    FromRedisValue, from_redis_value,
    streams::{StreamInfoGroupsReply, StreamPendingReply, StreamRangeReply},
};
use serde::{Deserialize, Serialize};

use crate::{
    counters::Lag,
    decision::{Fault, Origin},
    link::Link,
    trouble::Trouble,
};

/// The id of a stream entry, in its order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct EntryId {
    pub(crate) ms: u64,
    pub(crate) sequence: u64,
}

impl EntryId {
    /// Just before the first entry of that millisecond.
    pub(crate) fn before_ms(ms: u64) -> Self {
        Self { ms, sequence: 0 }.before()
    }

    /// The largest id below this one; the start of all streams is below itself.
    fn before(self) -> Self {
        match (self.ms, self.sequence) {
            (0, 0) => self,
            (ms, 0) => Self {
                ms: ms - 1,
                sequence: u64::MAX,
            },
            (ms, sequence) => Self {
                ms,
                sequence: sequence - 1,
            },
        }
    }
}

impl std::fmt::Display for EntryId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.ms, self.sequence)
    }
}

impl std::str::FromStr for EntryId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text
            .split_once('-')
            .map(|(ms, sequence)| (ms.parse(), sequence.parse()));
        match parts {
            Some((Ok(ms), Ok(sequence))) => Ok(Self { ms, sequence }),
            _ => Err(format!("{text:?} is no entry id")),
        }
    }
}

impl From<EntryId> for String {
    fn from(id: EntryId) -> String {
        id.to_string()
    }
}

impl TryFrom<String> for EntryId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Where the group stands on one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) last_delivered: EntryId,
    /// All up to here is acknowledged.
    pub(crate) settled: EntryId,
    pub(crate) lag: Lag,
}

/// Where the group stands on each stream that has it, and the clock of Redis when it was looked at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Survey {
    pub(crate) streams: BTreeMap<String, Standing>,
    pub(crate) redis_ms: u64,
}

impl Survey {
    /// Looks at the streams one after the other. A stream without the group, or that refuses, is left out.
    pub(crate) async fn take(
        link: &Link,
        group: &str,
        streams: &[String],
    ) -> Result<Self, Trouble> {
        let (seconds, micros): (u64, u64) = ask(link, &redis::cmd("TIME")).await?;
        let redis_ms = seconds * 1_000 + micros / 1_000;
        let mut survey = Self {
            streams: BTreeMap::new(),
            redis_ms,
        };
        for stream in streams {
            match standing(link, group, stream, redis_ms).await {
                Ok(Some(standing)) => {
                    survey.streams.insert(stream.clone(), standing);
                }
                Ok(None) => {}
                // The group went away just now, or the stream is not ours to read.
                Err(trouble) if matches!(trouble.fault, Fault::GroupGone | Fault::RedisForbids) => {
                }
                Err(trouble) => return Err(trouble),
            }
        }
        Ok(survey)
    }
}

/// The pending entries are looked at after the last delivered one: what is acknowledged in between is settled, and
/// what is delivered in between lies above.
async fn standing(
    link: &Link,
    group: &str,
    stream: &str,
    redis_ms: u64,
) -> Result<Option<Standing>, Trouble> {
    let kind: String = ask(link, redis::cmd("TYPE").arg(stream)).await?;
    if kind == "none" {
        return Ok(None);
    }
    let mut groups = redis::cmd("XINFO");
    groups.arg("GROUPS").arg(stream);
    let groups: StreamInfoGroupsReply = ask(link, &groups).await?;
    let Some(found) = groups.groups.into_iter().find(|found| found.name == group) else {
        return Ok(None);
    };
    let last_delivered = id(&found.last_delivered_id)?;
    let mut pending = redis::cmd("XPENDING");
    pending.arg(stream).arg(group);
    let oldest_pending = match ask(link, &pending).await? {
        StreamPendingReply::Data(data) => Some(id(&data.start_id)?),
        _ => None,
    };
    let mut next = redis::cmd("XRANGE");
    next.arg(stream)
        .arg(format!("({last_delivered}"))
        .arg("+")
        .arg("COUNT")
        .arg(1);
    let next: StreamRangeReply = ask(link, &next).await?;
    let next = next.ids.first().map(|entry| id(&entry.id)).transpose()?;
    let entries = match (next, found.lag) {
        (None, _) => 0,
        (Some(_), Some(lag)) => lag,
        // Redis does not count any more once the group was set back or entries were deleted.
        (Some(_), None) => ask(link, redis::cmd("XLEN").arg(stream)).await?,
    };
    let oldest = oldest_pending.into_iter().chain(next).min();
    let age_ms = oldest.map_or(0, |oldest| redis_ms.saturating_sub(oldest.ms));
    Ok(Some(Standing {
        last_delivered,
        settled: oldest_pending
            .map_or(last_delivered, |oldest| oldest.before().min(last_delivered)),
        lag: Lag {
            entries: entries as u64,
            pending: found.pending as u64,
            age: Duration::from_millis(age_ms),
        },
    }))
}

fn id(text: &str) -> Result<EntryId, Trouble> {
    text.parse()
        .map_err(|text: String| Trouble::new(Origin::Library, Fault::OtherRedis, text))
}

pub(crate) async fn ask<T: FromRedisValue>(
    link: &Link,
    command: &redis::Cmd,
) -> Result<T, Trouble> {
    let reply = link.query(command).await?;
    from_redis_value(reply).map_err(|error| Trouble::from(redis::RedisError::from(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_before_is_the_next_lower_one() {
        let cases = [
            ("5-3", "5-2"),
            ("5-0", "4-18446744073709551615"),
            ("0-1", "0-0"),
            ("0-0", "0-0"),
        ];
        for (text, before) in cases {
            let parsed: EntryId = text.parse().unwrap();
            assert_eq!(parsed.before().to_string(), before);
        }
        for text in ["", "5", "x-1", "5-"] {
            assert!(text.parse::<EntryId>().is_err(), "{text}");
        }
    }
}
