//! What may be wrong with a server, and how a call is to end then.

use outbox_testkit::{Output, Process};

use super::commands::{Call, Database};
use super::stage::{SECRET, Stage};

/// What is wrong with one of the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    NoSchema,
    NoRights,
    PostgresDown,
    PostgresSilent,
    WrongPassword,
    RedisDown,
    RedisSilent,
    WrongRedisPassword,
    NoRedisRights,
}

impl Fault {
    pub(super) fn is_of_redis(self) -> bool {
        match self {
            Fault::NoSchema
            | Fault::NoRights
            | Fault::PostgresDown
            | Fault::PostgresSilent
            | Fault::WrongPassword => false,
            Fault::RedisDown
            | Fault::RedisSilent
            | Fault::WrongRedisPassword
            | Fault::NoRedisRights => true,
        }
    }

    /// Whether the call cannot work with it.
    pub(super) fn concerns(self, call: &Call) -> bool {
        match self {
            Fault::NoSchema => matches!(call.database, Database::Outbox | Database::Inbox),
            _ if self.is_of_redis() => call.asks_redis,
            _ => call.database != Database::Nothing,
        }
    }

    /// The address that shows the fault.
    pub(super) async fn url(self, stage: &Stage) -> String {
        let database = &stage.pair.database;
        let redis = |user: &str| format!("redis://{user}@127.0.0.1:{}/0", stage.pair.redis.port());
        match self {
            Fault::NoSchema => {
                // One that `migrate` was run in is not bare any more.
                let bare = stage.pair.postgres.fresh_database().await.unwrap();
                stage.postgres_url(&stage.owner, SECRET, &bare)
            }
            Fault::NoRights => stage.postgres_url(&stage.stranger, SECRET, database),
            Fault::PostgresDown => format!("postgres://app:{SECRET}@127.0.0.1:1/shop"),
            Fault::PostgresSilent => format!("postgres://app:{SECRET}@{}/shop", stage.silent()),
            Fault::WrongPassword => {
                stage.postgres_url(&stage.owner, &format!("{SECRET}-not"), database)
            }
            Fault::RedisDown => format!("redis://:{SECRET}@127.0.0.1:1/0"),
            Fault::RedisSilent => format!("redis://:{SECRET}@{}/0", stage.silent()),
            Fault::WrongRedisPassword => redis(&format!(":{SECRET}-not")),
            Fault::NoRedisRights => redis(&format!("stranger:{SECRET}")),
        }
    }

    /// What the line says: the fault and the remedy.
    fn told(self, call: &Call, form: Form) -> [&'static str; 3] {
        let is_inbox = call.database == Database::Inbox;
        let flag = match (is_inbox, form) {
            (false, Form::Variables) => "in --database-url,",
            (false, Form::Files) => "in --database-url-file,",
            (true, Form::Variables) => "in --inbox-database-url,",
            (true, Form::Files) => "in --inbox-database-url-file,",
        };
        match self {
            Fault::NoSchema if is_inbox => [
                "no schema \"inbox\"",
                "in --inbox-database-url,",
                "run `outbox-relay migrate --inbox`",
            ],
            Fault::NoSchema => [
                "the database",
                "no schema \"outbox\"",
                "run `outbox-relay migrate`",
            ],
            // These rights are nobody's but the owner's.
            Fault::NoRights if call.database == Database::Bare => {
                ["Postgres", "permission denied", "migrate as the owner"]
            }
            Fault::NoRights => [
                "Postgres",
                "permission denied",
                "`outbox-relay grants` prints",
            ],
            Fault::PostgresDown => ["Postgres at app@127.0.0.1:1/shop", "refused", flag],
            Fault::PostgresSilent => ["Postgres", "did not answer", "frozen or cut off"],
            Fault::WrongPassword => ["Postgres at ", "password authentication failed", flag],
            Fault::RedisDown => ["Redis", "refused", "host and port in --redis-url"],
            Fault::RedisSilent => ["Redis", "timed out", "host and port in --redis-url"],
            Fault::WrongRedisPassword => [
                "Redis",
                "authentication failed",
                "user and password in --redis-url",
            ],
            Fault::NoRedisRights => [
                "Redis",
                "no permissions",
                "`outbox-relay grants --redis` prints",
            ],
        }
    }
}

/// How a call is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// With exit code 0.
    Works,
    /// With exit code 1, and one line on standard error that says this.
    Refused([&'static str; 3]),
    /// With this exit code, and a line on standard output that says this; that is what it was asked for.
    Reports(i32, [&'static str; 3]),
}

impl Outcome {
    pub(super) fn of(call: &Call, fault: Option<Fault>, form: Form) -> Self {
        match fault.filter(|fault| fault.concerns(call)) {
            // This Redis keeps nothing, and nobody consumes.
            None if call.is_of("doctor") => {
                Outcome::Reports(2, ["WARNING", "redis", "persistence"])
            }
            None => Outcome::Works,
            Some(Fault::NoRedisRights) if call.is_of("doctor") => {
                Outcome::Reports(3, ["ERROR", "redis", "rights"])
            }
            Some(fault) if call.is_of("config-check") => {
                Outcome::Reports(1, fault.told(call, form))
            }
            Some(fault) => Outcome::Refused(fault.told(call, form)),
        }
    }

    /// What is not as it is to be.
    pub(super) fn problems(self, process: &Process, is_verbose: bool) -> Vec<String> {
        let code = process.exit_status().and_then(|status| status.code());
        let mut told = process.lines_of(Output::Stderr);
        if is_verbose {
            told.retain(|line| line.starts_with("outbox-relay: "));
        }
        let says = |line: &String, parts: [&str; 3]| parts.iter().all(|part| line.contains(part));
        let (expected, is_told) = match self {
            Outcome::Works => (0, true),
            Outcome::Refused(parts) => (1, told.len() == 1 && says(&told[0], parts)),
            Outcome::Reports(code, parts) => {
                let report = process.lines_of(Output::Stdout);
                (
                    code,
                    told.is_empty() && report.iter().any(|line| says(line, parts)),
                )
            }
        };
        let mut problems = Vec::new();
        if code != Some(expected) {
            problems.push(format!("exit code {code:?}"));
        }
        if !is_told {
            problems.push(format!("not told, or not in one line: {self:?}"));
        }
        problems
    }
}

/// Where a command has its addresses from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Variables,
    Files,
}
