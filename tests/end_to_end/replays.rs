//! What `outbox-relay replay` publishes again: a group that has applied it does not apply it again, and a new one does once.

use outbox_consumer::{Message, Transaction};
use outbox_testkit::eventually;

use crate::world::{DEADLINE, World, place_order, run};

const ORDERS: usize = 120;

/// The handler of the group that reads the other stream.
async fn rebuild(tx: &Transaction<'_>, message: &Message) -> Result<(), tokio_postgres::Error> {
    let sql = "INSERT INTO rebuilt (key) VALUES ($1)";
    tx.execute(sql, &[&message.message_key()]).await.map(drop)
}

async fn with_orders() -> (World, outbox_testkit::Process) {
    let world = World::open().await;
    let relay = world.relay();
    let mut cashier = world.cashier().await;
    for number in 0..ORDERS {
        place_order(&mut cashier, &format!("order-{number:03}")).await;
    }
    world.everything_sent().await;
    (world, relay)
}

#[tokio::test]
async fn what_a_group_has_applied_it_does_not_apply_again_after_a_replay() {
    let (world, relay) = with_orders().await;
    let consumer = world.consumer();
    world.one_effect_for_each_order().await;

    // Once in full, once in part, beside a consumer that works and before one that comes back.
    world.command(&["replay", "--name", "all", "--all"]).await;
    world.one_effect_for_each_order().await;
    assert_eq!(world.stream_keys().await.len(), 2 * ORDERS);
    let counts = consumer.counters.snapshot();
    assert_eq!(counts.applied, ORDERS as u64);
    assert_eq!(counts.repeated, ORDERS as u64);
    assert_eq!((counts.failed, counts.dead), (0, 0));
    consumer.stop().await;
    let part = [
        "replay",
        "--name",
        "part",
        "--message-key",
        "order-007",
        "--from-id",
        "1",
    ];
    world.command(&part).await;
    let mut cashier = world.cashier().await;
    place_order(&mut cashier, "new").await;
    let consumer = world.consumer();
    world.one_effect_for_each_order().await;
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.applied, counts.repeated), (1, 1));
    consumer.stop().await;
    assert_eq!(relay.exit_status(), None);
}

#[tokio::test]
async fn a_new_group_on_the_stream_of_a_replay_applies_each_message_once() {
    let (world, relay) = with_orders().await;
    let consumer = world.consumer();
    world.one_effect_for_each_order().await;
    let table = "CREATE TABLE rebuilt (key text NOT NULL)";
    world.warehouse.batch_execute(table).await.unwrap();

    let to_rebuilt = |name| {
        [
            "replay",
            "--name",
            name,
            "--all",
            "--stream",
            "outbox:rebuilt",
        ]
    };
    world.command(&to_rebuilt("first")).await;
    let rebuilding = run(world.builder("rebuilding", "rebuilt"), rebuild);
    let rebuilt = async |repeated: u64| {
        eventually(DEADLINE, "the group of the other stream", || async {
            let counts = rebuilding.counters.snapshot();
            if counts.applied + counts.repeated == ORDERS as u64 + repeated {
                Ok(())
            } else {
                Err((counts.applied, counts.repeated))
            }
        })
        .await
        .unwrap();
        let sql = "SELECT count(*), count(DISTINCT key) FROM rebuilt";
        let row = world.warehouse.query_one(sql, &[]).await.unwrap();
        let (all, distinct): (i64, i64) = (row.get(0), row.get(1));
        assert_eq!((all, distinct), (ORDERS as i64, ORDERS as i64));
    };
    rebuilt(0).await;
    // Nothing is done under a name that was, and under another one the inbox absorbs it.
    world.command(&to_rebuilt("first")).await;
    world.command(&to_rebuilt("second")).await;
    rebuilt(ORDERS as u64).await;
    // The group of the messages' own stream has seen nothing of it.
    world.one_effect_for_each_order().await;
    assert_eq!(consumer.counters.snapshot().repeated, 0);
    rebuilding.stop().await;
    consumer.stop().await;
    assert_eq!(relay.exit_status(), None);
}
