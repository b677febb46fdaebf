//! Writing in the caller's transaction: what commits and what does not.

use outbox_producer::{Message, Outcome, limits, write, write_all, write_once};
use tokio_postgres::Transaction;

use crate::database::Database;

#[tokio::test]
async fn a_message_commits_with_the_business_row_or_not_at_all() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    client
        .batch_execute("CREATE TABLE orders (id int)")
        .await
        .unwrap();

    for (order, commits) in [(1, true), (2, false)] {
        let transaction = client.transaction().await.unwrap();
        transaction
            .execute("INSERT INTO orders VALUES ($1)", &[&order])
            .await
            .unwrap();
        let message = Message::raw_json("orders", "{}").message_key(format!("order-{order}"));
        let written = write(&transaction, &message).await.unwrap();
        assert_eq!(written.message_key, format!("order-{order}"));
        if commits {
            transaction.commit().await.unwrap();
        } else {
            transaction.rollback().await.unwrap();
        }
    }

    let rows = client
        .query("SELECT message_key FROM outbox.messages", &[])
        .await
        .unwrap();
    assert_eq!(
        rows.iter()
            .map(|row| row.get::<_, String>(0))
            .collect::<Vec<_>>(),
        ["order-1"]
    );
    let orders = client.query("SELECT id FROM orders", &[]).await.unwrap();
    assert_eq!(
        orders
            .iter()
            .map(|row| row.get::<_, i32>(0))
            .collect::<Vec<_>>(),
        [1]
    );
}

type Texts = [Option<String>; 7];

/// The columns of text, in the order of the ids, and the binary payloads.
async fn stored(transaction: &Transaction<'_>) -> Vec<(i64, Texts, Option<Vec<u8>>)> {
    let query = "SELECT id, topic, ordering_key, message_key, event_type, payload::text, content_type, \
                        headers::text, payload_binary FROM outbox.messages ORDER BY id";
    let rows = transaction.query(query, &[]).await.unwrap();
    rows.iter()
        .map(|row| {
            (
                row.get(0),
                [1, 2, 3, 4, 5, 6, 7].map(|column| row.get(column)),
                row.get(8),
            )
        })
        .collect()
}

#[tokio::test]
async fn every_field_arrives_in_its_column() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let full = Message::json("orders", &serde_json::json!({"n": 1}))
        .unwrap()
        .ordering_key("customer-7")
        .message_key("order-1")
        .event_type("order.placed")
        .header("b", "2")
        .headers([("a", "1 \"quoted\""), ("b", "3")]);
    let binary = Message::binary("images", [0, 159, 255], "image/png");
    let bare = Message::raw_json("orders", "null");
    let messages = [full, binary, bare];
    let [_, binary_key, bare_key] = messages.each_ref().map(Message::key);
    let headers = r#"{"a":"1 \"quoted\"","b":"3"}"#;
    let expected = [
        [
            Some("orders"),
            Some("customer-7"),
            Some("order-1"),
            Some("order.placed"),
            Some(r#"{"n":1}"#),
            None,
            Some(headers),
        ],
        [
            Some("images"),
            None,
            Some(binary_key),
            None,
            None,
            Some("image/png"),
            None,
        ],
        [
            Some("orders"),
            None,
            Some(bare_key),
            None,
            Some("null"),
            None,
            None,
        ],
    ];
    let expected = expected.map(|texts| texts.map(|text| text.map(str::to_owned)));

    for batch in [false, true] {
        let transaction = client.transaction().await.unwrap();
        let mut written = Vec::new();
        if batch {
            written = write_all(&transaction, &messages).await.unwrap();
        } else {
            for message in &messages {
                written.push(write(&transaction, message).await.unwrap());
            }
        }
        let rows = stored(&transaction).await;
        assert_eq!(rows.len(), 3);
        for (((id, texts, bytes), expected), written) in
            rows.into_iter().zip(&expected).zip(&written)
        {
            assert_eq!(&texts, expected, "batch: {batch}");
            assert_eq!(bytes, texts[5].is_some().then(|| vec![0, 159, 255]));
            assert_eq!(
                (id, &texts[2]),
                (written.id, &Some(written.message_key.clone()))
            );
        }
        transaction.rollback().await.unwrap();
    }
}

#[tokio::test]
async fn ids_of_a_batch_rise_in_the_order_of_the_slice_across_statements() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let count = limits::STATEMENT_ROWS_MAX + 500;
    // Keys that sort against the slice, so that no index order can look like the right one.
    let messages: Vec<Message> = (0..count)
        .map(|n| Message::raw_json("t", "1").message_key(format!("key-{:05}", count - n)))
        .collect();

    let transaction = client.transaction().await.unwrap();
    let written = write_all(&transaction, &messages).await.unwrap();
    transaction.commit().await.unwrap();

    assert!(written.windows(2).all(|pair| pair[0].id < pair[1].id));
    let rows = client
        .query(
            "SELECT id, message_key FROM outbox.messages ORDER BY id",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(rows.len(), count);
    for ((row, written), message) in rows.iter().zip(&written).zip(&messages) {
        assert_eq!(
            (row.get(0), row.get::<_, &str>(1)),
            (written.id, message.key())
        );
        assert_eq!(written.message_key, message.key());
    }
}

#[tokio::test]
async fn an_empty_batch_does_nothing_even_in_an_aborted_transaction() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let transaction = client.transaction().await.unwrap();
    transaction.batch_execute("SELECT 1/0").await.unwrap_err();
    assert_eq!(write_all(&transaction, &[]).await.unwrap(), []);
}

#[tokio::test]
async fn write_once_says_that_a_key_is_known_and_leaves_the_transaction_usable() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let first = Message::raw_json("t", "1").message_key("month-closed");
    let again = Message::raw_json("t", "2")
        .message_key("month-closed")
        .ordering_key("k")
        .ordered();

    let transaction = client.transaction().await.unwrap();
    let Outcome::Written(written) = write_once(&transaction, &first).await.unwrap() else {
        panic!("it is new")
    };
    assert_eq!(written.message_key, "month-closed");
    assert_eq!(
        write_once(&transaction, &again).await.unwrap(),
        Outcome::AlreadyWritten
    );
    transaction.commit().await.unwrap();

    let transaction = client.transaction().await.unwrap();
    assert_eq!(
        write_once(&transaction, &again).await.unwrap(),
        Outcome::AlreadyWritten
    );
    write(&transaction, &Message::raw_json("t", "3"))
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    let rows = client
        .query("SELECT payload::text FROM outbox.messages ORDER BY id", &[])
        .await
        .unwrap();
    assert_eq!(
        rows.iter()
            .map(|row| row.get::<_, &str>(0))
            .collect::<Vec<_>>(),
        ["1", "3"]
    );
}

#[tokio::test]
async fn write_once_waits_for_an_open_writer_of_the_key() {
    let database = Database::outbox().await;
    let message = Message::raw_json("t", "1").message_key("once");
    for first_commits in [false, true] {
        let mut client = database.client().await;
        let first = client.transaction().await.unwrap();
        assert!(matches!(
            write_once(&first, &message).await.unwrap(),
            Outcome::Written(_)
        ));

        let mut other = database.client().await;
        let copy = message.clone();
        let second = tokio::spawn(async move {
            let transaction = other.transaction().await.unwrap();
            let outcome = write_once(&transaction, &copy).await.unwrap();
            transaction.commit().await.unwrap();
            outcome
        });
        database.sessions_wait_for_locks(1).await;
        if first_commits {
            first.commit().await.unwrap();
            assert_eq!(second.await.unwrap(), Outcome::AlreadyWritten);
        } else {
            first.rollback().await.unwrap();
            assert!(matches!(second.await.unwrap(), Outcome::Written(_)));
            database
                .client()
                .await
                .batch_execute("DELETE FROM outbox.messages")
                .await
                .unwrap();
        }
    }
    assert_eq!(database.count().await, 1);
}
