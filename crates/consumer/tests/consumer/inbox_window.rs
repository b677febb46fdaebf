//! What the inbox remembers, for how long, and what is done about messages that are older than that.

use outbox_consumer::Error;
use outbox_testkit::{Process, eventually};

use crate::shop::{DEADLINE, Shop, run, ship};

const DAY_MS: u64 = 24 * 60 * 60 * 1_000;

async fn relay_says(shop: &Shop, fields: &[(&str, u64)]) {
    let mut command = redis::cmd("HSET");
    command.arg("outbox:relay:marker").arg("version").arg(1);
    for (name, value) in fields {
        command.arg(name).arg(value);
    }
    command
        .query_async::<i64>(&mut shop.redis().await)
        .await
        .unwrap();
}

#[tokio::test]
async fn an_inbox_that_would_forget_too_early_is_refused_and_the_setting_named() {
    let shop = Shop::open().await;
    relay_says(
        &shop,
        &[
            ("retention_ms", 3 * DAY_MS),
            ("stream_max_age_ms", 20 * DAY_MS),
        ],
    )
    .await;

    let consumer = shop.consumer().build().unwrap();
    let ended = tokio::time::timeout(DEADLINE, consumer.run(ship, std::future::pending())).await;
    let error = ended.expect("it ends").unwrap_err();
    assert!(
        matches!(
            error,
            Error::Setting {
                field: "inbox_retention",
                ..
            }
        ),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("--stream-max-age (480 h)"),
        "{error}"
    );

    relay_says(&shop, &[("stream_max_age_ms", 3 * DAY_MS)]).await;
    shop.publish("orders", "a").await;
    let consumer = run(shop.consumer(), ship);
    shop.effects_are(&["a"]).await;
    consumer.stop().await;
}

#[tokio::test]
async fn keys_and_attempts_past_their_retention_are_purged_and_younger_ones_are_not() {
    let shop = Shop::open().await;
    shop.db
        .batch_execute(
            "INSERT INTO inbox.purged (consumer_group) VALUES ('shipping'), ('billing');
             INSERT INTO inbox.applied (consumer_group, topic, message_key, applied_at)
                 SELECT 'shipping', 'orders', 'old-' || n, now() - interval '15 days' FROM generate_series(1, 2500) n;
             INSERT INTO inbox.applied (consumer_group, topic, message_key, applied_at) VALUES
                 ('shipping', 'orders', 'young', now() - interval '13 days'),
                 ('billing', 'orders', 'old', now() - interval '15 days');
             INSERT INTO inbox.attempts (consumer_group, topic, message_key, attempts, updated_at) VALUES
                 ('shipping', 'orders', 'old', 1, now() - interval '15 days'),
                 ('shipping', 'orders', 'young', 1, now());
             INSERT INTO inbox.dead_letters
                 (consumer_group, stream, entry_id, topic, message_key, payload, attempts, reason, set_aside_at) VALUES
                 ('shipping', 's', '1-0', 'orders', 'dead-old', '', 5, 'r', now() - interval '8 days'),
                 ('shipping', 's', '2-0', 'orders', 'dead-young', '', 5, 'r', now() - interval '6 days')",
        )
        .await
        .unwrap();

    let consumer = run(shop.consumer(), ship);

    eventually(DEADLINE, "the purge", || async {
        let keys = shop
            .count("SELECT count(*) FROM inbox.applied WHERE message_key LIKE 'old-%'")
            .await;
        let letters = shop.dead_letters().await.len();
        if (keys, letters) == (0, 1) {
            Ok(())
        } else {
            Err((keys, letters))
        }
    })
    .await
    .unwrap();
    let left = "SELECT string_agg(consumer_group || ' ' || message_key, ', ' ORDER BY message_key) FROM inbox.applied";
    let left: String = shop.db.query_one(left, &[]).await.unwrap().get(0);
    // A dead letter that was given up is not run when it comes again.
    assert_eq!(left, "shipping dead-old, billing old, shipping young");
    assert_eq!(shop.count("SELECT count(*) FROM inbox.attempts").await, 1);
    assert_eq!(
        shop.dead_letters().await[0].0.as_deref(),
        Some("dead-young")
    );
    consumer.stop().await;
}

/// Each call looks at a part of a large table, and the next one goes on behind it.
#[tokio::test]
async fn the_purge_walks_through_the_whole_table_and_comes_around() {
    let shop = Shop::open().await;
    let insert = |key: &str, age: &str, count: u32| {
        format!(
            "INSERT INTO inbox.applied SELECT 'shipping', 'orders', '{key}-' || n, now() - interval '{age}'
             FROM generate_series(1, {count}) n;"
        )
    };
    let statements = [
        "INSERT INTO inbox.purged (consumer_group) VALUES ('shipping');".to_owned(),
        insert("first", "15 days", 30),
        insert("young", "1 day", 180_000),
        insert("last", "15 days", 150),
    ];
    shop.db.batch_execute(&statements.concat()).await.unwrap();
    let pages = "SELECT pg_relation_size('inbox.applied') / 8192";
    assert!(shop.count(pages).await > 1_000, "one call sees it all");
    let purge = async || {
        let purge = "SELECT inbox.purge('shipping', interval '14 days', 100)";
        shop.count(purge).await
    };

    // The first thousand pages, the rest up to the limit, what that left.
    for deleted in [30, 100, 50] {
        assert_eq!(purge().await, deleted);
    }
    let again = insert("again", "15 days", 20);
    let vacuumed = "VACUUM inbox.applied";
    shop.db.batch_execute(vacuumed).await.unwrap();
    shop.db.batch_execute(&again).await.unwrap();
    assert_eq!(purge().await + purge().await, 20, "it began again");

    let left = "SELECT count(*) FROM inbox.applied WHERE message_key LIKE 'young-%'";
    assert_eq!(shop.count(left).await, 180_000);
}

/// The test's entries were created in February 2026, long ago.
#[tokio::test]
async fn a_message_older_than_the_purged_keys_is_set_aside_and_one_that_is_known_is_not() {
    let shop = Shop::open().await;
    shop.publish("orders", "forgotten").await;
    shop.publish("orders", "known").await;
    shop.db
        .batch_execute(
            "INSERT INTO inbox.purged VALUES ('shipping', '2026-03-01');
             INSERT INTO inbox.applied (consumer_group, topic, message_key) VALUES ('shipping', 'orders', 'known')",
        )
        .await
        .unwrap();

    let consumer = run(shop.consumer(), ship);

    shop.dead_letter_count(1).await;
    shop.nothing_pending().await;
    let letters = shop.dead_letters().await;
    assert_eq!(
        (letters[0].0.as_deref(), letters[0].1),
        (Some("forgotten"), 0)
    );
    assert!(
        letters[0].2.contains("may have been applied already"),
        "{}",
        letters[0].2
    );
    assert!(shop.effects().await.is_empty());
    consumer.stop().await;
}

#[tokio::test]
async fn a_backlog_of_any_age_is_applied_while_nothing_was_purged() {
    let shop = Shop::open().await;
    shop.publish_many(20).await;
    let consumer = run(shop.consumer(), ship);
    shop.single_effects(20).await;
    assert!(shop.dead_letters().await.is_empty());
    consumer.stop().await;
}

/// psql stands for any language with a Postgres driver.
#[tokio::test]
async fn any_language_applies_once_with_the_sql_function() {
    let shop = Shop::open().await;
    let claim = "BEGIN; INSERT INTO effects SELECT 'shipping', k
                 FROM inbox.claim('shipping', 'orders', ARRAY['a', 'b', 'a']) AS k; SHOW synchronous_commit; COMMIT;";
    for _ in 0..2 {
        let psql = Process::builder("psql")
            .args([
                "-X",
                "-q",
                "-A",
                "-t",
                "-v",
                "ON_ERROR_STOP=1",
                "-d",
                &shop.postgres_url,
                "-c",
                claim,
            ])
            .env("PGOPTIONS", "-c synchronous_commit=off")
            .spawn()
            .unwrap();
        let status = psql.wait(DEADLINE).await.unwrap();
        assert!(status.success(), "{:?}", psql.lines());
        assert!(
            psql.lines().iter().any(|line| line == "on"),
            "{:?}",
            psql.lines()
        );
    }
    shop.effects_are(&["a", "b"]).await;

    // The Rust consumer of the same group knows what the other language has applied, and the other way round.
    for key in ["a", "c"] {
        shop.publish("orders", key).await;
    }
    let consumer = run(shop.consumer(), ship);
    shop.effects_are(&["a", "b", "c"]).await;
    consumer.stop().await;
    let fresh = "SELECT count(*) FROM inbox.claim('shipping', 'orders', ARRAY['a', 'c', 'd'])";
    assert_eq!(shop.count(fresh).await, 1);
}
