//! Servers that are away. Nothing of that counts for a message.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use outbox_consumer::{HandlerError, Message, Transaction};
use outbox_testkit::{
    Direction, Fsync, Matcher, Persistence, Postgres, Proxy, Redis, Shutdown, eventually,
};

use tokio::sync::Notify;

use crate::shop::{DEADLINE, ORDERS, Running, Shop, consumer_at, run, ship, unharmed};

#[tokio::test]
async fn a_postgres_restart_loses_nothing() {
    let postgres = Postgres::start().await.unwrap();
    let mut shop = Shop::open_on(&postgres, Redis::start().await.unwrap()).await;
    shop.publish_many(20).await;
    let consumer = run(shop.consumer(), ship);
    shop.single_effects(20).await;

    postgres.kill9().await.unwrap();
    shop.publish("orders", "x").await;
    eventually(DEADLINE, "the outage is met", || async {
        consumer.counters.snapshot().outages > 3
    })
    .await
    .unwrap();
    postgres.start_again().await.unwrap();
    shop.db = postgres.connect(&shop.database).await.unwrap();

    shop.single_effects(21).await;
    shop.nothing_pending().await;
    unharmed(&consumer);
    postgres.restart(Shutdown::Immediate).await.unwrap();
    shop.db = postgres.connect(&shop.database).await.unwrap();
    shop.publish("orders", "y").await;
    shop.single_effects(22).await;
    consumer.stop().await;
}

/// The handler hides what it met behind a text, so that only the connection tells.
#[tokio::test]
async fn a_connection_lost_under_the_handler_is_no_failure_of_the_message() {
    let shop = Shop::open().await;
    shop.publish("orders", "a").await;
    let runs = Arc::new(AtomicU32::new(0));
    let run_number = Arc::clone(&runs);

    let consumer = run(
        shop.consumer().max_attempts(1),
        async move |tx: &Transaction<'_>, message| {
            if run_number.fetch_add(1, Ordering::SeqCst) < 5 {
                let killed = tx
                    .execute("SELECT pg_terminate_backend(pg_backend_pid())", &[])
                    .await;
                killed.map_err(|_| HandlerError::from("could not ship"))?;
            }
            ship(tx, message).await?;
            Ok::<_, HandlerError>(())
        },
    );

    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;
    assert_eq!(runs.load(Ordering::SeqCst), 6);
    unharmed(&consumer);
    assert_eq!(shop.count("SELECT count(*) FROM inbox.attempts").await, 0);
    consumer.stop().await;
}

#[tokio::test]
async fn a_redis_that_restarts_and_loads_is_waited_for() {
    let redis = Redis::builder()
        .persistence(Persistence::Aof(Fsync::Always))
        .arg("--key-load-delay", "1000")
        .start()
        .await
        .unwrap();
    let shop = Shop::open_on(Postgres::shared().await.unwrap(), redis).await;
    let mut pipeline = redis::pipe();
    for n in 0..1_500 {
        pipeline.set(format!("other-{n}"), n).ignore();
    }
    pipeline
        .query_async::<()>(&mut shop.redis().await)
        .await
        .unwrap();
    shop.publish_many(20).await;
    let consumer = run(shop.consumer(), ship);
    shop.single_effects(20).await;

    shop.redis.kill9().await.unwrap();
    shop.redis.start_again_loading().await.unwrap();
    eventually(DEADLINE, "the end of loading", || async {
        let mut connection = shop.redis.connect().await.ok()?;
        redis::cmd("XLEN")
            .arg(ORDERS)
            .query_async::<i64>(&mut connection)
            .await
            .ok()
    })
    .await
    .unwrap();
    shop.publish("orders", "x").await;

    shop.single_effects(21).await;
    shop.nothing_pending().await;
    unharmed(&consumer);
    assert!(consumer.counters.snapshot().outages > 0);
    redis::cmd("SCRIPT")
        .arg("FLUSH")
        .query_async::<()>(&mut shop.redis().await)
        .await
        .unwrap();
    consumer.stop().await;
    assert!(shop.members().await.is_empty());
}

#[tokio::test]
async fn a_refused_acknowledgement_is_tried_until_it_passes() {
    let shop = Shop::open().await;
    let mut connection = shop.redis().await;
    redis::cmd("ACL")
        .arg(&["SETUSER", "default", "-xack"])
        .query_async::<()>(&mut connection)
        .await
        .unwrap();
    shop.publish("orders", "a").await;
    let consumer = run(shop.consumer(), ship);
    eventually(DEADLINE, "refusals", || async {
        consumer.counters.snapshot().outages > 2
    })
    .await
    .unwrap();
    assert_eq!(shop.pending("orders").await, 1);

    redis::cmd("ACL")
        .arg(&["SETUSER", "default", "+xack"])
        .query_async::<()>(&mut connection)
        .await
        .unwrap();

    shop.nothing_pending().await;
    shop.effects_are(&["a"]).await;
    unharmed(&consumer);
    consumer.stop().await;
}

/// Waits out an outage of five seconds, and returns the tries of its last three.
async fn tries_in_an_outage(consumer: &Running) -> u64 {
    let before = consumer.counters.snapshot().outages;
    // Fifteen tries later the waits have reached their cap.
    eventually(DEADLINE, "tries", || async {
        consumer.counters.snapshot().outages >= before + 15
    })
    .await
    .unwrap();
    let (started, first) = (Instant::now(), consumer.counters.snapshot().outages);
    eventually(DEADLINE, "three seconds", || async {
        started.elapsed() >= Duration::from_secs(3)
    })
    .await
    .unwrap();
    consumer.counters.snapshot().outages - first
}

#[tokio::test]
async fn a_long_outage_of_redis_is_met_at_an_even_pace_and_ends_at_once() {
    let shop = Shop::open().await;
    shop.publish("orders", "a").await;
    let consumer = run(shop.consumer(), ship);
    shop.effects_are(&["a"]).await;

    shop.redis.kill9().await.unwrap();
    let tries = tries_in_an_outage(&consumer).await;
    assert!(
        (15..=60).contains(&tries),
        "{tries} tries in 3 s with a cap of 100 ms"
    );
    shop.redis.start_again().await.unwrap();
    shop.publish("orders", "b").await;
    let back = Instant::now();

    shop.effects_are(&["a", "b"]).await;
    assert!(
        back.elapsed() < Duration::from_secs(1),
        "{:?}",
        back.elapsed()
    );
    consumer.stop().await;
}

#[tokio::test]
async fn a_long_outage_of_postgres_is_met_at_an_even_pace_and_ends_at_once() {
    let postgres = Postgres::start().await.unwrap();
    let mut shop = Shop::open_on(&postgres, Redis::start().await.unwrap()).await;
    shop.publish("orders", "a").await;
    let consumer = run(shop.consumer(), ship);
    shop.effects_are(&["a"]).await;

    postgres.kill9().await.unwrap();
    shop.publish("orders", "b").await;
    let tries = tries_in_an_outage(&consumer).await;
    assert!(
        (15..=60).contains(&tries),
        "{tries} tries in 3 s with a cap of 100 ms"
    );
    postgres.start_again().await.unwrap();
    let back = Instant::now();
    shop.db = postgres.connect(&shop.database).await.unwrap();

    shop.effects_are(&["a", "b"]).await;
    assert!(
        back.elapsed() < Duration::from_secs(1),
        "{:?}",
        back.elapsed()
    );
    unharmed(&consumer);
    consumer.stop().await;
}

#[tokio::test]
async fn a_lost_reply_to_commit_doubles_nothing() {
    let postgres = Postgres::shared().await.unwrap();
    let shop = Shop::open().await;
    let proxy = Proxy::start(postgres.port()).await.unwrap();
    let url = postgres.url_via(proxy.port(), &shop.database);
    shop.publish_many(3).await;
    let (begun, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (began, open) = (Arc::clone(&begun), Arc::clone(&gate));
    let consumer = run(
        // The keeper of leases commits once a quarter of their time, and not in between.
        consumer_at(&url, &shop.redis.url())
            .topic("orders")
            .lease(Duration::from_secs(60)),
        async move |tx: &Transaction<'_>, message: &Message| {
            if message.message_key() == "order-2" && message.attempt() == 1 {
                began.notify_one();
                open.notified().await;
            }
            ship(tx, message).await
        },
    );
    begun.notified().await;
    // The upkeep has just committed, and does not again for some time.
    let mark = "SELECT coalesce(max(mark), 0) FROM inbox.history";
    let before = shop.count(mark).await;
    eventually(DEADLINE, "a new mark", || async {
        shop.count(mark).await > before
    })
    .await
    .unwrap();
    let hold = proxy.hold(Matcher::sql("COMMIT"), Direction::Reply);
    gate.notify_one();
    hold.reached().await.unwrap();
    gate.notify_one();
    hold.drop_it();

    shop.nothing_pending().await;
    shop.single_effects(3).await;
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.applied, counts.repeated, counts.failed), (0, 3, 0));
    consumer.stop().await;
}

/// The entries are pending for a member that does not know of them, and nobody claims them for long.
#[tokio::test]
async fn entries_whose_delivery_was_lost_are_found_among_ones_own() {
    let shop = Shop::open().await;
    let proxy = Proxy::start(shop.redis.port()).await.unwrap();
    let builder = consumer_at(&shop.postgres_url, &shop.redis.url_via(proxy.port()));
    let consumer = run(
        builder
            .topic("orders")
            .claim_after(Duration::from_secs(600)),
        ship,
    );
    shop.publish("orders", "a").await;
    shop.effects_are(&["a"]).await;
    let hold = proxy.hold(Matcher::redis("XREADGROUP"), Direction::Reply);
    // Answers the read that was sent before the hold; the next one is held.
    shop.publish("orders", "b").await;
    shop.effects_are(&["a", "b"]).await;
    shop.publish("orders", "c").await;
    hold.reached().await.unwrap();
    assert_eq!(shop.pending("orders").await, 1);

    hold.drop_it();

    shop.effects_are(&["a", "b", "c"]).await;
    shop.nothing_pending().await;
    assert_eq!(consumer.counters.snapshot().claimed, 0);
    unharmed(&consumer);
    consumer.stop().await;
}

/// Longer than every timeout, and idle for longer than a frozen process would be allowed.
#[tokio::test]
async fn a_slow_handler_on_a_living_connection_is_left_alone() {
    let shop = Shop::open().await;
    let runs = Arc::new(AtomicU32::new(0));
    let run_number = Arc::clone(&runs);
    let ms = Duration::from_millis;
    let builder = shop
        .consumer()
        .response_timeout(ms(600))
        .claim_after(ms(600));
    let consumer = run(
        builder,
        async move |tx: &Transaction<'_>, message: &Message| {
            run_number.fetch_add(1, Ordering::SeqCst);
            tx.execute("SELECT pg_sleep(2)", &[]).await?;
            tokio::time::sleep(ms(2_000)).await;
            ship(tx, message).await
        },
    );
    shop.publish("orders", "a").await;

    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    consumer.stop().await;
}
