//! Publishing while as many messages as are published have to be purged.
//!
//! The outbox holds rows that were published and whose retention is over, and as many that are not published yet. The
//! clock stops when all of the second are in the stream and all of the first are deleted. So both sides publish and
//! delete the same number of rows.

use std::time::{Duration, Instant};

use outbox_testkit::Redis;
use redis::aio::MultiplexedConnection;
use tokio_postgres::Client;

use crate::{
    Error,
    backlog::{COPY_MESSAGES, copy_rows},
    figures::{Outcome, Target},
    marking::{self, Sent},
    rows::{ONE_TOPIC, row},
    stage::Stage,
    stats::quotients,
};

/// All that was published was published long ago. The row at `high` is never purged.
const OVERDUE: &str = "
    DELETE FROM outbox.milestones;
    INSERT INTO outbox.milestones (high, published_at) SELECT high - 1, now() - interval '1 day' FROM outbox.checkpoint";

const SETTLE: &str = "VACUUM (ANALYZE) outbox.messages";

const PURGED_TO: &str = "SELECT purged_to FROM outbox.purge";

/// Longer than a run, so that nothing of this run is purged in it.
const RETENTION: [&str; 2] = ["--retention", "1h"];

const POLL_INTERVAL: Duration = Duration::from_millis(10);
const STALL_DEADLINE: Duration = Duration::from_secs(300);

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let rows = stage.sizes.drain_rows;
    let database = stage.fresh_outbox().await?;
    let loop_database = stage.fresh_outbox().await?;
    let client = stage.connect(&database).await?;
    let redis = Redis::start().await?;
    let mut connection = redis.connect().await?;
    // What the first repetition purges.
    write(stage, &client, 1..=rows).await?;
    let relay = stage.relay(&stage.url_beside(&database), &redis, &RETENTION)?;
    relay.published(&mut connection, rows).await?;
    relay.stop().await?;

    let (mut ours, mut deleting) = (Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        deleting.push(marking::drain(stage, &loop_database, rows, Sent::Deleted).await?);
        let before = rows * (round as u64 + 1);
        write(stage, &client, before + 1..=before + rows).await?;
        // The entries of the repetition before; the marker stays.
        let stream = crate::rows::stream(&crate::rows::topic(0));
        let _: u64 = redis::cmd("DEL")
            .arg(stream)
            .query_async(&mut connection)
            .await?;
        stage.round("the relay drains and purges", round);
        let seconds = publish_and_purge(
            stage,
            &database,
            &client,
            &redis,
            &mut connection,
            before,
            rows,
        )
        .await?;
        ours.push(rows as f64 / seconds);
    }
    stage.drop_database(&database).await?;
    stage.drop_database(&loop_database).await?;
    Ok(Outcome::default()
        .must(
            "relay and purge / loop",
            "",
            &quotients(&ours, &deleting),
            Target::AtLeast(1.5),
        )
        .beside("relay and purge", "rows/s", &ours)
        .beside("loop with DELETE", "rows/s", &deleting))
}

async fn write(
    stage: &Stage,
    client: &Client,
    numbers: std::ops::RangeInclusive<u64>,
) -> Result<(), Error> {
    stage
        .progress
        .step(format!("writing messages up to {}", numbers.end()));
    copy_rows(client, COPY_MESSAGES, numbers, |number| {
        row(number, ONE_TOPIC)
    })
    .await?;
    client.batch_execute(SETTLE).await?;
    Ok(client.batch_execute(OVERDUE).await?)
}

/// Publishes the rows after `before` while those up to it are purged; returns the seconds until both are done.
async fn publish_and_purge(
    stage: &Stage,
    database: &str,
    client: &Client,
    redis: &Redis,
    connection: &mut MultiplexedConnection,
    before: u64,
    rows: u64,
) -> Result<f64, Error> {
    let begun = Instant::now();
    let relay = stage.relay(&stage.url_beside(database), redis, &RETENTION)?;
    relay.published(connection, before + rows).await?;
    loop {
        let purged_to: i64 = client.query_one(PURGED_TO, &[]).await?.get(0);
        if u64::try_from(purged_to)? + 1 >= before {
            break;
        }
        if begun.elapsed() > STALL_DEADLINE {
            return Err(format!(
                "the purge is at {purged_to} and has to come to {before} less one"
            )
            .into());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let seconds = begun.elapsed().as_secs_f64();
    relay.stop().await?;
    Ok(seconds)
}
