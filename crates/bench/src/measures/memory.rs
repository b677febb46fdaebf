//! The relay's peak memory. It is bounded by pages, and not by what waits.

use std::fmt::Write as _;

use bytes::Bytes;
use futures_util::SinkExt as _;
use outbox_testkit::Redis;
use tokio_postgres::Client;

use crate::{
    Error,
    figures::{Outcome, Target},
    stage::Stage,
};

/// Bytes of a large payload.
const LARGE_BYTES: usize = 4 << 20;

const COPY_LARGE: &str = "COPY outbox.messages (topic, payload) FROM STDIN";

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let backlog = stage.backlog().await?;
    let large = stage.fresh_outbox().await?;
    let client = stage.connect(&large).await?;
    stage.progress.step("writing large messages");
    write_large(&client, stage.sizes.large_rows).await?;
    let (mut of_many, mut of_large) = (Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        stage.round("many messages", round);
        of_many.push(backlog.drain(stage, &[]).await?.peak_rss_mb);
        stage.round("large messages", round);
        of_large.push(drain_large(stage, &large, stage.sizes.large_rows).await?);
    }
    stage.drop_database(&large).await?;
    let many = format!("{} messages", backlog.rows);
    let few = format!("{} messages of 4 MiB", stage.sizes.large_rows);
    Ok(Outcome::default()
        .must(many, "MB", &of_many, Target::AtMost(40.0))
        .must(few, "MB", &of_large, Target::AtMost(120.0)))
}

/// Text that does not compress well, as JSON strings.
async fn write_large(client: &Client, rows: u64) -> Result<(), Error> {
    let sink = client.copy_in::<_, Bytes>(COPY_LARGE).await?;
    let mut sink = std::pin::pin!(sink);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..rows {
        let mut line = String::with_capacity(LARGE_BYTES + 16);
        line.push_str("large\t\"");
        while line.len() < LARGE_BYTES {
            // xorshift
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            write!(line, "{state:016x}")?;
        }
        line.push_str("\"\n");
        sink.send(Bytes::from(line)).await?;
    }
    sink.finish().await?;
    Ok(())
}

async fn drain_large(stage: &Stage, database: &str, rows: u64) -> Result<f64, Error> {
    let backlog = crate::backlog::Backlog {
        database: database.to_owned(),
        rows,
        spread: crate::rows::ONE_TOPIC,
    };
    backlog.forget_sending(stage).await?;
    let redis = Redis::start().await?;
    let relay = stage.relay(&stage.url_beside(database), &redis, &[])?;
    relay.published(&mut redis.connect().await?, rows).await?;
    let peak_rss_mb = relay.peak_rss_mb()?;
    relay.stop().await?;
    Ok(peak_rss_mb)
}
