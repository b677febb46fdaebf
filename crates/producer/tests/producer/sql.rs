//! The producer for every other language: the SQL functions, COPY, and what the table refuses.

use std::pin::pin;

use bytes::Bytes;
use futures_util::SinkExt;
use tokio_postgres::Client;

use crate::database::Database;

async fn refused(client: &Client, sql: &str) -> (String, Option<String>) {
    let Err(error) = client.batch_execute(sql).await else {
        panic!("accepted: {sql}")
    };
    let cause = error
        .as_db_error()
        .unwrap_or_else(|| panic!("{sql}: {error}"));
    (
        cause.code().code().to_owned(),
        cause.constraint().map(str::to_owned),
    )
}

#[tokio::test]
async fn the_sql_of_the_readme_publishes_an_order_and_an_image() {
    let database = Database::outbox().await;
    let client = database.client().await;
    client
        .batch_execute("CREATE TABLE orders (customer text, cents int)")
        .await
        .unwrap();
    let readme = include_str!("../../README.md");
    let sql = readme
        .split("```sql\n")
        .find(|part| part.starts_with("BEGIN"))
        .expect("the README shows SQL");
    client
        .batch_execute(sql.split_once("```").unwrap().0)
        .await
        .unwrap();

    let rows = client
        .query(
            "SELECT topic, ordering_key, message_key, event_type, payload::text, headers::text, \
                    payload_binary, content_type FROM outbox.messages ORDER BY id",
            &[],
        )
        .await
        .unwrap();
    let texts: [&str; 6] = [0, 1, 2, 3, 4, 5].map(|column| rows[0].get(column));
    let payload = r#"{"customer":"ada","cents":1999}"#;
    assert_eq!(
        texts,
        [
            "orders",
            "ada",
            "order-42-placed",
            "order.placed",
            payload,
            r#"{"source":"shop"}"#
        ]
    );
    assert_eq!(rows[1].get::<_, Vec<u8>>(6), b"\x89PNG");
    assert_eq!(rows[1].get::<_, &str>(7), "image/png");
    assert_eq!(
        rows[1].get::<_, Option<&str>>(5),
        None,
        "no headers are no headers"
    );
    assert_eq!(
        rows[1].get::<_, &str>(2).len(),
        36,
        "a key is made where none is given"
    );
}

/// Statements, and the constraints that refuse them.
const REFUSED: &[(&str, &str)] = &[
    ("SELECT outbox.publish('a b', '1')", "messages_topic_check"),
    (
        "SELECT outbox.publish(E'a\\n', '1')",
        "messages_topic_check",
    ),
    (
        "SELECT outbox.publish('t', NULL)",
        "messages_one_payload_check",
    ),
    (
        "SELECT outbox.publish('t', '1', ordering_key => '')",
        "messages_ordering_key_check",
    ),
    (
        "SELECT outbox.publish('t', '1', message_key => repeat('x', 513))",
        "messages_message_key_check",
    ),
    (
        "SELECT outbox.publish('t', '1', event_type => '')",
        "messages_event_type_check",
    ),
    (
        "SELECT outbox.publish_binary('t', 'x', NULL)",
        "messages_content_type_check",
    ),
    (
        "SELECT outbox.publish_binary('t', 'x', '')",
        "messages_content_type_check",
    ),
    (
        "SELECT outbox.publish_binary('t', NULL, 'a/b')",
        "messages_content_type_check",
    ),
    (
        "SELECT outbox.publish('t', '1', headers => '[]')",
        "messages_headers_check",
    ),
    (
        "SELECT outbox.publish('t', '1', headers => '\"a\"')",
        "messages_headers_check",
    ),
    (
        "SELECT outbox.publish('t', '1', headers => 'null')",
        "messages_headers_check",
    ),
    (
        "SELECT outbox.publish('t', '1', headers => '{\"a\":1}')",
        "messages_headers_check",
    ),
    (
        "SELECT outbox.publish('t', '1', headers => '{\"a\":null}')",
        "messages_headers_check",
    ),
    (
        "SELECT outbox.publish('t', '1', headers => '{\"a\":\"b\",\"c\":{}}')",
        "messages_headers_check",
    ),
    (
        "INSERT INTO outbox.messages (topic, payload, payload_binary, content_type) VALUES ('t', '1', 'x', 'a/b')",
        "messages_one_payload_check",
    ),
    (
        "INSERT INTO outbox.messages (topic) VALUES ('t')",
        "messages_one_payload_check",
    ),
    (
        "INSERT INTO outbox.messages (topic, payload, content_type) VALUES ('t', '1', 'a/b')",
        "messages_content_type_check",
    ),
];

#[tokio::test]
async fn the_functions_refuse_what_the_table_refuses() {
    let database = Database::outbox().await;
    let client = database.client().await;
    for (sql, constraint) in REFUSED {
        let (code, name) = refused(&client, sql).await;
        assert_eq!(
            (code.as_str(), name.as_deref()),
            ("23514", Some(*constraint)),
            "{sql}"
        );
    }
    // Escapes that no text can hold are refused in headers, whose strings every consumer decodes.
    for escape in ["\\u0000", "\\ud800"] {
        for headers in [
            format!("{{\"a\":\"{escape}\"}}"),
            format!("{{\"{escape}\":\"a\"}}"),
        ] {
            let (code, _) = refused(
                &client,
                &format!("SELECT outbox.publish('t', '1', headers => '{headers}')"),
            )
            .await;
            assert!(
                ["22P02", "22P05"].contains(&code.as_str()),
                "{headers}: {code}"
            );
        }
    }
    assert_eq!(
        refused(&client, "SELECT outbox.publish('t', '{')").await.0,
        "22P02"
    );
    assert_eq!(
        refused(&client, "SELECT outbox.publish(NULL, '1')").await.0,
        "23502"
    );
    client
        .batch_execute("SELECT outbox.publish('t', '1', message_key => 'a')")
        .await
        .unwrap();
    let (code, name) = refused(
        &client,
        "SELECT outbox.publish('t', '1', message_key => 'a')",
    )
    .await;
    assert_eq!(
        (code.as_str(), name.as_deref()),
        ("23505", Some("messages_message_key_unique"))
    );
    assert_eq!(database.count().await, 1);
}

#[tokio::test]
async fn a_time_that_no_reader_can_hold_fails_in_the_producers_transaction() {
    let database = Database::outbox().await;
    let client = database.client().await;
    let insert = |time: &str| {
        format!(
            "SET TimeZone = 'UTC'; INSERT INTO outbox.messages (topic, payload, created_at) VALUES ('t', '1', '{time}')"
        )
    };
    for time in [
        "infinity",
        "-infinity",
        "294276-12-31",
        "0044-03-15 BC",
        "10000-01-01 00:00:00+00",
        "0001-12-31 23:59:59.999999+00 BC",
    ] {
        let (code, name) = refused(&client, &insert(time)).await;
        assert_eq!(
            (code.as_str(), name.as_deref()),
            ("23514", Some("messages_created_at_check")),
            "{time}"
        );
    }
    for time in ["0001-01-01 00:00:00+00", "9999-12-31 23:59:59.999999+00"] {
        client.batch_execute(&insert(time)).await.unwrap();
    }
}

#[tokio::test]
async fn copy_writes_many_messages_and_gives_them_ids() {
    let database = Database::outbox().await;
    let client = database.client().await;
    let copy = "COPY outbox.messages (topic, message_key, payload) FROM STDIN";
    let mut sink = pin!(client.copy_in::<_, Bytes>(copy).await.unwrap());
    let lines: String = (0..1_000)
        .map(|n| format!("t\tkey-{n}\t{{\"n\":{n}}}\n"))
        .collect();
    sink.send(Bytes::from(lines)).await.unwrap();
    assert_eq!(sink.finish().await.unwrap(), 1_000);
    let row = client
        .query_one("SELECT count(DISTINCT id), min(id), max(id), bool_and(payload->>'n' = substr(message_key, 5)) FROM outbox.messages", &[])
        .await
        .unwrap();
    assert_eq!(
        (
            row.get::<_, i64>(0),
            row.get::<_, i64>(1),
            row.get::<_, i64>(2)
        ),
        (1_000, 1, 1_000)
    );
    assert!(row.get::<_, bool>(3));
}

#[tokio::test]
async fn an_id_by_hand_is_refused_in_an_insert() {
    let database = Database::outbox().await;
    let client = database.client().await;
    let insert = "INSERT INTO outbox.messages (id, topic, payload) VALUES (7, 't', '1')";
    assert_eq!(refused(&client, insert).await.0, "428C9");
}

#[tokio::test]
async fn uuid_v7_sorts_by_time_and_has_its_version_and_variant() {
    let database = Database::outbox().await;
    let client = database.client().await;
    let query = "SELECT outbox.uuid_v7(), floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS after";
    let mut last_ms = 0;
    for _ in 0..200 {
        let row = client.query_one(query, &[]).await.unwrap();
        let (uuid, after): (uuid::Uuid, i64) = (row.get(0), row.get(1));
        assert_eq!(uuid.get_version_num(), 7, "{uuid}");
        assert_eq!(uuid.get_variant(), uuid::Variant::RFC4122, "{uuid}");
        let ms = i64::try_from(uuid.as_u128() >> 80).unwrap();
        assert!(
            last_ms <= ms && ms <= after && after - ms < 60_000,
            "{last_ms} {ms} {after}"
        );
        last_ms = ms;
    }
    let distinct = "SELECT count(DISTINCT outbox.uuid_v7()) FROM generate_series(1, 10000)";
    assert_eq!(
        client
            .query_one(distinct, &[])
            .await
            .unwrap()
            .get::<_, i64>(0),
        10_000
    );
}
