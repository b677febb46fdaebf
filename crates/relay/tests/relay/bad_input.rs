//! What is wrong at start is told in one line that names the thing and the remedy: exit code 64 for the
//! configuration, 1 for a server. No secret is ever printed.

use std::time::Duration;

use outbox_testkit::{
    Authority, Output, Postgres, Process, ProcessBuilder, Redis, relay, relay_binary,
};

use crate::pair::{DEADLINE, Pair, STOP, stop};

const SECRET: &str = "s3cret-Pa55word";

/// Asserts how a command ended, and that one line besides the log says all of this.
async fn refused(command: ProcessBuilder, code: i32, says: &[&str]) {
    let process = command
        .env("OUTBOX_LOG", "trace")
        .env("OUTBOX_START_TIMEOUT", "0s")
        .spawn()
        .unwrap();
    let status = process.wait(DEADLINE).await.unwrap();
    let lines = process.lines();
    assert_no_secret(&process);
    assert_eq!(status.code(), Some(code), "{lines:#?}");
    let errors = process.lines_of(Output::Stderr);
    let mut told = errors.iter().filter(|l| l.starts_with("outbox-relay: "));
    let (Some(line), None) = (told.next(), told.next()) else {
        panic!("not told in one line: {errors:#?}");
    };
    for text in says {
        assert!(line.contains(text), "no {text:?} in {line:?}");
    }
}

fn assert_no_secret(process: &Process) {
    for line in process.lines() {
        assert!(!line.contains(SECRET), "{line}");
    }
}

/// `run` with these addresses; neither server needs to be there.
fn run(postgres: &str, redis: &str) -> ProcessBuilder {
    relay(postgres, redis)
}

const POSTGRES: &str = "postgres://app:s3cret-Pa55word@127.0.0.1:1/shop";
const REDIS: &str = "redis://:s3cret-Pa55word@127.0.0.1:1/0";

#[tokio::test]
async fn addresses_that_are_not_understood() {
    for url in [
        "mysql://app:s3cret-Pa55word@db/shop",
        "s3cret-Pa55word",
        "",
        "postgres://app:s3cret-Pa55word@db:port/shop",
        "postgres:///shop?password=s3cret-Pa55word",
        "postgres://app:s3cret-Pa55word@db/shop?sslmode=always",
        "postgres://app:s3cret-Pa55word@db/shop?sslmode=disable&sslrootcert=ca.pem",
        "postgres://app:s3cret-Pa55word@db/shop?colour=red",
    ] {
        refused(run(url, REDIS), 64, &["--database-url"]).await;
    }
    for url in [
        "http://:s3cret-Pa55word@cache:6379",
        "s3cret-Pa55word",
        "",
        "redis://:s3cret-Pa55word@cache:port/0",
        "redis://:s3cret-Pa55word@cache/first",
        "rediss://:s3cret-Pa55word@cache/0#insecure",
    ] {
        refused(run(POSTGRES, url), 64, &["--redis-url"]).await;
    }
    let nothing = || Process::builder(relay_binary()).arg("run");
    refused(nothing(), 64, &["--database-url", "DATABASE_URL"]).await;
    let half = nothing().env("DATABASE_URL", POSTGRES);
    refused(half, 64, &["--redis-url", "REDIS_URL"]).await;
}

#[tokio::test]
async fn settings_out_of_bounds_or_against_each_other() {
    for (flag, value) in [
        ("--page-rows", "0"),
        ("--page-rows", "70000"),
        ("--page-bytes", "1"),
        ("--poll-interval", "1ms"),
        ("--poll-interval", "11m"),
        ("--checkpoint-interval", "0s"),
        ("--retention", "0s"),
        ("--redis-timeout", "10ms"),
        ("--postgres-timeout", "0s"),
        ("--backoff-first", "0s"),
        ("--backoff-max", "2m"),
        ("--start-timeout", "2h"),
        ("--name", ""),
        ("--stream-prefix", "with space:"),
    ] {
        refused(run(POSTGRES, REDIS).args([flag, value]), 64, &[flag]).await;
    }
    for (args, says) in [
        (
            ["--backoff-first", "2s", "--backoff-max", "1s"],
            ["--backoff-first", "--backoff-max"],
        ),
        (
            ["--redis-tls-mode", "verify-full", "--name", "x"],
            ["--redis-tls-mode", "rediss://"],
        ),
        (
            ["--redis-ca-file", "ca.pem", "--name", "x"],
            ["--redis-ca-file", "rediss://"],
        ),
    ] {
        refused(run(POSTGRES, REDIS).args(args), 64, &says).await;
    }
}

#[tokio::test]
async fn what_the_command_line_does_not_know() {
    for args in [
        vec!["--page-rows", "many"],
        vec!["--poll-interval", "soon"],
        vec!["--on-redis-loss", "panic"],
        vec!["--no-such-flag"],
    ] {
        let process = run(POSTGRES, REDIS).args(args.clone()).spawn().unwrap();
        let status = process.wait(DEADLINE).await.unwrap();
        assert_eq!(status.code(), Some(64), "{:#?}", process.lines());
        let text = process.lines_of(Output::Stderr).join("\n");
        assert!(text.contains(args[0]), "{text}");
        assert_no_secret(&process);
    }
    // What is not asked for rightly is refused before any server is.
    for args in [["dead-letters", "retry"], ["dead-letters", "discard"]] {
        let command = Process::builder(relay_binary()).args(args);
        let command = command.env("DATABASE_URL", POSTGRES);
        refused(command, 64, &["one of the three"]).await;
    }
    // Help shows variables, and not what they hold.
    let help = run(POSTGRES, REDIS).arg("--help").spawn().unwrap();
    assert!(help.wait(DEADLINE).await.unwrap().success());
    assert!(help.lines().iter().any(|l| l.contains("DATABASE_URL")));
    assert_no_secret(&help);
}

#[tokio::test]
async fn hosts_that_nobody_knows() {
    let pair = Pair::start().await;
    let database = pair.postgres.url(&pair.database);
    let nowhere = "postgres://app@no-such-host.invalid/shop";
    refused(
        run(nowhere, &pair.redis.url()),
        1,
        &["Postgres", "--database-url"],
    )
    .await;
    let nowhere = "redis://no-such-host.invalid";
    refused(run(&database, nowhere), 1, &["Redis", "--redis-url"]).await;
}

#[tokio::test]
async fn servers_that_come_while_the_relay_waits_for_them() {
    let pair = Pair::start().await;
    pair.redis.stop().await.unwrap();
    let relay = pair.relay().args(["--start-timeout", "30s"]);
    let relay = relay.spawn().unwrap();
    relay.wait_for_line("out of reach", DEADLINE).await.unwrap();
    pair.redis.start_again().await.unwrap();
    pair.leads(&relay).await;
    stop(&relay).await;
}

#[tokio::test]
async fn a_wrong_password_user_or_database() {
    let hba = "host all all 127.0.0.1/32 scram-sha-256";
    let postgres = Postgres::builder().hba(hba).start().await.unwrap();
    let redis = Redis::builder().password(SECRET).start().await.unwrap();
    let database = postgres.fresh_outbox().await.unwrap();
    // The kit's own way in, past the rules for TCP.
    let psql = Process::builder(postgres.bin_dir().join("psql"))
        .args([
            "-h",
            &postgres.data_dir().parent().unwrap().display().to_string(),
        ])
        .args(["-p", &postgres.port().to_string(), "-U", "postgres"])
        .args(["-c", &format!("ALTER ROLE postgres PASSWORD '{SECRET}'")])
        .spawn()
        .unwrap();
    assert!(psql.wait(DEADLINE).await.unwrap().success());

    let to = |user: &str, password: &str, database: &str| {
        format!(
            "postgres://{user}{password}@127.0.0.1:{}/{database}",
            postgres.port()
        )
    };
    let right = to("postgres", ":s3cret-Pa55word", &database);
    for (user, password, database) in [
        ("postgres", ":s3cret-Pa55word-not", database.as_str()),
        ("postgres", "", &database),
        ("nobody", ":s3cret-Pa55word", &database),
    ] {
        let url = to(user, password, database);
        let says = ["Postgres", "user, password"];
        refused(run(&url, &redis.url()), 1, &says).await;
    }
    let other = to("postgres", ":s3cret-Pa55word", "other");
    let says = ["Postgres", "other", "database name in --database-url"];
    refused(run(&other, &redis.url()), 1, &says).await;

    let says = ["Redis", "user and password in --redis-url"];
    for user in ["", ":wrong-s3cret-Pa55word@", "nobody:s3cret-Pa55word@"] {
        let url = format!("redis://{user}127.0.0.1:{}/0", redis.port());
        refused(run(&right, &url), 1, &says).await;
    }
    let url = format!("redis://:s3cret-Pa55word@127.0.0.1:{}/99", redis.port());
    refused(run(&right, &url), 1, &["Redis", "DB index"]).await;

    // And with everything right it works, without a word of the secret at the highest log level.
    let relay = run(&right, &redis.url()).env("OUTBOX_LOG", "trace");
    let relay = relay.spawn().unwrap();
    relay.wait_for_line("leading;", DEADLINE).await.unwrap();
    stop(&relay).await;
    assert_no_secret(&relay);
}

#[tokio::test]
async fn a_redis_that_would_lose_entries_or_cannot_run_the_script() {
    for (name, value, says) in [
        ("--maxmemory-policy", "allkeys-lru", "maxmemory-policy"),
        ("--maxmemory-policy", "volatile-ttl", "maxmemory-policy"),
        ("--cluster-enabled", "yes", "cluster"),
    ] {
        let redis = Redis::builder().arg(name, value).start().await.unwrap();
        let pair = Pair::with_redis(redis).await;
        pair.write("orders", "waits", 1).await;
        refused(pair.relay(), 1, &[says]).await;
    }
}

#[tokio::test]
async fn a_redis_user_without_rights() {
    let pair = Pair::start().await;
    let mut redis = pair.redis.connect().await.unwrap();
    for rules in [
        "+ping",
        "~* +@all -eval",
        "~* +@all -xlen",
        "~other:* +@all",
    ] {
        let mut user = redis::cmd("ACL");
        user.arg(&["SETUSER", "publisher", "reset", "on", ">s3cret-Pa55word"]);
        for rule in rules.split(' ') {
            user.arg(rule);
        }
        user.exec_async(&mut redis).await.unwrap();
        let url = format!(
            "redis://publisher:s3cret-Pa55word@127.0.0.1:{}/0",
            pair.redis.port()
        );
        let relay = run(&pair.postgres.url(&pair.database), &url);
        pair.no_relay_is_left().await;
        refused(relay, 1, &["Redis", "rights"]).await;
    }
}

/// Starts a relay that must work, and stops it.
async fn connects(command: ProcessBuilder) {
    let relay = command.spawn().unwrap();
    relay.wait_for_line("leading;", STOP).await.unwrap();
    stop(&relay).await;
}

/// Each refusal names TLS and comes at once: nothing is tried without it.
async fn refused_for_tls(command: ProcessBuilder) {
    let within = Duration::from_secs(10);
    let refusal = refused(command, 1, &["TLS"]);
    tokio::time::timeout(within, refusal).await.unwrap();
}

#[tokio::test]
async fn a_postgres_with_tls() {
    let ours = Authority::new().unwrap();
    let other = Authority::new().unwrap();
    let hba = "hostssl all all 127.0.0.1/32 trust";
    let postgres = Postgres::builder()
        .hba(hba)
        .tls(ours.issue("localhost").unwrap());
    let postgres = postgres.start().await.unwrap();
    let redis = Redis::start().await.unwrap();
    let database = postgres.fresh_outbox().await.unwrap();
    let (port, ca) = (postgres.port(), ours.root().display().to_string());
    let wrong_ca = other.root().display().to_string();
    let to = |host: &str, query: String| {
        let url = format!("postgres://postgres@{host}:{port}/{database}?{query}");
        run(&url, &redis.url())
    };
    refused_for_tls(to("localhost", "sslmode=disable".into())).await;
    connects(to("localhost", "sslmode=prefer".into())).await;
    connects(to("localhost", "sslmode=require".into())).await;
    for mode in ["require", "verify-ca", "verify-full"] {
        let right = format!("sslmode={mode}&sslrootcert={ca}");
        connects(to("localhost", right)).await;
        let wrong = format!("sslmode={mode}&sslrootcert={wrong_ca}");
        refused_for_tls(to("localhost", wrong)).await;
    }
    connects(to(
        "127.0.0.1",
        format!("sslmode=verify-ca&sslrootcert={ca}"),
    ))
    .await;
    refused_for_tls(to(
        "127.0.0.1",
        format!("sslmode=verify-full&sslrootcert={ca}"),
    ))
    .await;
    // Naming the authority alone means that everything is checked; so do the system's own.
    connects(to("localhost", format!("sslrootcert={ca}"))).await;
    refused_for_tls(to("127.0.0.1", format!("sslrootcert={ca}"))).await;
    refused_for_tls(to("localhost", "sslmode=verify-full".into())).await;
    refused(
        to("localhost", "sslrootcert=no-such-file.pem".into()),
        64,
        &["no-such-file.pem"],
    )
    .await;
}

#[tokio::test]
async fn a_postgres_without_tls_where_it_is_asked_for() {
    let pair = Pair::start().await;
    let url = pair.postgres.url(&pair.database);
    for mode in ["require", "verify-full"] {
        refused_for_tls(run(&format!("{url}?sslmode={mode}"), &pair.redis.url())).await;
    }
    connects(run(&format!("{url}?sslmode=prefer"), &pair.redis.url())).await;
}

#[tokio::test]
async fn a_redis_with_tls() {
    let ours = Authority::new().unwrap();
    let other = Authority::new().unwrap();
    let redis = Redis::builder().tls(ours.issue("localhost").unwrap());
    let pair = Pair::with_redis(redis.start().await.unwrap()).await;
    let (port, ca) = (
        pair.redis.tls_port().unwrap(),
        ours.root().display().to_string(),
    );
    let wrong_ca = other.root().display().to_string();
    let to = |host: &str, args: &[&str]| {
        let url = format!("rediss://{host}:{port}/0");
        run(&pair.postgres.url(&pair.database), &url).args(args.iter().copied())
    };
    connects(to("localhost", &["--redis-tls-mode", "require"])).await;
    for mode in ["require", "verify-ca", "verify-full"] {
        let mode = ["--redis-tls-mode", mode, "--redis-ca-file"];
        connects(to("localhost", &[&mode[..], &[&ca]].concat())).await;
        refused_for_tls(to("localhost", &[&mode[..], &[&wrong_ca]].concat())).await;
    }
    let verify_ca = ["--redis-tls-mode", "verify-ca", "--redis-ca-file", &ca];
    connects(to("127.0.0.1", &verify_ca)).await;
    connects(to("localhost", &["--redis-ca-file", &ca])).await;
    refused_for_tls(to("127.0.0.1", &["--redis-ca-file", &ca])).await;
    refused_for_tls(to("localhost", &[])).await;
    // The port without TLS is never fallen back to, nor taken for one with it.
    let plain = format!("rediss://localhost:{}/0", pair.redis.port());
    let plain = run(&pair.postgres.url(&pair.database), &plain);
    refused_for_tls(plain.args(["--redis-tls-mode", "require"])).await;
    let without = format!("redis://localhost:{port}/0");
    refused_for_tls(run(&pair.postgres.url(&pair.database), &without)).await;
    let missing = ["--redis-ca-file", "no-such-file.pem"];
    refused(to("localhost", &missing), 64, &["no-such-file.pem"]).await;
}
