//! Who has which partition, and that a key keeps its order whatever happens to its owner.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use outbox_consumer::{HandlerError, Message, Transaction};
use outbox_testkit::{Process, eventually};
use tokio::sync::Semaphore;

use crate::{
    ordered::note,
    shop::{DEADLINE, ORDERS, Shop, consumer_at, run, ship},
};

const KEYS: [&str; 12] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];

#[tokio::test]
async fn members_share_the_partitions_evenly_and_each_key_keeps_its_order() {
    let shop = Shop::open().await.keeping_sequence().await;
    shop.set_partitions("orders", "4,1").await;
    shop.publish_keyed(4, &KEYS, 0..10).await;
    let one = run(shop.named("one"), note);
    shop.shares_are(&[4]).await;
    let two = run(shop.named("two"), note);
    shop.publish_keyed(4, &KEYS, 10..20).await;
    shop.shares_are(&[2, 2]).await;
    let three = run(shop.named("three"), note);
    shop.publish_keyed(4, &KEYS, 20..30).await;
    shop.shares_are(&[1, 1, 2]).await;

    one.stop().await;
    shop.publish_keyed(4, &KEYS, 30..40).await;
    shop.shares_are(&[2, 2]).await;
    two.stop().await;
    shop.publish_keyed(4, &KEYS, 40..50).await;

    shop.in_order(&KEYS, 50).await;
    shop.shares_are(&[4]).await;
    three.stop().await;
    assert_eq!(shop.shares().await, [0_i64; 0]);
    assert_eq!(shop.count("SELECT count(*) FROM inbox.members").await, 0);
}

#[tokio::test]
async fn a_crashed_members_partitions_have_a_new_owner_within_five_seconds() {
    let shop = Shop::open().await.keeping_sequence().await;
    shop.set_partitions("orders", "4").await;
    let lease = Duration::from_secs(3);
    let one = run(shop.named("one").lease(lease), note);
    let two = run(shop.named("two").lease(lease), note);
    shop.shares_are(&[2, 2]).await;

    one.crash();
    let crashed = Instant::now();
    shop.publish_keyed(4, &KEYS, 0..5).await;
    shop.shares_are(&[4]).await;

    let taken = crashed.elapsed();
    assert!(taken < Duration::from_secs(5), "{taken:?}");
    shop.in_order(&KEYS, 5).await;
    two.stop().await;
}

/// Whoever held them may be alive: they are claimed at once all the same, since they come first.
#[tokio::test]
async fn what_others_hold_comes_before_anything_new() {
    let shop = Shop::open().await;
    shop.publish_many(10).await;
    shop.held_by("zombie", 5, Duration::ZERO).await;
    let order = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&order);

    let builder = shop.consumer().claim_after(Duration::from_secs(600));
    let consumer = run(builder, async move |tx, message| {
        seen.lock().unwrap().push(message.message_key().to_owned());
        ship(tx, message).await
    });

    shop.single_effects(10).await;
    consumer.stop().await;
    let expected: Vec<String> = (0..10).map(|n| format!("order-{n}")).collect();
    assert_eq!(*order.lock().unwrap(), expected);
}

/// A former owner that reads once more after it lost the stream gets an entry between those of the new one.
#[tokio::test]
async fn an_entry_that_a_former_owner_reads_late_is_handled_in_its_place() {
    let shop = Shop::open().await.keeping_sequence().await;
    let gate = Arc::new(Semaphore::new(0));
    let go = Arc::clone(&gate);
    // One runs and one is read ahead; then there is no room.
    let builder = shop
        .consumer()
        .batch(1)
        .claim_after(Duration::from_secs(600));
    let consumer = run(
        builder,
        async move |tx: &Transaction<'_>, message: &Message| {
            go.acquire().await?.forget();
            note(tx, message).await
        },
    );
    shop.publish_keyed(1, &["a"], 0..2).await;
    eventually(DEADLINE, "two entries in hand", || async {
        shop.pending("orders").await == 2
    })
    .await
    .unwrap();
    shop.publish_keyed(1, &["a"], 2..4).await;
    let reply: redis::Value = redis::cmd("XREADGROUP")
        .arg(&[
            "GROUP", "shipping", "zombie", "COUNT", "1", "STREAMS", ORDERS, ">",
        ])
        .query_async(&mut shop.redis().await)
        .await
        .unwrap();
    assert_ne!(reply, redis::Value::Nil);

    gate.add_permits(100);

    shop.in_order(&["a"], 4).await;
    shop.nothing_pending().await;
    consumer.stop().await;
}

#[tokio::test]
async fn a_planned_hand_over_waits_for_what_runs() {
    let shop = Shop::open().await.keeping_sequence().await;
    shop.set_partitions("orders", "2").await;
    let gate = Arc::new(Semaphore::new(0));
    let go = Arc::clone(&gate);
    let one = run(
        shop.named("one").batch(1).lanes(2),
        async move |tx: &Transaction<'_>, message: &Message| {
            note(tx, message).await?;
            go.acquire().await?.forget();
            Ok::<_, HandlerError>(())
        },
    );
    shop.shares_are(&[2]).await;
    shop.publish_keyed(2, &KEYS, 0..1).await;
    eventually(DEADLINE, "both partitions at work", || async {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'";
        shop.count(sql).await == 2
    })
    .await
    .unwrap();
    let two = run(shop.named("two"), note);
    eventually(DEADLINE, "the second member is known", || async {
        shop.count("SELECT count(*) FROM inbox.members").await == 2
    })
    .await
    .unwrap();
    assert_eq!(shop.shares().await, [2]);

    gate.add_permits(1_000);

    shop.shares_are(&[1, 1]).await;
    shop.in_order(&KEYS, 1).await;
    one.stop().await;
    two.stop().await;
}

/// Not a test of its own: a member as a process, which stands still in the middle of `a-0` until it is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_member_process() {
    let (Ok(postgres), Ok(redis), Ok(gate)) = (
        std::env::var("SLOW_POSTGRES"),
        std::env::var("SLOW_REDIS"),
        std::env::var("SLOW_GATE"),
    ) else {
        return;
    };
    let builder = consumer_at(&postgres, &redis)
        .topic("orders")
        .name("frozen");
    let handler = async move |tx: &Transaction<'_>, message: &Message| {
        note(tx, message).await?;
        println!("begun {}", message.message_key());
        while !std::path::Path::new(&gate).exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok::<_, HandlerError>(())
    };
    let consumer = builder.batch(2).build().unwrap();
    consumer.run(handler, std::future::pending()).await.unwrap();
}

#[tokio::test]
async fn a_frozen_owner_blocks_nobody_and_commits_nothing_when_it_thaws() {
    let shop = Shop::open().await.keeping_sequence().await;
    let gate = shop.redis.data_dir().join("gate");
    let process = Process::builder(std::env::current_exe().unwrap())
        .args(["--exact", "ownership::slow_member_process", "--nocapture"])
        .env("SLOW_POSTGRES", &shop.postgres_url)
        .env("SLOW_REDIS", shop.redis.url())
        .env("SLOW_GATE", &gate)
        .spawn()
        .unwrap();
    shop.publish_keyed(1, &["a"], 0..5).await;
    process.wait_for_line("begun a-0", DEADLINE).await.unwrap();

    process.pause();
    let consumer = run(shop.named("next"), note);
    shop.in_order(&["a"], 5).await;
    std::fs::write(&gate, "").unwrap();
    process.resume();
    // It takes part again when the other one leaves; by then it has met its own past.
    shop.publish_keyed(1, &["a"], 5..8).await;
    shop.in_order(&["a"], 8).await;
    consumer.stop().await;
    shop.publish_keyed(1, &["a"], 8..9).await;

    shop.in_order(&["a"], 9).await;
    shop.nothing_pending().await;
    assert!(shop.dead_letters().await.is_empty());
    process.kill9();
}
