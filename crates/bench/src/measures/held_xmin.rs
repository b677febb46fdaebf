//! Publishing while a transaction stays open, so that no dead row can be cleaned away.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use outbox_testkit::Redis;
use tokio::task::JoinHandle;

use crate::{
    Error,
    figures::{Outcome, Series, Target},
    marking::{self, Loop, Sent},
    producers::{Producer, paced},
    stage::{Stage, published},
};

/// 250 transactions of 20 messages each second.
const TRANSACTIONS_PER_S: f64 = 250.0;
const MESSAGES: u64 = 20;
const WRITERS: usize = 8;

/// It has seen the database and holds on to that.
const HOLD: &str = "
    BEGIN ISOLATION LEVEL REPEATABLE READ;
    SELECT pg_current_xact_id(), (SELECT count(*) FROM pg_class)";

/// How often it is looked how far publishing is.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// How long a loop waits that found nothing.
const LOOP_PAUSE: Duration = Duration::from_millis(1);

/// When, in seconds, and how many messages were published by then.
type Looks = Vec<(f64, f64)>;

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let (mut ours, mut loops) = (Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        stage.round("the relay, under an open transaction", round);
        ours.push(relay(stage).await?);
        stage.round("the loop, under an open transaction", round);
        loops.push(marking(stage).await?);
    }
    let part = stage.sizes.held_part.as_secs_f64();
    let of = |runs: &[Looks]| {
        runs.iter()
            .map(|looks| last_by_first(looks, part))
            .collect::<Vec<f64>>()
    };
    let rate = |runs: &[Looks]| {
        runs.iter()
            .map(|looks| rates(looks).1)
            .collect::<Vec<f64>>()
    };
    let outcome = Outcome::default()
        .must(
            "relay, last part / first part",
            "",
            &of(&ours),
            Target::AtLeast(0.95),
        )
        .beside("loop, last part / first part", "", &of(&loops))
        .beside("relay over all", "messages/s", &rate(&ours))
        .beside("loop over all", "messages/s", &rate(&loops));
    let middle = stage.sizes.repeats / 2;
    let series = [
        ("relay", &ours[middle]),
        ("loop with UPDATE", &loops[middle]),
    ]
    .map(|(name, looks)| Series {
        name: name.to_owned(),
        points: rates(looks).0,
    });
    Ok(outcome.with_series(series.into()))
}

/// The rate of each second, and over all.
fn rates(looks: &Looks) -> (Vec<(f64, f64)>, f64) {
    let mut seconds: Vec<(f64, f64)> = Vec::new();
    let mut from = looks.first().copied().unwrap_or_default();
    let (begun, last) = (from, looks.last().copied().unwrap_or_default());
    for look in looks {
        if look.0 - from.0 >= 1.0 {
            seconds.push((look.0, (look.1 - from.1) / (look.0 - from.0)));
            from = *look;
        }
    }
    (seconds, (last.1 - begun.1) / (last.0 - begun.0))
}

/// The rate of the last `part` seconds divided by that of the first.
fn last_by_first(looks: &Looks, part: f64) -> f64 {
    let (Some(first), Some(last)) = (looks.first(), looks.last()) else {
        return f64::NAN;
    };
    let rate = |from: &(f64, f64), to: &(f64, f64)| (to.1 - from.1) / (to.0 - from.0);
    let first_end = looks
        .iter()
        .find(|look| look.0 >= first.0 + part)
        .unwrap_or(last);
    let last_begin = looks
        .iter()
        .rev()
        .find(|look| look.0 <= last.0 - part)
        .unwrap_or(first);
    rate(last_begin, last) / rate(first, first_end)
}

/// Messages at a pace, for the time of the measure and a second before it.
async fn produce(
    stage: &Stage,
    database: &str,
    table: &str,
) -> Result<JoinHandle<Result<(), Error>>, Error> {
    let mut writers = Vec::new();
    for _ in 0..WRITERS {
        writers.push(Producer::open_on(stage, database, table).await?);
    }
    let seconds = stage.sizes.held.as_secs_f64() + 1.0;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a positive number of transactions"
    )]
    let count = (TRANSACTIONS_PER_S * seconds) as u64;
    Ok(tokio::spawn(paced(
        writers,
        TRANSACTIONS_PER_S,
        count,
        |writer, number| async move {
            writer
                .write_many(number * MESSAGES + 1..(number + 1) * MESSAGES + 1)
                .await
        },
    )))
}

/// Looks at `published` until the time is over.
async fn look(
    stage: &Stage,
    mut published: impl AsyncFnMut() -> Result<u64, Error>,
) -> Result<Looks, Error> {
    tokio::time::sleep(Duration::from_secs(1)).await;
    let begun = Instant::now();
    let mut looks = Looks::new();
    while begun.elapsed() <= stage.sizes.held {
        let published = published().await?;
        looks.push((begun.elapsed().as_secs_f64(), published as f64));
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    Ok(looks)
}

async fn relay(stage: &Stage) -> Result<Looks, Error> {
    let database = stage.fresh_outbox().await?;
    let holder = stage.connect(&database).await?;
    let redis = Redis::start().await?;
    let mut connection = redis.connect().await?;
    let relay = stage.relay(&stage.url_beside(&database), &redis, &["--retention", "1s"])?;
    holder.batch_execute(HOLD).await?;
    let producing = produce(stage, &database, "outbox.messages").await?;
    let looks = look(stage, async || published(&mut connection).await).await?;
    producing.await??;
    relay.stop().await?;
    drop(holder);
    stage.drop_database(&database).await?;
    Ok(looks)
}

async fn marking(stage: &Stage) -> Result<Looks, Error> {
    let database = stage.fresh_outbox().await?;
    let client = stage.connect(&database).await?;
    marking::create_table(&client, 0, Sent::Marked).await?;
    let holder = stage.connect(&database).await?;
    let redis = Redis::start().await?;
    let mut marking = Loop::open(stage, &database, &redis, Sent::Marked).await?;
    holder.batch_execute(HOLD).await?;
    let published = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&published);
    let looping: JoinHandle<Result<(), Error>> = tokio::spawn(async move {
        loop {
            match marking.turn().await? {
                0 => tokio::time::sleep(LOOP_PAUSE).await,
                rows => drop(counted.fetch_add(rows as u64, Ordering::Relaxed)),
            }
        }
    });
    let producing = produce(stage, &database, "marked").await?;
    let looks = look(stage, async || Ok(published.load(Ordering::Relaxed))).await?;
    producing.await??;
    if looping.is_finished() {
        looping.await??;
    } else {
        looping.abort();
    }
    drop(holder);
    stage.drop_database(&database).await?;
    Ok(looks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_is_compared_with_the_first() {
        // 100 a second for five seconds, then 50.
        let looks: Looks = (0..=10)
            .map(|second| {
                (
                    f64::from(second),
                    f64::from(100 * second.min(5) + 50 * (second - 5).max(0)),
                )
            })
            .collect();
        assert_eq!(last_by_first(&looks, 3.0), 0.5);
        let (seconds, all) = rates(&looks);
        assert_eq!(
            (seconds.len(), seconds[0], seconds[9]),
            (10, (1.0, 100.0), (10.0, 50.0))
        );
        assert_eq!(all, 75.0);
    }
}
