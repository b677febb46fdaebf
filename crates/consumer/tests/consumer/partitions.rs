//! Partition counts that change.

use outbox_consumer::{Consumer, Order};
use outbox_testkit::eventually;

use crate::{
    ordered::{note, stream_of},
    shop::{DEADLINE, GROUP, Shop, run, ship},
};

const KEYS: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];

#[tokio::test]
async fn a_running_group_moves_over_when_the_count_changes() {
    let shop = Shop::open().await.keeping_sequence().await;
    let one = run(shop.named("one"), note);
    let two = run(shop.named("two"), note);
    shop.publish_keyed(1, &KEYS, 0..10).await;
    shop.in_order(&KEYS, 10).await;
    shop.nothing_pending().await;

    shop.set_partitions("orders", "4,1").await;
    shop.publish_keyed(4, &KEYS, 10..20).await;
    shop.in_order(&KEYS, 20).await;
    shop.shares_are(&[2, 2]).await;
    shop.set_partitions("orders", "2,4,1").await;
    shop.publish_keyed(2, &KEYS, 20..30).await;

    shop.in_order(&KEYS, 30).await;
    shop.shares_are(&[1, 1]).await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn a_new_group_drains_the_streams_of_earlier_counts_first() {
    let shop = Shop::open().await.keeping_sequence().await;
    shop.publish_keyed(1, &KEYS, 0..30).await;
    shop.publish_keyed(4, &KEYS, 30..60).await;
    shop.publish_keyed(16, &KEYS, 60..90).await;
    shop.set_partitions("orders", "16,4,1").await;

    let one = run(shop.named("one"), note);
    let two = run(shop.named("two"), note);

    shop.in_order(&KEYS, 90).await;
    shop.shares_are(&[8, 8]).await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn competing_consumers_read_all_partitions() {
    let shop = Shop::open().await;
    shop.set_partitions("orders", "4").await;
    let mut pipeline = redis::pipe();
    for n in 0..100 {
        let key = format!("order-{n}");
        pipeline.add_command(crate::shop::entry(
            &stream_of("orders", 4, &key),
            &key,
            "{}",
        ));
    }
    pipeline
        .query_async::<Vec<String>>(&mut shop.redis().await)
        .await
        .unwrap();

    let one = run(shop.named("one").order(Order::None), ship);
    let two = run(shop.named("two").order(Order::None), ship);

    shop.single_effects(100).await;
    assert_eq!(shop.count("SELECT count(*) FROM inbox.leases").await, 0);
    one.stop().await;
    two.stop().await;
}

/// The second group has partitions of two topics to share with a member that reads only one of them.
#[tokio::test]
async fn groups_own_streams_independently_and_members_may_differ_in_their_topics() {
    let shop = Shop::open().await;
    shop.set_partitions("orders", "2").await;
    shop.publish("refunds", "r").await;
    let builder = |group: &str| {
        let redis = redis::Client::open(shop.redis.url()).unwrap();
        Consumer::builder(crate::shop::pool(&shop.postgres_url), redis, group)
    };
    let shipping = run(builder(GROUP).topic("orders"), ship);
    let both = run(builder("billing").topics(["orders", "refunds"]), ship);
    let single = run(builder("billing").topic("orders"), ship);

    shop.effects_are(&["r"]).await;
    eventually(DEADLINE, "five streams with an owner", || async {
        let sql = "SELECT count(*) FROM inbox.leases WHERE expires_at > clock_timestamp()";
        shop.count(sql).await == 5
    })
    .await
    .unwrap();
    for consumer in [shipping, both, single] {
        consumer.stop().await;
    }
}
