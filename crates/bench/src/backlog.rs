//! A backlog of committed messages, and the outbox as it was before any of them was sent.

use std::time::Instant;

use bytes::Bytes;
use futures_util::SinkExt as _;
use outbox_testkit::Redis;
use tokio_postgres::Client;

use crate::{
    Error,
    rows::{Row, Spread, row},
    stage::{Relay, Stage, redis_cpu_s},
};

pub(crate) const COPY_MESSAGES: &str = "COPY outbox.messages
    (topic, ordering_key, message_key, event_type, created_at, headers, payload) FROM STDIN";

/// What a relay leaves in Postgres, besides the messages.
const FORGET_SENDING: &str = "
    TRUNCATE outbox.checkpoint, outbox.checkpoint_gaps, outbox.blocked_streams, outbox.milestones;
    UPDATE outbox.purge SET purged_to = 0";

/// A backlog is not read for the first time in its life: the first reader would write hint bits for all others.
const SETTLE: &str = "VACUUM (ANALYZE) outbox.messages";

const LINES_OF_A_CHUNK: u64 = 2_000;

/// A database whose outbox holds messages 1 to `rows`.
pub(crate) struct Backlog {
    pub(crate) database: String,
    pub(crate) rows: u64,
    pub(crate) spread: Spread,
}

/// What draining took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drained {
    pub(crate) rows_per_s: f64,
    pub(crate) redis_us_per_row: f64,
    pub(crate) relay_us_per_row: f64,
    pub(crate) peak_rss_mb: f64,
}

impl Backlog {
    pub(crate) async fn load(stage: &Stage, rows: u64, spread: Spread) -> Result<Self, Error> {
        stage.progress.step(format!("writing {rows} messages"));
        let database = stage.fresh_outbox().await?;
        let client = stage.connect(&database).await?;
        Self::fill(&client, rows, spread).await?;
        client.batch_execute(SETTLE).await?;
        Ok(Self {
            database,
            rows,
            spread,
        })
    }

    /// Writes messages 1 to `rows`, in one transaction.
    pub(crate) async fn fill(client: &Client, rows: u64, spread: Spread) -> Result<(), Error> {
        copy_rows(client, COPY_MESSAGES, 1..=rows, |number| {
            row(number, spread)
        })
        .await
    }

    /// Starts a relay on a Redis that is new, and waits until all messages are in their streams. The clock starts with
    /// the process.
    pub(crate) async fn drain(&self, stage: &Stage, args: &[&str]) -> Result<Drained, Error> {
        let (drained, relay) = self
            .drain_and_keep(stage, &stage.url_beside(&self.database), args)
            .await?;
        relay.stop().await?;
        Ok(drained)
    }

    /// The same as another role, with the relay still running.
    pub(crate) async fn drain_and_keep(
        &self,
        stage: &Stage,
        url: &str,
        args: &[&str],
    ) -> Result<(Drained, Relay), Error> {
        self.forget_sending(stage).await?;
        let redis = Redis::start().await?;
        let mut connection = redis.connect().await?;
        let redis_before = redis_cpu_s(&mut connection).await?;
        let begun = Instant::now();
        let relay = stage.relay(url, &redis, args)?;
        relay.published(&mut connection, self.rows).await?;
        let seconds = begun.elapsed().as_secs_f64();
        let drained = Drained {
            rows_per_s: self.rows as f64 / seconds,
            redis_us_per_row: (redis_cpu_s(&mut connection).await? - redis_before) * 1e6
                / self.rows as f64,
            relay_us_per_row: relay.cpu_s()? * 1e6 / self.rows as f64,
            peak_rss_mb: relay.peak_rss_mb()?,
        };
        let entries = self.entries(&redis).await?;
        if entries != self.rows {
            return Err(format!("{entries} entries came of {} messages", self.rows).into());
        }
        Ok((drained, relay))
    }

    /// Has the outbox as if nothing had ever been sent.
    pub(crate) async fn forget_sending(&self, stage: &Stage) -> Result<(), Error> {
        let client = stage.connect(&self.database).await?;
        Ok(client.batch_execute(FORGET_SENDING).await?)
    }

    async fn entries(&self, redis: &Redis) -> Result<u64, Error> {
        let mut connection = redis.connect().await?;
        let mut lengths = redis::pipe();
        for topic in 0..self.spread.topics {
            lengths
                .cmd("XLEN")
                .arg(crate::rows::stream(&crate::rows::topic(topic)));
        }
        let lengths: Vec<u64> = lengths.query_async(&mut connection).await?;
        Ok(lengths.iter().sum())
    }
}

/// Writes rows with COPY, in one transaction.
pub(crate) async fn copy_rows(
    client: &Client,
    copy: &str,
    numbers: std::ops::RangeInclusive<u64>,
    row: impl Fn(u64) -> Row,
) -> Result<(), Error> {
    let sink = client.copy_in::<_, Bytes>(copy).await?;
    let mut sink = std::pin::pin!(sink);
    let mut lines = String::new();
    for number in numbers {
        row(number).copy_line(&mut lines);
        if number % LINES_OF_A_CHUNK == 0 {
            sink.send(Bytes::from(std::mem::take(&mut lines))).await?;
        }
    }
    sink.send(Bytes::from(lines)).await?;
    sink.finish().await?;
    Ok(())
}
