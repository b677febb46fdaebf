//! Dead letters that a person retries or discards, and messages that wait behind one.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

use outbox_consumer::{Consumer, Error, HandlerError, Message, OnDeadLetter, Order, Transaction};
use outbox_testkit::{Process, eventually, relay_binary};

use crate::shop::{DEADLINE, ORDERS, Shop, entry, pool, run, ship};

/// Runs `outbox-relay dead-letters` on the shop's database and returns what it printed.
async fn dead_letters(shop: &Shop, arguments: &[&str]) -> Vec<String> {
    let (code, lines) = attempt(shop, arguments).await;
    assert_eq!(code, 0, "{lines:?}");
    lines
}

async fn attempt(shop: &Shop, arguments: &[&str]) -> (i32, Vec<String>) {
    let process = Process::builder(relay_binary())
        .arg("dead-letters")
        .args(arguments.iter().copied())
        .args(["--inbox-database-url", &shop.postgres_url])
        .spawn()
        .unwrap();
    let status = process.wait(DEADLINE).await.unwrap();
    let lines = process.lines();
    (status.code().unwrap(), lines)
}

async fn publish_ordered(shop: &Shop, key: &str, ordering_key: &str) {
    let mut command = entry(ORDERS, key, "{\"n\":1}");
    command
        .arg("ordering_key")
        .arg(ordering_key)
        .arg("event_type")
        .arg("Placed");
    command
        .query_async::<String>(&mut shop.redis().await)
        .await
        .unwrap();
}

/// Fails for keys that begin with `bad` until it is repaired, and notes what it applied.
#[derive(Clone, Default)]
struct Bench {
    repaired: Arc<AtomicBool>,
    failed: Arc<AtomicU32>,
    applied: Arc<Mutex<Vec<String>>>,
}

impl Bench {
    fn handler(
        &self,
    ) -> impl AsyncFn(&Transaction<'_>, &Message) -> Result<(), HandlerError> + Send + use<> {
        let bench = self.clone();
        async move |tx, message| {
            let key = message.message_key();
            if key.starts_with("bad") && !bench.repaired.load(Ordering::SeqCst) {
                bench.failed.fetch_add(1, Ordering::SeqCst);
                return Err(format!("{key} is broken").into());
            }
            ship(tx, message).await?;
            bench.applied.lock().unwrap().push(key.to_owned());
            Ok(())
        }
    }

    fn repair(&self) {
        self.repaired.store(true, Ordering::SeqCst);
    }

    fn applied(&self) -> Vec<String> {
        self.applied.lock().unwrap().clone()
    }
}

#[tokio::test]
async fn a_retried_dead_letter_takes_effect_once_and_only_in_its_group() {
    let shop = Shop::open().await;
    let bench = Bench::default();
    for key in ["a", "bad-1", "bad-2"] {
        publish_ordered(&shop, key, key).await;
    }
    let consumer = run(shop.consumer().max_attempts(2), bench.handler());
    let redis = redis::Client::open(shop.redis.url()).unwrap();
    let billing = run(
        Consumer::builder(pool(&shop.postgres_url), redis, "billing").topic("orders"),
        async |tx: &Transaction<'_>, message: &Message| {
            let sql = "INSERT INTO effects (grp, key) VALUES ('billing', $1)";
            tx.execute(sql, &[&message.message_key()]).await.map(drop)
        },
    );
    shop.dead_letter_count(2).await;
    shop.single_effects(4).await;
    let listed = dead_letters(&shop, &["list", "--group", "shipping", "--reason", "BAD-1"]).await;
    assert_eq!(listed.len(), 2, "{listed:?}");
    assert!(
        listed[1].ends_with("shipping\torders\tPlaced\tbad-1\t2\tbad-1 is broken"),
        "{listed:?}"
    );
    assert!(!listed[1].contains("{\"n\":1}"));
    let id = listed[1].split('\t').next().unwrap().to_owned();
    let shown = dead_letters(&shop, &["show", &id]).await;
    assert_eq!(shown.last().unwrap(), "{\"n\":1}");
    assert!(
        shown.contains(&"message_key     bad-1".to_owned()),
        "{shown:?}"
    );

    // Not repaired yet: a new series of attempts, then it is dead again.
    dead_letters(&shop, &["retry", &id]).await;
    eventually(DEADLINE, "two more attempts", || async {
        let letters = shop.dead_letters().await;
        let attempts = letters
            .iter()
            .find(|letter| letter.0.as_deref() == Some("bad-1"))
            .unwrap()
            .1;
        let waiting = shop
            .count("SELECT count(*) FROM inbox.dead_letters WHERE state <> 'dead'")
            .await;
        if (attempts, waiting) == (4, 0) {
            Ok(())
        } else {
            Err(letters)
        }
    })
    .await
    .unwrap();
    bench.repair();
    let said = dead_letters(
        &shop,
        &["retry", "--topic", "orders", "--event-type", "Placed"],
    )
    .await;
    assert_eq!(said, ["2 will be delivered again"]);

    shop.single_effects(6).await;
    shop.dead_letter_count(0).await;
    assert_eq!(
        shop.count("SELECT count(*) FROM effects WHERE grp = 'billing'")
            .await,
        3
    );
    assert_eq!(
        shop.count("SELECT count(*) FROM inbox.applied WHERE consumer_group = 'shipping'")
            .await,
        3
    );
    consumer.stop().await;
    billing.stop().await;
}

#[tokio::test]
async fn a_discarded_dead_letter_does_not_run_when_it_comes_again() {
    let shop = Shop::open().await;
    let bench = Bench::default();
    publish_ordered(&shop, "bad", "k").await;
    let consumer = run(shop.consumer().max_attempts(1), bench.handler());
    shop.dead_letter_count(1).await;

    for (arguments, code) in [
        (&["discard"][..], 64),
        (&["retry", "--all", "--group", "shipping"], 64),
        (&["discard", "999999"], 1),
        (&["show", "999999"], 1),
    ] {
        let (found, lines) = attempt(&shop, arguments).await;
        assert_eq!(found, code, "{arguments:?}: {lines:?}");
    }
    assert_eq!(
        dead_letters(&shop, &["discard", "--older-than", "1h"]).await,
        ["0 discarded"]
    );
    assert_eq!(
        dead_letters(&shop, &["discard", "--all"]).await,
        ["1 discarded"]
    );

    bench.repair();
    publish_ordered(&shop, "bad", "k").await;
    publish_ordered(&shop, "good", "k").await;
    shop.effects_are(&["good"]).await;
    shop.nothing_pending().await;
    assert!(shop.dead_letters().await.is_empty());
    consumer.stop().await;
}

#[tokio::test]
async fn a_held_key_waits_for_its_dead_letter_and_goes_on_in_order_also_after_a_restart() {
    let shop = Shop::open().await;
    let bench = Bench::default();
    let builder = || {
        shop.consumer()
            .max_attempts(2)
            .on_dead_letter(OnDeadLetter::HoldKey)
    };
    for (key, ordering_key) in [
        ("a-1", "a"),
        ("bad", "k"),
        ("k-1", "k"),
        ("k-2", "k"),
        ("a-2", "a"),
    ] {
        publish_ordered(&shop, key, ordering_key).await;
    }
    shop.publish("orders", "keyless").await;
    let consumer = run(builder(), bench.handler());
    shop.effects_are(&["a-1", "a-2", "keyless"]).await;
    shop.nothing_pending().await;
    consumer.stop().await;

    let consumer = run(builder(), bench.handler());
    publish_ordered(&shop, "k-3", "k").await;
    publish_ordered(&shop, "a-3", "a").await;
    shop.effects_are(&["a-1", "a-2", "a-3", "keyless"]).await;
    shop.nothing_pending().await;
    let states =
        "SELECT string_agg(message_key || ' ' || state, ', ' ORDER BY id) FROM inbox.dead_letters";
    let states: String = shop.db.query_one(states, &[]).await.unwrap().get(0);
    assert_eq!(states, "bad dead, k-1 waiting, k-2 waiting, k-3 waiting");
    assert_eq!(dead_letters(&shop, &["list"]).await.len(), 2);

    bench.repair();
    dead_letters(&shop, &["retry", "--all"]).await;
    shop.single_effects(8).await;
    publish_ordered(&shop, "k-4", "k").await;
    shop.single_effects(9).await;
    shop.dead_letter_count(0).await;
    let of_k: Vec<String> = bench
        .applied()
        .into_iter()
        .filter(|key| !key.starts_with('a') && key != "keyless")
        .collect();
    assert_eq!(of_k, ["bad", "k-1", "k-2", "k-3", "k-4"]);
    consumer.stop().await;
}

#[tokio::test]
async fn discarding_a_dead_letter_lets_its_key_go_on() {
    let shop = Shop::open().await;
    let bench = Bench::default();
    let builder = shop
        .consumer()
        .max_attempts(1)
        .on_dead_letter(OnDeadLetter::HoldKey);
    for key in ["bad", "k-1"] {
        publish_ordered(&shop, key, "k").await;
    }
    let consumer = run(builder, bench.handler());
    shop.dead_letter_count(2).await;

    dead_letters(&shop, &["discard", "--all"]).await;

    shop.effects_are(&["k-1"]).await;
    shop.dead_letter_count(0).await;
    assert_eq!(consumer.counters.snapshot().held, 1);
    consumer.stop().await;
}

#[tokio::test]
async fn keys_are_held_only_where_they_have_one_owner() {
    let shop = Shop::open().await;
    let builder = shop
        .consumer()
        .order(Order::None)
        .on_dead_letter(OnDeadLetter::HoldKey);
    let error = builder.build().unwrap_err();
    assert!(
        matches!(
            error,
            Error::Setting {
                field: "on_dead_letter",
                ..
            }
        ),
        "{error:?}"
    );
}
