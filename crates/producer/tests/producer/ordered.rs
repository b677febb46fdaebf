//! `ordered()`: the order of ids of one key is the order of its commits.

use std::collections::BTreeMap;
use std::sync::Arc;

use outbox_producer::{Message, ORDERED_LOCK_CLASS, write, write_all, write_once};
use tokio::task::JoinSet;
use tokio_postgres::Client;

use crate::database::Database;

const LAST_ID: &str = "SELECT last_value FROM outbox.messages_id_seq";

fn ordered(key: &str) -> Message {
    Message::raw_json("t", "1").ordering_key(key).ordered()
}

/// Each way of writing, with one ordered message of the key `k`.
async fn write_in_form(form: usize, client: &mut Client) -> i64 {
    let transaction = client.transaction().await.unwrap();
    let id = match form {
        0 => write(&transaction, &ordered("k")).await.unwrap().id,
        1 => {
            write_all(&transaction, &[Message::raw_json("t", "0"), ordered("k")])
                .await
                .unwrap()[0]
                .id
        }
        _ => match write_once(&transaction, &ordered("k")).await.unwrap() {
            outbox_producer::Outcome::Written(written) => written.id,
            outbox_producer::Outcome::AlreadyWritten => panic!("the key is new"),
        },
    };
    transaction.commit().await.unwrap();
    id
}

#[tokio::test]
async fn a_waiting_writer_has_drawn_no_id() {
    let database = Arc::new(Database::outbox().await);
    let mut client = database.client().await;
    for form in 0..3 {
        let first = client.transaction().await.unwrap();
        let before = write(&first, &ordered("k")).await.unwrap().id;

        let waiting = Arc::clone(&database);
        let second =
            tokio::spawn(async move { write_in_form(form, &mut waiting.client().await).await });
        database.sessions_wait_for_locks(1).await;
        let last: i64 = first.query_one(LAST_ID, &[]).await.unwrap().get(0);
        assert_eq!(
            last, before,
            "form {form}: the second writer waits without an id"
        );
        // A later write of the first transaction still comes before everything of the second.
        let after = write(&first, &ordered("k")).await.unwrap().id;
        first.commit().await.unwrap();
        assert!(second.await.unwrap() > after, "form {form}");
    }
}

#[tokio::test]
async fn sql_takes_the_same_lock() {
    let database = Arc::new(Database::outbox().await);
    let mut client = database.client().await;
    let transaction = client.transaction().await.unwrap();
    let lock = format!("SELECT pg_advisory_xact_lock({ORDERED_LOCK_CLASS}, hashtext('k'))");
    assert!(
        include_str!("../../README.md")
            .contains("SELECT pg_advisory_xact_lock(1869968483, hashtext('ada'))")
    );
    transaction.batch_execute(&lock).await.unwrap();
    let waiting = Arc::clone(&database);
    let writer = tokio::spawn(async move { write_in_form(0, &mut waiting.client().await).await });
    database.sessions_wait_for_locks(1).await;
    transaction.commit().await.unwrap();
    writer.await.unwrap();
}

#[tokio::test]
async fn other_keys_and_unordered_messages_do_not_wait() {
    let database = Database::outbox().await;
    let (mut one, mut two) = (database.client().await, database.client().await);
    let first = one.transaction().await.unwrap();
    write(&first, &ordered("k")).await.unwrap();
    let second = two.transaction().await.unwrap();
    second
        .batch_execute("SET LOCAL lock_timeout = '10s'")
        .await
        .unwrap();
    write(&second, &ordered("l")).await.unwrap();
    write(&second, &Message::raw_json("t", "1").ordering_key("k"))
        .await
        .unwrap();
}

/// 8 writers, 3 keys, single writes and batches, some of them rolled back. Whoever has an id must see every
/// committed message of its key with a lower id: then no lower id can commit later.
#[tokio::test]
async fn ids_of_a_key_commit_in_their_order() {
    const WRITERS: usize = 8;
    const ROUNDS: usize = 40;
    let database = Arc::new(Database::outbox().await);
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let database = Arc::clone(&database);
        writers.spawn(async move {
            let mut client = database.client().await;
            let mut seen = Vec::new();
            for round in 0..ROUNDS {
                let key = format!("key-{}", (writer + round) % 3);
                let transaction = client.transaction().await.unwrap();
                let id = if round % 2 == 0 {
                    write(&transaction, &ordered(&key)).await.unwrap().id
                } else {
                    write_all(&transaction, &[ordered(&key), Message::raw_json("t", "2")])
                        .await
                        .unwrap()[0]
                        .id
                };
                let lower =
                    "SELECT count(*) FROM outbox.messages WHERE ordering_key = $1 AND id < $2";
                let lower: i64 = transaction
                    .query_one(lower, &[&key, &id])
                    .await
                    .unwrap()
                    .get(0);
                if (writer + round) % 7 == 0 {
                    transaction.rollback().await.unwrap();
                } else {
                    transaction.commit().await.unwrap();
                    seen.push((key, id, lower));
                }
            }
            seen
        });
    }
    let mut of_key: BTreeMap<String, Vec<(i64, i64)>> = BTreeMap::new();
    for (key, id, lower) in writers.join_all().await.into_iter().flatten() {
        of_key.entry(key).or_default().push((id, lower));
    }
    assert_eq!(of_key.len(), 3);
    for (key, mut messages) in of_key {
        messages.sort_unstable();
        for (position, (id, lower)) in messages.into_iter().enumerate() {
            assert_eq!(usize::try_from(lower).unwrap(), position, "{key}, id {id}");
        }
    }
}

/// Without the sorted locks this ends in a deadlock (40P01) within a few rounds.
#[tokio::test]
async fn batches_with_the_same_keys_in_other_orders_do_not_deadlock() {
    let database = Arc::new(Database::outbox().await);
    let mut writers = JoinSet::new();
    for writer in 0..4 {
        let database = Arc::clone(&database);
        writers.spawn(async move {
            let mut client = database.client().await;
            for _ in 0..25 {
                let mut messages: Vec<Message> =
                    (0..40).map(|key| ordered(&format!("key-{key}"))).collect();
                if writer % 2 == 0 {
                    messages.reverse();
                }
                let transaction = client.transaction().await.unwrap();
                write_all(&transaction, &messages).await.unwrap();
                transaction.commit().await.unwrap();
            }
        });
    }
    writers.join_all().await;
    assert_eq!(database.count().await, 4 * 25 * 40);
}
