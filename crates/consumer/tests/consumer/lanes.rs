//! Several transactions at a time, and the order of each key.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use outbox_consumer::{HandlerError, Message, Order, Transaction};
use outbox_testkit::eventually;
use tokio::sync::Semaphore;

use crate::{
    ordered::note,
    shop::{DEADLINE, Shop, pool_of, run, ship},
};

#[tokio::test]
async fn keys_do_not_wait_for_each_other() {
    let shop = Shop::open().await.keeping_sequence().await;
    let gate = Arc::new(Semaphore::new(0));
    let go = Arc::clone(&gate);
    let builder = shop.consumer().lanes(2).batch(1);
    let consumer = run(
        builder,
        async move |tx: &Transaction<'_>, message: &Message| {
            if message.message_key() == "slow-0" {
                go.acquire().await?.forget();
            }
            note(tx, message).await
        },
    );
    shop.publish_keyed(1, &["slow", "fast"], 0..5).await;

    eventually(DEADLINE, "the fast key", || async {
        let sequences = shop.sequences().await;
        sequences.get("fast").map(Vec::len) == Some(5)
    })
    .await
    .unwrap();
    assert_eq!(shop.sequences().await.get("slow"), None);
    gate.add_permits(1);

    shop.in_order(&["fast", "slow"], 5).await;
    consumer.stop().await;
}

#[tokio::test]
async fn a_key_that_waits_for_another_try_holds_up_its_own_messages_only() {
    let shop = Shop::open().await.keeping_sequence().await;
    let builder = shop
        .consumer()
        .retry_backoff(Duration::from_secs(2), Duration::from_secs(2));
    let consumer = run(
        builder,
        async move |tx: &Transaction<'_>, message: &Message| {
            if message.message_key() == "bad-1" && message.attempt() == 1 {
                return Err(HandlerError::from("not yet"));
            }
            note(tx, message).await
        },
    );
    shop.publish_keyed(1, &["bad", "good"], 0..30).await;

    eventually(DEADLINE, "the good key", || async {
        let sequences = shop.sequences().await;
        sequences.get("good").map(Vec::len) == Some(30)
    })
    .await
    .unwrap();
    assert_eq!(shop.sequences().await["bad"], [0]);
    shop.in_order(&["bad", "good"], 30).await;
    consumer.stop().await;
}

#[tokio::test]
async fn eight_lanes_keep_every_key_in_order_through_failures() {
    let shop = Shop::open().await.keeping_sequence().await;
    let keys: Vec<String> = (0..20).map(|n| format!("key-{n}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let at_once = Arc::new((AtomicU32::new(0), AtomicU32::new(0)));
    let open = Arc::new(Mutex::new(HashMap::<String, u32>::new()));
    let (seen, busy) = (Arc::clone(&at_once), Arc::clone(&open));
    let builder = shop
        .consumer_on(pool_of(&shop.postgres_url, 12))
        .lanes(8)
        .batch(4);
    let consumer = run(
        builder,
        async move |tx: &Transaction<'_>, message: &Message| {
            let key = message.ordering_key().unwrap_or_default().to_owned();
            *busy.lock().unwrap().entry(key.clone()).or_default() += 1;
            let now = seen.0.fetch_add(1, Ordering::SeqCst) + 1;
            seen.1.fetch_max(now, Ordering::SeqCst);
            let noted = note(tx, message).await;
            tokio::task::yield_now().await;
            seen.0.fetch_sub(1, Ordering::SeqCst);
            let others = busy.lock().unwrap().insert(key, 0);
            assert_eq!(others, Some(1), "one key on two lanes");
            // Every seventh message fails at first.
            if message.json::<i64>()? % 7 == 0 && message.attempt() == 1 {
                return Err(HandlerError::from("not yet"));
            }
            noted
        },
    );

    shop.publish_keyed(1, &keys, 0..40).await;

    shop.in_order(&keys, 40).await;
    shop.nothing_pending().await;
    assert!(
        at_once.1.load(Ordering::SeqCst) > 1,
        "nothing ran at the same time"
    );
    assert!(shop.dead_letters().await.is_empty());
    consumer.stop().await;
}

/// The handler takes five times the claim time; another member competes for the entries.
#[tokio::test]
async fn a_long_handler_keeps_its_entries_and_what_waits_behind_it() {
    let shop = Shop::open().await;
    let starts = Arc::new(AtomicU32::new(0));
    let long = |starts: Arc<AtomicU32>| {
        async move |tx: &Transaction<'_>, message: &Message| {
            starts.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(1_500)).await;
            ship(tx, message).await
        }
    };
    let shared = || {
        let builder = shop.consumer().order(Order::None);
        builder.claim_after(Duration::from_millis(600)).batch(4)
    };
    shop.publish_many(4).await;
    let one = run(shared().name("one"), long(Arc::clone(&starts)));
    eventually(DEADLINE, "entries in hand", || async {
        shop.pending("orders").await == 4
    })
    .await
    .unwrap();
    let two = run(shared().name("two"), long(Arc::clone(&starts)));

    shop.single_effects(4).await;
    shop.nothing_pending().await;
    assert_eq!(starts.load(Ordering::SeqCst), 4);
    assert_eq!(two.counters.snapshot().claimed, 0);
    one.stop().await;
    two.stop().await;
}
