//! What stands in the streams already, and what their groups have acknowledged of it.

use std::collections::HashMap;
use std::time::Duration;

use redis::AsyncCommands;

use super::{Publisher, REPLAY_FIELD};
use crate::error::{Error, Result, redis_fault};
use crate::protocol::failure::{RedisFault, ReplyCode};

/// Clocks of two Redis servers may differ by this much when a stream's tail is searched.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(60);

/// Entries of a stream's tail that are read in one call.
const TAIL_CHUNK: usize = 1_000;

impl Publisher {
    /// A group that has not acknowledged all of a stream; none when every group has.
    pub(crate) async fn undrained_group(&mut self, stream: &str) -> Result<Option<String>> {
        let failed = |source| Error::Redis {
            doing: "look at a stream's groups",
            source,
        };
        let last: redis::streams::StreamRangeReply = self
            .connection
            .xrevrange_count(stream, "+", "-", 1)
            .await
            .map_err(failed)?;
        let Some(last) = last.ids.first().map(|entry| entry.id.clone()) else {
            return Ok(None);
        };
        let groups: redis::streams::StreamInfoGroupsReply =
            self.connection.xinfo_groups(stream).await.map_err(failed)?;
        let behind = |group: &redis::streams::StreamInfoGroup| {
            group.pending > 0 || stream_id(&group.last_delivered_id) < stream_id(&last)
        };
        Ok(groups
            .groups
            .into_iter()
            .find(behind)
            .map(|group| group.name))
    }

    /// Which of the wanted ids stand in a stream, with their message keys, among the entries that were
    /// added since `since_ms` (less the possible skew of clocks).
    ///
    /// Reads forward, since what was published right after that time is what matters most, and stops
    /// after `entries_max` entries; the second value says whether it reached the end.
    pub(crate) async fn tail(
        &mut self,
        stream: &str,
        since_ms: i64,
        entries_max: usize,
        wanted: impl Fn(i64) -> bool,
    ) -> Result<(HashMap<i64, String>, bool)> {
        let mut from = tail_from_ms(since_ms).to_string();
        let mut found = HashMap::new();
        let mut seen = 0;
        while seen < entries_max {
            let range: redis::RedisResult<redis::streams::StreamRangeReply> = redis::cmd("XRANGE")
                .arg(stream)
                .arg(&from)
                .arg("+")
                .arg("COUNT")
                .arg(TAIL_CHUNK)
                .query_async(&mut self.connection)
                .await;
            let entries = match range {
                Ok(range) => range.ids,
                // A key of another type, or one that we may not read, holds no entry of ours to find.
                Err(error)
                    if matches!(
                        redis_fault(&error),
                        RedisFault::Reply(ReplyCode::WrongType | ReplyCode::NoPerm)
                    ) =>
                {
                    return Ok((found, true));
                }
                Err(source) => {
                    return Err(Error::Redis {
                        doing: "read a stream's tail",
                        source,
                    });
                }
            };
            let Some(last) = entries.last() else {
                return Ok((found, true));
            };
            from = format!("({}", last.id);
            seen += entries.len();
            // What was published again on a person's word proves nothing of what the relay published.
            for entry in entries.iter().filter(|e| !e.contains_key(REPLAY_FIELD)) {
                let id = entry.get::<i64>("id").filter(|id| wanted(*id));
                if let (Some(id), Some(key)) = (id, entry.get::<String>("message_key")) {
                    found.insert(id, key);
                }
            }
        }
        Ok((found, false))
    }
}

/// From where on a tail is searched for what was added since some time, in milliseconds.
pub(crate) fn tail_from_ms(since_ms: i64) -> i64 {
    let skew_ms = i64::try_from(CLOCK_SKEW_MAX.as_millis()).unwrap_or(i64::MAX);
    (since_ms - skew_ms).max(0)
}

/// A stream id as two numbers, to be compared.
fn stream_id(id: &str) -> (u64, u64) {
    let (ms, sequence) = id.split_once('-').unwrap_or((id, "0"));
    (ms.parse().unwrap_or(0), sequence.parse().unwrap_or(0))
}
