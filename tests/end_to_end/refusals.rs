//! Redis is there and refuses: everything for a while, one stream, or one message. Relay and consumer wait, try again
//! on the connections that they have, and are done soon after; nothing counts as sent that is not in the stream.

use std::{collections::HashSet, sync::Arc, time::Duration};

use outbox_consumer::{Message, Transaction};
use outbox_testkit::{Process, Redis, eventually};
use redis::aio::MultiplexedConnection;
use tokio::sync::Notify;
use tokio_postgres::Client;

use crate::world::{DEADLINE, Running, World, place_order, ship};

/// Orders that come in while Redis refuses.
const ORDERS: usize = 200;

/// What waited arrives within this time after the last refusal.
const RETURN: Duration = Duration::from_secs(10);

/// Clients that may come on top of those before the refusal: a connection that is made anew while the old one is being
/// closed. One for each refusal would be dozens.
const MORE_CLIENTS_MAX: usize = 2;

/// Refusals after which it would show that each of them opens a connection.
const REFUSALS: u64 = 30;

async fn command(redis: &mut MultiplexedConnection, line: &str) {
    let mut words = line.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    for word in words {
        command.arg(word);
    }
    command.exec_async(redis).await.unwrap();
}

async fn ask(redis: &mut MultiplexedConnection, command: &[&str]) -> String {
    redis::cmd(command[0])
        .arg(&command[1..])
        .query_async(redis)
        .await
        .unwrap()
}

/// Open connections, the test's own among them.
async fn clients(redis: &mut MultiplexedConnection) -> usize {
    ask(redis, &["CLIENT", "LIST"]).await.lines().count()
}

/// How often Redis has answered with an error of this code.
async fn refusals(redis: &mut MultiplexedConnection, code: &str) -> u64 {
    let stats = ask(redis, &["INFO", "errorstats"]).await;
    let field = format!("errorstat_{code}:count=");
    let count = stats.lines().find_map(|line| line.strip_prefix(&field));
    count.map_or(0, |count| count.parse().unwrap())
}

/// Waits until Redis has refused so often, and looks at the number of clients all the while.
async fn refused(redis: &mut MultiplexedConnection, code: &str, before: usize) {
    eventually(DEADLINE, "refusals", || {
        let mut redis = redis.clone();
        async move {
            let clients = clients(&mut redis).await;
            assert!(
                clients <= before + MORE_CLIENTS_MAX,
                "{clients} clients, {before} before"
            );
            let refusals = refusals(&mut redis, code).await;
            if refusals >= REFUSALS {
                Ok(())
            } else {
                Err(refusals)
            }
        }
    })
    .await
    .unwrap();
}

/// Each message that counts as sent stands in the stream.
async fn nothing_sent_is_missing(world: &World) {
    let sent = "SELECT message_key FROM outbox.message_status WHERE sent AND topic = 'orders'";
    let sent = world.shop.query(sent, &[]).await.unwrap();
    let stream: HashSet<String> = world.stream_keys().await.into_iter().collect();
    for row in sent {
        let key: String = row.get(0);
        assert!(stream.contains(&key), "{key} counts as sent");
    }
}

/// Everything is in the stream once and has its effect once, soon, and by the same relay.
async fn all_is_well_soon(world: &World, relay: &Process) {
    let settled = world.one_effect_for_each_order();
    tokio::time::timeout(RETURN, settled).await.unwrap();
    let mut keys = world.stream_keys().await;
    keys.sort();
    assert_eq!(keys, world.orders().await);
    assert_eq!(relay.exit_status(), None);
}

/// A world in which one message has gone the whole way.
struct Shop {
    world: World,
    relay: Process,
    consumer: Running,
    cashier: Client,
    redis: MultiplexedConnection,
}

impl Shop {
    async fn open() -> Self {
        let world = World::open().await;
        let relay = world.relay_without_ceiling();
        let consumer = world.consumer();
        let mut cashier = world.cashier().await;
        let redis = world.redis.connect().await.unwrap();
        place_order(&mut cashier, "before").await;
        world.one_effect_for_each_order().await;
        Self {
            world,
            relay,
            consumer,
            cashier,
            redis,
        }
    }
}

/// Redis refuses what changes data from `refuse` until `lift`, while orders come in.
async fn writes_are_refused(refuse: &str, lift: &str, code: &str) {
    let Shop {
        world,
        relay,
        consumer,
        mut cashier,
        mut redis,
    } = Shop::open().await;

    let before = clients(&mut redis).await;
    command(&mut redis, refuse).await;
    for n in 0..ORDERS {
        place_order(&mut cashier, &format!("during-{n}")).await;
    }
    refused(&mut redis, code, before).await;
    nothing_sent_is_missing(&world).await;
    assert_eq!(world.stream_keys().await, ["before"]);
    command(&mut redis, lift).await;

    all_is_well_soon(&world, &relay).await;
    consumer.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_redis_is_waited_for_on_the_same_connections() {
    writes_are_refused("CONFIG SET maxmemory 1mb", "CONFIG SET maxmemory 0", "OOM").await;
}

/// Here the consumer's reads are refused, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_replicas_are_waited_for_on_the_same_connections() {
    writes_are_refused(
        "CONFIG SET min-replicas-to-write 1",
        "CONFIG SET min-replicas-to-write 0",
        "NOREPLICAS",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_an_acl_refuses_stops_no_other() {
    let Shop {
        world,
        relay,
        consumer,
        mut cashier,
        mut redis,
    } = Shop::open().await;

    let before = clients(&mut redis).await;
    command(
        &mut redis,
        "ACL SETUSER default -xadd (+xadd ~outbox:audit)",
    )
    .await;
    for n in 0..ORDERS {
        place_order(&mut cashier, &format!("during-{n}")).await;
        let audit = "SELECT outbox.publish('audit', '{}')";
        world.shop.execute(audit, &[]).await.unwrap();
    }
    eventually(DEADLINE, "the other stream to go on", || {
        let mut redis = redis.clone();
        async move {
            assert!(clients(&mut redis).await <= before + MORE_CLIENTS_MAX);
            let mut len = redis::cmd("XLEN");
            let len: usize = len
                .arg("outbox:audit")
                .query_async(&mut redis)
                .await
                .unwrap();
            if len == ORDERS { Ok(()) } else { Err(len) }
        }
    })
    .await
    .unwrap();
    nothing_sent_is_missing(&world).await;
    assert_eq!(world.stream_keys().await, ["before"]);
    command(&mut redis, "ACL SETUSER default clearselectors +@all").await;

    all_is_well_soon(&world, &relay).await;
    consumer.stop().await;
}

/// The acknowledgement of a handler that runs meanwhile is refused, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshots_that_fail_under_a_handler_double_no_effect() {
    let redis = Redis::builder().arg("--save", "3600 1");
    let world = World::open_with(redis.start().await.unwrap()).await;
    let relay = world.relay();
    let (begun, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (began, open) = (Arc::clone(&begun), Arc::clone(&gate));
    let consumer = world.consumer_with(async move |tx: &Transaction<'_>, message: &Message| {
        if message.message_key() == "slow" {
            began.notify_one();
            open.notified().await;
        }
        ship(tx, message).await
    });
    let mut cashier = world.cashier().await;
    let mut redis = world.redis.connect().await.unwrap();
    place_order(&mut cashier, "slow").await;
    begun.notified().await;

    let in_the_way = world.redis.data_dir().join("dump.rdb");
    std::fs::create_dir(&in_the_way).unwrap();
    snapshot(&mut redis, "err").await;
    for n in 0..20 {
        place_order(&mut cashier, &format!("during-{n}")).await;
    }
    // Also for a second run of that handler, should there be one.
    gate.notify_one();
    eventually(DEADLINE, "the slow effect", || async {
        world.effects().await == ["slow"]
    })
    .await
    .unwrap();
    gate.notify_one();
    let before = clients(&mut redis).await;
    refused(&mut redis, "MISCONF", before).await;
    nothing_sent_is_missing(&world).await;
    assert_eq!(world.stream_keys().await, ["slow"]);
    std::fs::remove_dir(&in_the_way).unwrap();
    snapshot(&mut redis, "ok").await;

    all_is_well_soon(&world, &relay).await;
    consumer.stop().await;
}

/// Has a snapshot written, and waits until it has ended so.
async fn snapshot(redis: &mut MultiplexedConnection, status: &str) {
    command(redis, "BGSAVE").await;
    let status = format!("rdb_last_bgsave_status:{status}");
    eventually(DEADLINE, "the snapshot", || {
        let (mut redis, status) = (redis.clone(), status.clone());
        async move {
            let info = ask(&mut redis, &["INFO", "persistence"]).await;
            info.contains(&status) && info.contains("rdb_bgsave_in_progress:0")
        }
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_is_too_large_for_redis_is_set_aside_and_the_others_arrive_once() {
    let Shop {
        world,
        relay,
        consumer,
        mut cashier,
        mut redis,
    } = Shop::open().await;

    command(&mut redis, "CONFIG SET proto-max-bulk-len 1mb").await;
    for n in 0..10 {
        place_order(&mut cashier, &format!("first-{n}")).await;
    }
    let large =
        "SELECT outbox.publish('orders', to_json(repeat('x', 1200000)), message_key => 'large')";
    world.shop.execute(large, &[]).await.unwrap();
    for n in 0..10 {
        place_order(&mut cashier, &format!("second-{n}")).await;
    }
    world.one_effect_for_each_order().await;
    let letter = eventually(DEADLINE, "the dead letter", || async {
        let letter = "SELECT message_key, reason FROM outbox.dead_letters";
        world.shop.query_opt(letter, &[]).await.unwrap()
    })
    .await
    .unwrap();
    assert_eq!(letter.get::<_, String>(0), "large");
    let reason: String = letter.get(1);
    assert!(reason.contains("proto-max-bulk-len"), "{reason}");

    place_order(&mut cashier, "after").await;
    all_is_well_soon(&world, &relay).await;
    consumer.stop().await;
}
