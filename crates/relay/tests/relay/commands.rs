//! What the commands say, in one line, of a set-up that they cannot work with.

use outbox_testkit::{Output, Postgres, Process, Redis, relay_binary};

use crate::support::{DEADLINE, Outbox};

/// Commands, with what each needs at least; those that need Redis come first.
const COMMANDS: [&[&str]; 6] = [
    &["replay", "--name", "again", "--all"],
    &["status"],
    &["doctor"],
    &["trace", "row"],
    &["pause", "--reason", "a test"],
    &["resume"],
];
const NEED_REDIS: usize = 4;

/// What a command said, and its exit code.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) out: Vec<String>,
    pub(crate) err: Vec<String>,
}

impl Said {
    /// Asserts exit code 0, and returns the lines of standard output.
    pub(crate) fn done(self) -> Vec<String> {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.out
    }

    /// Asserts this exit code and one line on standard error, with all of these in it.
    pub(crate) fn refused(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        let [line] = self.err.as_slice() else {
            panic!("not one line: {self:?}")
        };
        for part in parts {
            assert!(line.contains(part), "{part:?} is not in {line:?}");
        }
        assert_eq!(self.out, [""; 0]);
    }
}

/// Runs a command between two servers.
pub(crate) async fn run(postgres_url: &str, redis_url: &str, args: &[&str]) -> Said {
    let process = Process::builder(relay_binary())
        .args(args)
        .env("DATABASE_URL", postgres_url)
        .env("REDIS_URL", redis_url)
        .spawn()
        .unwrap();
    let code = process.wait(DEADLINE).await.unwrap().code();
    Said {
        code,
        out: process.lines_of(Output::Stdout),
        err: process.lines_of(Output::Stderr),
    }
}

/// Runs a command between the servers of an outbox.
pub(crate) async fn run_on(outbox: &Outbox<'_>, args: &[&str]) -> Said {
    run(&outbox.postgres_url(), &outbox.redis.url(), args).await
}

#[tokio::test]
async fn a_database_without_the_schema_is_told_with_its_remedy() {
    let postgres = Postgres::shared().await.unwrap();
    let redis = Redis::start().await.unwrap();
    let database = postgres.fresh_database().await.unwrap();
    for args in COMMANDS {
        run(&postgres.url(&database), &redis.url(), args)
            .await
            .refused(1, &["no schema \"outbox\"", "run `outbox-relay migrate`"]);
    }
}

#[tokio::test]
async fn a_role_without_rights_is_told_so() {
    let outbox = Outbox::open().await;
    let role = "CREATE ROLE without_rights LOGIN PASSWORD 'hush-hush'";
    outbox.db.batch_execute(role).await.unwrap();
    let url = outbox
        .postgres_url()
        .replace("postgres@", "without_rights:hush-hush@");
    for args in COMMANDS {
        let said = run(&url, &outbox.redis.url(), args).await;
        said.refused(1, &["Postgres", "permission denied", "grant"]);
        assert!(!format!("{said:?}").contains("hush-hush"));
        let mut verbose = vec!["--log", "trace"];
        verbose.extend(args);
        let said = run(&url, &outbox.redis.url(), &verbose).await;
        assert!(!format!("{said:?}").contains("hush-hush"), "{said:?}");
    }
}

#[tokio::test]
async fn a_redis_that_is_down_is_told_so() {
    let outbox = Outbox::open().await;
    outbox.redis.kill9().await.unwrap();
    for args in &COMMANDS[..NEED_REDIS] {
        run_on(&outbox, args)
            .await
            .refused(1, &["Redis", "check host and port in --redis-url"]);
    }
}

#[tokio::test]
async fn a_missing_address_is_an_error_of_usage() {
    for args in COMMANDS {
        let process = Process::builder(relay_binary()).args(args).spawn().unwrap();
        assert_eq!(process.wait(DEADLINE).await.unwrap().code(), Some(64));
        assert!(process.lines()[0].contains("DATABASE_URL"));
    }
}
