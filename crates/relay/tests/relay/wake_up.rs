//! A sleeping relay is woken by a notification; without one it finds the row all the same, later.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use outbox_testkit::{Postgres, Proxy, Redis, Shutdown, eventually};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_postgres::{AsyncMessage, Client, NoTls};

use crate::support::{DEADLINE, Outbox, TOPIC, insert, leading};

/// So rarely does the relay look by itself. Its check of the history, every five seconds, reads as well: so one quick
/// arrival proves nothing, and several do.
const RARELY: [&str; 2] = ["--poll-interval", "60s"];

/// Most arrivals of a woken relay are within this time.
const WOKEN_WITHIN: Duration = Duration::from_secs(1);

/// After a fault, the first row is in Redis within this time.
const FIRST_WITHIN: Duration = Duration::from_secs(5);

/// A leader whose connection went dead finds out within this time: a heartbeat every 1.2 s, answered within 3 s, and
/// what else it says answered within `--postgres-timeout`.
const HEALTH_CHECK: Duration = Duration::from_millis(4_200);

/// Asserts that most of these are woken arrivals.
fn assert_woken(mut latencies: Vec<Duration>) {
    latencies.sort();
    assert!(
        latencies[latencies.len() / 2] < WOKEN_WITHIN,
        "{latencies:?}"
    );
}

/// Waits until the leader sleeps and is up for nothing but the check of the history.
async fn sound_asleep(outbox: &Outbox<'_>) {
    outbox.settles().await;
    outbox.leader_sleeps().await;
}

/// Inserts while the leader sleeps, several times, and returns how long each took to arrive.
async fn latencies(outbox: &Outbox<'_>, db: &Client, name: &str) -> Vec<Duration> {
    let mut latencies = Vec::new();
    for n in 0..7 {
        sound_asleep(outbox).await;
        let key = format!("{name}-{n}");
        let begun = Instant::now();
        insert(db, &key).await;
        outbox.arrives(&key).await;
        latencies.push(begun.elapsed());
    }
    latencies
}

#[tokio::test]
async fn a_notification_wakes_the_relay_however_rarely_it_polls() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&RARELY).await;
    assert_woken(latencies(&outbox, &outbox.db, "row").await);
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_relay_beside_postgres_works_by_its_socket() {
    let outbox = Outbox::open().await;
    let url = outbox.postgres.socket_url(&outbox.database);
    assert!(url.contains("%2F"), "{url} names no socket");
    let over_socket = outbox.relay_between(&url, &outbox.redis.url());
    let relay = leading(over_socket.args(RARELY)).await;
    assert_woken(latencies(&outbox, &outbox.db, "row").await);
    outbox.published_exactly_once(TOPIC).await;
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_message_that_comes_alone_goes_by_one_script() {
    let outbox = Outbox::open().await;
    let _relay = outbox.leader(&RARELY).await;
    let mut redis = outbox.redis.connect().await.unwrap();
    sound_asleep(&outbox).await;
    let reset = redis::cmd("CONFIG").arg("RESETSTAT").clone();
    reset.exec_async(&mut redis).await.unwrap();
    for n in 0..5 {
        let key = format!("alone-{n}");
        insert(&outbox.db, &key).await;
        outbox.arrives(&key).await;
        sound_asleep(&outbox).await;
    }
    let info = redis::cmd("INFO").arg("commandstats").clone();
    let calls: String = info.query_async(&mut redis).await.unwrap();
    assert!(!calls.contains("cmdstat_exec"), "{calls}");
    assert!(calls.contains("cmdstat_xadd:calls=5,"), "{calls}");
}

#[tokio::test]
async fn a_script_that_may_not_ask_for_the_time_leaves_nothing() {
    let outbox = Outbox::open().await;
    let _relay = outbox.leader(&RARELY).await;
    let mut redis = outbox.redis.connect().await.unwrap();
    sound_asleep(&outbox).await;
    let acl = |right: &str| {
        redis::cmd("ACL")
            .arg(&["SETUSER", "default", right])
            .clone()
    };
    acl("-time").exec_async(&mut redis).await.unwrap();
    insert(&outbox.db, "alone").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    acl("+time").exec_async(&mut redis).await.unwrap();
    outbox.arrives("alone").await;
    outbox.settles().await;
    assert_eq!(outbox.message_keys(TOPIC).await, ["alone"]);
}

#[tokio::test]
async fn the_messages_of_one_transaction_all_arrive_after_its_notification() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&RARELY).await;
    let mut latencies = Vec::new();
    for messages in 1..=7 {
        sound_asleep(&outbox).await;
        outbox.db.batch_execute("BEGIN").await.unwrap();
        for n in 1..=messages {
            insert(&outbox.db, &format!("{n} of {messages}")).await;
        }
        let begun = Instant::now();
        outbox.db.batch_execute("COMMIT").await.unwrap();
        outbox.arrives(&format!("{messages} of {messages}")).await;
        latencies.push(begun.elapsed());
    }
    assert_woken(latencies);
    outbox.published_exactly_once(TOPIC).await;
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_writer_that_saw_the_relay_awake_is_found_soon_although_nobody_notifies() {
    let outbox = Outbox::open().await;
    let mut listener = Listener::on(&outbox).await;
    let mut writers = Vec::new();
    for n in 0..7 {
        let writer = outbox.client().await;
        writer.batch_execute("BEGIN").await.unwrap();
        insert(&writer, &format!("row-{n}")).await; // no relay holds the lock yet
        writers.push(writer);
    }
    let relay = outbox.leader(&RARELY).await;
    let mut latencies = Vec::new();
    for (n, writer) in writers.iter().enumerate() {
        sound_asleep(&outbox).await;
        let begun = Instant::now();
        writer.batch_execute("COMMIT").await.unwrap();
        outbox.arrives(&format!("row-{n}")).await;
        latencies.push(begun.elapsed());
    }
    assert_woken(latencies);
    assert_eq!(listener.heard(&outbox).await, 0);
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn rows_of_a_session_that_does_not_notify_are_found_by_polling() {
    let outbox = Outbox::open().await;
    let mut listener = Listener::on(&outbox).await;
    let relay = outbox.leader(&["--poll-interval", "200ms"]).await;
    let silent = outbox.client().await;
    silent
        .batch_execute("SET outbox.notify = 'off'")
        .await
        .unwrap();
    assert_woken(latencies(&outbox, &silent, "silent").await);
    assert_eq!(listener.heard(&outbox).await, 0);
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_terminated_session_is_replaced_and_listens_again() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&RARELY).await;
    outbox.leader_sleeps().await;
    let terminate = "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks
        WHERE locktype = 'advisory' AND classid = 1869968482 AND objid = 1 AND granted
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    let ended = outbox.db.query(terminate, &[]).await.unwrap();
    assert_eq!(ended.len(), 1);
    outbox.insert("first").await;
    outbox.arrives_within(FIRST_WITHIN, "first").await;
    assert_woken(latencies(&outbox, &outbox.db, "next").await);
    outbox.published_exactly_once(TOPIC).await;
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_connection_that_went_dead_without_a_word_is_replaced_and_listens_again() {
    let outbox = Outbox::open().await;
    let proxy = Proxy::start(outbox.postgres.port()).await.unwrap();
    let relay = outbox.relay_via(&proxy).args(RARELY);
    let relay = leading(relay.args(["--postgres-timeout", "3s"])).await;
    outbox.leader_sleeps().await;
    proxy.blackhole().await.unwrap();
    outbox.insert("first").await;
    outbox
        .arrives_within(HEALTH_CHECK + FIRST_WITHIN, "first")
        .await;
    assert_woken(latencies(&outbox, &outbox.db, "next").await);
    outbox.published_exactly_once(TOPIC).await;
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn after_a_crash_of_postgres_the_relay_is_back_and_listens_again() {
    let postgres = Postgres::start().await.unwrap();
    let outbox = Outbox::open_on(&postgres, Redis::start().await.unwrap()).await;
    let relay = outbox.leader(&RARELY).await;
    outbox.leader_sleeps().await;
    postgres.restart(Shutdown::Immediate).await.unwrap();
    let outbox = outbox.reopened().await;
    outbox.insert("first").await;
    outbox.arrives_within(FIRST_WITHIN, "first").await;
    assert_woken(latencies(&outbox, &outbox.db, "next").await);
    outbox.published_exactly_once(TOPIC).await;
    assert!(relay.exit_status().is_none());
}

/// What a notification may hold is limited, what a message may hold is not: it carries no row data.
#[tokio::test]
async fn large_rows_and_large_transactions_commit_with_one_notification_at_most() {
    let outbox = Outbox::open().await;
    let mut listener = Listener::on(&outbox).await;
    write_large(&outbox, "before").await;
    assert_eq!(listener.heard(&outbox).await, 0, "no relay runs");
    let relay = outbox.leader(&RARELY).await;
    outbox.settles().await;
    outbox.leader_sleeps().await;
    write_large(&outbox, "after").await;
    let heard = listener.heard(&outbox).await;
    assert!((1..=3).contains(&heard), "{heard} of three transactions");
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 2 * 20_002);
    assert!(relay.exit_status().is_none());
}

/// Three transactions: a payload of 100 kB, a key and a header of 9,000 bytes, and 20,000 rows.
async fn write_large(outbox: &Outbox<'_>, name: &str) {
    let sql = "INSERT INTO outbox.messages (topic, message_key, ordering_key, headers, payload)
        VALUES ('orders', $1, $2, json_build_object('h', $2::text), to_json($3::text))";
    let (large, long) = ("x".repeat(100_000), "k".repeat(9_000));
    let key = format!("{name}-large");
    outbox.db.execute(sql, &[&key, &"k", &large]).await.unwrap();
    let key = format!("{name}-long");
    outbox.db.execute(sql, &[&key, &long, &"x"]).await.unwrap();
    let sql = "INSERT INTO outbox.messages (topic, message_key, payload)
        SELECT 'orders', $1 || '-' || n, '{}' FROM generate_series(1, 20000) AS n";
    outbox.db.execute(sql, &[&name]).await.unwrap();
}

/// A session that listens on the relay's channel.
struct Listener {
    _client: Client,
    payloads: UnboundedReceiver<String>,
}

impl Listener {
    async fn on(outbox: &Outbox<'_>) -> Self {
        let url = outbox.postgres_url();
        let (client, mut connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
        let (sender, payloads) = unbounded_channel();
        tokio::spawn(async move {
            let mut messages =
                futures_util::stream::poll_fn(move |context| connection.poll_message(context));
            while let Some(Ok(message)) = messages.next().await {
                if let AsyncMessage::Notification(notification) = message {
                    let _ = sender.send(notification.payload().to_owned());
                }
            }
        });
        client.batch_execute("LISTEN outbox").await.unwrap();
        Self {
            _client: client,
            payloads,
        }
    }

    /// How many notifications came since the last call.
    async fn heard(&mut self, outbox: &Outbox<'_>) -> usize {
        // Notifications arrive in the order of the commits: behind this one there is none of before.
        outbox
            .db
            .batch_execute("NOTIFY outbox, 'end'")
            .await
            .unwrap();
        let mut heard = 0;
        let end = async {
            while self.payloads.recv().await.unwrap() != "end" {
                heard += 1;
            }
        };
        tokio::time::timeout(DEADLINE, end).await.unwrap();
        heard
    }
}

#[tokio::test]
async fn a_relay_that_is_gone_makes_nobody_notify() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&RARELY).await;
    outbox.leader_sleeps().await;
    relay.kill9();
    let gone = "SELECT NOT outbox.relay_is_asleep()";
    eventually(DEADLINE, "the lock of the dead relay to go", || async {
        let row = outbox.db.query_one(gone, &[]).await.unwrap();
        row.get::<_, bool>(0)
    })
    .await
    .unwrap();
    let mut listener = Listener::on(&outbox).await;
    outbox.insert("row").await;
    assert_eq!(listener.heard(&outbox).await, 0);
}
