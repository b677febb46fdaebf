//! Settings from flags, environment, file and default: which goes first, what is refused, and what `config` says of them.

use std::path::PathBuf;

use outbox_testkit::{Output, Postgres, Process, ProcessBuilder, Redis, eventually, relay_binary};

use crate::pair::{DEADLINE, Pair, stop};

const SECRET: &str = "s3cret-Pa55word";

/// A directory for files of settings.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Files(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        // Whole or not at all, as a secret is turned over.
        let new = self.0.path().join(format!("{name}.new"));
        std::fs::write(&new, text).unwrap();
        std::fs::rename(&new, &path).unwrap();
        path
    }
}

fn command(args: &[&str]) -> ProcessBuilder {
    Process::builder(relay_binary()).args(args.iter().copied())
}

/// Runs a command to its end, and returns its exit code and its lines.
async fn ended(command: ProcessBuilder) -> (Option<i32>, Vec<String>) {
    let process = command.spawn().unwrap();
    let status = process.wait(DEADLINE).await.unwrap();
    let lines = process.lines();
    for line in &lines {
        assert!(!line.contains(SECRET), "{line}");
    }
    (status.code(), lines)
}

/// The line of `config check` about a setting: its value and where that came from.
fn setting(lines: &[String], key: &str) -> Vec<String> {
    let line = lines
        .iter()
        .find(|line| line.split_whitespace().next() == Some(key));
    let line = line.unwrap_or_else(|| panic!("no {key} in {lines:#?}"));
    line.split_whitespace().skip(1).map(str::to_owned).collect()
}

#[tokio::test]
async fn a_flag_goes_before_the_environment_that_before_the_file_and_that_before_the_default() {
    let pair = Pair::start().await;
    let files = Files::new();
    let file = files.write(
        "relay.toml",
        &format!(
            "# what this relay does\nredis-url = \"{}\"\nname = \"of the file\"\npage-rows = 1_100\n\
             poll-interval = \"1100ms\"\nretention = \"9d\"\n",
            pair.redis.url()
        ),
    );
    let check = command(&["config", "check", "--name", "of-the-flag"])
        .arg("--config")
        .arg(&file)
        .env("DATABASE_URL", pair.postgres.url(&pair.database))
        .env("OUTBOX_NAME", "of-the-environment")
        .env("OUTBOX_PAGE_ROWS", "1200");
    let (code, lines) = ended(check).await;
    assert_eq!(code, Some(0), "{lines:#?}");
    assert_eq!(setting(&lines, "name"), ["of-the-flag", "flag"]);
    assert_eq!(
        setting(&lines, "page-rows"),
        ["1200", "environment", "OUTBOX_PAGE_ROWS"]
    );
    assert_eq!(setting(&lines, "retention"), ["9d", "file"]);
    assert_eq!(setting(&lines, "backoff-max"), ["150ms", "default"]);
    assert_eq!(setting(&lines, "listen"), ["not", "set"]);
    assert_eq!(setting(&lines, "redis-url"), ["***", "file"]);
    let said = lines.iter().filter(|l| l.ends_with("nothing is wrong"));
    assert_eq!(said.count(), 2, "{lines:#?}");

    // And the relay runs by it; the file is named by the environment this time.
    let relay = command(&["run"])
        .env("OUTBOX_CONFIG", &file)
        .env("DATABASE_URL", pair.postgres.url(&pair.database))
        .spawn()
        .unwrap();
    pair.leads(&relay).await;
    pair.write("orders", "row", 3).await;
    pair.all_published(DEADLINE).await;
    let status = pair.status().await;
    assert!(status.contains("of the file (backend"), "{status}");
    stop(&relay).await;
}

#[tokio::test]
async fn a_file_that_is_wrong_is_refused_with_its_name_the_key_and_the_remedy() {
    let files = Files::new();
    for (text, says) in [
        (
            "page_rows = 5",
            "key page_rows: is not known; write page-rows",
        ),
        ("colour = 5", "the keys are database-url,"),
        ("config = \"x\"", "key config: is not known"),
        ("[run]\npage-rows = 5", "key run: is a section"),
        (
            "page-rows = \"5\"",
            "must be a decimal number without quotes, not text",
        ),
        ("page-rows = 5.5", "not a number with a fraction"),
        ("page-rows = -5", "key page-rows: is refused"),
        ("page-rows = [5, 6]", "not a list"),
        ("retention = 5", "must be text in quotes, not a number"),
        ("retention = \"soon\"", "write e.g. \"500ms\""),
        ("on-redis-loss = \"panic\"", "is none of replay, resume"),
        ("name = true", "must be text in quotes, not true or false"),
        ("name = \"a\"\nname = \"b\"", "line 2 is no TOML"),
        (
            "database-url = postgres://s3cret-Pa55word",
            "line 1 is no TOML",
        ),
        (
            "\npage-rows = 0",
            "1 to 10000 (it is set by the key page-rows in",
        ),
        (
            "backoff-first = \"5s\"",
            "not be longer than --backoff-max (it is set by the key",
        ),
        ("redis-tls-mode = \"require\"", "need a rediss:// URL"),
    ] {
        let file = files.write("relay.toml", text);
        let run = command(&["run", "--config"])
            .arg(&file)
            .env(
                "DATABASE_URL",
                "postgres://u:s3cret-Pa55word@127.0.0.1:1/shop",
            )
            .env("REDIS_URL", "redis://:s3cret-Pa55word@127.0.0.1:1");
        let (code, lines) = ended(run).await;
        assert_eq!(code, Some(64), "{text}: {lines:#?}");
        let [line] = lines.as_slice() else {
            panic!("{text}: not one line: {lines:#?}");
        };
        assert!(line.contains(says), "{text}: no {says:?} in {line:?}");
        assert!(line.contains("relay.toml"), "{text}: {line}");
    }
    let (code, lines) = ended(command(&["status", "--config", "no-such-file.toml"])).await;
    assert_eq!(code, Some(64));
    assert!(
        lines[0].contains("no-such-file.toml: cannot be read"),
        "{lines:#?}"
    );
    // Help tells no value of the file: it may be a secret.
    let file = files.write(
        "relay.toml",
        "database-url = \"postgres://u:s3cret-Pa55word@h/d\"",
    );
    let (code, lines) = ended(command(&["run", "--help", "--config"]).arg(&file)).await;
    assert_eq!(code, Some(0), "{lines:#?}");
}

#[tokio::test]
async fn an_address_and_a_file_of_it_contradict_each_other() {
    let files = Files::new();
    let file = files.write("address", "postgres://u:s3cret-Pa55word@127.0.0.1:1/shop\n");
    for (flag, variable, address) in [
        (
            "--database-url-file",
            "DATABASE_URL",
            "postgres://u@127.0.0.1:1/d",
        ),
        ("--redis-url-file", "REDIS_URL", "redis://127.0.0.1:1"),
    ] {
        let run = command(&["run", flag])
            .arg(&file)
            .env("DATABASE_URL", "postgres://u@127.0.0.1:1/d")
            .env(variable, address);
        let (code, lines) = ended(run).await;
        assert_eq!(code, Some(64), "{lines:#?}");
        assert!(
            lines[0].contains(flag) && lines[0].contains("drop one"),
            "{lines:#?}"
        );
    }
    let empty = files.write("empty", " \n");
    for file in [empty, PathBuf::from("no-such-file")] {
        let run = command(&[
            "run",
            "--redis-url",
            "redis://127.0.0.1:1",
            "--database-url-file",
        ]);
        let (code, lines) = ended(run.arg(&file)).await;
        assert_eq!(code, Some(64), "{lines:#?}");
        let name = file.display().to_string();
        assert!(lines[0].contains("--database-url-file") && lines[0].contains(&name));
    }
}

#[tokio::test]
async fn a_password_that_is_turned_over_in_its_file_is_taken_by_the_next_connection() {
    let hba = "host all all 127.0.0.1/32 scram-sha-256";
    let postgres = Postgres::builder().hba(hba).start().await.unwrap();
    let redis = Redis::builder().password("first").start().await.unwrap();
    let database = postgres.fresh_outbox().await.unwrap();
    // The kit's own way in, past the rules for TCP.
    let sql = async |text: &str| {
        let socket = postgres.data_dir().parent().unwrap().display().to_string();
        let psql = Process::builder(postgres.bin_dir().join("psql"))
            .args([
                "-h", &socket, "-U", "postgres", "-d", &database, "-XAtc", text,
            ])
            .args(["-p", &postgres.port().to_string()])
            .spawn()
            .unwrap();
        assert!(psql.wait(DEADLINE).await.unwrap().success(), "{text}");
        psql.lines_of(Output::Stdout).join("\n")
    };
    let files = Files::new();
    let turn_over = |password: &str| {
        let url = format!(
            "postgres://postgres:{password}@127.0.0.1:{}/{database}\n",
            postgres.port()
        );
        let redis = format!("redis://:{password}@127.0.0.1:{}/0\n", redis.port());
        (files.write("postgres", &url), files.write("redis", &redis))
    };
    sql("ALTER ROLE postgres PASSWORD 'first'").await;
    let (postgres_file, redis_file) = turn_over("first");
    let relay = command(&["run"])
        .arg("--database-url-file")
        .arg(&postgres_file)
        .env("REDIS_URL_FILE", &redis_file)
        .spawn()
        .unwrap();
    relay.wait_for_line("leading;", DEADLINE).await.unwrap();

    let mut admin = redis.connect().await.unwrap();
    redis::cmd("CONFIG")
        .arg(&["SET", "requirepass", "second"])
        .exec_async(&mut admin)
        .await
        .unwrap();
    sql("ALTER ROLE postgres PASSWORD 'second'").await;
    turn_over("second");
    redis::cmd("CLIENT")
        .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
        .exec_async(&mut admin)
        .await
        .unwrap();
    sql("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE 'outbox-relay%'").await;
    sql("SELECT outbox.publish('orders', '{}')").await;
    eventually(DEADLINE, "the message in its stream", || {
        let mut admin = admin.clone();
        async move {
            let mut len = redis::cmd("XLEN");
            let len: usize = len
                .arg("outbox:orders")
                .query_async(&mut admin)
                .await
                .unwrap();
            if len == 1 { Ok(()) } else { Err(len) }
        }
    })
    .await
    .unwrap();
    stop(&relay).await;
}

#[tokio::test]
async fn a_check_names_what_is_wrong_with_each_server() {
    let pair = Pair::start().await;
    let bare = pair.postgres.fresh_database().await.unwrap();
    let check = |postgres: &str, redis: &str| {
        command(&["config", "check"])
            .env("DATABASE_URL", postgres)
            .env("REDIS_URL", redis)
    };
    let nowhere = "redis://:s3cret-Pa55word@127.0.0.1:1";
    let (code, lines) = ended(check(&pair.postgres.url(&bare), nowhere)).await;
    assert_eq!(code, Some(1), "{lines:#?}");
    let [.., postgres, redis] = lines.as_slice() else {
        panic!("{lines:#?}")
    };
    assert!(
        postgres.contains("run `outbox-relay migrate`"),
        "{postgres}"
    );
    assert!(
        redis.contains("check host and port in --redis-url"),
        "{redis}"
    );
    let bad = check("mysql://u:s3cret-Pa55word@h/d", nowhere);
    let (code, lines) = ended(bad).await;
    assert_eq!(code, Some(64), "{lines:#?}");
    // It is told on the other output, whose lines may come in between.
    let told = lines
        .iter()
        .any(|line| line.contains("it is set by DATABASE_URL"));
    assert!(told, "{lines:#?}");
}

/// Whoever adds or changes a flag runs `outbox-relay config docs > docs/configuration.md`.
#[tokio::test]
async fn the_table_of_settings_is_what_the_binary_prints() {
    let (code, lines) = ended(command(&["config", "docs"])).await;
    assert_eq!(code, Some(0));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
    let written = std::fs::read_to_string(path).unwrap();
    let differs = written.lines().zip(&lines).find(|(a, b)| a != b);
    assert_eq!(
        differs, None,
        "run `outbox-relay config docs > docs/configuration.md`"
    );
    assert_eq!(
        written.lines().count(),
        lines.len(),
        "run `outbox-relay config docs > docs/configuration.md`"
    );
}
