//! What is between the two ends dies in the middle, and nothing is lost, doubled or made up.

use std::sync::atomic::{AtomicUsize, Ordering};

use outbox_testkit::eventually;

use crate::world::{DEADLINE, World, write_order};

const CASHIERS: usize = 4;

/// Of each cashier; every fifth is rolled back.
const ORDERS: usize = 150;

const ALL: usize = CASHIERS * ORDERS;

/// Several cashiers place orders; `written` counts those that are committed or rolled back.
async fn sell(world: &World, written: &AtomicUsize) {
    let cashier = async |cashier: usize| {
        let mut client = world.cashier().await;
        for number in 0..ORDERS {
            let transaction = client.transaction().await.unwrap();
            write_order(&transaction, &format!("order-{cashier}-{number}")).await;
            if number % 5 == 3 {
                transaction.rollback().await.unwrap();
            } else {
                transaction.commit().await.unwrap();
            }
            written.fetch_add(1, Ordering::SeqCst);
        }
    };
    tokio::join!(cashier(0), cashier(1), cashier(2), cashier(3));
}

async fn until_written(written: &AtomicUsize, percent: usize) {
    eventually(DEADLINE, "orders to be written", || async {
        let written = written.load(Ordering::SeqCst);
        if written * 100 >= ALL * percent {
            Ok(())
        } else {
            Err(written)
        }
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_killed_while_the_shop_sells_loses_and_doubles_nothing() {
    let world = World::open().await;
    let consumer = world.consumer();
    let written = AtomicUsize::new(0);
    let faults = async {
        let mut relay = world.relay();
        for percent in [20, 40, 60, 80] {
            until_written(&written, percent).await;
            relay.kill9();
            relay = world.relay();
        }
        relay
    };
    let ((), relay) = tokio::join!(sell(&world, &written), faults);
    world.everything_sent().await;
    world.one_effect_for_each_order().await;
    assert_eq!(world.orders().await.len(), ALL / 5 * 4);

    // Not even the stream has one of them twice: page and marker are one step.
    let mut keys = world.stream_keys().await;
    keys.sort();
    assert_eq!(keys, world.orders().await);
    consumer.stop().await;
    drop(relay);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_comes_back_empty_is_filled_again_and_the_inbox_absorbs_the_repeats() {
    let world = World::open().await;
    let relay = world.relay();
    let consumer = world.consumer();
    let written = AtomicUsize::new(0);
    let faults = async {
        until_written(&written, 50).await;
        eventually(DEADLINE, "effects to be repeated", || async {
            !world.effects().await.is_empty()
        })
        .await
        .unwrap();
        world.redis.kill9().await.unwrap();
        until_written(&written, 75).await;
        world.redis.start_again().await.unwrap();
    };
    tokio::join!(sell(&world, &written), faults);

    // The new Redis has every message of the outbox, those from before the loss too.
    let orders = world.orders().await;
    eventually(DEADLINE, "every message in the new Redis", || async {
        let mut keys = world.stream_keys().await;
        keys.sort();
        if keys == orders {
            Ok(())
        } else {
            Err((keys.len(), orders.len()))
        }
    })
    .await
    .unwrap();
    world.everything_sent().await;
    world.one_effect_for_each_order().await;
    consumer.stop().await;
    drop(relay);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relay_and_redis_killed_at_once_lose_nothing() {
    let world = World::open().await;
    let consumer = world.consumer();
    let written = AtomicUsize::new(0);
    let faults = async {
        let relay = world.relay();
        until_written(&written, 40).await;
        relay.kill9();
        world.redis.kill9().await.unwrap();
        until_written(&written, 70).await;
        world.redis.start_again().await.unwrap();
        world.relay()
    };
    let ((), relay) = tokio::join!(sell(&world, &written), faults);
    world.everything_sent().await;
    world.one_effect_for_each_order().await;
    consumer.stop().await;
    drop(relay);
}
