//! Sentinels promote a replica of Redis while the shop sells, and each order takes effect once.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use outbox_testkit::{Authority, Redis, Sentinels, eventually};

use crate::world::{DEADLINE, World, place_order};

/// What the old primary had and the replica had not goes out again; what the group then is given again, the inbox absorbs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_by_sentinels_under_relay_and_consumer_loses_and_doubles_nothing() {
    let world = World::open_with(Redis::start().await.unwrap()).await;
    let replica = world.redis.replica().await.unwrap();
    let sentinels = Sentinels::watch(&world.redis, 1).await.unwrap();
    nothing_is_lost_or_doubled(world, replica, sentinels).await;
}

/// The same with TLS between all of them, and a login for the servers and another one for the sentinels.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_with_tls_and_two_logins_loses_and_doubles_nothing() {
    let ours = Authority::new().unwrap();
    let redis = Redis::builder()
        .tls(ours.issue("127.0.0.1").unwrap())
        .tls_replication(ours.root())
        .password("of-the-servers");
    let mut world = World::open_with(redis.start().await.unwrap()).await;
    world.redis_tls.ca_file = Some(ours.root());
    let replica = world.redis.replica().await.unwrap();
    let sentinels = Sentinels::builder().login("watcher", "of-the-sentinels");
    let sentinels = sentinels.watch(&world.redis, 1).await.unwrap();
    assert!(sentinels.url().starts_with("rediss+sentinel://"));
    nothing_is_lost_or_doubled(world, replica, sentinels).await;
}

/// Orders are placed while the primary is killed and the replica promoted.
async fn nothing_is_lost_or_doubled(mut world: World, replica: Redis, sentinels: Sentinels) {
    world.redis_url = sentinels.url();
    let relay = world.relay();
    let consumer = world.consumer();
    let mut cashier = world.cashier().await;
    let (placed, is_closed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let selling = async {
        while !is_closed.load(Ordering::SeqCst) {
            let number = placed.load(Ordering::SeqCst);
            place_order(&mut cashier, &format!("order-{number}")).await;
            placed.fetch_add(1, Ordering::SeqCst);
        }
    };
    let failing = async {
        eventually(DEADLINE, "effects", || async {
            let effects = world.effects().await.len();
            if effects >= 100 { Ok(()) } else { Err(effects) }
        })
        .await
        .unwrap();
        // From here on the replica is behind, by as much as its link had not carried.
        world.redis.kill9().await.unwrap();
        sentinels.agree_on(&replica).await.unwrap();
        let before = placed.load(Ordering::SeqCst);
        eventually(DEADLINE, "orders after the failover", || async {
            placed.load(Ordering::SeqCst) >= before + 100
        })
        .await
        .unwrap();
        is_closed.store(true, Ordering::SeqCst);
    };
    tokio::join!(selling, failing);

    world.redis = replica;
    world.one_effect_for_each_order().await;
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.failed, counts.dead, counts.lost), (0, 0, 0));
    assert_eq!(relay.exit_status(), None);
    consumer.stop().await;
}
