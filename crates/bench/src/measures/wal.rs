//! How much the relay adds to the write-ahead log.

use outbox_testkit::Redis;
use tokio_postgres::{Client, types::PgLsn};

use crate::{
    Error,
    backlog::Backlog,
    figures::{Outcome, Target},
    producers::{Producer, paced},
    rows::{ONE_TOPIC, row},
    stage::Stage,
    stats::quotients,
};

const PER_S: u32 = 500;
const WRITERS: usize = 8;

/// Vacuum writes as well, now in one arm and now in another; and after a checkpoint of Postgres every page goes whole.
const STEADY: &str = "ALTER TABLE outbox.messages SET (autovacuum_enabled = off); CHECKPOINT";

const INSERTED: &str = "SELECT pg_current_wal_insert_lsn()";

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let mut draining = (Vec::new(), Vec::new());
    let mut paced = (Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        stage.round("draining", round);
        let (insert, sent) = drain(stage).await?;
        draining.0.push(sent);
        draining.1.push(insert);
        stage.round("500/s without a relay", round);
        paced.1.push(at_a_pace(stage, false).await?);
        stage.round("500/s with the relay", round);
        paced.0.push(at_a_pace(stage, true).await?);
    }
    Ok(Outcome::default()
        .must(
            "draining, sent / insert",
            "",
            &quotients(&draining.0, &draining.1),
            Target::AtMost(1.05),
        )
        .must(
            "500/s, sent / insert",
            "",
            &quotients(&paced.0, &paced.1),
            Target::AtMost(1.3),
        )
        .beside("draining, insert", "bytes/message", &draining.1)
        .beside("draining, insert to sent", "bytes/message", &draining.0)
        .beside("500/s, insert", "bytes/message", &paced.1)
        .beside("500/s, insert to sent", "bytes/message", &paced.0))
}

async fn position(client: &Client) -> Result<f64, Error> {
    let lsn: PgLsn = client.query_one(INSERTED, &[]).await?.get(0);
    Ok(u64::from(lsn) as f64)
}

/// Bytes per message of the INSERT, and until it is sent and the checkpoint written.
async fn drain(stage: &Stage) -> Result<(f64, f64), Error> {
    let rows = stage.sizes.drain_rows;
    let database = stage.fresh_outbox().await?;
    let client = stage.connect(&database).await?;
    client.batch_execute(STEADY).await?;
    let before = position(&client).await?;
    Backlog::fill(&client, rows, ONE_TOPIC).await?;
    let inserted = position(&client).await?;
    let redis = Redis::start().await?;
    let relay = stage.relay(&stage.url_beside(&database), &redis, &[])?;
    relay.published(&mut redis.connect().await?, rows).await?;
    relay.stop().await?;
    let sent = position(&client).await?;
    drop(client);
    stage.drop_database(&database).await?;
    Ok((
        (inserted - before) / rows as f64,
        (sent - before) / rows as f64,
    ))
}

async fn at_a_pace(stage: &Stage, with_relay: bool) -> Result<f64, Error> {
    let count = u64::from(PER_S) * u64::try_from(stage.sizes.paced.as_millis())? / 1_000;
    let database = stage.fresh_outbox().await?;
    let redis = Redis::start().await?;
    let mut writers = Vec::new();
    for _ in 0..WRITERS {
        writers.push(Producer::open(stage, &database).await?);
    }
    let client = stage.connect(&database).await?;
    let relay = with_relay
        .then(|| stage.relay(&stage.url_beside(&database), &redis, &[]))
        .transpose()?;
    let id = writers[0].write(&row(count + 1, ONE_TOPIC)).await?;
    if let Some(relay) = &relay {
        relay
            .published(&mut redis.connect().await?, u64::try_from(id)?)
            .await?;
    }
    client.batch_execute(STEADY).await?;
    let before = position(&client).await?;
    paced(
        writers,
        f64::from(PER_S),
        count,
        |writer, number| async move { writer.write(&row(number, ONE_TOPIC)).await.map(drop) },
    )
    .await?;
    if let Some(relay) = relay {
        relay
            .published(&mut redis.connect().await?, count + 1)
            .await?;
        relay.stop().await?;
    }
    let bytes = position(&client).await? - before;
    drop(client);
    stage.drop_database(&database).await?;
    Ok(bytes / count as f64)
}
