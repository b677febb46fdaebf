//! Runs a command to its end, and holds on to what it said.

use outbox_testkit::{Output, Process, relay_binary};

use crate::support::{DEADLINE, Outbox};

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
