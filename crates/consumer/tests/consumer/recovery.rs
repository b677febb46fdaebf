//! Entries that were given out before, groups that went away.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use outbox_consumer::Order;
use outbox_testkit::eventually;

use crate::shop::{DEADLINE, GROUP, ORDERS, Shop, run, ship};

const LONG_AGO: Duration = Duration::from_secs(3_600);

#[tokio::test]
async fn own_pending_entries_come_before_new_ones() {
    let shop = Shop::open().await;
    shop.publish_many(25).await;
    shop.held_by("stable", 25, Duration::ZERO).await;
    shop.publish("orders", "new").await;
    let order = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&order);

    let consumer = run(shop.consumer().name("stable"), async move |tx, message| {
        seen.lock().unwrap().push(message.message_key().to_owned());
        ship(tx, message).await
    });

    shop.single_effects(26).await;
    shop.nothing_pending().await;
    consumer.stop().await;
    let expected: Vec<String> = (0..25)
        .map(|n| format!("order-{n}"))
        .chain(["new".to_owned()])
        .collect();
    assert_eq!(*order.lock().unwrap(), expected);
}

/// XAUTOCLAIM with COUNT 10 looks at 100 pending entries; the first 150 here are of a member that lives.
#[tokio::test]
async fn a_dead_members_entries_are_claimed_past_the_first_hundred() {
    let shop = Shop::open().await;
    shop.publish_many(300).await;
    shop.held_by("alive", 150, Duration::ZERO).await;
    shop.held_by("dead", 150, LONG_AGO).await;

    let shared = shop.consumer().order(Order::None);
    let consumer = run(shared.claim_after(Duration::from_secs(600)), ship);

    shop.single_effects(150).await;
    eventually(DEADLINE, "150 acknowledged", || async {
        match shop.pending("orders").await {
            150 => Ok(()),
            pending => Err(pending),
        }
    })
    .await
    .unwrap();
    assert_eq!(consumer.counters.snapshot().claimed, 150);
    assert_eq!(
        shop.count("SELECT count(*) FROM effects WHERE key = 'order-149'")
            .await,
        0
    );
    assert_eq!(shop.count("SELECT count(*) FROM inbox.attempts").await, 0);
    consumer.stop().await;
}

#[tokio::test]
async fn new_messages_do_not_wait_for_a_long_walk() {
    let shop = Shop::open().await;
    shop.publish_many(200).await;
    shop.held_by("dead", 200, LONG_AGO).await;
    shop.publish("orders", "new").await;
    let position = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&position);

    let shared = shop.consumer().order(Order::None);
    let consumer = run(shared, async move |tx, message| {
        seen.lock().unwrap().push(message.message_key().to_owned());
        ship(tx, message).await
    });

    shop.single_effects(201).await;
    consumer.stop().await;
    let place = position
        .lock()
        .unwrap()
        .iter()
        .position(|key| key == "new")
        .unwrap();
    assert!(
        place <= 20,
        "the new message came after {place} claimed ones"
    );
}

#[tokio::test]
async fn deleted_entries_of_ones_own_are_counted_and_acknowledged() {
    let shop = Shop::open().await;
    shop.publish_many(3).await;
    let ids = shop.held_by("c1", 3, Duration::ZERO).await;
    redis::cmd("XDEL")
        .arg(ORDERS)
        .arg(&ids[1])
        .query_async::<i64>(&mut shop.redis().await)
        .await
        .unwrap();

    let consumer = run(shop.consumer().name("c1"), ship);

    shop.effects_are(&["order-0", "order-2"]).await;
    shop.nothing_pending().await;
    assert_eq!(consumer.counters.snapshot().lost, 1);
    shop.publish("orders", "x").await;
    shop.effects_are(&["order-0", "order-2", "x"]).await;
    consumer.stop().await;
}

#[tokio::test]
async fn deleted_entries_of_a_dead_member_are_counted() {
    let shop = Shop::open().await;
    shop.publish_many(3).await;
    let ids = shop.held_by("c1", 3, LONG_AGO).await;
    redis::cmd("XDEL")
        .arg(ORDERS)
        .arg(&ids[1])
        .query_async::<i64>(&mut shop.redis().await)
        .await
        .unwrap();

    let consumer = run(shop.consumer().name("c2"), ship);

    shop.effects_are(&["order-0", "order-2"]).await;
    shop.nothing_pending().await;
    eventually(DEADLINE, "the lost one", || async {
        consumer.counters.snapshot().lost == 1
    })
    .await
    .unwrap();
    consumer.stop().await;
}

#[tokio::test]
async fn a_flushed_redis_gets_its_group_anew_from_the_start() {
    let shop = Shop::open().await;
    shop.publish_many(5).await;
    let consumer = run(shop.consumer(), ship);
    shop.single_effects(5).await;

    redis::cmd("FLUSHALL")
        .query_async::<()>(&mut shop.redis().await)
        .await
        .unwrap();
    // The relay publishes again what was there, and more.
    shop.publish_many(8).await;

    shop.single_effects(8).await;
    shop.nothing_pending().await;
    assert!(shop.dead_letters().await.is_empty());
    consumer.stop().await;
}

#[tokio::test]
async fn a_group_that_is_destroyed_is_made_anew_from_the_start() {
    let shop = Shop::open().await;
    shop.publish_many(5).await;
    let consumer = run(shop.consumer(), ship);
    shop.single_effects(5).await;

    redis::cmd("XGROUP")
        .arg(&["DESTROY", ORDERS, GROUP])
        .query_async::<i64>(&mut shop.redis().await)
        .await
        .unwrap();
    shop.publish("orders", "x").await;

    shop.single_effects(6).await;
    shop.nothing_pending().await;
    assert!(consumer.counters.snapshot().repeated >= 5);
    consumer.stop().await;
}

#[tokio::test]
async fn an_entry_that_was_set_aside_but_not_acknowledged_is_not_run_again() {
    let shop = Shop::open().await;
    let id = shop.publish("orders", "a").await;
    shop.held_by("dead", 1, LONG_AGO).await;
    shop.db
        .execute(
            "INSERT INTO inbox.dead_letters (consumer_group, stream, entry_id, topic, message_key, payload, attempts, reason)
             VALUES ('shipping', 'outbox:orders', $1, 'orders', 'a', '', 5, 'before the crash')",
            &[&id],
        )
        .await
        .unwrap();

    let consumer = run(shop.consumer(), ship);

    shop.nothing_pending().await;
    assert!(shop.effects().await.is_empty());
    assert_eq!(shop.dead_letters().await.len(), 1);
    consumer.stop().await;
}

/// A stream that is none, and one that the user may not read, beside one that is fine.
#[tokio::test]
async fn a_stream_that_refuses_does_not_stop_the_others() {
    let shop = Shop::open().await;
    let mut connection = shop.redis().await;
    redis::cmd("SET")
        .arg(&["outbox:refunds", "no stream"])
        .query_async::<()>(&mut connection)
        .await
        .unwrap();
    shop.publish("audit", "secret").await;
    redis::cmd("ACL")
        .arg(&[
            "SETUSER",
            "shop",
            "on",
            ">pw",
            "+@all",
            "~outbox:orders",
            "~outbox:refunds",
        ])
        .arg(&["~outbox:relay:*", "~outbox:group:*"])
        .query_async::<()>(&mut connection)
        .await
        .unwrap();
    let url = shop.redis.url().replace("redis://", "redis://shop:pw@");
    let builder = crate::shop::consumer_at(&shop.postgres_url, &url);
    let consumer = run(builder.topics(["audit", "orders", "refunds"]), ship);
    shop.publish_many(10).await;
    shop.single_effects(10).await;
    shop.nothing_pending().await;

    redis::cmd("DEL")
        .arg("outbox:refunds")
        .query_async::<i64>(&mut connection)
        .await
        .unwrap();
    redis::cmd("ACL")
        .arg(&["SETUSER", "shop", "allkeys"])
        .query_async::<()>(&mut connection)
        .await
        .unwrap();
    shop.publish("refunds", "r").await;

    shop.single_effects(12).await;
    consumer.stop().await;
}
