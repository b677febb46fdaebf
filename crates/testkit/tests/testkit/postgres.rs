use outbox_testkit::{Postgres, Shutdown, eventually};
use tokio_postgres::{Client, NoTls, error::SqlState};

use crate::{DEADLINE, QUIET};

async fn table(postgres: &Postgres) -> (String, Client) {
    let database = postgres.fresh_database().await.unwrap();
    let client = postgres.connect(&database).await.unwrap();
    client
        .batch_execute("CREATE TABLE t (n int)")
        .await
        .unwrap();
    (database, client)
}

async fn rows(postgres: &Postgres, database: &str) -> i64 {
    let client = postgres.connect(database).await.unwrap();
    client
        .query_one("SELECT count(*) FROM t", &[])
        .await
        .unwrap()
        .get(0)
}

async fn text(client: &Client, sql: &str) -> String {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn fresh_databases_have_the_schema_and_differ() {
    let postgres = Postgres::shared().await.unwrap();
    let outbox = postgres.fresh_outbox().await.unwrap();
    let inbox = postgres.fresh_inbox().await.unwrap();
    assert_ne!(outbox, inbox);
    let client = postgres.connect(&outbox).await.unwrap();
    client
        .query_one("SELECT count(*) FROM outbox.messages", &[])
        .await
        .unwrap();
    let client = postgres.connect(&inbox).await.unwrap();
    client
        .query_one("SELECT count(*) FROM inbox.applied", &[])
        .await
        .unwrap();
}

#[tokio::test]
async fn the_shared_server_refuses_faults() {
    let postgres = Postgres::shared().await.unwrap();
    let error = postgres.kill9().await.unwrap_err();
    assert!(error.to_string().contains("shared"), "{error}");
    assert!(postgres.pause().await.is_err());
    assert!(postgres.stop(Shutdown::Fast).await.is_err());
    postgres.connect("postgres").await.unwrap();
}

#[tokio::test]
async fn a_server_is_utf8_durable_and_unlike_any_other() {
    let (one, other) = tokio::try_join!(Postgres::start(), Postgres::start()).unwrap();
    let client = one.connect("postgres").await.unwrap();
    assert_eq!(text(&client, "SHOW server_encoding").await, "UTF8");
    eventually(DEADLINE, "fsync after the start", || async {
        text(&client, "SHOW fsync").await == "on"
    })
    .await
    .unwrap();
    assert_eq!(text(&client, "SHOW synchronous_commit").await, "on");
    assert_eq!(text(&client, "SHOW lc_collate").await, "C");
    let id = "SELECT system_identifier::text FROM pg_control_system()";
    let other = other.connect("postgres").await.unwrap();
    assert_ne!(text(&client, id).await, text(&other, id).await);
}

#[tokio::test]
async fn the_builder_sets_what_it_is_told() {
    let postgres = Postgres::builder()
        .encoding("SQL_ASCII")
        .setting("max_prepared_transactions", "7")
        .setting("cluster_name", "it's \"quoted\"")
        .start()
        .await
        .unwrap();
    let database = postgres.fresh_database().await.unwrap();
    let client = postgres.connect(&database).await.unwrap();
    assert_eq!(text(&client, "SHOW server_encoding").await, "SQL_ASCII");
    assert_eq!(text(&client, "SHOW max_prepared_transactions").await, "7");
    assert_eq!(text(&client, "SHOW cluster_name").await, "it's \"quoted\"");
}

#[tokio::test]
async fn hba_lines_bind_clients_and_not_the_kit() {
    let postgres = Postgres::builder()
        .hba("host all all 127.0.0.1/32 reject")
        .start()
        .await
        .unwrap();
    let database = postgres.fresh_outbox().await.unwrap();
    let error = postgres.connect(&database).await.unwrap_err();
    assert_eq!(
        error.sql_state(),
        Some(&SqlState::INVALID_AUTHORIZATION_SPECIFICATION),
        "{error}"
    );
}

#[tokio::test]
async fn a_server_that_does_not_start_shows_its_log() {
    let error = Postgres::builder()
        .setting("shared_buffers", "plenty")
        .start()
        .await
        .unwrap_err();
    let shown = format!("{error:?}");
    assert!(shown.contains("did not start"), "{shown}");
    assert!(
        shown.contains("invalid value for parameter \"shared_buffers\""),
        "{shown}"
    );
}

#[tokio::test]
async fn kill_9_keeps_commits_and_loses_open_transactions() {
    let postgres = Postgres::start().await.unwrap();
    let (database, client) = table(&postgres).await;
    client
        .batch_execute("INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    client
        .batch_execute("BEGIN; INSERT INTO t VALUES (2)")
        .await
        .unwrap();
    postgres.kill9().await.unwrap();
    assert!(!postgres.is_running());
    eventually(DEADLINE, "the client to notice", || async {
        client.is_closed()
    })
    .await
    .unwrap();
    assert!(postgres.connect(&database).await.is_err());
    postgres.start_again().await.unwrap();
    assert_eq!(rows(&postgres, &database).await, 1);
    assert!(postgres.log().contains("not properly shut down"));
}

#[tokio::test]
async fn kill_9_ends_a_backend_that_is_busy() {
    let postgres = Postgres::start().await.unwrap();
    let (_, client) = table(&postgres).await;
    let pid: i32 = client
        .query_one("SELECT pg_backend_pid()", &[])
        .await
        .unwrap()
        .get(0);
    let busy = tokio::spawn(async move {
        client
            .batch_execute("DO $$ BEGIN LOOP END LOOP; END $$")
            .await
            .unwrap_err()
    });
    let watcher = postgres.connect("postgres").await.unwrap();
    eventually(DEADLINE, "the loop to run", || async {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND query LIKE 'DO%'";
        watcher
            .query_one(sql, &[&pid])
            .await
            .unwrap()
            .get::<_, i64>(0)
            == 1
    })
    .await
    .unwrap();
    postgres.kill9().await.unwrap();
    assert!(!crate::process::is_alive(u32::try_from(pid).unwrap()));
    busy.await.unwrap();
    // Neither the busy backend's shared memory nor its sockets are in the way.
    postgres.start_again().await.unwrap();
}

#[tokio::test]
async fn every_way_to_stop_keeps_commits_and_the_port() {
    let postgres = Postgres::start().await.unwrap();
    let port = postgres.port();
    let (database, client) = table(&postgres).await;
    for (mode, recovers) in [
        (Shutdown::Fast, false),
        (Shutdown::Immediate, true),
        (Shutdown::Smart, false),
    ] {
        let writer = postgres.connect(&database).await.unwrap();
        writer
            .batch_execute("INSERT INTO t VALUES (1)")
            .await
            .unwrap();
        drop(writer);
        let before = postgres.log().len();
        postgres.restart(mode).await.unwrap();
        let recovered = postgres.log()[before..].contains("automatic recovery in progress");
        assert_eq!(recovered, recovers, "{mode:?}");
    }
    assert!(client.is_closed());
    assert_eq!(postgres.port(), port);
    assert_eq!(rows(&postgres, &database).await, 3);
}

#[tokio::test]
async fn a_paused_server_answers_nothing_and_then_everything() {
    let postgres = Postgres::start().await.unwrap();
    let (database, client) = table(&postgres).await;
    postgres.pause().await.unwrap();
    let insert = client.execute("INSERT INTO t VALUES (1)", &[]);
    tokio::pin!(insert);
    assert!(tokio::time::timeout(QUIET, &mut insert).await.is_err());
    let url = postgres.url(&database);
    assert!(
        tokio::time::timeout(QUIET, tokio_postgres::connect(&url, NoTls))
            .await
            .is_err()
    );
    postgres.resume().await.unwrap();
    assert_eq!(insert.await.unwrap(), 1);
    assert_eq!(rows(&postgres, &database).await, 1);
}

#[tokio::test]
async fn a_paused_server_can_be_killed_and_stopped() {
    let postgres = Postgres::start().await.unwrap();
    postgres.pause().await.unwrap();
    postgres.kill9().await.unwrap();
    postgres.start_again().await.unwrap();
    postgres.pause().await.unwrap();
    postgres.restart(Shutdown::Fast).await.unwrap();
}

#[tokio::test]
async fn a_snapshot_is_the_past_and_disturbs_no_session() {
    let postgres = Postgres::start().await.unwrap();
    let (database, client) = table(&postgres).await;
    let timeline = "SELECT system_identifier || ' ' || timeline_id
        FROM pg_control_system(), pg_control_checkpoint()";
    let past = text(&client, timeline).await;
    client
        .batch_execute("INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    let snapshot = postgres.snapshot().await.unwrap();
    client
        .batch_execute("INSERT INTO t VALUES (2)")
        .await
        .unwrap();
    assert_eq!(rows(&postgres, &database).await, 2);
    for _ in 0..2 {
        postgres.restore(&snapshot).await.unwrap();
        let client = postgres.connect(&database).await.unwrap();
        assert_eq!(rows(&postgres, &database).await, 1);
        assert_eq!(text(&client, timeline).await, past);
        client
            .batch_execute("INSERT INTO t VALUES (3), (4)")
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_snapshot_of_a_stopped_server_is_clean_and_of_a_killed_one_is_not() {
    let postgres = Postgres::start().await.unwrap();
    let (database, client) = table(&postgres).await;
    assert!(postgres.snapshot_stopped().await.is_err());
    client
        .batch_execute("INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    postgres.kill9().await.unwrap();
    let crashed = postgres.snapshot_stopped().await.unwrap();
    postgres.start_again().await.unwrap();
    postgres.stop(Shutdown::Fast).await.unwrap();
    let clean = postgres.snapshot_stopped().await.unwrap();
    for (snapshot, recovers) in [(clean, false), (crashed, true)] {
        let before = postgres.log().len();
        postgres.restore(&snapshot).await.unwrap();
        let recovered = postgres.log()[before..].contains("automatic recovery in progress");
        assert_eq!(recovered, recovers);
        assert_eq!(rows(&postgres, &database).await, 1);
    }
}
