//! What a handler can say about a message, and which handler gets it.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use outbox_consumer::{HandlerError, Message, Router, Transaction};
use outbox_testkit::eventually;
use tokio::{sync::oneshot, time::Instant};

use crate::shop::{DEADLINE, Shop, entry, run, ship, stream};

async fn publish_typed(shop: &Shop, topic: &str, key: &str, event_type: &str, payload: &str) {
    let mut command = entry(&stream(topic), key, payload);
    command.arg("event_type").arg(event_type);
    command
        .query_async::<String>(&mut shop.redis().await)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_rejected_message_is_a_dead_letter_after_one_attempt() {
    let shop = Shop::open().await;
    for key in ["a", "bad", "b"] {
        shop.publish("orders", key).await;
    }

    let consumer = run(shop.consumer().max_attempts(5), async |tx, message| {
        ship(tx, message).await?;
        if message.message_key() == "bad" {
            return Err(HandlerError::reject("no such order"));
        }
        Ok(())
    });

    shop.effects_are(&["a", "b"]).await;
    shop.dead_letter_count(1).await;
    shop.nothing_pending().await;
    assert_eq!(
        shop.dead_letters().await,
        [(Some("bad".to_owned()), 1, "no such order".to_owned())]
    );
    consumer.stop().await;
}

#[tokio::test]
async fn a_message_comes_again_after_the_time_that_the_handler_names() {
    let shop = Shop::open().await;
    shop.publish("orders", "a").await;
    let wait = Duration::from_millis(700);
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&attempts);

    // The back-off would be an hour.
    let hour = Duration::from_secs(3_600);
    let builder = shop.consumer().retry_backoff(hour, hour);
    let consumer = run(builder, async move |tx, message| {
        seen.lock()
            .unwrap()
            .push((message.attempt(), Instant::now()));
        if message.attempt() == 1 {
            return Err(HandlerError::retry_after(wait, "not yet"));
        }
        ship(tx, message).await?;
        Ok(())
    });

    shop.effects_are(&["a"]).await;
    let attempts = attempts.lock().unwrap().clone();
    assert_eq!(attempts.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [1, 2]);
    assert!(attempts[1].1 - attempts[0].1 >= wait);
    let counts = consumer.counters.snapshot();
    assert_eq!(
        (counts.applied, counts.failed, counts.retried, counts.dead),
        (1, 1, 1, 0)
    );
    consumer.stop().await;
}

#[derive(serde::Deserialize)]
struct Placed {
    order: String,
}

async fn placed(
    tx: &Transaction<'_>,
    _: &Message,
    placed: Placed,
) -> Result<(), tokio_postgres::Error> {
    let sql = "INSERT INTO effects (grp, key) VALUES ('placed', $1)";
    tx.execute(sql, &[&placed.order]).await.map(drop)
}

#[tokio::test]
async fn topics_and_event_types_go_to_their_handlers_and_unknown_ones_are_set_aside() {
    let shop = Shop::open().await;
    publish_typed(&shop, "orders", "1", "Placed", r#"{"order":"forty-two"}"#).await;
    publish_typed(&shop, "orders", "2", "Placed", r#"{"no":"order"}"#).await;
    publish_typed(&shop, "orders", "3", "Cancelled", "{}").await;
    publish_typed(&shop, "orders", "4", "Unheard", "{}").await;
    publish_typed(&shop, "refunds", "5", "Unheard", "{}").await;
    let router = Router::new()
        .on_json("Placed", placed)
        .on_topic_and_type("orders", "Cancelled", ship)
        .on_topic("refunds", ship);

    let consumer = shop.consumer().topic("refunds").build().unwrap();
    let counters = consumer.counters();
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(consumer.run_handler(router, async move {
        let _ = stopped.await;
    }));

    shop.effects_are(&["3", "5", "forty-two"]).await;
    shop.dead_letter_count(2).await;
    let letters = shop.dead_letters().await;
    assert!(
        letters[0].2.starts_with("missing field `order`"),
        "{}",
        letters[0].2
    );
    assert_eq!(letters[1].2, "no handler for event type \"Unheard\"");
    assert_eq!((letters[0].1, letters[1].1), (1, 1));
    let streams = counters.streams();
    let by_stream: Vec<_> = streams
        .iter()
        .map(|s| {
            (
                s.stream.as_str(),
                s.counts.applied,
                s.counts.dead,
                s.in_flight,
            )
        })
        .collect();
    assert_eq!(
        by_stream,
        [("outbox:orders", 2, 2, 0), ("outbox:refunds", 1, 0, 0)]
    );
    assert!(streams[0].handler_times.calls() >= 4);
    let _ = stop.send(());
    task.await.unwrap().unwrap();
}

#[tokio::test]
async fn the_lag_of_the_group_is_known_in_entries_and_in_time() {
    let shop = Shop::open().await;
    shop.publish_many(30).await;
    let (gate, opened) = oneshot::channel::<()>();
    let opened = Arc::new(tokio::sync::Mutex::new(Some(opened)));

    // Holds the first batch until it is told to go on.
    let builder = shop.consumer().claim_after(Duration::from_secs(600));
    let consumer = run(builder, async move |tx, message| {
        if let Some(opened) = opened.lock().await.take() {
            let _ = opened.await;
        }
        ship(tx, message).await
    });
    eventually(
        DEADLINE,
        "a lag of 30 entries, some of them pending",
        || async {
            let streams = consumer.counters.streams();
            let lag = streams.first().and_then(|stream| stream.lag);
            lag.filter(|lag| {
                lag.pending > 0 && lag.pending + lag.entries == 30 && !lag.age.is_zero()
            })
            .ok_or(streams)
        },
    )
    .await
    .unwrap();

    gate.send(()).unwrap();
    shop.single_effects(30).await;
    eventually(DEADLINE, "no lag", || async {
        let streams = consumer.counters.streams();
        let lag = streams[0].lag.unwrap();
        if (lag.entries, lag.pending, lag.age.is_zero()) == (0, 0, true) {
            Ok(())
        } else {
            Err(lag)
        }
    })
    .await
    .unwrap();
    consumer.stop().await;
}
