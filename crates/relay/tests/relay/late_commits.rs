//! Ids are drawn before the commit: whoever commits late is published late, and never passed over.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use outbox_testkit::{Process, eventually};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::support::{DEADLINE, Outbox, TOPIC, insert, insert_ordered};

/// How soon after its commit a late row has to be in Redis.
const LATE_ROW_LIMIT: Duration = Duration::from_secs(2);

/// An outbox with a relay, and row A (id 1) uncommitted while B and C are published.
struct Schedule {
    outbox: Outbox<'static>,
    late: tokio_postgres::Client,
    relay: Process,
}

async fn a_is_open_and_b_and_c_are_published(before_a: &str) -> Schedule {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let late = outbox.client().await;
    late.batch_execute("BEGIN").await.unwrap();
    late.batch_execute(before_a).await.unwrap();
    assert_eq!(insert(&late, "A").await, 1);
    assert_eq!(outbox.insert("B").await, 2);
    outbox.arrives("B").await;
    outbox.insert("C").await;
    outbox.arrives("C").await;
    assert_eq!(outbox.message_keys(TOPIC).await, ["B", "C"]);
    Schedule {
        outbox,
        late,
        relay,
    }
}

impl Schedule {
    async fn ends_with(self, keys: &[&str]) {
        self.outbox.published_exactly_once(TOPIC).await;
        assert_eq!(self.outbox.message_keys(TOPIC).await, keys);
        assert!(self.relay.exit_status().is_none());
    }
}

#[tokio::test]
async fn a_row_that_commits_late_arrives_soon_after_its_commit() {
    let schedule = a_is_open_and_b_and_c_are_published("").await;
    schedule.late.batch_execute("COMMIT").await.unwrap();
    schedule.outbox.arrives_within(LATE_ROW_LIMIT, "A").await;
    schedule.ends_with(&["B", "C", "A"]).await;
}

#[tokio::test]
async fn a_row_that_rolls_back_late_never_arrives() {
    let schedule = a_is_open_and_b_and_c_are_published("").await;
    schedule.late.batch_execute("ROLLBACK").await.unwrap();
    schedule.outbox.insert("D").await;
    schedule.outbox.arrives("D").await;
    schedule.ends_with(&["B", "C", "D"]).await;
}

#[tokio::test]
async fn a_row_of_a_rolled_back_savepoint_never_arrives_and_the_rest_of_its_transaction_does() {
    let before_a = "SAVEPOINT s";
    let schedule = a_is_open_and_b_and_c_are_published(before_a).await;
    insert(&schedule.late, "A2").await;
    let rest = "ROLLBACK TO SAVEPOINT s; SELECT 1";
    schedule.late.batch_execute(rest).await.unwrap();
    insert(&schedule.late, "rest").await;
    schedule.outbox.insert("D").await;
    schedule.outbox.arrives("D").await;
    schedule.late.batch_execute("COMMIT").await.unwrap();
    schedule.outbox.arrives_within(LATE_ROW_LIMIT, "rest").await;
    schedule.ends_with(&["B", "C", "D", "rest"]).await;
}

#[tokio::test]
async fn rows_around_a_rolled_back_savepoint_arrive_with_their_transaction() {
    let schedule = a_is_open_and_b_and_c_are_published("").await;
    let (late, outbox) = (&schedule.late, &schedule.outbox);
    late.batch_execute("SAVEPOINT s").await.unwrap();
    insert(late, "inner").await;
    outbox.insert("D").await;
    outbox.arrives("D").await;
    late.batch_execute("ROLLBACK TO s; SAVEPOINT kept")
        .await
        .unwrap();
    insert(late, "kept").await;
    outbox.insert("E").await;
    outbox.arrives("E").await;
    late.batch_execute("RELEASE kept; COMMIT").await.unwrap();
    outbox.arrives_within(LATE_ROW_LIMIT, "kept").await;
    schedule.ends_with(&["B", "C", "D", "E", "A", "kept"]).await;
}

#[tokio::test]
async fn a_transaction_prepared_after_its_gap_was_seen_is_waited_for() {
    let schedule = a_is_open_and_b_and_c_are_published("SET LOCAL outbox.notify = 'off'").await;
    let (late, outbox) = (&schedule.late, &schedule.outbox);
    late.batch_execute(&format!("PREPARE TRANSACTION '{}'", outbox.database))
        .await
        .unwrap();
    for key in ["D", "E", "F"] {
        outbox.insert(key).await;
        outbox.arrives(key).await;
    }
    late.batch_execute(&format!("COMMIT PREPARED '{}'", outbox.database))
        .await
        .unwrap();
    outbox.arrives_within(LATE_ROW_LIMIT, "A").await;
    schedule.ends_with(&["B", "C", "D", "E", "F", "A"]).await;
}

#[tokio::test]
async fn a_transaction_prepared_before_its_gap_was_seen_is_waited_for() {
    let outbox = Outbox::open().await;
    outbox.db.batch_execute("BEGIN").await.unwrap();
    outbox.insert("A").await;
    let prepare = format!("PREPARE TRANSACTION '{}'", outbox.database);
    outbox.db.batch_execute(&prepare).await.unwrap();
    let relay = outbox.leader(&[]).await;
    for key in ["B", "C", "D"] {
        outbox.insert(key).await;
        outbox.arrives(key).await;
    }
    let commit = format!("COMMIT PREPARED '{}'", outbox.database);
    outbox.db.batch_execute(&commit).await.unwrap();
    outbox.arrives_within(LATE_ROW_LIMIT, "A").await;
    outbox.published_exactly_once(TOPIC).await;
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_prepared_transaction_that_is_rolled_back_leaves_no_gap() {
    let schedule = a_is_open_and_b_and_c_are_published("SET LOCAL outbox.notify = 'off'").await;
    let (late, outbox) = (&schedule.late, &schedule.outbox);
    late.batch_execute(&format!("PREPARE TRANSACTION '{}'", outbox.database))
        .await
        .unwrap();
    outbox.insert("D").await;
    outbox.arrives("D").await;
    let gaps = "SELECT count(*) FROM outbox.checkpoint_gaps";
    eventually(DEADLINE, "A's gap in the checkpoint", || async {
        outbox
            .db
            .query_one(gaps, &[])
            .await
            .unwrap()
            .get::<_, i64>(0)
            == 1
    })
    .await
    .unwrap();
    late.batch_execute(&format!("ROLLBACK PREPARED '{}'", outbox.database))
        .await
        .unwrap();
    schedule.ends_with(&["B", "C", "D"]).await;
}

/// The snapshot's list of transactions does not name a writer that has no transaction id yet, or that the
/// snapshot is older than; the table's lock does.
#[tokio::test]
async fn a_transaction_with_the_younger_xid_and_the_lower_id_is_waited_for() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let (a, b) = (outbox.client().await, outbox.client().await);
    let xid = async |client: &tokio_postgres::Client| -> i64 {
        let sql = "SELECT pg_current_xact_id()::text::bigint";
        client.query_one(sql, &[]).await.unwrap().get(0)
    };
    a.batch_execute("BEGIN").await.unwrap();
    let xid_of_a = xid(&a).await;
    b.batch_execute("BEGIN").await.unwrap();
    assert!(xid(&b).await > xid_of_a);
    assert_eq!(insert(&b, "B").await, 1);
    assert_eq!(insert(&a, "A").await, 2);
    a.batch_execute("COMMIT").await.unwrap();
    outbox.arrives("A").await;
    // Each of these is at least one more trip of the reader.
    for n in 0..5 {
        outbox.insert(&format!("later-{n}")).await;
        outbox.arrives(&format!("later-{n}")).await;
    }
    b.batch_execute("COMMIT").await.unwrap();
    outbox.arrives_within(LATE_ROW_LIMIT, "B").await;
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 7);
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_locked_row_holds_nothing_up() {
    let outbox = Outbox::open().await;
    for n in 0..20 {
        insert_ordered(&outbox.db, &format!("m{n}"), &format!("k{}", n % 4)).await;
    }
    let holder = outbox.client().await;
    let lock = "BEGIN; SELECT FROM outbox.messages WHERE ordering_key = 'k0' ORDER BY id LIMIT 1 FOR UPDATE";
    holder.batch_execute(lock).await.unwrap();
    let relay = outbox.leader(&[]).await;
    let in_order: Vec<String> = (0..20).map(|n| format!("m{n}")).collect();
    eventually(DEADLINE, "all rows while one is locked", || async {
        let keys = outbox.message_keys(TOPIC).await;
        if keys == in_order { Ok(()) } else { Err(keys) }
    })
    .await
    .unwrap();
    holder.batch_execute("COMMIT").await.unwrap();
    outbox.published_exactly_once(TOPIC).await;
    assert!(relay.exit_status().is_none());
}

/// What one of the writers did.
#[derive(Default)]
struct Written {
    committed: Vec<String>,
    rolled_back: Vec<String>,
}

/// Writes transactions of one to three rows, each ending as the dice say.
async fn write_at_random(
    db: tokio_postgres::Client,
    writer: u64,
    stop: Arc<AtomicBool>,
) -> Written {
    let mut dice = StdRng::seed_from_u64(writer);
    let mut written = Written::default();
    let mut n = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut kept = Vec::new();
        db.batch_execute("BEGIN").await.unwrap();
        for _ in 0..dice.random_range(1..=3) {
            n += 1;
            let key = format!("w{writer}-{n}");
            if dice.random_bool(0.2) {
                db.batch_execute("SAVEPOINT s").await.unwrap();
                insert(&db, &key).await;
                db.batch_execute("ROLLBACK TO s").await.unwrap();
                written.rolled_back.push(key);
            } else {
                insert(&db, &key).await;
                kept.push(key);
            }
        }
        if dice.random_bool(0.15) {
            // Stays open while others commit: time is what makes it late.
            let pause = Duration::from_millis(dice.random_range(1..60));
            tokio::time::sleep(pause).await;
        }
        if dice.random_bool(0.3) {
            db.batch_execute("ROLLBACK").await.unwrap();
            written.rolled_back.append(&mut kept);
        } else {
            db.batch_execute("COMMIT").await.unwrap();
            written.committed.append(&mut kept);
        }
    }
    written
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_row_of_24_concurrent_writers_is_lost_doubled_or_made_up() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for writer in 0..24 {
        let db = outbox.client().await;
        writers.push(tokio::spawn(write_at_random(db, writer, Arc::clone(&stop))));
    }
    tokio::time::sleep(Duration::from_secs(8)).await; // how long they write
    stop.store(true, Ordering::Relaxed);
    let (mut committed, mut rolled_back) = (Vec::new(), Vec::new());
    for writer in writers {
        let mut written = writer.await.unwrap();
        committed.append(&mut written.committed);
        rolled_back.append(&mut written.rolled_back);
    }
    assert!(committed.len() > 1_000, "only {} rows", committed.len());
    assert_eq!(outbox.published_exactly_once(TOPIC).await, committed.len());
    let counts = outbox.count_by_key(TOPIC).await;
    assert!(committed.iter().all(|key| counts.get(key) == Some(&1)));
    assert!(rolled_back.iter().all(|key| !counts.contains_key(key)));
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn open_transactions_hold_up_no_other_and_their_gaps_close_in_the_end() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let mut held = Vec::new();
    for n in 0..4 {
        let client = outbox.client().await;
        client.batch_execute("BEGIN").await.unwrap();
        insert(&client, &format!("held-{n}")).await;
        held.push(client);
        // A rollback after each, whose gap nobody can close while the older ones are open.
        outbox.db.batch_execute("BEGIN").await.unwrap();
        outbox.insert(&format!("gone-{n}")).await;
        outbox.db.batch_execute("ROLLBACK").await.unwrap();
        outbox.insert(&format!("between-{n}")).await;
        outbox.arrives(&format!("between-{n}")).await;
    }
    let begun = Instant::now();
    let mut slowest = Duration::ZERO;
    let mut n = 0;
    while begun.elapsed() < Duration::from_secs(3) {
        outbox.db.batch_execute("BEGIN").await.unwrap();
        outbox.insert(&format!("rolled-{n}")).await;
        outbox.db.batch_execute("ROLLBACK").await.unwrap();
        let committed = Instant::now();
        outbox.insert(&format!("flowing-{n}")).await;
        outbox.arrives(&format!("flowing-{n}")).await;
        slowest = slowest.max(committed.elapsed());
        n += 1;
    }
    assert!(slowest < LATE_ROW_LIMIT, "one of {n} took {slowest:?}");
    for (n, client) in held.iter().enumerate() {
        let end = if n % 2 == 0 { "COMMIT" } else { "ROLLBACK" };
        client.batch_execute(end).await.unwrap();
    }
    // Settled means that no gap is left.
    let published = outbox.published_exactly_once(TOPIC).await;
    assert_eq!(published, 4 + n + 2);
    assert!(relay.exit_status().is_none());
}
