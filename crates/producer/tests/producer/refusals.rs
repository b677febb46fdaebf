//! What the producer refuses, with which error, and what is left of the transaction then.

use std::{error::Error as _, process::Command};

use outbox_producer::{Error, Message, Outcome, write, write_all, write_once};
use outbox_testkit::relay_binary;

use crate::database::Database;

#[tokio::test]
async fn an_invalid_message_names_its_field_and_leaves_the_transaction_usable() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let transaction = client.transaction().await.unwrap();
    let good = Message::raw_json("t", "1");
    let bad = Message::raw_json("no spaces", "1");

    let error = write(&transaction, &bad).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "topic has the character ' ': use 1 to 200 of the characters A-Z a-z 0-9 . _ -"
    );
    let error = write_once(&transaction, &Message::raw_json("t", "{"))
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "payload is not JSON: give it one JSON document, or use `Message::binary`"
    );
    assert!(error.source().is_some(), "the parser tells where");
    let error = write_all(&transaction, &[good.clone(), bad])
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Invalid {
                index: Some(1),
                field: "topic",
                ..
            }
        ),
        "{error}"
    );
    assert!(
        error.to_string().starts_with("message 1: topic "),
        "{error}"
    );
    let error = write(&transaction, &good.clone().ordered())
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Invalid {
                field: "ordering_key",
                ..
            }
        ),
        "{error}"
    );

    write(&transaction, &good).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(database.count().await, 1);
}

#[tokio::test]
async fn a_used_message_key_is_named() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let message = |key: &str| Message::raw_json("t", "1").message_key(key);
    let transaction = client.transaction().await.unwrap();
    write(&transaction, &message("b")).await.unwrap();
    transaction.commit().await.unwrap();

    let transaction = client.transaction().await.unwrap();
    let error = write(&transaction, &message("b")).await.unwrap_err();
    assert_duplicate(&error, Some("b"));
    assert!(
        error
            .to_string()
            .starts_with("message_key \"b\" is already in the outbox"),
        "{error}"
    );
    transaction.rollback().await.unwrap();

    let transaction = client.transaction().await.unwrap();
    let error = write_all(&transaction, &[message("a"), message("b"), message("c")])
        .await
        .unwrap_err();
    assert_duplicate(&error, Some("b"));
    transaction.rollback().await.unwrap();

    let transaction = client.transaction().await.unwrap();
    let error = write_all(&transaction, &[message("a"), message("c"), message("a")])
        .await
        .unwrap_err();
    assert_duplicate(&error, Some("a"));
    assert!(error.source().is_none(), "found before the round trip");
    write(&transaction, &message("d")).await.unwrap();
}

#[tokio::test]
async fn a_used_key_is_a_duplicate_even_where_postgres_may_not_name_it() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    database
        .role(
            "blind",
            "GRANT INSERT (topic, message_key, ordering_key, event_type, payload, payload_binary, \
                            content_type, headers), SELECT (id) ON outbox.messages TO blind",
        )
        .await;
    client
        .batch_execute("SELECT outbox.publish('t', '1', message_key => 'a'); SET ROLE blind")
        .await
        .unwrap();

    let transaction = client.transaction().await.unwrap();
    let messages = ["a", "b"].map(|key| Message::raw_json("t", "1").message_key(key));
    let error = write_all(&transaction, &messages).await.unwrap_err();
    assert_duplicate(&error, None);
}

fn assert_duplicate(error: &Error, expected: Option<&str>) {
    match error {
        Error::DuplicateKey { message_key, .. } => assert_eq!(message_key.as_deref(), expected),
        other => panic!("expected a duplicate key, got {other}"),
    }
}

#[tokio::test]
async fn a_database_without_outbox_names_the_command_that_makes_it() {
    let database = Database::empty().await;
    let mut client = database.client().await;
    let message = Message::raw_json("t", "1").ordering_key("k").ordered();
    for dropped in ["SELECT", "CREATE SCHEMA outbox"] {
        client.batch_execute(dropped).await.unwrap();
        let transaction = client.transaction().await.unwrap();
        let error = write(&transaction, &message).await.unwrap_err();
        assert!(matches!(error, Error::SchemaMissing(_)), "{error}");
        assert_eq!(
            error.to_string(),
            "this database has no outbox: run `outbox-relay migrate`"
        );
    }
}

#[tokio::test]
async fn an_aborted_transaction_and_a_lost_connection_are_errors_of_the_database() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let message = Message::raw_json("t", "1").ordering_key("k").ordered();
    let transaction = client.transaction().await.unwrap();
    transaction.batch_execute("SELECT 1/0").await.unwrap_err();
    let error = write(&transaction, &message).await.unwrap_err();
    assert!(
        matches!(&error, Error::Database(cause) if cause.code().is_some_and(|code| code.code() == "25P02"))
    );
    transaction.rollback().await.unwrap();

    let transaction = client.transaction().await.unwrap();
    let pid: i32 = transaction
        .query_one("SELECT pg_backend_pid()", &[])
        .await
        .unwrap()
        .get(0);
    let killer = database.client().await;
    killer
        .execute("SELECT pg_terminate_backend($1)", &[&pid])
        .await
        .unwrap();
    let error = write(&transaction, &message).await.unwrap_err();
    assert!(matches!(error, Error::Database(_)), "{error}");
    assert_eq!(database.count().await, 0);
}

#[tokio::test]
async fn a_role_with_the_rights_that_are_printed_writes_but_sets_no_id_and_no_time() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let mut grants = Command::new(relay_binary());
    let printed = grants.args(["grants", "--producer", "shop"]).output();
    let grants = String::from_utf8(printed.unwrap().stdout).unwrap();
    assert!(grants.contains("GRANT INSERT"), "{grants}");
    database.role("shop", &grants).await;
    client.batch_execute("SET ROLE shop").await.unwrap();

    let transaction = client.transaction().await.unwrap();
    let message = |key: &str| {
        Message::raw_json("t", "1")
            .message_key(key)
            .ordering_key("k")
            .ordered()
            .header("a", "b")
    };
    write(&transaction, &message("a")).await.unwrap();
    write_all(&transaction, &[message("b"), message("c")])
        .await
        .unwrap();
    assert_eq!(
        write_once(&transaction, &message("a")).await.unwrap(),
        Outcome::AlreadyWritten
    );
    transaction
        .batch_execute(
            "SELECT outbox.publish('t', '1'); SELECT outbox.publish_binary('t', 'x', 'a/b')",
        )
        .await
        .unwrap();
    transaction.commit().await.unwrap();

    for refused in [
        "INSERT INTO outbox.messages (id, topic, payload) OVERRIDING SYSTEM VALUE VALUES (99, 't', '1')",
        "INSERT INTO outbox.messages (topic, payload, created_at) VALUES ('t', '1', now())",
        "COPY outbox.messages (id, topic, payload) FROM STDIN",
        "UPDATE outbox.messages SET topic = 'u'",
        "DELETE FROM outbox.messages",
        "SELECT payload FROM outbox.messages",
    ] {
        let error = client.batch_execute(refused).await.unwrap_err();
        assert_eq!(
            error.code().map(|code| code.code()),
            Some("42501"),
            "{refused}: {error:?}"
        );
    }
}
