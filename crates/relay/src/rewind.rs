//! `outbox-relay rewind`: a consumer group is given again what was published since some time.

use std::time::{Duration, SystemTime};

use clap::Args;
use redis::aio::MultiplexedConnection;
use redis::streams::StreamInfoGroupsReply;

use crate::error::{Error, Result};
use crate::publisher::RedisTarget;

const LIMIT: Duration = Duration::from_secs(10);

/// Keys that one step of the search looks at.
const SCAN_COUNT: usize = 1_000;

/// What `rewind` is asked to do.
#[derive(Args, Clone, Debug)]
pub struct RewindFlags {
    /// The consumer group
    #[arg(long, value_name = "GROUP")]
    pub group: String,

    /// From when on entries are delivered again: a time ago such as 2h, or a moment such as 2026-02-03T04:05:06Z
    #[arg(long, value_parser = parse_since, value_name = "TIME")]
    pub since: Since,

    /// Only this topic; may be given several times [default: every topic that the group reads]
    #[arg(long = "topic", value_name = "TOPIC")]
    pub topics: Vec<String>,
}

/// A point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// So long ago, by the clock of Redis.
    Ago(Duration),
    /// Milliseconds since 1970.
    At(u64),
}

/// A stream that was set back, or was not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewound {
    /// The key of the stream.
    pub stream: String,
    /// The last entry that had been delivered.
    pub from: String,
    /// Where delivery goes on after; none when that would have been forward.
    pub to: Option<String>,
}

/// Reads a duration, or a moment as RFC 3339 has it.
pub(crate) fn parse_since(text: &str) -> std::result::Result<Since, String> {
    if let Ok(ago) = humantime::parse_duration(text) {
        return Ok(Since::Ago(ago));
    }
    let moment = humantime::parse_rfc3339(text).map_err(|_| {
        "use a time ago such as 90m or 2d, or a moment such as 2026-02-03T04:05:06Z".to_owned()
    })?;
    let since_epoch = moment
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    Ok(Since::At(
        u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX),
    ))
}

/// Sets a group back on its streams, never forward. Members that run deliver the entries again at once; what the
/// inbox still knows as applied has no second effect.
///
/// # Errors
///
/// Redis is out of reach, or no stream has that group.
pub async fn rewind(
    redis: &RedisTarget,
    prefix: &str,
    flags: &RewindFlags,
) -> Result<Vec<Rewound>> {
    let mut connection = redis.connect(LIMIT).await?;
    let since_ms = match flags.since {
        Since::At(ms) => ms,
        Since::Ago(ago) => {
            let (seconds, micros): (u64, u64) =
                ask(&mut connection, "read the clock", &redis::cmd("TIME")).await?;
            let ago = u64::try_from(ago.as_millis()).unwrap_or(u64::MAX);
            (seconds * 1_000 + micros / 1_000).saturating_sub(ago)
        }
    };
    // The largest id before that millisecond: delivery goes on after it.
    let target = match since_ms {
        0 => (0, 0),
        ms => (ms - 1, u64::MAX),
    };
    let mut rewound = Vec::new();
    for stream in streams(&mut connection, prefix, &flags.topics).await? {
        let groups: StreamInfoGroupsReply = ask(
            &mut connection,
            "read the groups",
            redis::cmd("XINFO").arg("GROUPS").arg(&stream),
        )
        .await?;
        let Some(group) = groups
            .groups
            .into_iter()
            .find(|group| group.name == flags.group)
        else {
            continue;
        };
        let mut done = Rewound {
            stream,
            from: group.last_delivered_id,
            to: None,
        };
        if target < id_parts(&done.from) {
            let to = format!("{}-{}", target.0, target.1);
            let mut set = redis::cmd("XGROUP");
            set.arg("SETID")
                .arg(&done.stream)
                .arg(&flags.group)
                .arg(&to);
            ask::<()>(&mut connection, "set the group back", &set).await?;
            done.to = Some(to);
        }
        rewound.push(done);
    }
    if rewound.is_empty() {
        return Err(no_such_group(prefix, &flags.group));
    }
    Ok(rewound)
}

/// That no stream of the topics has a group.
pub(crate) fn no_such_group(prefix: &str, group: &str) -> Error {
    Error::Setup {
        problem: format!("no stream of these topics below {prefix:?} has a group {group:?}"),
        remedy: "check --group, --topic and --stream-prefix".into(),
    }
}

/// The streams of the topics, of all their partitions, also of earlier counts; those of every topic if none is named.
pub(crate) async fn streams(
    connection: &mut MultiplexedConnection,
    prefix: &str,
    topics: &[String],
) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut cursor = 0_u64;
    loop {
        cursor = streams_step(connection, prefix, topics, cursor, &mut found).await?;
        if cursor == 0 {
            break;
        }
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// One step of that search, from a cursor of SCAN to the next; 0 begins and ends it. A stream may be found twice.
pub(crate) async fn streams_step(
    connection: &mut MultiplexedConnection,
    prefix: &str,
    topics: &[String],
    cursor: u64,
    found: &mut Vec<String>,
) -> Result<u64> {
    let mut scan = redis::cmd("SCAN");
    scan.arg(cursor)
        .arg("MATCH")
        .arg(format!("{}*", escaped(prefix)));
    scan.arg("COUNT").arg(SCAN_COUNT).arg("TYPE").arg("stream");
    let (next, keys): (u64, Vec<String>) = ask(connection, "look for streams", &scan).await?;
    found.extend(keys.into_iter().filter(|key| belongs(key, prefix, topics)));
    Ok(next)
}

/// Whether a stream is one of the topics', with or without the number of a partition.
fn belongs(key: &str, prefix: &str, topics: &[String]) -> bool {
    topic_of(key, prefix)
        .is_some_and(|topic| topics.is_empty() || topics.iter().any(|wanted| wanted == topic))
}

/// The topic of a stream. Topics have no colon.
pub(crate) fn topic_of<'k>(key: &'k str, prefix: &str) -> Option<&'k str> {
    let rest = key.strip_prefix(prefix)?;
    match rest.split_once(':') {
        Some((topic, partition)) if partition.bytes().all(|b| b.is_ascii_digit()) => Some(topic),
        Some(_) => None,
        None => Some(rest),
    }
}

fn escaped(prefix: &str) -> String {
    prefix
        .chars()
        .flat_map(|c| "*?[]\\".contains(c).then_some('\\').into_iter().chain([c]))
        .collect()
}

pub(crate) fn id_parts(id: &str) -> (u64, u64) {
    let (ms, sequence) = id.split_once('-').unwrap_or((id, "0"));
    (ms.parse().unwrap_or(0), sequence.parse().unwrap_or(0))
}

async fn ask<T: redis::FromRedisValue>(
    connection: &mut MultiplexedConnection,
    doing: &'static str,
    command: &redis::Cmd,
) -> Result<T> {
    command
        .query_async(connection)
        .await
        .map_err(|source| Error::Redis { doing, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_ago_and_a_moment_are_told_apart() {
        assert_eq!(
            parse_since("2h"),
            Ok(Since::Ago(Duration::from_secs(7_200)))
        );
        assert_eq!(parse_since("1970-01-01T00:00:01Z"), Ok(Since::At(1_000)));
        assert!(parse_since("yesterday").is_err());
    }

    #[test]
    fn streams_are_known_by_their_topic() {
        let topics = ["orders".to_owned()];
        let cases = [
            ("p:orders", true),
            ("p:orders:3", true),
            ("p:orders:x", false),
            ("p:orders2", false),
            ("q:orders", false),
        ];
        for (key, expected) in cases {
            assert_eq!(belongs(key, "p:", &topics), expected, "{key}");
        }
        assert!(belongs("p:refunds", "p:", &[]));
        assert!(!belongs("p:group:g:history", "p:", &[]));
        assert_eq!(escaped("{a}:[*"), "{a}:\\[\\*");
    }
}
