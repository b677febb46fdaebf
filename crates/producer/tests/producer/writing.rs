//! Writing in the caller's transaction: what commits and what does not.

use outbox_producer::{Message, Outcome, limits, write, write_all, write_once};

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

    for (round, batch) in [false, true].into_iter().enumerate() {
        let transaction = client.transaction().await.unwrap();
        let messages = [full.clone(), binary.clone(), bare.clone()];
        let written = if batch {
            write_all(&transaction, &messages).await.unwrap()
        } else {
            let mut written = Vec::new();
            for message in &messages {
                written.push(write(&transaction, message).await.unwrap());
            }
            written
        };
        let rows = transaction
            .query(
                "SELECT id, topic, ordering_key, message_key, event_type, payload::text, payload_binary, \
                        content_type, headers::text \
                 FROM outbox.messages ORDER BY id",
                &[],
            )
            .await
            .unwrap();
        let texts = |row: usize| -> [Option<String>; 7] {
            [1, 2, 3, 4, 5, 7, 8].map(|column| rows[row].get::<_, Option<String>>(column))
        };
        let some = |text: &str| Some(text.to_owned());
        let headers = some(r#"{"a":"1 \"quoted\"","b":"3"}"#);
        let placed = some("order.placed");
        assert_eq!(
            texts(0),
            [
                some("orders"),
                some("customer-7"),
                some("order-1"),
                placed,
                some(r#"{"n":1}"#),
                None,
                headers
            ],
            "round {round}"
        );
        assert_eq!(
            texts(1),
            [
                some("images"),
                None,
                some(binary.key()),
                None,
                None,
                some("image/png"),
                None
            ]
        );
        assert_eq!(
            rows[1].get::<_, Option<Vec<u8>>>(6),
            Some(vec![0, 159, 255])
        );
        assert_eq!(
            texts(2),
            [
                some("orders"),
                None,
                some(bare.key()),
                None,
                some("null"),
                None,
                None
            ]
        );
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        assert_eq!(
            written.iter().map(|written| written.id).collect::<Vec<_>>(),
            ids
        );
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
