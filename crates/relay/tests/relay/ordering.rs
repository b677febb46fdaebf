//! Messages with one ordering key stand in the stream in the order of their commits.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::SinkExt;
use outbox_testkit::{Direction, Matcher, Proxy};
use tokio_postgres::Client;

use crate::support::{Outbox, TOPIC, insert_ordered, leading};

const KEYS: u32 = 8;

/// Takes a key's row lock, numbers the message under it, and sometimes rolls back.
async fn write_in_turn(db: Client, writer: u32, stop: Arc<AtomicBool>) {
    let mut n = writer;
    while !stop.load(Ordering::Relaxed) {
        n += 1;
        let key = format!("k{}", n % KEYS);
        db.batch_execute("BEGIN").await.unwrap();
        let next = "UPDATE counters SET n = n + 1 WHERE key = $1 RETURNING n";
        let number: i64 = db.query_one(next, &[&key]).await.unwrap().get(0);
        insert_ordered(&db, &format!("{key}:{number}:{writer}:{n}"), &key).await;
        let end = if n.is_multiple_of(11) {
            "ROLLBACK"
        } else {
            "COMMIT"
        };
        db.batch_execute(end).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_that_wait_for_each_other_are_published_in_the_order_of_their_commits() {
    let outbox = Outbox::open().await;
    let counters =
        "CREATE TABLE counters (key text PRIMARY KEY, n bigint NOT NULL) WITH (fillfactor = 10);
        INSERT INTO counters SELECT 'k' || i, 0 FROM generate_series(0, 7) AS i";
    outbox.db.batch_execute(counters).await.unwrap();
    let relay = outbox.leader(&[]).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for writer in 0..16 {
        let db = outbox.client().await;
        writers.push(tokio::spawn(write_in_turn(db, writer, Arc::clone(&stop))));
    }
    tokio::time::sleep(Duration::from_secs(15)).await; // how long they write
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    let published = outbox.published_exactly_once(TOPIC).await;
    assert!(published > 1_000, "only {published} messages");
    let mut last: HashMap<String, i64> = HashMap::new();
    for entry in outbox.entries(TOPIC).await {
        let message_key = entry.message_key();
        let mut parts = message_key.split(':');
        let (key, number) = (parts.next().unwrap(), parts.next().unwrap());
        let before = last.entry(key.to_owned()).or_default();
        // A rollback takes its number back: committed ones have no holes.
        assert_eq!(number.parse::<i64>().unwrap(), *before + 1, "{message_key}");
        *before += 1;
    }
    assert_eq!(last.len(), KEYS as usize);
    assert!(relay.exit_status().is_none());
}

/// The page that finds the copied rows is cut after 500 of them. The row that its own writer could insert
/// only after the COPY had committed is above `high`, and must not come along in that page.
#[tokio::test]
async fn a_copy_that_commits_between_two_reads_comes_whole_and_before_what_followed_it() {
    let outbox = Outbox::open().await;
    let copier = outbox.client().await;
    copier.batch_execute("BEGIN").await.unwrap();
    let copy = "COPY outbox.messages (topic, ordering_key, message_key, payload) FROM STDIN";
    let mut sink = Box::pin(copier.copy_in::<_, Bytes>(copy).await.unwrap());
    for n in 1..=1_000 {
        let line = format!("{TOPIC}\tk\tcopied-{n}\t{{}}\n");
        sink.send(Bytes::from(line)).await.unwrap();
    }
    sink.close().await.unwrap();

    let proxy = Proxy::start(outbox.postgres.port()).await.unwrap();
    let relay = outbox.relay_via(&proxy).args(["--page-rows", "500"]);
    let relay = leading(relay).await;
    assert_eq!(outbox.insert("ahead").await, 1_001);
    outbox.arrives("ahead").await;
    let reading = proxy.hold(Matcher::sql("FROM unnest($4::bigint[]"), Direction::Request);
    reading.reached().await.unwrap();
    copier.batch_execute("COMMIT").await.unwrap();
    insert_ordered(&outbox.db, "follower", "k").await;
    assert_eq!(outbox.message_keys(TOPIC).await, ["ahead"]);
    reading.release();

    assert_eq!(outbox.published_exactly_once(TOPIC).await, 1_002);
    let mut expected = vec!["ahead".to_owned()];
    expected.extend((1..=1_000).map(|n| format!("copied-{n}")));
    expected.push("follower".to_owned());
    assert!(outbox.message_keys(TOPIC).await == expected);
    assert!(relay.exit_status().is_none());
}
