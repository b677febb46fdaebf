//! A Redis that fails over: the promoted replica may know less of the group than has been done.

use std::time::Duration;

use outbox_consumer::Order;
use outbox_testkit::{Postgres, Proxy, Redis, eventually};
use redis::streams::StreamRangeReply;

use crate::{
    ordered::note,
    shop::{DEADLINE, GROUP, ORDERS, Shop, consumer_at, run, ship},
};

const KEYS: [&str; 4] = ["a", "b", "c", "d"];

/// Two members, one of which owns the stream; the other only waits.
#[tokio::test]
async fn a_failover_under_running_members_applies_everything_once_and_in_order() {
    let mut shop = Shop::open().await.keeping_sequence().await;
    let replica = shop.redis.replica().await.unwrap();
    let proxy = Proxy::start(shop.redis.port()).await.unwrap();
    let builder =
        consumer_at(&shop.postgres_url, &shop.redis.url_via(proxy.port())).topic("orders");
    shop.publish_keyed(1, &KEYS, 0..150).await;
    replica.caught_up_with(&shop.redis).await.unwrap();
    let members = [run(builder.clone(), note), run(builder, note)];
    eventually(DEADLINE, "the middle", || async {
        shop.count("SELECT count(*) FROM sequence").await >= 100
    })
    .await
    .unwrap();

    replica.promote().await.unwrap();
    proxy.retarget(replica.port()).await.unwrap();
    // What the members still do on their old connections is lost, until the old master refuses it.
    shop.redis.replica_of(replica.port()).await.unwrap();
    let old = std::mem::replace(&mut shop.redis, replica);
    shop.publish_keyed(1, &KEYS, 150..200).await;

    shop.in_order(&KEYS, 200).await;
    shop.nothing_pending().await;
    old.in_sync().await.unwrap();
    for member in members {
        let counts = member.counters.snapshot();
        assert_eq!((counts.failed, counts.dead, counts.lost), (0, 0, 0));
        member.stop().await;
    }
    // Looked at again: nothing came twice after the first look.
    shop.in_order(&KEYS, 200).await;
}

/// The replica had the entries when its link broke, but nothing of the group; then its master dies.
#[tokio::test]
async fn a_promoted_replica_that_knows_nothing_of_the_group_doubles_nothing() {
    let redis = Redis::start().await.unwrap();
    let mut shop = Shop::open_on(Postgres::shared().await.unwrap(), redis).await;
    let replica = shop.redis.replica().await.unwrap();
    let link = Proxy::start(shop.redis.port()).await.unwrap();
    replica.replica_of(link.port()).await.unwrap();
    shop.publish_many(200).await;
    replica.in_sync().await.unwrap();
    replica.caught_up_with(&shop.redis).await.unwrap();
    link.refuse().await.unwrap();
    let proxy = Proxy::start(shop.redis.port()).await.unwrap();
    let builder = consumer_at(&shop.postgres_url, &shop.redis.url_via(proxy.port()));
    let consumer = run(builder.topic("orders"), ship);
    shop.single_effects(200).await;
    shop.nothing_pending().await;

    shop.redis.kill9().await.unwrap();
    replica.promote().await.unwrap();
    proxy.retarget(replica.port()).await.unwrap();
    shop.redis = replica;
    shop.publish("orders", "after").await;

    shop.single_effects(201).await;
    shop.nothing_pending().await;
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.applied, counts.repeated), (201, 200));
    assert_eq!((counts.failed, counts.dead, counts.lost), (0, 0, 0));
    consumer.stop().await;
}

/// A Redis that becomes a replica of an older state and is promoted again, with nobody disconnected, gives members again
/// what they have acknowledged. They do not know of it, and nothing fails.
#[tokio::test]
async fn entries_that_are_pending_again_behind_a_members_back_are_settled() {
    for order in [Order::PerKey, Order::None] {
        let shop = Shop::open().await;
        // No lease is lost, after which an owner would look by itself.
        let builder = shop
            .consumer()
            .order(order)
            .lease(Duration::from_secs(60))
            .claim_after(Duration::from_secs(1));
        let consumer = run(builder, ship);
        shop.publish_many(20).await;
        shop.single_effects(20).await;
        shop.nothing_pending().await;

        let members = shop.members().await;
        let mut redis = shop.redis().await;
        let entries: StreamRangeReply = redis::cmd("XRANGE")
            .arg(&[ORDERS, "-", "+"])
            .query_async(&mut redis)
            .await
            .unwrap();
        let mut claim = redis::cmd("XCLAIM");
        claim.arg(ORDERS).arg(GROUP).arg(&members[0]).arg(0);
        for entry in &entries.ids {
            claim.arg(&entry.id);
        }
        let claim = claim.arg("FORCE").arg("JUSTID");
        claim.exec_async(&mut redis).await.unwrap();
        assert_eq!(shop.pending("orders").await, 20);

        shop.nothing_pending().await;
        shop.single_effects(20).await;
        let counts = consumer.counters.snapshot();
        assert_eq!((counts.applied, counts.repeated), (20, 20));
        assert_eq!((counts.failed, counts.dead, counts.lost), (0, 0, 0));
        consumer.stop().await;
    }
}
