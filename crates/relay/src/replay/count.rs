//! A dry run: counts the messages that a replay is about.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::choice::Choice;
use crate::error::Result;
use crate::postgres::{Session, operator_sql};

/// Ids that one statement looks through.
const IDS_MAX: i64 = 100_000;

/// How often it is told how far it is: whoever waits for a count sits in front of it.
const TELL_INTERVAL: Duration = Duration::from_secs(1);

/// The messages of one topic.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicCount {
    /// The topic.
    pub topic: String,
    /// How many.
    pub messages: i64,
    /// Their payloads, headers and ordering keys.
    pub bytes: i64,
    /// The lowest of their ids.
    pub first_id: i64,
    /// The highest.
    pub last_id: i64,
}

/// Counts a step of ids at a time, by topic. What waits in a gap or is held back is counted, too; a replay leaves it out.
pub(super) async fn count(session: &Session, choice: &Choice) -> Result<Vec<TopicCount>> {
    let mut topics: BTreeMap<String, TopicCount> = BTreeMap::new();
    let (mut next, mut told) = (choice.from, Instant::now());
    while let Some(range) = choice.range_from(next, IDS_MAX) {
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 6] = [
            &range.first,
            &range.last,
            &choice.topics,
            &choice.ordering_key,
            &choice.since,
            &choice.until,
        ];
        let rows = session
            .all("count messages", operator_sql::REPLAY_COUNTS, &params)
            .await?;
        for row in rows {
            let topic: String = row.get(0);
            let (first_id, last_id) = (row.get(3), row.get(4));
            let sum = topics.entry(topic.clone()).or_insert(TopicCount {
                topic,
                messages: 0,
                bytes: 0,
                first_id,
                last_id,
            });
            sum.messages += row.get::<_, i64>(1);
            sum.bytes += row.get::<_, i64>(2);
            sum.last_id = last_id;
        }
        next = range.last + 1;
        if told.elapsed() >= TELL_INTERVAL {
            tracing::info!(next, to = choice.to, "counting");
            told = Instant::now();
        }
    }
    Ok(topics.into_values().collect())
}
