//! Pages are bounded in rows and bytes, and so is the relay's memory, whatever waits.

use std::time::Duration;

use outbox_testkit::eventually;

use crate::support::{DEADLINE, Outbox, PREFIX, TOPIC};

/// Takes the oldest entries out of a stream and returns their message keys: a reader that leaves Redis room.
const TAKE: &str = "local keys = {}
    for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 10)) do
        for i = 1, #entry[2], 2 do
            if entry[2][i] == 'message_key' then keys[#keys + 1] = entry[2][i + 1] end
        end
        redis.call('XDEL', KEYS[1], entry[1])
    end
    return keys";

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn more_rows_in_a_page_than_can_be_are_refused_with_the_limit() {
    let outbox = Outbox::open().await;
    let relay = outbox
        .relay()
        .args(["--page-rows", "70000"])
        .spawn()
        .unwrap();
    let status = relay.wait(DEADLINE).await.unwrap();
    assert_eq!(status.code(), Some(64));
    let line = relay.wait_for_line("--page-rows", DEADLINE).await.unwrap();
    assert!(line.contains("70000") && line.contains("10000"), "{line}");
    assert_eq!(relay.lines().len(), 1);
}

#[tokio::test]
async fn a_backlog_of_70_000_rows_is_published_in_the_largest_pages() {
    let outbox = Outbox::open().await;
    let insert = "INSERT INTO outbox.messages (topic, message_key, payload)
        SELECT 'orders', 'row-' || n, '{}' FROM generate_series(1, 70000) AS n";
    outbox.db.batch_execute(insert).await.unwrap();
    let relay = outbox.leader(&["--page-rows", "10000"]).await;
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 70_000);
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_backlog_of_large_payloads_takes_little_memory() {
    let outbox = Outbox::open().await;
    let insert = "INSERT INTO outbox.messages (topic, message_key, payload)
        SELECT 'orders', 'row-' || lpad(n::text, 3, '0'), to_json(repeat('x', 4194304)) FROM generate_series(1, 200) AS n";
    outbox.db.batch_execute(insert).await.unwrap();
    let relay = outbox.leader(&["--page-rows", "500"]).await;
    let mut redis = outbox.redis.connect().await.unwrap();
    let mut taken = Vec::new();
    while taken.len() < 200 {
        let keys = eventually(DEADLINE, "the next large messages", async || {
            let keys: Vec<String> = redis::cmd("EVAL")
                .arg(TAKE)
                .arg(1)
                .arg(format!("{PREFIX}{TOPIC}"))
                .query_async(&mut redis.clone())
                .await
                .unwrap();
            (!keys.is_empty()).then_some(keys)
        });
        taken.extend(keys.await.unwrap());
    }
    let peak = relay.peak_rss_bytes().unwrap();
    outbox.settles().await;
    let expected: Vec<String> = (1..=200).map(|n| format!("row-{n:03}")).collect();
    assert_eq!(taken, expected);
    assert_eq!(outbox.entry_count(TOPIC).await, 0);
    assert!(peak < 120 * MIB, "{} MiB", peak / MIB);
    redis::cmd("PING").exec_async(&mut redis).await.unwrap();
}

#[tokio::test]
async fn a_page_holds_no_more_bytes_than_it_may() {
    let outbox = Outbox::open().await;
    let insert = "INSERT INTO outbox.messages (topic, message_key, payload)
        SELECT 'orders', 'row-' || n, to_json(repeat('x', 10000)) FROM generate_series(1, 100) AS n";
    outbox.db.batch_execute(insert).await.unwrap();
    let relay = outbox.leader(&["--page-bytes", "65536"]).await;
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 100);
    let page: i64 = outbox
        .db
        .query_one("SELECT page FROM outbox.checkpoint", &[])
        .await
        .unwrap()
        .get(0);
    // Seven rows of 10,002 bytes are the first that reach 65,536.
    assert!(page >= 100 / 7, "all in {page} pages");
    assert!(relay.exit_status().is_none());
}

/// Gaps that are filled all at once come in pages too.
#[tokio::test]
async fn rows_that_commit_late_are_bounded_as_well() {
    let outbox = Outbox::open().await;
    let late = outbox.client().await;
    let insert = "BEGIN; INSERT INTO outbox.messages (topic, message_key, payload)
        SELECT 'orders', 'late-' || n, to_json(repeat('x', 1000000)) FROM generate_series(1, 100) AS n";
    late.batch_execute(insert).await.unwrap();
    let relay = outbox.leader(&[]).await;
    outbox.insert("ahead").await;
    outbox.arrives("ahead").await;
    late.batch_execute("COMMIT").await.unwrap();
    outbox.settles_within(Duration::from_secs(60)).await;
    let peak = relay.peak_rss_bytes().unwrap();
    assert!(peak < 120 * MIB, "{} MiB", peak / MIB);
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 101);
}
