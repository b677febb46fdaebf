//! Each message takes effect once.

use std::sync::{Arc, Mutex};

use outbox_consumer::{Consumer, HandlerError, Message, Transaction};
use outbox_testkit::eventually;

use crate::shop::{DEADLINE, GROUP, Shop, entry, pool, run, ship};

#[tokio::test]
async fn a_backlog_older_than_the_group_is_applied_once() {
    let shop = Shop::open().await;
    shop.publish_many(1_000).await;

    let consumer = run(shop.consumer().batch(100), ship);

    shop.single_effects(1_000).await;
    shop.nothing_pending().await;
    assert_eq!(consumer.counters.snapshot().applied, 1_000);
    consumer.stop().await;
}

#[tokio::test]
async fn a_key_that_comes_again_takes_effect_once() {
    let shop = Shop::open().await;
    for key in ["a", "b", "a", "a"] {
        shop.publish("orders", key).await;
    }
    let consumer = run(shop.consumer(), ship);
    shop.effects_are(&["a", "b"]).await;

    shop.publish("orders", "b").await;
    shop.publish("orders", "c").await;

    shop.effects_are(&["a", "b", "c"]).await;
    shop.nothing_pending().await;
    assert_eq!(consumer.counters.snapshot().repeated, 3);
    consumer.stop().await;
}

/// Keys are taken for new until one turns out known, and again after a batch without any.
#[tokio::test]
async fn known_keys_here_and_there_take_effect_once() {
    let shop = Shop::open().await;
    let mut published = 0;
    for number in 0..200 {
        shop.publish("orders", &format!("{number:03}")).await;
        published += 1;
        if number % 9 == 0 {
            let again = format!("{:03}", number / 2);
            shop.publish("orders", &again).await;
            published += 1;
        }
    }
    let consumer = run(shop.consumer().batch(4).lanes(2), ship);
    let keys: Vec<String> = (0..200).map(|number| format!("{number:03}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    shop.effects_are(&keys).await;
    shop.nothing_pending().await;
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.applied, counts.repeated), (200, published - 200));
    assert_eq!((counts.failed, counts.outages), (0, 0));
    consumer.stop().await;
}

/// What the database did not take in is not said to be taken, whatever keeps it out.
#[tokio::test]
async fn a_key_that_is_not_taken_in_has_no_effect() {
    let shop = Shop::open().await;
    let consumer = run(shop.consumer(), ship);
    shop.publish("orders", "a").await;
    shop.effects_are(&["a"]).await;
    shop.db
        .batch_execute(
            "CREATE FUNCTION keep_out() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$;
             CREATE TRIGGER t BEFORE INSERT ON inbox.applied FOR EACH ROW WHEN (new.message_key = 'b')
             EXECUTE FUNCTION keep_out()",
        )
        .await
        .unwrap();
    shop.publish("orders", "b").await;
    shop.publish("orders", "c").await;

    shop.effects_are(&["a", "c"]).await;
    shop.nothing_pending().await;
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.applied, counts.repeated), (2, 1));
    consumer.stop().await;
}

#[tokio::test]
async fn groups_and_topics_do_not_share_keys() {
    let shop = Shop::open().await;
    shop.publish("orders", "same").await;
    shop.publish("refunds", "same").await;

    let shipping = run(shop.consumer().topic("refunds"), ship);
    let redis = redis::Client::open(shop.redis.url()).unwrap();
    let billing = run(
        Consumer::builder(pool(&shop.postgres_url), redis, "billing").topic("orders"),
        ship,
    );

    shop.effects_are(&["same", "same", "same"]).await;
    shipping.stop().await;
    billing.stop().await;
    assert_eq!(shop.count("SELECT count(*) FROM inbox.applied").await, 3);
}

#[tokio::test]
async fn a_batch_handler_gets_the_fresh_messages_in_order() {
    let shop = Shop::open().await;
    for key in ["a", "b", "a", "c"] {
        shop.publish("orders", key).await;
    }
    let (seen, consumer) = (
        Arc::new(Mutex::new(Vec::new())),
        shop.consumer().build().unwrap(),
    );
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let batches = Arc::clone(&seen);
    let task = tokio::spawn(consumer.run_batches(
        async move |tx, messages| {
            batches.lock().unwrap().push(
                messages
                    .iter()
                    .map(|m: &Message| m.message_key().to_owned())
                    .collect(),
            );
            for message in messages {
                ship(tx, message).await?;
            }
            Ok::<_, HandlerError>(())
        },
        async { drop(stopped.await) },
    ));

    shop.effects_are(&["a", "b", "c"]).await;
    stop.send(()).unwrap();
    task.await.unwrap().unwrap();
    let seen: Vec<Vec<String>> = seen.lock().unwrap().clone();
    assert_eq!(seen, [["a", "b", "c"]]);
}

#[tokio::test]
async fn the_handlers_transaction_is_durable_and_otherwise_as_configured() {
    let shop = Shop::open().await;
    let sql = format!(
        "ALTER DATABASE {} SET synchronous_commit = off",
        shop.database
    );
    shop.db.batch_execute(&sql).await.unwrap();
    let sql = format!("ALTER DATABASE {} SET lock_timeout = '77s'", shop.database);
    shop.db.batch_execute(&sql).await.unwrap();
    shop.publish("orders", "a").await;

    let consumer = run(
        shop.consumer(),
        async |tx: &Transaction<'_>, _: &Message| {
            tx.execute(
            "INSERT INTO effects VALUES ('', current_setting('synchronous_commit') || ' ' || current_setting('lock_timeout'))",
            &[],
        )
        .await
        .map(drop)
        },
    );

    shop.effects_are(&["on 77s"]).await;
    consumer.stop().await;
}

#[tokio::test]
async fn the_handler_sees_what_was_published() {
    let shop = Shop::open().await;
    let mut full = entry("shop:orders", "order-1", "{\"total\":1.10}");
    full.arg("ordering_key")
        .arg("k")
        .arg("event_type")
        .arg("Placed")
        .arg("headers")
        .arg(r#"{"trace":"x"}"#);
    let id: String = full.query_async(&mut shop.redis().await).await.unwrap();

    let seen = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&seen);
    let builder = shop.consumer().stream_prefix("shop:");
    let consumer = run(builder, async move |_, message| {
        *slot.lock().unwrap() = Some(message.clone());
        Ok::<_, HandlerError>(())
    });

    let message = eventually(DEADLINE, "a message", || async {
        seen.lock().unwrap().clone()
    })
    .await
    .unwrap();
    consumer.stop().await;
    assert_eq!(
        (message.topic(), message.stream(), message.entry_id()),
        ("orders", "shop:orders", id.as_str())
    );
    assert_eq!(
        (message.ordering_key(), message.event_type()),
        (Some("k"), Some("Placed"))
    );
    assert_eq!((message.header("trace"), message.attempt()), (Some("x"), 1));
    assert_eq!(message.payload(), b"{\"total\":1.10}");
    assert!(message.age().as_secs() > 0);
}

/// Postgres answers COMMIT of an aborted transaction with success.
#[tokio::test]
async fn a_handler_that_hides_an_sql_error_loses_nothing() {
    let shop = Shop::open().await;
    shop.publish("orders", "hidden").await;
    shop.publish("orders", "good").await;

    let consumer = run(shop.consumer().max_attempts(2), async |tx, message| {
        ship(tx, message).await?;
        if message.message_key() == "hidden" {
            let _ = tx.execute("SELECT 1/0", &[]).await;
        }
        Ok::<_, tokio_postgres::Error>(())
    });

    shop.dead_letter_count(1).await;
    shop.effects_are(&["good"]).await;
    shop.nothing_pending().await;
    assert_eq!(shop.dead_letters().await[0].0.as_deref(), Some("hidden"));
    consumer.stop().await;
}

#[tokio::test]
async fn a_handler_that_ends_the_transaction_is_found_out() {
    let shop = Shop::open().await;
    shop.publish("orders", "ended").await;

    let consumer = run(
        shop.consumer().max_attempts(2),
        async |tx: &Transaction<'_>, _: &Message| tx.batch_execute("ROLLBACK; BEGIN").await,
    );

    shop.dead_letter_count(1).await;
    assert_eq!(
        shop.dead_letters().await[0].2,
        "the handler ended the transaction it was given"
    );
    assert_eq!(shop.count("SELECT count(*) FROM inbox.applied").await, 0);
    consumer.stop().await;
}

/// Handlers of all shapes compile in a spawned task: this test only has to build, and to run once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_handler_runs_in_a_spawned_task() {
    struct Shipping {
        group: String,
    }
    impl Shipping {
        async fn handle(
            &self,
            tx: &Transaction<'_>,
            message: &Message,
        ) -> Result<(), HandlerError> {
            let sql = "INSERT INTO effects (grp, key) VALUES ($1, $2)";
            tx.execute(sql, &[&self.group, &message.message_key()])
                .await?;
            Ok(())
        }
    }
    let shop = Shop::open().await;
    shop.publish("orders", "a").await;
    let build = |group: &str| {
        let redis = redis::Client::open(shop.redis.url()).unwrap();
        Consumer::builder(pool(&shop.postgres_url), redis, group)
            .topic("orders")
            .build()
            .unwrap()
    };

    let shared = Arc::new(Shipping {
        group: GROUP.to_owned(),
    });
    let owned = Shipping {
        group: "g".to_owned(),
    };
    let (by_function, by_state, by_owned, by_text) =
        (build("1"), build("2"), build("3"), build("4"));
    let tasks = [
        tokio::spawn(by_function.run(ship, std::future::pending())),
        tokio::spawn(async move {
            let state = Arc::clone(&shared);
            by_state
                .run(
                    async move |tx, message| state.handle(tx, message).await,
                    std::future::pending(),
                )
                .await
        }),
        tokio::spawn(by_owned.run(
            async move |tx, m| owned.handle(tx, m).await,
            std::future::pending(),
        )),
        tokio::spawn(by_text.run(
            async |tx: &Transaction<'_>, m: &Message| -> Result<(), String> {
                // Not `Send`, and held over an await.
                let not_send = std::rc::Rc::new(m.message_key().to_owned());
                ship(tx, m)
                    .await
                    .map_err(|error| format!("{not_send}: {error}"))
            },
            std::future::pending(),
        )),
    ];

    shop.effects_are(&["a", "a", "a", "a"]).await;
    for task in tasks {
        task.abort();
    }
}
