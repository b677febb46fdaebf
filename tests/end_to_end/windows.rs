//! The two moments at which code that writes to two systems goes wrong.

use outbox_testkit::eventually;

use crate::world::{DEADLINE, World, place_order, write_order};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fact_committed_while_nobody_can_publish_gets_its_message_later() {
    let world = World::open().await;
    let mut cashier = world.cashier().await;
    let consumer = world.consumer();

    // Neither a Redis nor a relay: the commit needs none of them.
    world.redis.kill9().await.unwrap();
    place_order(&mut cashier, "placed-without-redis").await;
    world.redis.start_again().await.unwrap();
    let relay = world.relay();
    world.one_effect_for_each_order().await;

    // A relay that has lost its Redis.
    world.redis.kill9().await.unwrap();
    place_order(&mut cashier, "placed-while-the-relay-waits").await;
    world.redis.start_again().await.unwrap();
    world.one_effect_for_each_order().await;
    assert_eq!(
        world.effects().await,
        ["placed-while-the-relay-waits", "placed-without-redis"]
    );
    consumer.stop().await;
    drop(relay);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fact_that_was_rolled_back_never_becomes_a_message() {
    let world = World::open().await;
    let relay = world.relay();
    let consumer = world.consumer();
    let mut cashier = world.cashier().await;
    let mut other = world.cashier().await;

    // Its id is drawn first and it stays open while a later one is committed, published and applied.
    let open = cashier.transaction().await.unwrap();
    write_order(&open, "rolled-back").await;
    place_order(&mut other, "placed-meanwhile").await;
    world.one_effect_for_each_order().await;
    assert_eq!(world.stream_keys().await, ["placed-meanwhile"]);

    open.rollback().await.unwrap();
    place_order(&mut other, "placed-afterwards").await;
    world.one_effect_for_each_order().await;
    world.everything_sent().await;
    assert_eq!(
        world.stream_keys().await,
        ["placed-meanwhile", "placed-afterwards"]
    );
    assert_eq!(
        world.effects().await,
        ["placed-afterwards", "placed-meanwhile"]
    );
    consumer.stop().await;
    drop(relay);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fact_whose_client_died_before_the_commit_never_becomes_a_message() {
    let world = World::open().await;
    let relay = world.relay();
    let consumer = world.consumer();
    let mut other = world.cashier().await;

    let mut dying = world.cashier().await;
    let open = dying.transaction().await.unwrap();
    write_order(&open, "died-before-commit").await;
    let backend: i32 = open
        .query_one("SELECT pg_backend_pid()", &[])
        .await
        .unwrap()
        .get(0);
    other
        .execute("SELECT pg_terminate_backend($1)", &[&backend])
        .await
        .unwrap();
    drop(open);

    place_order(&mut other, "placed-afterwards").await;
    world.one_effect_for_each_order().await;
    eventually(DEADLINE, "the gap of the dead client to close", || async {
        let gaps = "SELECT count(*) FROM outbox.checkpoint_gaps";
        let gaps: i64 = world.shop.query_one(gaps, &[]).await.unwrap().get(0);
        if gaps == 0 { Ok(()) } else { Err(gaps) }
    })
    .await
    .unwrap();
    assert_eq!(world.stream_keys().await, ["placed-afterwards"]);
    consumer.stop().await;
    drop(relay);
}
