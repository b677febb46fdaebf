//! Every command against servers that it cannot work with: one line that names the fault and the remedy, exit code 1, soon. And
//! no password in any output at the highest log level, whether all is well or not.

mod commands;
mod faults;
mod stage;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use outbox_testkit::{Output, Process, ProcessBuilder, relay_binary};

use self::commands::{ALL, Call, Database};
use self::faults::{Fault, Form, Outcome};
use self::stage::{SECRET, Stage};
use crate::pair::{DEADLINE, stop};

/// Whoever asks waits no longer, also on a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// A call with the addresses that it is given.
struct Given<'a> {
    call: &'a Call,
    form: Form,
    log: &'a str,
    addresses: [(&'static str, String); 3],
    listen: &'a str,
}

impl<'a> Given<'a> {
    async fn new(
        stage: &'a Stage,
        call: &'a Call,
        fault: Option<Fault>,
        form: Form,
        log: &'a str,
    ) -> Self {
        let (postgres, redis) = stage.right_urls();
        let mut addresses = [
            ("DATABASE_URL", postgres.clone()),
            ("INBOX_DATABASE_URL", postgres),
            ("REDIS_URL", redis),
        ];
        if let Some(fault) = fault {
            let which = match (fault.is_of_redis(), call.database) {
                (true, _) => 2,
                (false, Database::Inbox) => 1,
                (false, _) => 0,
            };
            addresses[which].1 = fault.url(stage).await;
        }
        Given {
            call,
            form,
            log,
            addresses,
            listen: &stage.listen,
        }
    }

    /// The command, about to be started; files of addresses are in the directory.
    fn command(&self, dir: &Path) -> ProcessBuilder {
        let mut command = Process::builder(relay_binary())
            .args(self.call.line.split(' '))
            .env("OUTBOX_LOG", self.log);
        if self.call.is_of("ready") {
            command = command.arg(self.listen);
        }
        for (name, address) in &self.addresses {
            command = match self.form {
                Form::Variables => command.env(*name, address),
                Form::Files => {
                    let file = dir.join(name);
                    std::fs::write(&file, address).unwrap();
                    command.env(format!("{name}_FILE"), file)
                }
            };
        }
        command
    }
}

/// Makes one call, and returns what is not as it is to be.
async fn called(
    stage: &Stage,
    call: &Call,
    fault: Option<Fault>,
    (form, log): (Form, &str),
) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    let given = Given::new(stage, call, fault, form, log).await;
    let process = given.command(dir.path()).spawn().unwrap();
    let begun = Instant::now();
    let outcome = Outcome::of(call, fault, form);
    if outcome == Outcome::Works && call.is_of("run") {
        let standing_by = process.wait_for_line("standing by", DEADLINE).await;
        standing_by.unwrap();
        stop(&process).await;
    }
    let ended = process.wait(DEADLINE).await;
    let mut problems = outcome.problems(&process, log == "trace");
    problems.extend(ended.err().map(|error| error.to_string()));
    problems.extend(tells_the_secret(&process));
    if begun.elapsed() > SOON {
        problems.push(format!("took {:?}", begun.elapsed()));
    }
    let mut lines = process.lines();
    lines.retain(|line| !line.contains(" TRACE ") && !line.contains(" DEBUG "));
    let line = call.line;
    (!problems.is_empty()).then(|| format!("{line} ({form:?}, {log}): {problems:#?} {lines:#?}"))
}

/// Every command, with addresses from variables and from files, at the default level of logs and at the highest.
async fn sweep(stage: &Stage, fault: Option<Fault>) {
    let mut wrong = Vec::new();
    for call in ALL {
        for given in [
            (Form::Variables, "info"),
            (Form::Variables, "trace"),
            (Form::Files, "trace"),
        ] {
            wrong.extend(called(stage, call, fault, given).await);
        }
    }
    assert!(wrong.is_empty(), "{fault:?}: {}", wrong.join("\n"));
}

/// Those that a server concerns that takes a connection and then says nothing, all at once: each waits for its limit.
async fn sweep_silent(fault: Fault) {
    let stage = Stage::open().await;
    let concerned = ALL.iter().filter(|call| fault.concerns(call));
    let calls = concerned.map(|call| called(&stage, call, Some(fault), (Form::Variables, "info")));
    let wrong: Vec<String> = join_all(calls).await.into_iter().flatten().collect();
    assert!(wrong.is_empty(), "{fault:?}: {}", wrong.join("\n"));
}

/// Lines with the secret as it is, or as the debug form of bytes shows it.
fn tells_the_secret(process: &Process) -> Vec<String> {
    let bytes = format!("{:?}", SECRET.as_bytes());
    let bytes = bytes.trim_matches(['[', ']']);
    let mut lines = process.lines();
    lines.retain(|line| line.contains(SECRET) || line.contains(bytes));
    lines
}

#[tokio::test]
async fn no_command_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let man = Process::builder(relay_binary())
        .args(["man", "--dir"])
        .arg(dir.path())
        .spawn()
        .unwrap();
    assert!(man.wait(DEADLINE).await.unwrap().success());
    // One page for each command that clap knows, and for each group of commands.
    let pages: BTreeSet<String> = dir
        .path()
        .read_dir()
        .unwrap()
        .map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let name = name.strip_suffix(".1").unwrap();
            name.strip_prefix("outbox-relay")
                .unwrap()
                .trim_start_matches('-')
                .to_owned()
        })
        .filter(|name| !name.is_empty())
        .collect();
    let is_group = |name: &str| {
        pages.iter().any(|page| {
            page.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('-'))
        })
    };
    let left_out: Vec<_> = pages
        .iter()
        .filter(|name| !is_group(name) && !ALL.iter().any(|call| call.is_of(name)))
        .collect();
    assert!(pages.len() > 20, "{pages:?}");
    assert!(left_out.is_empty(), "{left_out:?}");
}

#[tokio::test]
async fn a_missing_address_is_an_error_of_usage() {
    for call in ALL {
        let variable = match (call.database, call.asks_redis) {
            (Database::Nothing, false) => continue,
            (Database::Nothing, true) => "REDIS_URL",
            _ => "DATABASE_URL",
        };
        let command = Process::builder(relay_binary()).args(call.line.split(' '));
        let process = command.spawn().unwrap();
        let code = process.wait(DEADLINE).await.unwrap().code();
        let told = process.lines_of(Output::Stderr);
        assert_eq!(
            (code, told.len()),
            (Some(64), 1),
            "{}: {told:#?}",
            call.line
        );
        assert!(told[0].contains(variable), "{}: {told:#?}", call.line);
    }
}

#[tokio::test]
async fn servers_that_are_as_they_should_be_are_worked_with() {
    sweep(&Stage::open_with_passwords().await, None).await;
}

#[tokio::test]
async fn a_database_without_the_schema_is_told() {
    sweep(&Stage::open().await, Some(Fault::NoSchema)).await;
}

#[tokio::test]
async fn a_role_without_rights_is_told() {
    sweep(&Stage::open().await, Some(Fault::NoRights)).await;
}

#[tokio::test]
async fn a_postgres_that_is_down_is_told() {
    sweep(&Stage::open().await, Some(Fault::PostgresDown)).await;
}

#[tokio::test]
async fn a_postgres_that_says_nothing_is_told() {
    sweep_silent(Fault::PostgresSilent).await;
}

#[tokio::test]
async fn a_wrong_password_of_postgres_is_told() {
    sweep(
        &Stage::open_with_passwords().await,
        Some(Fault::WrongPassword),
    )
    .await;
}

#[tokio::test]
async fn a_redis_that_is_down_is_told() {
    sweep(&Stage::open().await, Some(Fault::RedisDown)).await;
}

#[tokio::test]
async fn a_redis_that_says_nothing_is_told() {
    sweep_silent(Fault::RedisSilent).await;
}

#[tokio::test]
async fn a_wrong_password_of_redis_is_told() {
    sweep(&Stage::open().await, Some(Fault::WrongRedisPassword)).await;
}

#[tokio::test]
async fn a_redis_user_without_rights_is_told() {
    sweep(&Stage::open().await, Some(Fault::NoRedisRights)).await;
}
