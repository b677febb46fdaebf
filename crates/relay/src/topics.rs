//! `outbox-relay topics`: how many partitions a topic has, and the wish for another number.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::postgres::{PostgresTarget, Session, sql};

const LIMIT: Duration = Duration::from_secs(5);

/// A topic that has, or had, another number of partitions than one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicPartitions {
    /// The topic.
    pub topic: String,
    /// How many streams its messages go to.
    pub partitions: i32,
    /// How many it should have, while the change waits for the groups.
    pub wanted: Option<i32>,
}

/// All topics that were ever given a number of partitions; every other topic has one.
///
/// # Errors
///
/// That Postgres is out of reach, or has no outbox.
pub async fn list_topics(postgres: &PostgresTarget) -> Result<Vec<TopicPartitions>> {
    let session = Session::open(postgres, "outbox-relay topics", LIMIT).await?;
    let rows = session.all("list the topics", sql::TOPICS, &[]).await?;
    let topic = |row: &tokio_postgres::Row| TopicPartitions {
        topic: row.get(0),
        partitions: row.get(1),
        wanted: row.get(2),
    };
    Ok(rows.iter().map(topic).collect())
}

/// Asks for another number of partitions, and returns the present one. The leader carries it out within
/// seconds: it holds the topic back until all groups have acknowledged what stands in its streams.
///
/// With `at_once` it does not wait: messages of one ordering key may then be applied out of order, since
/// a later one can be read from its new stream before an earlier one from the old.
///
/// # Errors
///
/// [`Error::Config`] for a topic or a number that is not allowed; or that Postgres is out of reach.
pub async fn set_partitions(
    postgres: &PostgresTarget,
    topic: &str,
    partitions: u32,
    at_once: bool,
) -> Result<i32> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if topic.is_empty() || topic.len() > 200 || !topic.bytes().all(allowed) {
        return Err(Error::Config {
            field: "TOPIC",
            problem: "must be 1 to 200 of the characters A-Z a-z 0-9 . _ -".into(),
        });
    }
    let wanted = i32::try_from(partitions)
        .ok()
        .filter(|count| (1..=1024).contains(count));
    let Some(wanted) = wanted else {
        return Err(Error::Config {
            field: "--partitions",
            problem: format!("{partitions} must be 1 to 1024"),
        });
    };
    let session = Session::open(postgres, "outbox-relay topics", LIMIT).await?;
    let row = session
        .one(
            "ask for the change",
            sql::WANT_LAYOUT,
            &[&topic, &wanted, &at_once],
        )
        .await?;
    Ok(row.get(0))
}
