//! The trigger notifies only a relay that sleeps.

use std::future::poll_fn;

use outbox_producer::{Message, write};
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, Client, NoTls};

use crate::database::{DEADLINE, Database};

/// The advisory lock that a sleeping relay holds.
const ASLEEP: &str = "1869968482, 2";

/// A session that listens, and what it hears.
struct Listener {
    heard: mpsc::UnboundedReceiver<String>,
    client: Client,
}

impl Listener {
    async fn start(database: &Database) -> Self {
        let (client, mut connection) = tokio_postgres::connect(&database.url(), NoTls)
            .await
            .unwrap();
        let (sender, heard) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await
            {
                if let AsyncMessage::Notification(notification) = message {
                    let _ = sender.send(notification.payload().to_owned());
                }
            }
        });
        client.batch_execute("LISTEN outbox").await.unwrap();
        Self { heard, client }
    }

    /// What was notified up to now. Notifications come in the order of commits, so the sentinel comes last.
    async fn heard(&mut self) -> Vec<String> {
        self.client
            .batch_execute("NOTIFY outbox, 'sentinel'")
            .await
            .unwrap();
        let mut heard = Vec::new();
        loop {
            let payload = tokio::time::timeout(DEADLINE, self.heard.recv())
                .await
                .expect("the sentinel comes")
                .unwrap();
            if payload == "sentinel" {
                return heard;
            }
            heard.push(payload);
        }
    }
}

async fn write_one(client: &mut Client, before: &str) {
    let transaction = client.transaction().await.unwrap();
    transaction.batch_execute(before).await.unwrap();
    write(&transaction, &Message::raw_json("t", "1"))
        .await
        .unwrap();
    transaction.commit().await.unwrap();
}

#[tokio::test]
async fn only_a_relay_that_sleeps_is_notified() {
    let database = Database::outbox().await;
    let mut listener = Listener::start(&database).await;
    let mut client = database.client().await;
    let relay = database.client().await;

    write_one(&mut client, "").await;
    assert_eq!(listener.heard().await, [""; 0], "nobody sleeps");

    relay
        .batch_execute(&format!("SELECT pg_advisory_lock({ASLEEP})"))
        .await
        .unwrap();
    write_one(&mut client, "").await;
    assert_eq!(listener.heard().await, [""], "the relay sleeps");

    // One for each transaction, whatever it writes.
    write_one(
        &mut client,
        "SELECT outbox.publish('t', '1') FROM generate_series(1, 1000)",
    )
    .await;
    assert_eq!(listener.heard().await, [""]);
    let large = "SELECT outbox.publish('t', to_json(repeat('x', 100000)), ordering_key => repeat('k', 9000), \
                 headers => json_build_object('h', repeat('x', 9000)))";
    write_one(&mut client, large).await;
    assert_eq!(
        listener.heard().await,
        [""],
        "size does not matter, a notification carries nothing"
    );

    write_one(&mut client, "SET LOCAL outbox.notify = 'off'").await;
    assert_eq!(
        listener.heard().await,
        [""; 0],
        "the transaction does not want to"
    );
    write_one(&mut client, "").await;
    assert_eq!(
        listener.heard().await,
        [""],
        "after SET LOCAL the setting is empty, not off"
    );

    relay
        .batch_execute(&format!("SELECT pg_advisory_unlock({ASLEEP})"))
        .await
        .unwrap();
    write_one(&mut client, "").await;
    assert_eq!(listener.heard().await, [""; 0], "the relay is awake");
}

#[tokio::test]
async fn the_probe_keeps_no_lock() {
    let database = Database::outbox().await;
    let mut client = database.client().await;
    let transaction = client.transaction().await.unwrap();
    write(&transaction, &Message::raw_json("t", "1"))
        .await
        .unwrap();
    let relay = database.client().await;
    let lie_down = format!("SELECT pg_try_advisory_lock({ASLEEP})");
    assert!(
        relay
            .query_one(&lie_down, &[])
            .await
            .unwrap()
            .get::<_, bool>(0),
        "an open writer is not in the way"
    );
}

#[tokio::test]
async fn a_transaction_that_does_not_notify_can_be_prepared() {
    let database = Database::outbox().await;
    let client = database.client().await;
    let relay = database.client().await;
    relay
        .batch_execute(&format!("SELECT pg_advisory_lock({ASLEEP})"))
        .await
        .unwrap();

    let prepare = |name: &str, off: &str| {
        format!("BEGIN; {off}; SELECT outbox.publish('t', '1'); PREPARE TRANSACTION '{name}'")
    };
    let notified = prepare(&format!("{}-a", database.name()), "SELECT 1");
    let error = client.batch_execute(&notified).await.unwrap_err();
    assert_eq!(
        error.code().map(|code| code.code()),
        Some("0A000"),
        "{error:?}"
    );
    client.batch_execute("ROLLBACK").await.unwrap();

    let name = format!("{}-b", database.name());
    client
        .batch_execute(&prepare(&name, "SET LOCAL outbox.notify = 'off'"))
        .await
        .unwrap();
    assert_eq!(database.count().await, 0);
    client
        .batch_execute(&format!("COMMIT PREPARED '{name}'"))
        .await
        .unwrap();
    assert_eq!(database.count().await, 1);
}
