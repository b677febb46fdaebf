//! `outbox-relay migrate`: safe to repeat, from two places at once and while producers write.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use outbox_testkit::{Output, Postgres, Process, ProcessBuilder, eventually, relay_binary};

use crate::support::{DEADLINE, Outbox, TOPIC, insert};

/// What a command ended with: exit code, standard output and standard error.
type Ended = (Option<i32>, Vec<String>, Vec<String>);

fn migrate(postgres: &Postgres, database: &str) -> ProcessBuilder {
    Process::builder(relay_binary())
        .arg("migrate")
        .env("DATABASE_URL", postgres.url(database))
}

async fn ended(command: Process) -> Ended {
    let code = command.wait(DEADLINE).await.unwrap().code();
    (
        code,
        command.lines_of(Output::Stdout),
        command.lines_of(Output::Stderr),
    )
}

fn says(line: &str) -> Ended {
    (Some(0), vec![line.to_owned()], Vec::new())
}

/// Asserts a refusal: exit code 1 and one line with all of these in it.
fn assert_refused((code, stdout, stderr): Ended, parts: &[&str]) {
    assert_eq!((code, stdout.len()), (Some(1), 0), "{stdout:?} {stderr:?}");
    let [line] = stderr.as_slice() else {
        panic!("not one line: {stderr:?}")
    };
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
}

async fn version(postgres: &Postgres, database: &str, schema: &str) -> i32 {
    let db = postgres.connect(database).await.unwrap();
    let sql = format!("SELECT max(version) FROM {schema}.schema_version");
    db.query_one(&sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_schema_is_made_once_and_a_second_run_changes_nothing() {
    let postgres = Postgres::shared().await.unwrap();
    for (flag, schema) in [(None, "outbox"), (Some("--inbox"), "inbox")] {
        let database = postgres.fresh_database().await.unwrap();
        let run = || migrate(postgres, &database).args(flag).spawn().unwrap();
        let made = format!("schema {schema} created at version 1");
        assert_eq!(ended(run()).await, says(&made));
        let there = format!("schema {schema} is at version 1 already");
        assert_eq!(ended(run()).await, says(&there));
        assert_eq!(version(postgres, &database, schema).await, 1);
    }
}

/// An index in the order of a language finds keys no more once the system's library changes that order: a key that was
/// applied would be taken again.
#[tokio::test]
async fn no_index_depends_on_the_order_of_a_language() {
    let postgres = Postgres::shared().await.unwrap();
    let database = postgres.fresh_database().await.unwrap();
    for flag in [None, Some("--inbox")] {
        let process = migrate(postgres, &database).args(flag).spawn().unwrap();
        assert_eq!(ended(process).await.0, Some(0));
    }
    let db = postgres.connect(&database).await.unwrap();
    let sql = "
        SELECT i.relnamespace::regnamespace::text, a.attrelid::regclass::text || '.' || a.attname, c.collname::text
        FROM pg_class AS i JOIN pg_attribute AS a ON a.attrelid = i.oid JOIN pg_collation AS c ON c.oid = a.attcollation
        WHERE i.relkind = 'i' AND i.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)";
    let indexed = db.query(sql, &[]).await.unwrap();
    for schema in ["outbox", "inbox"] {
        assert!(indexed.iter().any(|row| row.get::<_, &str>(0) == schema));
    }
    for row in indexed {
        let (column, collation): (&str, &str) = (row.get(1), row.get(2));
        assert_eq!(collation, "C", "{column}");
    }
}

#[tokio::test]
async fn several_at_once_all_succeed() {
    let postgres = Postgres::shared().await.unwrap();
    for flag in [None, Some("--inbox")] {
        let database = postgres.fresh_database().await.unwrap();
        let run = || migrate(postgres, &database).args(flag).spawn().unwrap();
        for process in [run(), run(), run(), run()] {
            let (code, _, stderr) = ended(process).await;
            assert_eq!(code, Some(0), "{stderr:?}");
        }
    }
}

#[tokio::test]
async fn what_is_printed_is_a_migration_for_psql() {
    let postgres = Postgres::shared().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    for (flag, schema) in [(None, "outbox"), (Some("--inbox"), "inbox")] {
        let database = postgres.fresh_database().await.unwrap();
        let print = Process::builder(relay_binary())
            .args(["migrate", "--print"])
            .args(flag);
        let (code, sql, stderr) = ended(print.spawn().unwrap()).await;
        assert_eq!((code, stderr.len()), (Some(0), 0), "no database is needed");
        let file = dir.path().join(format!("{schema}.sql"));
        fs::write(&file, sql.join("\n")).unwrap();
        for _ in 0..2 {
            let psql = Process::builder(postgres.bin_dir().join("psql"))
                .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d"])
                .arg(postgres.url(&database))
                .arg("-f")
                .arg(&file);
            let (code, _, stderr) = ended(psql.spawn().unwrap()).await;
            assert_eq!(code, Some(0), "{stderr:?}");
        }
        let there = format!("schema {schema} is at version 1 already");
        let again = migrate(postgres, &database).args(flag).spawn().unwrap();
        assert_eq!(ended(again).await, says(&there));
    }
}

/// No producer fails or waits for long, and the relay loses nothing.
#[tokio::test]
async fn producers_write_on_while_it_runs() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let stop = Arc::new(AtomicBool::new(false));
    let written = Arc::new(AtomicU64::new(0));
    let mut producers = Vec::new();
    for producer in 0..4 {
        let (db, stop, written) = (
            outbox.client().await,
            Arc::clone(&stop),
            Arc::clone(&written),
        );
        db.batch_execute("SET statement_timeout = '5s'")
            .await
            .unwrap();
        producers.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let n = written.fetch_add(1, Ordering::Relaxed);
                insert(&db, &format!("row-{producer}-{n}")).await;
            }
        }));
    }
    // One that stays open all the time: a lock on the table would have to wait for it.
    let open = outbox.client().await;
    open.batch_execute("BEGIN").await.unwrap();
    insert(&open, "open").await;
    for _ in 0..3 {
        let before = written.load(Ordering::Relaxed);
        let run = migrate(outbox.postgres, &outbox.database).spawn().unwrap();
        let there = "schema outbox is at version 1 already";
        assert_eq!(ended(run).await, says(there));
        eventually(DEADLINE, "more rows", || async {
            written.load(Ordering::Relaxed) > before + 20
        })
        .await
        .unwrap();
    }
    open.batch_execute("COMMIT").await.unwrap();
    stop.store(true, Ordering::Relaxed);
    for producer in producers {
        producer.await.unwrap();
    }
    outbox.published_exactly_once(TOPIC).await;
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_schema_that_is_too_new_is_refused_with_the_remedy() {
    let outbox = Outbox::open().await;
    let newer = "INSERT INTO outbox.schema_version (version) VALUES (99)";
    outbox.db.batch_execute(newer).await.unwrap();
    let parts = ["\"outbox\"", "99", "upgrade outbox-relay"];
    let run = migrate(outbox.postgres, &outbox.database).spawn().unwrap();
    assert_refused(ended(run).await, &parts);
    assert_refused(ended(outbox.relay().spawn().unwrap()).await, &parts);
}

#[tokio::test]
async fn a_schema_of_somebody_else_is_refused_and_left_alone() {
    let postgres = Postgres::shared().await.unwrap();
    for (flag, schema) in [(None, "outbox"), (Some("--inbox"), "inbox")] {
        let database = postgres.fresh_database().await.unwrap();
        let db = postgres.connect(&database).await.unwrap();
        let theirs =
            format!("CREATE SCHEMA {schema}; CREATE TABLE {schema}.messages (theirs integer)");
        db.batch_execute(&theirs).await.unwrap();
        let run = migrate(postgres, &database).args(flag).spawn().unwrap();
        assert_refused(
            ended(run).await,
            &[schema, "not made by", "another database"],
        );
        let columns = "SELECT string_agg(column_name, ',') FROM information_schema.columns WHERE table_schema = $1";
        let columns: String = db.query_one(columns, &[&schema]).await.unwrap().get(0);
        assert_eq!(columns, "theirs");
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named_with_the_remedy() {
    let run = Process::builder(relay_binary())
        .arg("migrate")
        .env("DATABASE_URL", "postgres://postgres@127.0.0.1:1/nowhere")
        .spawn()
        .unwrap();
    assert_refused(ended(run).await, &["Postgres", "--database-url"]);
}
