//! Stopping: what runs is finished, the rest stays pending, and that is no error.

use std::time::{Duration, Instant};

use outbox_consumer::{HandlerError, Message, Transaction};
use outbox_testkit::{Postgres, Redis, eventually};
use tokio::sync::Notify;

use crate::shop::{DEADLINE, Shop, run, ship};

use std::sync::Arc;

#[tokio::test]
async fn an_idle_member_stops_at_once_and_leaves_the_group() {
    let shop = Shop::open().await;
    shop.publish("orders", "a").await;
    let consumer = run(shop.consumer().claim_after(Duration::from_secs(60)), ship);
    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;
    assert_eq!(shop.members().await.len(), 1);

    let started = Instant::now();
    consumer.stop().await;

    assert!(
        started.elapsed() < Duration::from_secs(1),
        "{:?}",
        started.elapsed()
    );
    assert!(shop.members().await.is_empty());
}

/// A handler that says when it has begun, and goes on when it is told to.
fn gated(
    begun: Arc<Notify>,
    gate: Arc<Notify>,
) -> impl AsyncFn(&Transaction<'_>, &Message) -> Result<(), HandlerError> {
    async move |tx, message| {
        ship(tx, message).await?;
        begun.notify_one();
        gate.notified().await;
        Ok(())
    }
}

#[tokio::test]
async fn the_running_batch_is_finished_and_acknowledged_and_nothing_more_begins() {
    let shop = Shop::open().await;
    shop.publish_many(15).await;
    let (begun, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (started, go) = (Arc::clone(&begun), Arc::clone(&gate));
    let consumer = run(
        shop.consumer().batch(10),
        async move |tx: &Transaction<'_>, message: &Message| {
            ship(tx, message).await?;
            if message.message_key() == "order-0" {
                started.notify_one();
                go.notified().await;
            }
            Ok::<_, HandlerError>(())
        },
    );
    begun.notified().await;

    let stopping = tokio::spawn(consumer.stop());
    gate.notify_one();
    stopping.await.unwrap();

    shop.single_effects(10).await;
    // What was read ahead stays pending, free to be claimed.
    assert!([0, 5].contains(&shop.pending("orders").await));
    let next = run(shop.consumer(), ship);
    shop.single_effects(15).await;
    shop.nothing_pending().await;
    next.stop().await;
}

#[tokio::test]
async fn a_batch_past_the_grace_period_is_rolled_back_and_is_claimable_at_once() {
    let shop = Shop::open().await;
    shop.publish("orders", "a").await;
    let begun = Arc::new(Notify::new());
    let builder = shop
        .consumer()
        .claim_after(Duration::from_secs(600))
        .grace(Duration::from_millis(300));
    let consumer = run(
        builder.clone().name("slow"),
        gated(Arc::clone(&begun), Arc::new(Notify::new())),
    );
    begun.notified().await;

    let started = Instant::now();
    consumer.stop().await;

    assert!(
        started.elapsed() < Duration::from_secs(2),
        "{:?}",
        started.elapsed()
    );
    assert!(shop.effects().await.is_empty());
    assert_eq!(shop.pending("orders").await, 1);
    assert_eq!(shop.members().await, ["slow"]);
    let next = run(builder, ship);
    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;
    next.stop().await;
}

#[tokio::test]
async fn a_member_stops_in_time_while_redis_is_frozen() {
    let shop = Shop::open().await;
    shop.publish("orders", "a").await;
    let consumer = run(shop.consumer(), ship);
    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;

    shop.redis.pause().await.unwrap();
    let started = Instant::now();
    consumer.stop().await;

    assert!(
        started.elapsed() < Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
    shop.redis.resume().await.unwrap();
}

#[tokio::test]
async fn a_member_stops_in_time_while_postgres_is_frozen() {
    let postgres = Postgres::start().await.unwrap();
    let shop = Shop::open_on(&postgres, Redis::start().await.unwrap()).await;
    shop.publish("orders", "a").await;
    let consumer = run(shop.consumer().grace(Duration::from_secs(1)), ship);
    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;

    postgres.pause().await.unwrap();
    shop.publish("orders", "b").await;
    eventually(DEADLINE, "the entry is given out", || async {
        shop.pending("orders").await == 1
    })
    .await
    .unwrap();
    let started = Instant::now();
    consumer.stop().await;

    assert!(
        started.elapsed() < Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
    postgres.resume().await.unwrap();
    assert_eq!(shop.pending("orders").await, 1);
    shop.effects_are(&["a"]).await;
}

/// Each time one message comes while the member stops: none may be lost, none doubled.
#[tokio::test]
async fn stops_in_the_middle_of_deliveries_lose_and_double_nothing() {
    let shop = Shop::open().await;
    for n in 0..30_u64 {
        let consumer = run(shop.consumer(), ship);
        shop.publish("orders", &format!("order-{n}")).await;
        // The delivery and the stop race; different delays hit different moments.
        tokio::time::timeout(Duration::from_millis(n * 2), std::future::pending::<()>())
            .await
            .unwrap_err();
        consumer.stop().await;
    }
    let consumer = run(shop.consumer(), ship);
    shop.single_effects(30).await;
    shop.nothing_pending().await;
    consumer.stop().await;
}

#[tokio::test]
async fn a_dropped_consumer_rolls_back_what_it_ran() {
    let shop = Shop::open().await;
    shop.publish("orders", "a").await;
    let begun = Arc::new(Notify::new());
    let consumer = shop.consumer().build().unwrap();
    let task = tokio::spawn(consumer.run(
        gated(Arc::clone(&begun), Arc::new(Notify::new())),
        std::future::pending(),
    ));
    begun.notified().await;

    task.abort();

    let next = run(
        shop.consumer().claim_after(Duration::from_millis(200)),
        ship,
    );
    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;
    next.stop().await;
}

/// The running batch has committed and cannot be acknowledged any more.
#[tokio::test]
async fn a_stop_in_the_middle_of_a_thousand_with_a_frozen_redis_doubles_nothing() {
    let shop = Shop::open().await;
    shop.publish_many(1_000).await;
    let builder = || shop.consumer().lanes(1).grace(Duration::from_secs(2));
    let consumer = run(builder(), ship);
    eventually(DEADLINE, "the middle", || async {
        shop.count("SELECT count(*) FROM effects").await >= 200
    })
    .await
    .unwrap();

    shop.redis.pause().await.unwrap();
    let started = Instant::now();
    consumer.stop().await;
    let stopped = started.elapsed();
    shop.redis.resume().await.unwrap();

    assert!(stopped < Duration::from_secs(6), "{stopped:?}");
    let next = run(builder(), ship);
    shop.single_effects(1_000).await;
    shop.nothing_pending().await;
    assert!(shop.dead_letters().await.is_empty());
    next.stop().await;
}
