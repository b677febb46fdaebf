//! How often the relay has to force a commit, because what it read was not flushed yet.

use outbox_testkit::Redis;

use crate::{
    Error,
    figures::{Outcome, Target},
    log_role::{counted_url, forced_commits},
    producers::{Producer, paced},
    rows::{ONE_TOPIC, row},
    stage::Stage,
};

const PER_S: u32 = 5_000;
const WRITERS: usize = 16;

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let backlog = stage.backlog().await?;
    let url = counted_url(stage, &backlog.database).await?;
    let (mut draining, mut writing) = (Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        stage.round("draining", round);
        let before = forced_commits(stage);
        let (_, relay) = backlog.drain_and_keep(stage, &url, &[]).await?;
        relay.stop().await?;
        draining.push((forced_commits(stage) - before) as f64 * 1e3 / backlog.rows as f64);
        stage.round("16 writers", round);
        writing.push(with_writers(stage).await?);
    }
    Ok(Outcome::default()
        .must(
            "per 1,000 messages, draining",
            "",
            &draining,
            Target::AtMost(5.0),
        )
        .must(
            "per 1,000 messages, 5,000/s by 16 writers",
            "",
            &writing,
            Target::AtMost(20.0),
        ))
}

async fn with_writers(stage: &Stage) -> Result<f64, Error> {
    let count = u64::from(PER_S) * u64::try_from(stage.sizes.paced.as_millis())? / 1_000;
    let database = stage.fresh_outbox().await?;
    let url = counted_url(stage, &database).await?;
    let redis = Redis::start().await?;
    let mut connection = redis.connect().await?;
    let mut writers = Vec::new();
    for _ in 0..WRITERS {
        writers.push(Producer::open(stage, &database).await?);
    }
    let relay = stage.relay(&url, &redis, &[])?;
    writers[0].write(&row(count + 1, ONE_TOPIC)).await?;
    relay.published(&mut connection, 1).await?;
    let before = forced_commits(stage);
    paced(
        writers,
        f64::from(PER_S),
        count,
        |writer, number| async move { writer.write(&row(number, ONE_TOPIC)).await.map(drop) },
    )
    .await?;
    relay.published(&mut connection, count + 1).await?;
    let forced = forced_commits(stage) - before;
    relay.stop().await?;
    stage.drop_database(&database).await?;
    Ok(forced as f64 * 1e3 / count as f64)
}
