//! The examples of `docs/other-languages.md` run as they stand there.

use std::{fs, path::PathBuf};

use outbox_testkit::{Postgres, Process, ProcessBuilder, Redis, eventually, relay};
use tokio_postgres::Client;

use crate::world::DEADLINE;

const DOCUMENT: &str = include_str!("../../docs/other-languages.md");

/// Names a Python with psycopg2 and redis; goes before those that are looked for.
const PYTHON_VARIABLE: &str = "OUTBOX_PYTHON";

/// The blocks of a language, in their order.
fn blocks(language: &str) -> Vec<&'static str> {
    let fence = format!("```{language}\n");
    let parts = DOCUMENT.split(fence.as_str()).skip(1);
    parts
        .map(|part| part.split("```").next().unwrap())
        .collect()
}

/// A Python that has what the examples import. Debian's packages belong to its own, which need not be the first on PATH.
async fn python() -> PathBuf {
    let named = std::env::var_os(PYTHON_VARIABLE).map(PathBuf::from);
    let candidates = match named {
        Some(named) => vec![named],
        None => vec![PathBuf::from("/usr/bin/python3"), PathBuf::from("python3")],
    };
    for candidate in candidates {
        let imports = Process::builder(&candidate).args(["-c", "import psycopg2, redis"]);
        let Ok(imports) = imports.spawn() else {
            continue;
        };
        if imports.wait(DEADLINE).await.unwrap().success() {
            return candidate;
        }
    }
    panic!(
        "no Python has psycopg2 and redis: run scripts/install-servers.sh --for-tests, or name one in {PYTHON_VARIABLE}"
    );
}

struct Estate {
    redis: Redis,
    shop_url: String,
    warehouse_url: String,
    warehouse: Client,
    files: tempfile::TempDir,
    python: PathBuf,
    psql: PathBuf,
}

impl Estate {
    async fn open() -> Self {
        let postgres = Postgres::shared().await.unwrap();
        let (shop, warehouse) = (
            postgres.fresh_outbox().await.unwrap(),
            postgres.fresh_inbox().await.unwrap(),
        );
        let orders = "CREATE TABLE orders (number bigint PRIMARY KEY, customer text NOT NULL)";
        let client = postgres.connect(&shop).await.unwrap();
        client.batch_execute(orders).await.unwrap();
        // No unique key: double effects show.
        let parcels = "CREATE TABLE parcels (message_key text NOT NULL, body text NOT NULL)";
        let client = postgres.connect(&warehouse).await.unwrap();
        client.batch_execute(parcels).await.unwrap();
        Self {
            redis: Redis::start().await.unwrap(),
            shop_url: postgres.url(&shop),
            warehouse_url: postgres.url(&warehouse),
            warehouse: client,
            files: tempfile::tempdir().unwrap(),
            python: python().await,
            psql: postgres.bin_dir().join("psql"),
        }
    }

    /// A program that reads a file of this content.
    fn program(&self, program: &PathBuf, name: &str, content: &str) -> ProcessBuilder {
        let file = self.files.path().join(name);
        fs::write(&file, content).unwrap();
        let program = Process::builder(program)
            .env("SHOP_URL", &self.shop_url)
            .env("WAREHOUSE_URL", &self.warehouse_url)
            .env("REDIS_URL", self.redis.url())
            .env("MEMBER", "one");
        match name.ends_with(".sql") {
            true => program
                .args(["-X", "-v", "ON_ERROR_STOP=1", "-d", &self.shop_url, "-f"])
                .arg(file),
            false => program.arg(file),
        }
    }

    async fn parcels(&self) -> Vec<String> {
        let sql = "SELECT message_key FROM parcels ORDER BY message_key";
        let rows = self.warehouse.query(sql, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    async fn parcels_are(&self, expected: &[&str]) {
        eventually(DEADLINE, "the parcels", || async {
            let parcels = self.parcels().await;
            if parcels == expected {
                Ok(())
            } else {
                Err(parcels)
            }
        })
        .await
        .unwrap();
    }
}

/// Runs a program that succeeds.
async fn done(program: ProcessBuilder) {
    let program = program.spawn().unwrap();
    let status = program.wait(DEADLINE).await.unwrap();
    assert!(status.success(), "{:#?}", program.lines());
}

#[tokio::test]
async fn what_psql_and_python_write_is_applied_once_by_python() {
    let estate = Estate::open().await;
    let relay = relay(&estate.shop_url, &estate.redis.url())
        .spawn()
        .unwrap();
    let sql = blocks("sql");
    let python = blocks("python");
    assert_eq!(
        (sql.len(), python.len()),
        (2, 2),
        "two to write, one to read"
    );
    for (number, block) in sql.iter().enumerate() {
        done(estate.program(&estate.psql, &format!("{number}.sql"), block)).await;
    }
    done(estate.program(&estate.python, "write.py", python[0])).await;
    // What is written again is refused, with the order.
    let again = estate.program(&estate.python, "again.py", python[0]);
    let again = again.spawn().unwrap();
    assert_eq!(again.wait(DEADLINE).await.unwrap().code(), Some(1));

    let consumer = estate.program(&estate.python, "read.py", python[1]);
    let all = ["order-17-placed", "order-18-placed", "order-19-placed"];
    let first = consumer.clone().spawn().unwrap();
    estate.parcels_are(&all).await;
    first.kill9();

    // Given to the member before it died, and never acknowledged: it comes again, and is known.
    let mut redis = estate.redis.connect().await.unwrap();
    for (key, fields) in [("order-17-placed", "repeated"), ("order-20-placed", "new")] {
        let mut add = redis::cmd("XADD");
        add.arg("outbox:orders")
            .arg("*")
            .arg("message_key")
            .arg(key);
        add.arg("payload").arg(fields);
        add.exec_async(&mut redis).await.unwrap();
    }
    let mut give = redis::cmd("XREADGROUP");
    give.arg(&["GROUP", "packing", "one", "STREAMS", "outbox:orders", ">"]);
    give.exec_async(&mut redis).await.unwrap();
    let second = consumer.spawn().unwrap();
    let all = [&all[..], &["order-20-placed"]].concat();
    estate.parcels_are(&all).await;
    eventually(DEADLINE, "nothing left to acknowledge", || async {
        let mut redis = redis.clone();
        let mut pending = redis::cmd("XPENDING");
        pending.arg("outbox:orders").arg("packing");
        let pending: redis::streams::StreamPendingReply =
            pending.query_async(&mut redis).await.unwrap();
        pending.count() == 0
    })
    .await
    .unwrap();
    assert_eq!(estate.parcels().await, all);
    assert!(second.exit_status().is_none(), "{:#?}", second.lines());
    assert!(relay.exit_status().is_none());
}
