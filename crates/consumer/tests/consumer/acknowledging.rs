//! Between commit and acknowledgement: the next batch runs, and nothing is forgotten, doubled or handed over.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use outbox_consumer::{Builder, HandlerError, Message, Order, Transaction};
use outbox_testkit::{Direction, Matcher, Proxy, eventually};
use tokio::sync::Notify;

use crate::{
    ordered::{note, stream_of},
    shop::{DEADLINE, Running, Shop, consumer_at, run, ship},
};

/// From now on Redis refuses all writes, among them XACK, and answers all reads: a replica is missing that it must have.
/// Unlike a silence, a refusal leaves nothing under way that might still be carried out.
async fn refuse_writes(shop: &Shop) {
    set_replicas_min(shop, "1").await;
}

async fn allow_writes(shop: &Shop) {
    set_replicas_min(shop, "0").await;
}

async fn set_replicas_min(shop: &Shop, replicas: &str) {
    redis::cmd("CONFIG")
        .arg(&["SET", "min-replicas-to-write", replicas])
        .query_async::<()>(&mut shop.redis().await)
        .await
        .unwrap();
}

/// A consumer that has four messages in hand, in two batches of one lane, of which the first stops in the middle.
struct Halfway {
    consumer: Running,
    gate: Arc<Notify>,
}

impl Halfway {
    async fn through(shop: &Shop, builder: Builder) -> Self {
        shop.publish_many(4).await;
        Self::by(shop, builder, ship).await
    }

    async fn by<F, E>(shop: &Shop, builder: Builder, handler: F) -> Self
    where
        F: AsyncFn(&Transaction<'_>, &Message) -> Result<(), E> + Send + 'static,
        E: Into<HandlerError> + 'static,
    {
        let gate = Arc::new(Notify::new());
        let go = Arc::clone(&gate);
        let first = Mutex::new(true);
        let consumer = run(
            builder.lanes(1).batch(2),
            async move |tx: &Transaction<'_>, message: &Message| {
                let is_first = std::mem::take(&mut *first.lock().unwrap());
                if is_first {
                    go.notified().await;
                }
                handler(tx, message).await
            },
        );
        eventually(DEADLINE, "both batches are read", || async {
            shop.pending("orders").await == 4
        })
        .await
        .unwrap();
        Self { consumer, gate }
    }

    /// Lets the first batch go on.
    fn go(self) -> Running {
        self.gate.notify_one();
        self.consumer
    }
}

#[tokio::test]
async fn what_follows_in_the_same_key_runs_while_a_batch_is_acknowledged() {
    let shop = Shop::open().await.keeping_sequence().await;
    shop.publish_keyed(1, &["a"], 0..4).await;
    let halfway = Halfway::by(&shop, shop.consumer(), note).await;
    refuse_writes(&shop).await;
    let consumer = halfway.go();

    shop.in_order(&["a"], 4).await;
    assert_eq!(shop.pending("orders").await, 4);
    allow_writes(&shop).await;

    shop.nothing_pending().await;
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.applied, counts.repeated, counts.failed), (4, 0, 0));
    consumer.stop().await;
}

#[tokio::test]
async fn a_stop_waits_until_all_that_has_run_is_acknowledged() {
    let shop = Shop::open().await;
    let halfway = Halfway::through(&shop, shop.consumer().grace(DEADLINE)).await;
    refuse_writes(&shop).await;
    let consumer = halfway.go();
    shop.single_effects(4).await;

    let stopping = tokio::spawn(consumer.stop());
    // Who is told to stop could have no stream any more, and says so for as long as it is at work.
    let sql = "SELECT count(*) FROM inbox.members WHERE cardinality(streams) = 0";
    eventually(DEADLINE, "a member that is stopping", || async {
        shop.count(sql).await == 1
    })
    .await
    .unwrap();
    assert_eq!(shop.pending("orders").await, 4);
    allow_writes(&shop).await;
    stopping.await.unwrap();

    assert_eq!(shop.pending("orders").await, 0);
    assert!(shop.members().await.is_empty());
}

#[tokio::test]
async fn a_crash_with_two_batches_committed_and_none_acknowledged_doubles_nothing() {
    let shop = Shop::open().await;
    let halfway = Halfway::through(&shop, shop.consumer()).await;
    refuse_writes(&shop).await;
    let consumer = halfway.go();
    shop.single_effects(4).await;
    consumer.crash();
    allow_writes(&shop).await;

    let next = run(shop.consumer(), ship);

    shop.nothing_pending().await;
    shop.single_effects(4).await;
    let counts = next.counters.snapshot();
    assert_eq!((counts.applied, counts.repeated), (0, 4));
    assert_eq!(shop.count("SELECT count(*) FROM inbox.attempts").await, 0);
    next.stop().await;
}

/// The acknowledgement is under way for longer than the claim time.
#[tokio::test]
async fn entries_that_another_member_claims_before_they_are_acknowledged_take_effect_once() {
    let shop = Shop::open().await;
    let proxy = Proxy::start(shop.redis.port()).await.unwrap();
    let shared = |builder: Builder| builder.topic("orders").order(Order::None);
    let slowly = shared(consumer_at(
        &shop.postgres_url,
        &shop.redis.url_via(proxy.port()),
    ))
    .response_timeout(2 * DEADLINE);
    let halfway = Halfway::through(&shop, slowly.name("one")).await;
    let hold = proxy.hold(Matcher::redis("XACK"), Direction::Request);
    let one = halfway.go();
    hold.reached().await.unwrap();
    shop.single_effects(4).await;

    let quickly = shared(shop.consumer()).claim_after(Duration::from_millis(600));
    let two = run(quickly.name("two"), ship);
    shop.nothing_pending().await;
    let counts = two.counters.snapshot();
    assert_eq!((counts.claimed, counts.applied, counts.repeated), (4, 0, 4));
    two.stop().await;
    hold.release();
    shop.publish("orders", "later").await;

    shop.single_effects(5).await;
    shop.nothing_pending().await;
    let counts = one.counters.snapshot();
    assert_eq!((counts.applied, counts.repeated, counts.failed), (5, 0, 0));
    one.stop().await;
}

/// Else the next owner would find the entries pending, and claim them.
#[tokio::test]
async fn a_stream_is_handed_over_when_redis_has_acknowledged_what_was_committed() {
    let shop = Shop::open().await.keeping_sequence().await;
    shop.set_partitions("orders", "2").await;
    // Of two partitions the owner of both keeps the first.
    let goes = |key: &&str| stream_of("orders", 2, key) == "outbox:orders:1";
    let key = ["a", "b", "c", "d"].into_iter().find(goes).unwrap();
    let (begun, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (began, go) = (Arc::clone(&begun), Arc::clone(&gate));
    let lease = Duration::from_secs(4);
    let one = run(
        shop.named("one").lease(lease),
        async move |tx: &Transaction<'_>, message: &Message| {
            began.notify_one();
            go.notified().await;
            note(tx, message).await
        },
    );
    shop.publish_keyed(2, &[key], 0..1).await;
    begun.notified().await;
    let two = run(shop.named("two").lease(lease), note);
    let alive = "SELECT count(*) FROM inbox.members WHERE member = 'two'";
    eventually(DEADLINE, "a second member", || async {
        shop.count(alive).await == 1
    })
    .await
    .unwrap();

    refuse_writes(&shop).await;
    gate.notify_one();
    shop.in_order(&[key], 1).await;
    // Each report moves this on, and is followed by what has to be handed over.
    let until =
        "SELECT extract(epoch FROM expires_at)::bigint FROM inbox.members WHERE member = 'one'";
    let before = shop.count(until).await;
    eventually(DEADLINE, "some reports of the first", || async {
        shop.count(until).await >= before + 4
    })
    .await
    .unwrap();
    assert_eq!(shop.shares().await, [2]);
    allow_writes(&shop).await;

    shop.shares_are(&[1, 1]).await;
    shop.publish_keyed(2, &[key], 1..2).await;
    shop.in_order(&[key], 2).await;
    let counts = two.counters.snapshot();
    assert_eq!((counts.claimed, counts.applied, counts.repeated), (0, 1, 0));
    one.stop().await;
    two.stop().await;
}

/// What a message must find may be written by the last one of its key.
#[tokio::test]
async fn the_next_message_of_a_key_begins_after_the_commit_of_the_one_before() {
    let shop = Shop::open().await.keeping_sequence().await;
    shop.db
        .batch_execute(
            "CREATE FUNCTION wait_in_commit() RETURNS trigger LANGUAGE plpgsql AS
                 $$BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END$$;
             CREATE CONSTRAINT TRIGGER t AFTER INSERT ON sequence DEFERRABLE INITIALLY DEFERRED
                 FOR EACH ROW WHEN (new.ordering_key = 'a' AND new.n = 0) EXECUTE FUNCTION wait_in_commit();
             SELECT pg_advisory_lock(1)",
        )
        .await
        .unwrap();
    let begun = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&begun);
    let builder = shop.consumer().lanes(2).batch(1);
    let consumer = run(
        builder.response_timeout(2 * DEADLINE),
        async move |tx: &Transaction<'_>, message: &Message| {
            seen.lock().unwrap().push(message.message_key().to_owned());
            note(tx, message).await
        },
    );
    shop.publish_keyed(1, &["a"], 0..1).await;
    let waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
                   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    eventually(DEADLINE, "the commit", || async {
        shop.count(waiting).await == 1
    })
    .await
    .unwrap();

    // The other lane takes what is behind the second message of the key.
    shop.publish_keyed(1, &["a"], 1..2).await;
    shop.publish_keyed(1, &["b"], 0..1).await;
    eventually(DEADLINE, "the other key", || async {
        shop.sequences().await.get("b").map(Vec::len) == Some(1)
    })
    .await
    .unwrap();
    assert_eq!(*begun.lock().unwrap(), ["a-0", "b-0"]);
    let unlock = shop.db.batch_execute("SELECT pg_advisory_unlock(1)");
    unlock.await.unwrap();

    eventually(DEADLINE, "all three", || async {
        shop.sequences().await.get("a").map(Vec::len) == Some(2)
    })
    .await
    .unwrap();
    assert_eq!(*begun.lock().unwrap(), ["a-0", "b-0", "a-1"]);
    shop.nothing_pending().await;
    consumer.stop().await;
}
