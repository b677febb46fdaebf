//! What `outbox-relay status` shows: the state of the outbox as both servers tell it.
//!
//! `status/outbox.rs` asks Postgres, `status/streams.rs` asks Redis about the streams, `status/care.rs` about its memory and
//! what the leader has left for us, and `status/report.rs` says it, for people and as JSON. Everything is bounded, and what was left out is said.

mod care;
mod outbox;
mod report;
mod streams;

use std::time::{Duration, Instant};

use clap::Args;
use redis::aio::MultiplexedConnection;

pub use report::{
    Backlog, BlockedStream, CaretakerShown, CursorShown, GroupShown, HoldShown, HoldStanding,
    Holder, Leader, MarkerShown, MemoryShown, Rate, RedisLoss, RedisLosses, Retention, Status,
    StreamShown, StreamsShown, TrimmingShown,
};

use crate::checkpoint;
use crate::error::{Error, Result};
use crate::pause;
use crate::postgres::{PostgresTarget, Session};
use crate::protocol::place::Place;
use crate::protocol::start::MarkerFound;
use crate::publisher::{Publisher, RedisTarget};

const LIMIT: Duration = Duration::from_secs(5);

/// The first look takes this long, to see how fast messages are published.
const RATE_OVER_MIN: Duration = Duration::from_millis(500);

/// Shortest and longest time between two looks.
const WATCH: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(3_600));

/// What `status` is asked to show.
#[derive(Args, Clone, Debug)]
pub struct StatusFlags {
    /// Print JSON, one line for each look; docs/operations.md describes it
    #[arg(long)]
    pub json: bool,

    /// Look again and again until interrupted, every 500ms to 1h [default without a value: 2s]
    #[arg(long, value_name = "INTERVAL", num_args = 0..=1, require_equals = true, default_missing_value = "2s",
          value_parser = humantime::parse_duration)]
    pub watch: Option<Duration>,

    /// Streams of this topic only; may be given several times [default: the longest streams]
    #[arg(long = "topic", value_name = "TOPIC")]
    pub topics: Vec<String>,
}

impl StatusFlags {
    /// The time between two looks, if there is to be more than one.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for one that is out of its bounds.
    pub fn interval(&self) -> Result<Option<Duration>> {
        match self.watch {
            Some(interval) if !(WATCH.0..=WATCH.1).contains(&interval) => Err(Error::Config {
                field: "--watch",
                problem: format!(
                    "{} is out of bounds; it must be 500ms to 1h",
                    humantime::format_duration(interval)
                ),
            }),
            watch => Ok(watch),
        }
    }
}

pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// Where the servers are, and how far the marker was at the last look.
pub struct StatusLooker<'a> {
    postgres: &'a PostgresTarget,
    redis: &'a RedisTarget,
    prefix: &'a str,
    topics: &'a [String],
    before: Option<(i64, Instant)>,
}

impl std::fmt::Debug for StatusLooker<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StatusLooker({:?}, {:?})", self.postgres, self.redis)
    }
}

impl<'a> StatusLooker<'a> {
    /// Looks at these servers; at the streams of these topics, or the longest where none is named.
    pub fn new(
        postgres: &'a PostgresTarget,
        redis: &'a RedisTarget,
        prefix: &'a str,
        topics: &'a [String],
    ) -> Self {
        StatusLooker {
            postgres,
            redis,
            prefix,
            topics,
            before: None,
        }
    }

    /// Asks both servers. Takes no lock that a producer could feel. The first look takes half a second, to see how fast
    /// messages are published; later ones compare with the one before.
    ///
    /// # Errors
    ///
    /// That one of the servers is out of reach, or has no outbox.
    pub async fn look(&mut self) -> Result<Status> {
        let session = Session::open(self.postgres, "outbox-relay status", LIMIT).await?;
        let found = Publisher::connect(self.redis, self.prefix, LIMIT)
            .await?
            .marker()
            .await?;
        let mut connection = self.redis.connect(LIMIT).await?;
        let first = self.marker_now(&mut connection, &found).await?;
        let begun = self
            .before
            .or(first.as_ref().map(|now| (now.high, Instant::now())));

        let checkpoint = checkpoint::read(&session).await?;
        let published = match &found {
            MarkerFound::Marker { place, .. } => Some(place),
            MarkerFound::Missing | MarkerFound::Foreign(_) => checkpoint.as_ref(),
        };
        let retention = first.as_ref().and_then(|now| now.retention);
        let mut status = outbox::ask(&session, published, checkpoint.as_ref(), retention).await?;
        status.paused = pause::read(&session).await?;
        status.marker = MarkerShown::new(&found);
        status.blocked = blocked(published);
        status.redis_memory = care::memory(&mut connection).await?;
        let now_ms = streams::now_ms(&connection).await?;
        status.caretaker = care::caretaker(&mut connection, self.prefix, now_ms).await?;
        let max_age = first.as_ref().map(|now| now.stream_max_age);
        status.retention.stream_max_age_seconds = max_age.flatten().map(|age| age.as_secs_f64());
        let known = streams::Known { now_ms, max_age };
        status.streams = streams::look(&mut connection, self.prefix, self.topics, known).await?;

        if let Some((high, since)) = begun {
            tokio::time::sleep(RATE_OVER_MIN.saturating_sub(since.elapsed())).await;
            if let Some(now) = self.marker_now(&mut connection, &found).await? {
                let at = Instant::now();
                status.published = Some(Rate::new(now.high - high, at - since));
                self.before = Some((now.high, at));
            }
        }
        Ok(status)
    }

    /// What the marker says now; none where it is gone or none of ours.
    async fn marker_now(
        &self,
        connection: &mut MultiplexedConnection,
        found: &MarkerFound,
    ) -> Result<Option<MarkerNow>> {
        if !matches!(found, MarkerFound::Marker { .. }) {
            return Ok(None);
        }
        let [high, retention, age]: [Option<String>; 3] = redis::cmd("HMGET")
            .arg(format!("{}relay:marker", self.prefix))
            .arg(&["high", "retention_ms", "stream_max_age_ms"])
            .query_async(connection)
            .await
            .map_err(|source| Error::Redis {
                doing: "look at the marker",
                source,
            })?;
        let Some(high) = high.and_then(|high| high.parse().ok()) else {
            return Ok(None);
        };
        let time = |ms: Option<String>| Some(Duration::from_millis(ms?.parse().ok()?));
        Ok(Some(MarkerNow {
            high,
            retention: time(retention),
            stream_max_age: time(age),
        }))
    }
}

struct MarkerNow {
    high: i64,
    retention: Option<Duration>,
    /// None where streams are never trimmed.
    stream_max_age: Option<Duration>,
}

fn blocked(published: Option<&Place>) -> Vec<BlockedStream> {
    let held = published.into_iter().flat_map(|place| &place.blocked);
    held.map(|(name, blocked)| BlockedStream {
        name: name.clone(),
        topic: blocked.topic.clone(),
        since_id: blocked.cursor.high,
        reason: blocked.reason.clone(),
    })
    .collect()
}
