//! Members whose transactions conflict, on servers of any language: only the SQLSTATE decides what it means.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use outbox_consumer::{Message, Order, Transaction};
use outbox_testkit::{Postgres, Process, Redis, eventually};

use crate::shop::{DEADLINE, Shop, run};

/// Languages to try, the plainest last: one of them is installed everywhere. `LANGUAGE`, which the process of
/// [`a_server_of_another_language`] has set, counts for each but the plain `C`.
const LOCALES: [&str; 3] = ["fr_FR.UTF-8", "C.UTF-8", "C"];

/// Handlers that wait for the counter's row.
const WAITING: &str = "SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE 'UPDATE counter%'";

/// Two members count 200 messages, each twice on its stream, in one row. Under SERIALIZABLE each pair of
/// transactions on it conflicts.
async fn conflicts_count_for_nothing(postgres: &Postgres, shop: &Shop, order: Order) {
    let sql = format!(
        "ALTER DATABASE {} SET default_transaction_isolation = 'serializable'",
        shop.database
    );
    shop.db.batch_execute(&sql).await.unwrap();
    shop.set_partitions("orders", "2").await;
    let refused = Arc::new(AtomicU32::new(0));
    let conflicts = Arc::clone(&refused);
    let count = async move |tx: &Transaction<'_>, _: &Message| {
        let counted = tx.execute("UPDATE counter SET n = n + 1", &[]).await;
        if counted.is_err() {
            conflicts.fetch_add(1, Ordering::SeqCst);
        }
        counted.map(drop)
    };
    // A single counted failure would make a dead letter.
    let builder = shop.consumer().order(order).max_attempts(1);
    let members = [run(builder.clone(), count.clone()), run(builder, count)];
    if order == Order::PerKey {
        // One alone would have nobody to conflict with.
        shop.shares_are(&[1, 1]).await;
    }

    // Whoever waits for a row that another transaction changes is refused when that one commits.
    let first = postgres.connect(&shop.database).await.unwrap();
    first
        .batch_execute("BEGIN; UPDATE counter SET n = n")
        .await
        .unwrap();
    for _ in 0..2 {
        shop.publish_keyed(2, &["a", "b", "c", "d"], 0..50).await;
    }
    // Of competitors, one may have been given all that there is so far.
    let waiting = if order == Order::PerKey { 2 } else { 1 };
    eventually(DEADLINE, "handlers that wait for the row", || async {
        shop.count(WAITING).await >= waiting
    })
    .await
    .unwrap();
    first.batch_execute("COMMIT").await.unwrap();

    let counted = "SELECT n::bigint FROM counter";
    eventually(DEADLINE, "two hundred, and none pending", || async {
        let pending = shop.pending("orders:0").await + shop.pending("orders:1").await;
        match (shop.count(counted).await, pending) {
            (200, 0) => Ok(()),
            other => Err(other),
        }
    })
    .await
    .unwrap();
    assert!(i64::from(refused.load(Ordering::SeqCst)) >= waiting);
    assert_eq!(shop.dead_letters().await, []);
    // A member counts a message right after it has acknowledged it.
    eventually(DEADLINE, "all counted by the members", || async {
        let counts = members.iter().map(|member| member.counters.snapshot());
        let sums = counts.fold((0, 0), |(applied, repeated), counts| {
            (applied + counts.applied, repeated + counts.repeated)
        });
        if sums == (200, 200) {
            Ok(())
        } else {
            Err(sums)
        }
    })
    .await
    .unwrap();
    for member in members {
        let counts = member.counters.snapshot();
        assert_eq!((counts.failed, counts.dead, counts.lost), (0, 0, 0));
        member.stop().await;
    }
    assert_eq!(shop.count(counted).await, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn competitors_that_conflict_at_serializable_isolation_lose_nothing() {
    let postgres = Postgres::shared().await.unwrap();
    conflicts_count_for_nothing(postgres, &Shop::open().await, Order::None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owners_that_conflict_at_serializable_isolation_lose_nothing() {
    let postgres = Postgres::shared().await.unwrap();
    conflicts_count_for_nothing(postgres, &Shop::open().await, Order::PerKey).await;
}

/// Not a test of its own: started by the next one as a process in whose environment another language is set.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_of_another_language() {
    if std::env::var_os("CONFLICTS_LANGUAGE").is_none() {
        return;
    }
    let postgres = Postgres::start().await.unwrap();
    for order in [Order::None, Order::PerKey] {
        let mut shop = Shop::open_on(&postgres, Redis::start().await.unwrap()).await;
        let mut chosen = None;
        for locale in LOCALES {
            let sql = format!(
                "ALTER DATABASE {} SET lc_messages = '{locale}'",
                shop.database
            );
            if shop.db.batch_execute(&sql).await.is_ok() {
                chosen = Some(locale);
                break;
            }
        }
        shop.db = postgres.connect(&shop.database).await.unwrap();
        let refusal = shop.db.batch_execute("SELECT 1 / 0").await.unwrap_err();
        let refusal = refusal.as_db_error().unwrap();
        eprintln!("{}: {}", chosen.unwrap(), refusal.message());

        conflicts_count_for_nothing(&postgres, &shop, order).await;
    }
    eprintln!("all counted");
}

/// Where no other language is installed, the server speaks English and the same must hold.
#[tokio::test]
async fn the_language_of_the_server_changes_nothing() {
    let process = Process::builder(std::env::current_exe().unwrap())
        .args(["--exact", "conflicts::a_server_of_another_language"])
        .arg("--nocapture")
        .env("CONFLICTS_LANGUAGE", "fr")
        .env("LANGUAGE", "fr")
        .spawn()
        .unwrap();

    process
        .wait_for_line("all counted", 2 * DEADLINE)
        .await
        .unwrap();
    let status = process.wait(DEADLINE).await.unwrap();
    assert!(status.success(), "{status}: {:#?}", process.lines());
}
