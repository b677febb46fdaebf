//! A consumer's database that forgets what the group has acknowledged.

use outbox_testkit::{Postgres, Process, Redis, relay_binary};

use crate::shop::{DEADLINE, GROUP, Shop, run, ship};

#[tokio::test]
async fn what_a_restored_database_has_forgotten_is_delivered_again() {
    let postgres = Postgres::start().await.unwrap();
    let mut shop = Shop::open_on(&postgres, Redis::start().await.unwrap()).await;
    shop.publish_many(20).await;
    let consumer = run(shop.consumer(), ship);
    shop.single_effects(20).await;
    shop.nothing_pending().await;
    consumer.stop().await;
    let backup = postgres.snapshot().await.unwrap();

    let consumer = run(shop.consumer(), ship);
    for n in 20..50 {
        shop.publish("orders", &format!("order-{n}")).await;
    }
    shop.single_effects(50).await;
    shop.nothing_pending().await;
    consumer.stop().await;
    postgres.restore(&backup).await.unwrap();
    shop.db = postgres.connect(&shop.database).await.unwrap();
    assert_eq!(shop.count("SELECT count(*) FROM effects").await, 20);

    let consumer = run(shop.consumer(), ship);

    shop.single_effects(50).await;
    shop.nothing_pending().await;
    assert!(consumer.counters.snapshot().applied == 30);
    assert!(shop.dead_letters().await.is_empty());
    consumer.stop().await;
}

#[tokio::test]
async fn a_database_restored_under_a_running_consumer_is_found() {
    let postgres = Postgres::start().await.unwrap();
    let mut shop = Shop::open_on(&postgres, Redis::start().await.unwrap()).await;
    shop.publish_many(20).await;
    let consumer = run(shop.consumer(), ship);
    shop.single_effects(20).await;
    let backup = postgres.snapshot().await.unwrap();
    // The mark of the backup is older than what Redis knows.
    let marked = "SELECT mark FROM inbox.history";
    let before = shop.count(marked).await;
    for n in 20..30 {
        shop.publish("orders", &format!("order-{n}")).await;
    }
    shop.single_effects(30).await;
    outbox_testkit::eventually(DEADLINE, "a later mark", || async {
        shop.count(marked).await > before + 1
    })
    .await
    .unwrap();

    postgres.restore(&backup).await.unwrap();
    shop.db = postgres.connect(&shop.database).await.unwrap();

    shop.single_effects(30).await;
    shop.nothing_pending().await;
    consumer.stop().await;
}

#[tokio::test]
async fn a_restart_of_everything_sets_no_group_back() {
    let shop = Shop::open().await;
    shop.publish_many(5).await;
    for _ in 0..3 {
        let consumer = run(shop.consumer(), ship);
        shop.single_effects(5).await;
        shop.nothing_pending().await;
        assert_eq!(consumer.counters.snapshot().repeated, 0);
        consumer.stop().await;
    }
}

#[tokio::test]
async fn a_group_is_set_back_by_hand_and_the_inbox_absorbs_what_it_knows() {
    let shop = Shop::open().await;
    shop.publish_many(10).await;
    let consumer = run(shop.consumer(), ship);
    shop.single_effects(10).await;
    shop.nothing_pending().await;
    // Effects that somebody undid, with their keys.
    shop.db
        .batch_execute(
            "DELETE FROM effects WHERE key IN ('order-3', 'order-7');
             DELETE FROM inbox.applied WHERE message_key IN ('order-3', 'order-7')",
        )
        .await
        .unwrap();

    let rewind = |arguments: &[&str]| {
        Process::builder(relay_binary())
            .args(["rewind", "--group", GROUP])
            .args(arguments.iter().copied())
            .env("REDIS_URL", shop.redis.url())
            .spawn()
            .unwrap()
    };
    let done = rewind(&["--since", "1h"]);
    assert!(
        done.wait(DEADLINE).await.unwrap().success(),
        "{:?}",
        done.lines()
    );

    shop.single_effects(10).await;
    shop.nothing_pending().await;
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.applied, counts.repeated), (12, 8));

    let forward = rewind(&["--since", "2100-01-01T00:00:00Z", "--topic", "orders"]);
    assert!(
        forward.wait(DEADLINE).await.unwrap().success(),
        "{:?}",
        forward.lines()
    );
    assert!(
        forward.lines()[0].ends_with("which is not later"),
        "{:?}",
        forward.lines()
    );
    let nobody = rewind(&["--since", "1h", "--topic", "refunds"]);
    assert_eq!(nobody.wait(DEADLINE).await.unwrap().code(), Some(1));
    shop.publish("orders", "later").await;
    shop.single_effects(11).await;
    consumer.stop().await;
}
