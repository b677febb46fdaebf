//! Consumers that come late (case 27 of the field: a group made at the end of the stream never sees the backlog, and
//! a trimmed stream has lost it).

use crate::world::{World, write_order};

const MESSAGES: usize = 1_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_consumer_that_comes_late_gets_the_whole_backlog() {
    let world = World::open().await;
    let mut cashier = world.cashier().await;
    let relay = world.relay();
    for page in 0..10 {
        let transaction = cashier.transaction().await.unwrap();
        for number in 0..MESSAGES / 10 {
            write_order(&transaction, &format!("order-{page}-{number}")).await;
        }
        transaction.commit().await.unwrap();
    }
    world.everything_sent().await;
    let keys = world.stream_keys().await;
    assert_eq!(keys.len(), MESSAGES, "nothing is trimmed unless asked for");

    let consumer = world.consumer();
    world.one_effect_for_each_order().await;
    assert_eq!(world.effects().await.len(), MESSAGES);
    assert_eq!(world.stream_keys().await, keys);
    consumer.stop().await;
    drop(relay);
}
