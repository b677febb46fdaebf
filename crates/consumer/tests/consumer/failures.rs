//! What counts as an attempt, and what is set aside.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use outbox_consumer::{HandlerError, Message, Transaction};
use outbox_testkit::eventually;

use crate::shop::{DEADLINE, ORDERS, Running, Shop, run, ship};

async fn ship_but_bad(tx: &Transaction<'_>, message: &Message) -> Result<(), HandlerError> {
    ship(tx, message).await?;
    if message.message_key().starts_with("bad") {
        return Err("out of\0stock".into());
    }
    Ok(())
}

#[tokio::test]
async fn a_message_that_fails_too_often_becomes_a_dead_letter_and_its_batch_mates_do_not() {
    let shop = Shop::open().await;
    for key in ["a", "bad", "b"] {
        shop.publish("orders", key).await;
    }

    let consumer = run(shop.consumer().max_attempts(3), ship_but_bad);

    shop.effects_are(&["a", "b"]).await;
    shop.dead_letter_count(1).await;
    shop.nothing_pending().await;
    let letters = shop.dead_letters().await;
    assert_eq!(
        letters,
        [(Some("bad".to_owned()), 3, "out of\u{fffd}stock".to_owned())]
    );
    assert_eq!(
        shop.count("SELECT count(*) FROM inbox.applied WHERE message_key = 'bad'")
            .await,
        0
    );
    assert_eq!(shop.count("SELECT count(*) FROM inbox.attempts").await, 0);
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.applied, counts.failed, counts.dead), (2, 3, 1));
    consumer.stop().await;
}

#[tokio::test]
async fn a_dead_letter_keeps_the_whole_message() {
    let shop = Shop::open().await;
    let mut command = crate::shop::entry(ORDERS, "bad", "{\"n\":1.10}");
    command
        .arg("ordering_key")
        .arg("k")
        .arg("event_type")
        .arg("Placed")
        .arg("headers")
        .arg("{\"b\": \"1\",  \"a\": \"2\"}");
    let id: String = command.query_async(&mut shop.redis().await).await.unwrap();

    let consumer = run(shop.consumer().max_attempts(1), ship_but_bad);

    shop.dead_letter_count(1).await;
    let sql = "SELECT entry_id, topic, message_id, ordering_key, event_type, headers::text, payload,
                      to_char(created_at AT TIME ZONE 'UTC', 'HH24:MI:SS.US') FROM inbox.dead_letters";
    let row = shop.db.query_one(sql, &[]).await.unwrap();
    assert_eq!(row.get::<_, String>(0), id);
    assert_eq!(
        (row.get::<_, String>(1), row.get::<_, i64>(2)),
        ("orders".to_owned(), 7)
    );
    assert_eq!(
        (row.get::<_, String>(3), row.get::<_, String>(4)),
        ("k".to_owned(), "Placed".to_owned())
    );
    assert_eq!(row.get::<_, String>(5), "{\"b\": \"1\",  \"a\": \"2\"}");
    assert_eq!(row.get::<_, Vec<u8>>(6), b"{\"n\":1.10}");
    assert_eq!(row.get::<_, String>(7), "04:05:06.789012");
    consumer.stop().await;
}

#[tokio::test]
async fn malformed_entries_and_panics_do_not_stop_the_stream() {
    let shop = Shop::open().await;
    let mut connection = shop.redis().await;
    for fields in [
        ["foo".as_bytes(), b"bar"],
        [b"", b""],
        [b"payload", b"\xff\xfe"],
    ] {
        redis::cmd("XADD")
            .arg(ORDERS)
            .arg("*")
            .arg(&fields)
            .query_async::<String>(&mut connection)
            .await
            .unwrap();
    }
    shop.publish_many(10).await;
    shop.publish("orders", "p").await;

    let consumer = run(shop.consumer().max_attempts(2), async |tx, message| {
        assert_ne!(message.message_key(), "p", "the handler was given p");
        ship(tx, message).await
    });

    shop.single_effects(10).await;
    shop.dead_letter_count(4).await;
    shop.publish("orders", "later").await;
    shop.single_effects(11).await;
    shop.nothing_pending().await;
    let letters = shop.dead_letters().await;
    for (key, attempts, reason) in &letters[..3] {
        assert_eq!((key, *attempts), (&None, 0));
        assert!(reason.starts_with("malformed entry: field "), "{reason}");
    }
    assert_eq!((letters[3].0.as_deref(), letters[3].1), (Some("p"), 2));
    assert!(
        letters[3].2.starts_with("the handler panicked: "),
        "{}",
        letters[3].2
    );
    consumer.stop().await;
}

#[tokio::test]
async fn a_first_delivery_writes_nothing_but_its_key() {
    let shop = Shop::open().await;
    shop.db
        .batch_execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'written'; END$$;
             CREATE TRIGGER t BEFORE INSERT OR UPDATE OR DELETE ON inbox.attempts
                 FOR EACH ROW EXECUTE FUNCTION refuse();
             CREATE TRIGGER t BEFORE INSERT OR UPDATE OR DELETE ON inbox.dead_letters
                 FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
        .await
        .unwrap();
    shop.publish_many(25).await;

    let consumer = run(shop.consumer(), ship);

    shop.single_effects(25).await;
    assert_eq!(consumer.counters.snapshot().outages, 0);
    consumer.stop().await;
}

#[tokio::test]
async fn a_deferred_constraint_that_fails_at_commit_is_the_messages_failure() {
    let shop = Shop::open().await;
    shop.db
        .batch_execute(
            "ALTER TABLE effects ADD CONSTRAINT once UNIQUE (key) DEFERRABLE INITIALLY DEFERRED",
        )
        .await
        .unwrap();
    shop.publish("orders", "a").await;
    shop.publish("orders", "b").await;

    let consumer = run(shop.consumer().max_attempts(2), async |tx, message| {
        if message.message_key() == "b" {
            ship(tx, message).await?;
        }
        ship(tx, message).await
    });

    shop.effects_are(&["a"]).await;
    shop.dead_letter_count(1).await;
    assert_eq!(shop.dead_letters().await[0].0.as_deref(), Some("b"));
    consumer.stop().await;
}

#[tokio::test]
async fn a_message_that_fails_at_first_succeeds_later_and_leaves_no_count() {
    let shop = Shop::open().await;
    shop.publish("orders", "a").await;
    let attempts = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&attempts);

    let consumer = run(shop.consumer(), async move |tx, message| {
        seen.store(message.attempt(), Ordering::SeqCst);
        ship(tx, message).await?;
        if message.attempt() < 3 {
            Err(HandlerError::from("not yet"))
        } else {
            Ok(())
        }
    });

    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;
    assert_eq!(attempts.load(Ordering::SeqCst), 3);
    assert_eq!(shop.count("SELECT count(*) FROM inbox.attempts").await, 0);
    assert!(shop.dead_letters().await.is_empty());
    consumer.stop().await;
}

#[tokio::test]
async fn a_stored_count_at_the_end_of_its_range_neither_overflows_nor_hurts() {
    let shop = Shop::open().await;
    shop.db
        .batch_execute(
            "INSERT INTO inbox.attempts VALUES ('shipping', 'orders', 'bad', 2147483647, 'old')",
        )
        .await
        .unwrap();
    shop.publish("orders", "bad").await;

    let consumer = run(shop.consumer().max_attempts(u32::MAX), ship_but_bad);

    eventually_failed(&consumer, 3).await;
    assert_eq!(
        shop.count("SELECT attempts::bigint FROM inbox.attempts")
            .await,
        2_147_483_647
    );
    consumer.stop().await;
}

async fn eventually_failed(consumer: &Running, times: u64) {
    eventually(DEADLINE, "failed attempts", || async {
        consumer.counters.snapshot().failed >= times
    })
    .await
    .unwrap();
}

/// An application's error that passes on what its cause's cause is, but not the cause itself, as
/// some wrappers do.
#[derive(Debug)]
struct Wrapped(tokio_postgres::Error);

impl std::fmt::Display for Wrapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the shop failed")
    }
}

impl std::error::Error for Wrapped {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.0)
    }
}

#[tokio::test]
async fn a_conflict_behind_the_applications_own_error_counts_for_nothing() {
    let shop = Shop::open().await;
    shop.publish("orders", "a").await;
    let runs = Arc::new(AtomicU32::new(0));
    let run_number = Arc::clone(&runs);

    let consumer = run(
        shop.consumer().max_attempts(1),
        async move |tx: &Transaction<'_>, message: &Message| {
            let code = match run_number.fetch_add(1, Ordering::SeqCst) {
                0 => "40001",
                1 => "40P01",
                2 => "57P01",
                _ => return ship(tx, message).await.map_err(Wrapped),
            };
            let sql = format!("DO $$BEGIN RAISE 'in the way' USING ERRCODE = '{code}'; END$$");
            tx.batch_execute(&sql).await.map_err(Wrapped)
        },
    );

    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.failed, counts.dead, counts.outages), (0, 0, 3));
    consumer.stop().await;
}

#[tokio::test]
async fn a_batch_handler_that_fails_gets_its_messages_one_by_one() {
    let shop = Shop::open().await;
    for key in ["a", "bad", "b"] {
        shop.publish("orders", key).await;
    }
    let consumer = shop.consumer().max_attempts(2).build().unwrap();
    let task = tokio::spawn(consumer.run_batches(
        async |tx, messages| {
            for message in messages {
                ship_but_bad(tx, message).await?;
            }
            Ok::<_, HandlerError>(())
        },
        std::future::pending(),
    ));

    shop.dead_letter_count(1).await;
    shop.effects_are(&["a", "b"]).await;
    shop.nothing_pending().await;
    assert_eq!(shop.dead_letters().await[0].0.as_deref(), Some("bad"));
    task.abort();
}

/// The other holder may be frozen for long; each try must not leave a waiting backend behind.
#[tokio::test]
async fn a_key_that_another_member_holds_is_waited_for_without_piling_up() {
    let shop = Shop::open().await;
    shop.db
        .batch_execute("BEGIN; INSERT INTO inbox.applied VALUES ('shipping', 'orders', 'a')")
        .await
        .unwrap();
    shop.publish("orders", "a").await;
    let consumer = run(
        shop.consumer().response_timeout(Duration::from_millis(250)),
        ship,
    );
    eventually(DEADLINE, "tries", || async {
        consumer.counters.snapshot().outages >= 6
    })
    .await
    .unwrap();

    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    assert!(shop.count(waiting).await <= 1);
    shop.db.batch_execute("ROLLBACK").await.unwrap();

    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;
    assert_eq!(consumer.counters.snapshot().failed, 0);
    consumer.stop().await;
}

/// A slow member applies a message between the failure of another one and its setting aside, here by
/// a trigger, in the transaction that counts the attempt.
#[tokio::test]
async fn a_message_that_another_member_applies_meanwhile_is_no_dead_letter() {
    let shop = Shop::open().await;
    shop.db
        .batch_execute(
            "CREATE FUNCTION apply() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
                 INSERT INTO inbox.applied VALUES ('shipping', 'orders', 'bad'); RETURN NULL; END$$;
             CREATE TRIGGER t AFTER INSERT ON inbox.attempts FOR EACH ROW EXECUTE FUNCTION apply()",
        )
        .await
        .unwrap();
    shop.publish("orders", "bad").await;

    let consumer = run(shop.consumer().max_attempts(1), ship_but_bad);

    eventually_failed(&consumer, 1).await;
    shop.nothing_pending().await;
    assert!(shop.dead_letters().await.is_empty());
    assert_eq!(shop.count("SELECT count(*) FROM inbox.applied").await, 1);
    assert_eq!(shop.count("SELECT count(*) FROM inbox.attempts").await, 0);
    consumer.stop().await;
}
