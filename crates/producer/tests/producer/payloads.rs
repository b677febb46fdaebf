//! Payloads go out byte for byte, and both sides agree on what JSON is.

use outbox_producer::{Error, Message, write, write_all};

use crate::database::Database;

fn nested(levels: usize) -> String {
    "[".repeat(levels) + &"]".repeat(levels)
}

#[tokio::test]
async fn json_text_is_stored_byte_for_byte() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let documents = [
        " {\"b\" : 1.10,\n\t\"a\":12345678901234567890123 , \"b\":-0.0E+400}\r\n ".to_owned(),
        r#"{"a":"\u0000"}"#.to_owned(),
        r#"{"a":"\ud800","\udfff":"\/\u00E9é"}"#.to_owned(),
        nested(127),
        nested(128),
        nested(200),
        nested(5_000),
        "9".repeat(401),
        "\"\u{7f}\u{2028}😀\"".to_owned(),
    ];

    let transaction = client.transaction().await.unwrap();
    for document in &documents {
        write(&transaction, &Message::raw_json("t", document))
            .await
            .unwrap();
    }
    let messages: Vec<Message> = documents
        .iter()
        .map(|document| Message::raw_json("t", document))
        .collect();
    write_all(&transaction, &messages).await.unwrap();
    transaction.commit().await.unwrap();

    let rows = client
        .query("SELECT payload::text FROM outbox.messages ORDER BY id", &[])
        .await
        .unwrap();
    let stored: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    let expected: Vec<&str> = documents
        .iter()
        .chain(&documents)
        .map(String::as_str)
        .collect();
    assert_eq!(stored, expected);
}

/// Documents and near misses.
const DOCUMENTS: &[&str] = &[
    "",
    " ",
    "null",
    " true ",
    "nul",
    "True",
    "NaN",
    "Infinity",
    "-Infinity",
    "undefined",
    "'a'",
    "a",
    "0",
    "-0",
    "00",
    "01",
    "-01",
    "+1",
    "1.",
    ".5",
    "-",
    "--1",
    "1e5",
    "1E+5",
    "1e-5",
    "1e",
    "1e+",
    "1.5e3",
    "0x10",
    "1_000",
    "1a",
    "1 2",
    "-0.0e-0",
    "1e999999",
    "\"\"",
    "\"",
    "\"\\\"",
    "\"\\\\\"",
    "\"\\a\"",
    "\"\\/\\b\\f\\n\\r\\t\"",
    "\"\\v\"",
    "\"\\'\"",
    "\"\\u12\"",
    "\"\\u12G4\"",
    "\"\\uABcd\"",
    "\"\\U0041\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"\\ud800x\"",
    "\"\\udc00\\ud800\"",
    "\"\\ud800\\u0041\"",
    "\"\\uD83D\\uDE00\"",
    "\"a\nb\"",
    "\"a\tb\"",
    "\"\u{1}\"",
    "\"\u{1f}\"",
    "\"\u{7f}\"",
    "\"\u{80}\"",
    "\"\u{feff}\"",
    "\u{feff}1",
    "\u{a0}1",
    "\u{c}1",
    "\u{b}1",
    "\u{2028}1",
    "\t\r\n 1 \n\r\t",
    "1\u{0b}",
    "[]",
    "[1]",
    "[1,]",
    "[,1]",
    "[1 2]",
    "[1,,2]",
    "[",
    "]",
    "[[]",
    "[]]",
    "[1}",
    "{]",
    "[ ]",
    "[\n]",
    "{}",
    "{ }",
    "{\"a\":1}",
    "{\"a\" : 1 }",
    "{\"a\":1,}",
    "{,}",
    "{\"a\"}",
    "{\"a\":}",
    "{a:1}",
    "{1:1}",
    "{\"a\" 1}",
    "{\"a\":1 \"b\":2}",
    "{\"a\":1,\"a\":2}",
    "{\"a\":1}}",
    "{} {}",
    "{},",
    "{\"\":{\"\":[{}]}}",
    "{\"\\ud800\":1}",
    "/* c */ 1",
    "1 // c",
    "# 1",
    "1;",
    "[1, 2, [3, {\"x\": null}]]",
];

#[tokio::test]
async fn both_sides_agree_on_what_json_is() {
    let database = Database::outbox().await;
    let client = database.client().await;
    for document in DOCUMENTS {
        let here = Message::raw_json("t", *document).check().is_ok();
        let there = client
            .query_one("SELECT $1::text::json::text", &[document])
            .await;
        assert_eq!(here, there.is_ok(), "{document:?}: {there:?}");
    }
}

#[tokio::test]
async fn a_document_too_deep_for_the_server_names_the_payload() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let transaction = client.transaction().await.unwrap();
    let error = write(&transaction, &Message::raw_json("t", nested(2_000_000)))
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Invalid {
                field: "payload",
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("max_stack_depth"), "{error}");
}

#[tokio::test]
async fn every_byte_passes_in_a_binary_payload() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let bytes: Vec<u8> = (0..=255).collect();
    let transaction = client.transaction().await.unwrap();
    write(
        &transaction,
        &Message::binary("t", bytes.clone(), "application/octet-stream"),
    )
    .await
    .unwrap();
    write_all(
        &transaction,
        &[
            Message::binary("t", bytes.clone(), "a/b"),
            Message::binary("t", [], "a/b"),
        ],
    )
    .await
    .unwrap();
    transaction.commit().await.unwrap();
    let rows = client
        .query(
            "SELECT payload_binary FROM outbox.messages ORDER BY id",
            &[],
        )
        .await
        .unwrap();
    let stored: Vec<&[u8]> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(stored, [&bytes[..], &bytes[..], &[]]);
}
