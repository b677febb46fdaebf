//! The migration runs twice, from many places at once, while producers write, and leaves foreign schemas alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use outbox_producer::{Message, write};
use tokio::task::JoinSet;

use crate::database::{Database, MIGRATION};

/// Everything that a second run must not touch.
const FINGERPRINT: &str = "\
    SELECT (SELECT outbox_id::text FROM outbox.identity) \
        || (SELECT string_agg(version || '@' || applied_at, ',' ORDER BY version) FROM outbox.schema_version) \
        || (SELECT string_agg(relname || oid, ',' ORDER BY oid) FROM pg_class \
            WHERE relnamespace = 'outbox'::regnamespace) \
        || (SELECT string_agg(proname || oid || xmin, ',' ORDER BY oid) FROM pg_proc \
            WHERE pronamespace = 'outbox'::regnamespace)";

#[tokio::test]
async fn a_second_run_changes_nothing() {
    let database = Database::outbox().await;
    let client = database.client().await;
    let before: String = client.query_one(FINGERPRINT, &[]).await.unwrap().get(0);
    client.batch_execute(MIGRATION).await.unwrap();
    let after: String = client.query_one(FINGERPRINT, &[]).await.unwrap().get(0);
    assert_eq!(before, after);
}

#[tokio::test]
async fn it_runs_from_many_connections_at_once_at_any_default_isolation() {
    for isolation in ["read committed", "repeatable read", "serializable"] {
        let database = Database::empty().await;
        let client = database.client().await;
        let default = format!(
            "ALTER DATABASE {} SET default_transaction_isolation = '{isolation}'",
            database.name()
        );
        client.batch_execute(&default).await.unwrap();
        // The lock of the migrations: all of them are under way before the first one may go on.
        client
            .batch_execute("SELECT pg_advisory_lock(1869968482, 3)")
            .await
            .unwrap();
        let mut runs = JoinSet::new();
        for _ in 0..4 {
            let runner = database.client().await;
            runs.spawn(async move { runner.batch_execute(MIGRATION).await });
        }
        database.sessions_wait_for_locks(4).await;
        client
            .batch_execute("SELECT pg_advisory_unlock(1869968482, 3)")
            .await
            .unwrap();
        for run in runs.join_all().await {
            run.unwrap_or_else(|error| panic!("{isolation}: {error:?}"));
        }
        let versions = client
            .query("SELECT version FROM outbox.schema_version", &[])
            .await
            .unwrap();
        assert_eq!(versions.len(), 1, "{isolation}");
    }
}

#[tokio::test]
async fn a_foreign_schema_is_refused_and_left_alone() {
    let database = Database::empty().await;
    let client = database.client().await;
    client
        .batch_execute("CREATE SCHEMA outbox; CREATE TABLE outbox.messages (mine int)")
        .await
        .unwrap();
    let error = client.batch_execute(MIGRATION).await.unwrap_err();
    let cause = error.as_db_error().unwrap();
    assert_eq!(cause.code().code(), "42P06");
    assert!(
        cause.message().contains("not made by these migrations"),
        "{cause:?}"
    );
    assert!(cause.hint().is_some());
    let tables = "SELECT count(*) FROM pg_class WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r'";
    assert_eq!(
        client
            .query_one(tables, &[])
            .await
            .unwrap()
            .get::<_, i64>(0),
        1
    );
}

#[tokio::test]
async fn it_runs_while_producers_write() {
    let database = Arc::new(Database::outbox().await);
    let stop = Arc::new(AtomicBool::new(false));
    let mut producers = JoinSet::new();
    for _ in 0..4 {
        let (database, stop) = (Arc::clone(&database), Arc::clone(&stop));
        producers.spawn(async move {
            let mut client = database.client().await;
            let mut written = 0_i64;
            while !stop.load(Ordering::Relaxed) {
                let transaction = client.transaction().await.unwrap();
                write(&transaction, &Message::raw_json("t", "1"))
                    .await
                    .unwrap();
                transaction.commit().await.unwrap();
                written += 1;
            }
            written
        });
    }
    let mut holder = database.client().await;
    let open = holder.transaction().await.unwrap();
    write(&open, &Message::raw_json("t", "1")).await.unwrap();
    let client = database.client().await;
    for _ in 0..20 {
        client.batch_execute(MIGRATION).await.unwrap();
    }
    open.commit().await.unwrap();
    stop.store(true, Ordering::Relaxed);
    let written: i64 = producers.join_all().await.into_iter().sum();
    assert_eq!(database.count().await, written + 1);
}
