//! SIGTERM to real processes: exit code 0 in time, whatever they are at.

use std::time::{Duration, Instant};

use outbox_testkit::{Process, eventually};

use crate::{
    processes::{READY, Starts, member},
    shop::{DEADLINE, Shop},
};

/// What a supervisor gives a process before it kills it.
const EXIT_MAX: Duration = Duration::from_secs(10);

/// SIGTERM ends the process with code 0 in time.
async fn terminates(process: &Process) {
    let started = Instant::now();
    process.terminate();
    let status = process.wait(EXIT_MAX).await.unwrap();
    assert!(status.success(), "{status}: {:#?}", process.lines());
    assert!(started.elapsed() < EXIT_MAX, "{:?}", started.elapsed());
}

/// Waits until the process would notice a SIGTERM.
async fn ready(process: &Process) {
    process.wait_for_line(READY, DEADLINE).await.unwrap();
}

/// Waits until somebody reads as a member of the group.
async fn reading(shop: &Shop) {
    eventually(DEADLINE, "a member", || async {
        !shop.members().await.is_empty()
    })
    .await
    .unwrap();
}

async fn in_the_middle(shop: &Shop) {
    eventually(DEADLINE, "the middle", || async {
        shop.count("SELECT count(*) FROM effects").await >= 200
    })
    .await
    .unwrap();
    let applied = shop.count("SELECT count(*) FROM effects").await;
    assert!(applied < 1_000, "the end came before the signal");
}

/// The next process finds all that the last one left.
async fn finishes(shop: &Shop, starts: &Starts, count: usize) {
    let process = member(shop, starts);
    shop.single_effects(count).await;
    shop.nothing_pending().await;
    assert!(shop.dead_letters().await.is_empty());
    ready(&process).await;
    terminates(&process).await;
}

#[tokio::test]
async fn thirty_terminations_around_a_delivery_lose_and_double_nothing() {
    let shop = Shop::open().await;
    let starts = Starts::new(&shop);
    // Makes the group, so that its members can be asked for.
    shop.publish("orders", "first").await;
    finishes(&shop, &starts, 1).await;

    for n in 0..30_u64 {
        let process = member(&shop, &starts);
        ready(&process).await;
        // Every third one is hit while it starts.
        if n % 3 != 0 {
            reading(&shop).await;
        }
        shop.publish("orders", &format!("order-{n}")).await;
        // Waits for nothing: the delivery and the signal race, and each delay hits another moment.
        tokio::time::sleep(Duration::from_millis(n * 50 / 29)).await;
        terminates(&process).await;
    }

    finishes(&shop, &starts, 31).await;
}

#[tokio::test]
async fn a_termination_in_the_middle_of_a_thousand_loses_and_doubles_nothing() {
    let shop = Shop::open().await;
    let starts = Starts::new(&shop);
    shop.publish_many(1_000).await;
    let process = member(&shop, &starts);
    in_the_middle(&shop).await;

    terminates(&process).await;

    finishes(&shop, &starts, 1_000).await;
}

/// What has committed cannot be acknowledged any more; the next process finds it in the inbox.
#[tokio::test]
async fn a_termination_while_redis_is_frozen_comes_in_time_and_doubles_nothing() {
    let shop = Shop::open().await;
    let starts = Starts::new(&shop);
    shop.publish_many(1_000).await;
    let process = member(&shop, &starts);
    in_the_middle(&shop).await;

    shop.redis.pause().await.unwrap();
    terminates(&process).await;
    shop.redis.resume().await.unwrap();

    finishes(&shop, &starts, 1_000).await;
}
