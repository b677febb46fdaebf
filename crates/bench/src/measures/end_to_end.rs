//! Everything at once: from the commit of a producer to the commit of the effect.

use std::time::{Duration, Instant};

use outbox_consumer::{Consumer, Counters};
use outbox_testkit::Redis;
use tokio::{sync::watch, task::JoinSet};

use crate::{
    Error,
    effects::{CREATE_EFFECTS, apply_orders, pool},
    figures::Outcome,
    producers::paced,
    rows::topic,
    shop::{CREATE_ORDERS, Clerk},
    stage::Stage,
};

const CLIENTS: usize = 8;

/// A stream for each of the two consumers.
const TWO_PARTITIONS: &str =
    "INSERT INTO outbox.topics (topic, wanted, at_once) VALUES ($1, 2, true)";
const CONSUMERS: usize = 2;
const BATCH: usize = 1_000;

/// Faster than anything is: the pace is that of the clients.
const UNPACED: f64 = 1e9;

const POLL_INTERVAL: Duration = Duration::from_millis(2);
const STALL_DEADLINE: Duration = Duration::from_secs(120);

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let (mut through, mut produced) = (Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        stage.round("from commit to effect", round);
        let (all, committed) = run(stage, stage.sizes.end_to_end).await?;
        through.push(all);
        produced.push(committed);
    }
    Ok(Outcome::default()
        .beside("from first commit to last effect", "messages/s", &through)
        .beside("commits meanwhile", "messages/s", &produced))
}

async fn run(stage: &Stage, count: u64) -> Result<(f64, f64), Error> {
    let (shop, warehouse) = (stage.fresh_outbox().await?, stage.fresh_inbox().await?);
    let client = stage.connect(&shop).await?;
    client.batch_execute(CREATE_ORDERS).await?;
    client.execute(TWO_PARTITIONS, &[&topic(0)]).await?;
    stage
        .connect(&warehouse)
        .await?
        .batch_execute(CREATE_EFFECTS)
        .await?;
    let redis = Redis::start().await?;
    let relay = stage.relay(&stage.url_beside(&shop), &redis, &[])?;
    let (stop, _) = watch::channel(false);
    let mut members: JoinSet<Result<(), outbox_consumer::Error>> = JoinSet::new();
    let mut counters: Vec<Counters> = Vec::new();
    let pool = pool(stage, &warehouse)?;
    for _ in 0..CONSUMERS {
        let consumer = Consumer::builder(pool.clone(), redis::Client::open(redis.url())?, "bench")
            .topic(topic(0))
            .batch(BATCH)
            .build()?;
        counters.push(consumer.counters());
        let mut stopped = stop.subscribe();
        members.spawn(consumer.run_batches(apply_orders, async move {
            let _ = stopped.wait_for(|stop| *stop).await;
        }));
    }
    let applied = || {
        counters
            .iter()
            .map(|counters| counters.snapshot().applied)
            .sum::<u64>()
    };

    let clerks = Clerk::open_all(stage, &shop, CLIENTS).await?;
    // One ahead, after which all parts are up.
    clerks[0].order_and_message(count).await?;
    until(|| applied() >= 1).await?;
    let begun = Instant::now();
    paced(clerks, UNPACED, count, |clerk, number| async move {
        clerk.order_and_message(number).await
    })
    .await?;
    let committed = count as f64 / begun.elapsed().as_secs_f64();
    until(|| applied() > count).await?;
    let through = count as f64 / begun.elapsed().as_secs_f64();

    let _ = stop.send(true);
    while let Some(ended) = members.join_next().await {
        ended??;
    }
    pool.close();
    relay.stop().await?;
    stage.drop_database(&shop).await?;
    stage.drop_database(&warehouse).await?;
    Ok((through, committed))
}

async fn until(reached: impl Fn() -> bool) -> Result<(), Error> {
    let begun = Instant::now();
    while !reached() {
        if begun.elapsed() > STALL_DEADLINE {
            return Err("messages did not take effect".into());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}
