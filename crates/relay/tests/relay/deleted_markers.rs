//! A marker that is deleted, whole or in part, while the streams stand.

use outbox_testkit::eventually;
use redis::AsyncCommands;

use crate::{
    pair::{DEADLINE, MARKER, Pair, stop},
    start_table::NOTICED,
};

#[tokio::test]
async fn a_marker_that_was_deleted_alone_doubles_nothing() {
    let pair = Pair::start().await;
    let mut redis = pair.redis.connect().await.unwrap();
    pair.publish("orders", "first", 300).await;
    redis.del::<_, ()>(MARKER).await.unwrap();
    pair.write("orders", "second", 100).await;
    let relay = pair.relay().spawn().unwrap();
    relay
        .wait_for_line("the marker was missing", DEADLINE)
        .await
        .unwrap();
    pair.all_published(DEADLINE).await;

    // Again under a relay that is idle.
    redis.del::<_, ()>(MARKER).await.unwrap();
    eventually(NOTICED, "the marker to be written again", || async {
        pair.marker().await
    })
    .await
    .unwrap();
    pair.write("orders", "third", 100).await;
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn a_deleted_marker_that_was_ahead_of_the_checkpoint_doubles_nothing() {
    let pair = Pair::start().await;
    pair.publish("orders", "first", 100).await;
    let relay = pair.relay().args(["--page-rows", "50"]).spawn().unwrap();
    pair.leads(&relay).await;
    // The relay can write no checkpoint: the marker is far ahead when it dies.
    pair.sql
        .batch_execute("BEGIN; LOCK TABLE outbox.checkpoint IN EXCLUSIVE MODE")
        .await
        .unwrap();
    let writer = pair.postgres.connect(&pair.database).await.unwrap();
    writer
        .batch_execute(
            "INSERT INTO outbox.messages (topic, message_key, payload)
             SELECT 'orders', 'second-' || n, '{}' FROM generate_series(1, 400) AS n",
        )
        .await
        .unwrap();
    pair.reaches("orders", 500, DEADLINE).await;
    relay.kill9();
    pair.sql.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(pair.checkpoint().await.unwrap().2, 100);
    let mut redis = pair.redis.connect().await.unwrap();
    redis.del::<_, ()>(MARKER).await.unwrap();
    pair.write("orders", "third", 100).await;
    let relay = pair.relay().spawn().unwrap();
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn a_marker_deleted_while_the_last_row_is_held_back_doubles_nothing() {
    let pair = Pair::start().await;
    let mut redis = pair.redis.connect().await.unwrap();
    redis
        .set::<_, _, ()>("outbox:audit", "no stream")
        .await
        .unwrap();
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    pair.write("orders", "a", 20).await;
    pair.write("audit", "b", 20).await;
    pair.reaches("orders", 20, DEADLINE).await;
    relay
        .wait_for_line("refuses entries", DEADLINE)
        .await
        .unwrap();
    stop(&relay).await;
    assert_eq!(redis.del(MARKER).await, Ok(1));
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    redis.del::<_, ()>("outbox:audit").await.unwrap();
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn a_marker_whose_gaps_went_missing_is_not_believed() {
    let mut pair = Pair::start().await;
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    let mut late = pair.postgres.connect(&pair.database).await.unwrap();
    let late = late.transaction().await.unwrap();
    let insert =
        "INSERT INTO outbox.messages (topic, message_key, payload) VALUES ('orders', 'late', '{}')";
    late.execute(insert, &[]).await.unwrap();
    pair.write("orders", "first", 10).await;
    pair.reaches("orders", 10, DEADLINE).await;
    let mut redis = pair.redis.connect().await.unwrap();
    assert_eq!(redis.del("outbox:relay:gaps").await, Ok(1));
    pair.write("orders", "second", 10).await;
    pair.reaches("orders", 20, DEADLINE).await;
    stop(&relay).await;

    let line = pair.refuses().await;
    assert!(line.contains("list of gaps"), "{line}");
    redis.del::<_, ()>(MARKER).await.unwrap();
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    late.commit().await.unwrap();
    pair.reconnect().await;
    pair.assert_exactly_once_after(&relay).await;
}
