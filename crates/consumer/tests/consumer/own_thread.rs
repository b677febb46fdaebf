//! The thread that handlers run on: it may be blocked, and what belongs to it comes to nobody else.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use outbox_consumer::{HandlerError, Message, Transaction};
use tokio::sync::Semaphore;

use crate::shop::{Shop, pool, pool_of, run, ship, unharmed};

/// Longer than anything may take to answer: what was answered meanwhile is no outage, on this lane or the other.
#[tokio::test]
async fn a_handler_that_blocks_its_thread_breaks_nothing_off() {
    let shop = Shop::open().await;
    shop.publish_many(6).await;
    let runs = Arc::new(AtomicU32::new(0));
    let run_number = Arc::clone(&runs);
    let builder = shop
        .consumer()
        .batch(1)
        .lanes(2)
        .claim_after(Duration::from_secs(60))
        .response_timeout(Duration::from_millis(500));
    let consumer = run(
        builder,
        async move |tx: &Transaction<'_>, message: &Message| {
            run_number.fetch_add(1, Ordering::SeqCst);
            // The other lane's statements are under way then.
            tokio::time::sleep(Duration::from_millis(1)).await;
            std::thread::sleep(Duration::from_millis(1_000));
            ship(tx, message).await
        },
    );

    shop.single_effects(6).await;
    shop.nothing_pending().await;
    assert_eq!(runs.load(Ordering::SeqCst), 6);
    unharmed(&consumer);
    assert_eq!(consumer.counters.snapshot().outages, 0);
    consumer.stop().await;
}

#[tokio::test]
async fn a_consumer_that_stops_breaks_no_connection_that_others_have_of_its_pool() {
    let shop = Shop::open().await;
    let pool = pool(&shop.postgres_url);
    shop.publish_many(20).await;
    let consumer = run(shop.consumer_on(pool.clone()), ship);
    shop.single_effects(20).await;

    let mut taken = Vec::new();
    while let Ok(Ok(connection)) =
        tokio::time::timeout(Duration::from_millis(500), pool.get()).await
    {
        taken.push(connection);
    }
    assert!(taken.len() >= 3, "{}", taken.len());
    let slow = taken
        .iter()
        .map(|connection| connection.query_one("SELECT pg_sleep(2)", &[]));
    let (slow, ()) = tokio::join!(join_all(slow), consumer.stop());

    for result in slow {
        result.unwrap();
    }
}

/// The lane's is a new one. What the pool has open already it keeps, but for one where it is full.
#[tokio::test]
async fn a_lane_takes_no_connection_that_others_opened() {
    for (connections_max, left) in [(8, 4), (4, 3)] {
        let shop = Shop::open().await;
        let pool = pool_of(&shop.postgres_url, connections_max);
        let connections = join_all((0..4).map(|_| pool.get())).await;
        let connections: Vec<_> = connections.into_iter().map(Result::unwrap).collect();
        let sessions = connections
            .iter()
            .map(|connection| connection.query_one("SELECT pg_backend_pid()", &[]));
        let sessions: Vec<i32> = join_all(sessions)
            .await
            .into_iter()
            .map(|row| row.unwrap().get(0))
            .collect();
        drop(connections);

        let consumer = run(shop.consumer_on(pool), ship);
        shop.publish("orders", "a").await;
        shop.effects_are(&["a"]).await;

        let alive = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY ($1)";
        let alive: i64 = shop.db.query_one(alive, &[&sessions]).await.unwrap().get(0);
        assert_eq!(alive, left);
        consumer.stop().await;
    }
}

/// Whatever the handler opens or spawns lives on where the consumer was started.
#[tokio::test]
async fn what_a_handler_spawns_outlives_the_consumer() {
    let shop = Shop::open().await;
    let (done, mut dones) = tokio::sync::mpsc::unbounded_channel();
    let gate = Arc::new(Semaphore::new(0));
    let go = Arc::clone(&gate);
    let consumer = run(
        shop.consumer(),
        async move |tx: &Transaction<'_>, message: &Message| {
            let (done, go) = (done.clone(), Arc::clone(&go));
            tokio::task::spawn_blocking(|| ()).await?;
            tokio::spawn(async move {
                let _permit = go.acquire().await;
                done.send(())
            });
            ship(tx, message).await?;
            Ok::<_, HandlerError>(())
        },
    );
    shop.publish("orders", "a").await;
    shop.effects_are(&["a"]).await;

    consumer.stop().await;
    gate.add_permits(1);

    assert_eq!(dones.recv().await, Some(()));
}
