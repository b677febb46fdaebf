//! A relay that started on an empty table still reads by the primary key when there are many rows.

use std::time::Duration;

use crate::support::{DEADLINE, Outbox, TOPIC};

const ROWS: i64 = 200_000;

#[tokio::test]
async fn statements_prepared_on_an_empty_analysed_table_use_the_primary_key() {
    let outbox = Outbox::open().await;
    outbox
        .db
        .batch_execute("ANALYZE outbox.messages")
        .await
        .unwrap();
    let relay = outbox.leader(&[]).await;
    outbox.leader_sleeps().await;
    let fill = format!(
        "INSERT INTO outbox.messages (topic, message_key, payload)
         SELECT 'orders', 'row-' || n, '{{}}' FROM generate_series(1, {ROWS}) AS n"
    );
    outbox.db.batch_execute(&fill).await.unwrap();
    // A gap, so that the other half of the statement has something to look for.
    let late = outbox.client().await;
    late.batch_execute("BEGIN").await.unwrap();
    crate::support::insert(&late, "late").await;
    outbox.insert("ahead").await;
    outbox.settles_but_for_gaps(Duration::from_secs(60)).await;
    late.batch_execute("COMMIT").await.unwrap();
    outbox.settles().await;
    relay.terminate();
    assert!(relay.wait(DEADLINE).await.unwrap().success());

    // Sessions report what they did when they end.
    let used = "SELECT seq_tup_read, idx_tup_fetch FROM pg_stat_user_tables
        WHERE schemaname = 'outbox' AND relname = 'messages'";
    let (mut by_scan, mut by_key) = (0, 0);
    outbox_testkit::eventually(DEADLINE, "the relay's report", || async {
        let row = outbox.client().await.query_one(used, &[]).await.unwrap();
        let (scanned, fetched): (i64, i64) = (row.get(0), row.get(1));
        if fetched >= ROWS {
            Ok((scanned, fetched))
        } else {
            Err((scanned, fetched))
        }
    })
    .await
    .map(|seen| (by_scan, by_key) = seen)
    .unwrap();
    // One scan of the table would read that much.
    assert!(
        by_scan < ROWS,
        "{by_scan} rows by scans, {by_key} by the key"
    );
    // A page of a thousand rows that sorted, or read on to the end, would fetch a hundred times as much.
    assert!(by_key < 4 * ROWS, "{by_key} rows by the key");
    assert_eq!(outbox.entry_count(TOPIC).await as i64, ROWS + 2);
}
