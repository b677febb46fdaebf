//! The purge takes what was published longer ago than the retention, and nothing that is still needed.

use std::time::Instant;

use outbox_testkit::eventually;

use crate::support::{DEADLINE, Outbox, TOPIC, insert};

pub(crate) const RETENTION: [&str; 2] = ["--retention", "2s"];

/// Ids that are left, oldest first.
pub(crate) async fn left(outbox: &Outbox<'_>) -> Vec<i64> {
    let sql = "SELECT id FROM outbox.messages ORDER BY id";
    let rows = outbox.db.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

pub(crate) async fn only_these_are_left(outbox: &Outbox<'_>, ids: &[i64]) {
    eventually(DEADLINE, "the purge", || async {
        let left = left(outbox).await;
        if left == ids { Ok(()) } else { Err(left) }
    })
    .await
    .unwrap();
}

async fn purged_to(outbox: &Outbox<'_>) -> i64 {
    let sql = "SELECT purged_to FROM outbox.purge";
    outbox.db.query_one(sql, &[]).await.unwrap().get(0)
}

/// Waits until everything published by now is older than the retention, and a purge has run after that.
pub(crate) async fn a_purge_has_run_over_what_is_published_now(outbox: &Outbox<'_>) {
    let now = "SELECT clock_timestamp()::text";
    let begun: String = outbox.db.query_one(now, &[]).await.unwrap().get(0);
    let old = "SELECT clock_timestamp()::text WHERE clock_timestamp() - interval '2.1 s' > $1::text::timestamptz";
    let since: String = eventually(DEADLINE, "the retention to be over", || async {
        let row = outbox.db.query_opt(old, &[&begun]).await.unwrap();
        row.map(|row| row.get(0))
    })
    .await
    .unwrap();
    // A session tells its last query only: `forget old milestones` is the last of each purge.
    let ran = "SELECT EXISTS (SELECT FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE '% purge' AND state = 'idle'
          AND query LIKE '%DELETE FROM outbox.milestones%' AND query_start > $1::text::timestamptz)";
    eventually(DEADLINE, "another purge", || async {
        let row = outbox.db.query_one(ran, &[&since]).await.unwrap();
        row.get::<_, bool>(0)
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn published_rows_go_after_the_retention_but_for_the_last() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&RETENTION).await;
    let fill = "INSERT INTO outbox.messages (topic, message_key, payload)
        SELECT 'orders', 'row-' || n, '{}' FROM generate_series(1, 12000) AS n";
    outbox.db.batch_execute(fill).await.unwrap();
    outbox.settles().await;
    // Published while the purge is at work.
    let begun = Instant::now();
    let mut n = 0;
    while purged_to(&outbox).await < 12_000 {
        assert!(begun.elapsed() < DEADLINE, "no purge after {n} messages");
        outbox.insert(&format!("meanwhile-{n}")).await;
        outbox.arrives(&format!("meanwhile-{n}")).await;
        n += 1;
    }
    let last = 12_000 + n;
    only_these_are_left(&outbox, &[last]).await;
    assert_eq!(purged_to(&outbox).await, last - 1);
    assert_eq!(outbox.entry_count(TOPIC).await as i64, last);
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn rows_younger_than_the_retention_stay() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&["--retention", "1h"]).await;
    for n in 0..5 {
        outbox.insert(&format!("row-{n}")).await;
    }
    outbox.settles().await;
    let looked = "SELECT EXISTS (SELECT FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE '% purge' AND state = 'idle'
          AND query LIKE '%FROM outbox.milestones%')";
    eventually(DEADLINE, "the purge to look", || async {
        let row = outbox.db.query_one(looked, &[]).await.unwrap();
        row.get::<_, bool>(0)
    })
    .await
    .unwrap();
    assert_eq!(left(&outbox).await, [1, 2, 3, 4, 5]);
    assert_eq!(purged_to(&outbox).await, 0);
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_gap_stops_the_purge_until_it_is_filled() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&RETENTION).await;
    outbox.insert("below-1").await;
    outbox.insert("below-2").await;
    let late = outbox.client().await;
    late.batch_execute("BEGIN").await.unwrap();
    assert_eq!(insert(&late, "late").await, 3);
    for key in ["above-4", "above-5", "above-6"] {
        outbox.insert(key).await;
        outbox.arrives(key).await;
    }
    only_these_are_left(&outbox, &[4, 5, 6]).await;
    a_purge_has_run_over_what_is_published_now(&outbox).await;
    assert_eq!(left(&outbox).await, [4, 5, 6]);
    assert_eq!(purged_to(&outbox).await, 2);
    late.batch_execute("COMMIT").await.unwrap();
    outbox.arrives("late").await;
    only_these_are_left(&outbox, &[6]).await;
    assert_eq!(purged_to(&outbox).await, 5);
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_blocked_stream_stops_the_purge_until_it_has_caught_up() {
    let outbox = Outbox::open().await;
    let mut redis = outbox.redis.connect().await.unwrap();
    let set = |key: &str| redis::cmd("SET").arg(key).arg("not a stream").to_owned();
    set("outbox:refused").exec_async(&mut redis).await.unwrap();
    let relay = outbox.leader(&RETENTION).await;
    outbox.insert("first").await;
    outbox.arrives("first").await;
    let refused = "INSERT INTO outbox.messages (topic, message_key, payload) VALUES ('refused', 'held', '{}')";
    outbox.db.batch_execute(refused).await.unwrap();
    for key in ["second", "third"] {
        outbox.insert(key).await;
        outbox.arrives(key).await;
    }
    outbox.settles().await;
    a_purge_has_run_over_what_is_published_now(&outbox).await;
    let kept = left(&outbox).await;
    assert!(kept.ends_with(&[2, 3, 4]), "{kept:?}");
    redis::cmd("DEL")
        .arg("outbox:refused")
        .exec_async(&mut redis)
        .await
        .unwrap();
    only_these_are_left(&outbox, &[4]).await;
    assert_eq!(outbox.message_keys("refused").await, ["held"]);
    assert!(relay.exit_status().is_none());
}

/// What waits for Redis is not published, however old it is.
#[tokio::test]
async fn rows_that_wait_for_redis_stay() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&RETENTION).await;
    outbox.insert("published").await;
    outbox.settles().await;
    outbox.redis.pause().await.unwrap();
    for n in 0..3 {
        outbox.insert(&format!("waiting-{n}")).await;
    }
    let old = "SELECT min(created_at) < now() - interval '4 s' FROM outbox.messages WHERE id > 1";
    eventually(DEADLINE, "them to be old", || async {
        let row = outbox.db.query_one(old, &[]).await.unwrap();
        row.get::<_, bool>(0)
    })
    .await
    .unwrap();
    assert_eq!(left(&outbox).await, [1, 2, 3, 4]);
    outbox.redis.resume().await.unwrap();
    only_these_are_left(&outbox, &[4]).await;
    assert_eq!(
        outbox.message_keys(TOPIC).await,
        ["published", "waiting-0", "waiting-1", "waiting-2"]
    );
    assert!(relay.exit_status().is_none());
}

/// A pause may last longer than the retention.
#[tokio::test]
async fn rows_that_wait_for_the_end_of_a_pause_stay() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&RETENTION).await;
    outbox.insert("published").await;
    outbox.settles().await;
    let pause = ["pause", "--reason", "a test of the purge"];
    crate::commands::run_on(&outbox, &pause).await.done();
    relay
        .wait_for_line("publishing is paused", DEADLINE)
        .await
        .unwrap();
    for n in 0..3 {
        outbox.insert(&format!("waiting-{n}")).await;
    }
    a_purge_has_run_over_what_is_published_now(&outbox).await;
    a_purge_has_run_over_what_is_published_now(&outbox).await;
    assert_eq!(left(&outbox).await, [1, 2, 3, 4]);
    assert_eq!(outbox.entry_count(TOPIC).await, 1);
    crate::commands::run_on(&outbox, &["resume"]).await.done();
    only_these_are_left(&outbox, &[4]).await;
    assert_eq!(
        outbox.message_keys(TOPIC).await,
        ["published", "waiting-0", "waiting-1", "waiting-2"]
    );
}
