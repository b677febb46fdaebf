//! What a producer wrote is what stands in the stream, byte for byte.

use std::time::Duration;

use outbox_testkit::eventually;
use tokio_postgres::error::SqlState;

use crate::support::{DEADLINE, Outbox, TOPIC};

/// How soon an ordinary message is in Redis, whatever stands beside it.
const ORDINARY_WITHIN: Duration = Duration::from_secs(2);

const INSERT: &str = "INSERT INTO outbox.messages (topic, message_key, payload) VALUES ('orders', $1, $2::text::json)";

fn nested(depth: usize) -> String {
    "[".repeat(depth) + &"]".repeat(depth)
}

#[tokio::test]
async fn json_is_published_byte_for_byte() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let documents = [
        nested(127),
        nested(128),
        nested(200),
        nested(5_000),
        r#"{"a":"\ud800"}"#.to_owned(),
        r#"{"a":"\u0000"}"#.to_owned(),
        r#"{"b":1,"a":2,"b":3}"#.to_owned(),
        "9".repeat(401),
        "[1.10, 1e400, 12345678901234567890123, -0.0]".to_owned(),
        " { \"white\" :\t\"space\" }\n".to_owned(),
        r#""🦀 \u00e9 é""#.to_owned(),
        "null".to_owned(),
    ];
    for (n, document) in documents.iter().enumerate() {
        let key = format!("odd-{n}");
        outbox.db.execute(INSERT, &[&key, document]).await.unwrap();
    }
    outbox.insert("ordinary").await;
    outbox.arrives_within(ORDINARY_WITHIN, "ordinary").await;
    outbox.published_exactly_once(TOPIC).await;
    let entries = outbox.entries(TOPIC).await;
    for (entry, document) in entries.iter().zip(&documents) {
        let payload = entry.field("payload").unwrap();
        assert!(payload == document.as_bytes(), "{}", entry.message_key());
        assert_eq!(entry.field("content_type"), None, "absent means JSON");
    }
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn an_entry_has_the_fields_of_the_contract_in_their_order() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let all = "SELECT outbox.publish_binary('orders', '\\x00ff0a0d80'::bytea, 'application/x-protobuf', 'customer 7',
        'key-1', 'placed', '{\"z\": \"1\", \"a\":\"\\u00e9\"}')";
    outbox.db.execute(all, &[]).await.unwrap();
    let least = "SELECT outbox.publish('orders', '{}', message_key => 'key-2')";
    outbox.db.execute(least, &[]).await.unwrap();
    outbox.published_exactly_once(TOPIC).await;

    let created =
        "SELECT to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')
        FROM outbox.messages ORDER BY id";
    let created = outbox.db.query(created, &[]).await.unwrap();
    let created: Vec<String> = created.iter().map(|row| row.get(0)).collect();
    let field = |name: &str, value: &[u8]| (name.to_owned(), value.to_vec());
    let entries = outbox.entries(TOPIC).await;
    assert_eq!(
        entries[0].fields,
        [
            field("id", b"1"),
            field("message_key", b"key-1"),
            field("ordering_key", b"customer 7"),
            field("event_type", b"placed"),
            field("created_at", created[0].as_bytes()),
            field("content_type", b"application/x-protobuf"),
            field("headers", br#"{"z": "1", "a":"\u00e9"}"#),
            field("payload", b"\x00\xff\x0a\x0d\x80"),
        ]
    );
    assert_eq!(
        entries[1].fields,
        [
            field("id", b"2"),
            field("message_key", b"key-2"),
            field("created_at", created[1].as_bytes()),
            field("payload", b"{}"),
        ]
    );
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn times_that_no_reader_can_hold_are_refused_and_the_utmost_are_published() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let insert = "INSERT INTO outbox.messages (topic, message_key, payload, created_at)
        VALUES ('orders', $1, '{}', $1::text::timestamptz)";
    for odd in [
        "infinity",
        "-infinity",
        "294276-12-31",
        "0044-03-15 BC",
        "10000-01-01 00:00:00+00",
    ] {
        let refused = outbox.db.execute(insert, &[&odd]).await.unwrap_err();
        assert_eq!(refused.code(), Some(&SqlState::CHECK_VIOLATION), "{odd}");
    }
    let utmost = [
        ("0001-01-01 00:00:00+00", "0001-01-01T00:00:00.000000Z"),
        (
            "9999-12-31 23:59:59.999999+00",
            "9999-12-31T23:59:59.999999Z",
        ),
        (
            "2024-02-29 01:00:00.000001+02",
            "2024-02-28T23:00:00.000001Z",
        ),
    ];
    for (written, _) in utmost {
        outbox.db.execute(insert, &[&written]).await.unwrap();
    }
    for n in 0..10 {
        outbox.insert(&format!("ordinary-{n}")).await;
    }
    outbox.arrives_within(ORDINARY_WITHIN, "ordinary-9").await;
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 13);
    let entries = outbox.entries(TOPIC).await;
    for ((written, published), entry) in utmost.iter().zip(&entries) {
        assert_eq!(entry.text("created_at"), *published, "{written}");
    }
    assert!(relay.exit_status().is_none());
}

/// Database and role may have settings that change how values look; the relay's session sets its own.
#[tokio::test]
async fn settings_of_the_database_change_nothing_of_an_entry() {
    let outbox = Outbox::open().await;
    let settings = [
        "timezone = 'Asia/Kathmandu'",
        "datestyle = 'German'",
        "default_transaction_isolation = 'serializable'",
        "default_transaction_read_only = on",
        "statement_timeout = '1ms'",
        "search_path = ''",
        "bytea_output = 'escape'",
        "client_encoding = 'LATIN1'",
    ];
    for setting in settings {
        let sql = format!("ALTER DATABASE {} SET {setting}", outbox.database);
        outbox.db.batch_execute(&sql).await.unwrap();
    }
    let relay = outbox.leader(&[]).await;
    let insert = "INSERT INTO outbox.messages (topic, message_key, payload, created_at)
        VALUES ('orders', 'row', '\"é🦀\"', '2024-02-29 12:00:00+00')";
    outbox.db.batch_execute(insert).await.unwrap();
    let entry = eventually(DEADLINE, "the entry", || async {
        outbox.entries(TOPIC).await.pop()
    })
    .await
    .unwrap();
    assert_eq!(entry.text("payload"), "\"é🦀\"");
    assert_eq!(entry.text("created_at"), "2024-02-29T12:00:00.000000Z");
    assert!(relay.exit_status().is_none());
}
