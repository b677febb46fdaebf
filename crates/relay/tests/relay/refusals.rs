//! `outbox-relay run` refuses at start, in one line with the remedy, what it cannot work with.

use outbox_testkit::{Postgres, Process, Redis, relay};

use crate::support::{DEADLINE, Outbox};

/// Asserts exit code 1 and a last line with all of these in it.
async fn assert_refuses(relay: Process, parts: &[&str]) {
    let status = relay.wait(DEADLINE).await.unwrap();
    assert_eq!(status.code(), Some(1));
    let lines = relay.lines();
    let [line] = lines.as_slice() else {
        panic!("not one line: {lines:?}")
    };
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
}

/// In such a database one byte that is no UTF-8 would stop every read.
#[tokio::test]
async fn a_database_without_an_encoding() {
    let postgres = Postgres::shared().await.unwrap();
    let redis = Redis::start().await.unwrap();
    let database = "without_an_encoding";
    let admin = postgres.connect("postgres").await.unwrap();
    let create =
        format!("CREATE DATABASE {database} TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'");
    admin.batch_execute(&create).await.unwrap();
    postgres.migrate(database, "outbox").await.unwrap();
    let run = relay(&postgres.url(database), &redis.url());
    assert_refuses(run.spawn().unwrap(), &["SQL_ASCII", "ENCODING 'UTF8'"]).await;
}

#[tokio::test]
async fn a_standby() {
    let postgres = Postgres::start().await.unwrap();
    let outbox = Outbox::open_on(&postgres, Redis::start().await.unwrap()).await;
    let standby = postgres.standby_builder().start().await.unwrap();
    let run = relay(&standby.url(&outbox.database), &outbox.redis.url());
    let parts = ["standby", "point --database-url at the primary"];
    assert_refuses(run.spawn().unwrap(), &parts).await;
}

/// Sessions that draw ids in advance hand them out in no order that a cursor could follow.
#[tokio::test]
async fn a_sequence_that_gives_ids_out_in_advance() {
    for (change, shown) in [
        ("SET CACHE 10", "cache 10"),
        ("SET INCREMENT 2", "increment 2"),
        ("SET CYCLE", "cycle true"),
    ] {
        let outbox = Outbox::open().await;
        let alter = format!("ALTER TABLE outbox.messages ALTER COLUMN id {change}");
        outbox.db.batch_execute(&alter).await.unwrap();
        let run = outbox.relay().spawn().unwrap();
        assert_refuses(run, &[shown, "SET INCREMENT 1 SET CACHE 1 SET NO CYCLE"]).await;
    }
}
