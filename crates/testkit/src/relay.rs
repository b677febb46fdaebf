//! The relay's daemon as a process: which binary, with what, and the steps of its work.

use std::path::PathBuf;

use crate::{Direction, Error, Matcher, Process, ProcessBuilder};

/// Names the relay's binary, for tests that are not built beside it.
const RELAY_VARIABLE: &str = "OUTBOX_RELAY_BIN";

/// The relay's binary: what `OUTBOX_RELAY_BIN` names, else `outbox-relay` beside the running program or, for
/// a test, where cargo puts binaries. It is what the last build made: a test in another package does not build it.
///
/// # Panics
///
/// When it is not there: it has to be built before tests that run it, and the message says how.
#[must_use]
pub fn relay_binary() -> PathBuf {
    find_relay_binary().unwrap_or_else(|error| panic!("{error}"))
}

/// The same for programs.
///
/// # Errors
///
/// It is not there; the error says how to build or to name it.
pub fn find_relay_binary() -> Result<PathBuf, Error> {
    if let Some(path) = std::env::var_os(RELAY_VARIABLE).map(PathBuf::from) {
        return if path.is_file() {
            Ok(path)
        } else {
            let path = path.display();
            Err(Error::misuse(format!(
                "{RELAY_VARIABLE} names {path}, which is no file"
            )))
        };
    }
    let program = std::env::current_exe().map_err(|e| Error::io("find the running program", e))?;
    // Tests are in `deps/` of the directory in which the binaries are.
    let found = program
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join("outbox-relay"))
        .find(|path| path.is_file());
    found.ok_or_else(|| {
        Error::misuse(format!(
            "there is no outbox-relay beside {}: run `cargo build -p outbox-relay` with the same profile first, or name \
             the binary in {RELAY_VARIABLE}",
            program.display(),
        ))
    })
}

/// `outbox-relay run`, with its two servers in `DATABASE_URL` and `REDIS_URL`; add arguments, then spawn.
///
/// # Panics
///
/// When the binary is missing; see [`relay_binary`].
pub fn relay(postgres_url: &str, redis_url: &str) -> ProcessBuilder {
    Process::builder(relay_binary())
        .arg("run")
        .env("DATABASE_URL", postgres_url)
        .env("REDIS_URL", redis_url)
}

/// In each page that goes to Redis, and in nothing else: the time in the marker, which Redis is to fill in.
const PAGE_TIME: &str = "\r\n$8\r\nredis_ms\r\n$0\r\n";

/// A step of a page at which a test may stop the relay, or kill it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelayStep {
    /// Postgres has sent the page, the relay has not got it.
    PageRead,
    /// The page is on its way.
    PageSent,
    /// It has run, its reply is on its way.
    PageRun,
    /// The checkpoint is on its way.
    CheckpointSent,
    /// The checkpoint is committed.
    CheckpointWritten,
}

impl RelayStep {
    /// Whether the relay speaks to Redis then, and not to Postgres.
    #[must_use]
    pub fn is_of_redis(self) -> bool {
        matches!(self, RelayStep::PageSent | RelayStep::PageRun)
    }

    /// The request that it is about.
    #[must_use = "nothing is held before a proxy is told"]
    pub fn matcher(self) -> Matcher {
        match self {
            RelayStep::PageRead => Matcher::sql("FROM outbox.messages AS m WHERE m.id >"),
            RelayStep::PageSent | RelayStep::PageRun => Matcher::bytes(PAGE_TIME),
            RelayStep::CheckpointSent | RelayStep::CheckpointWritten => {
                Matcher::sql("UPDATE outbox.checkpoint")
            }
        }
    }

    /// Whether the request is held, or its reply.
    #[must_use]
    pub fn direction(self) -> Direction {
        match self {
            RelayStep::PageSent | RelayStep::CheckpointSent => Direction::Request,
            RelayStep::PageRead | RelayStep::PageRun | RelayStep::CheckpointWritten => {
                Direction::Reply
            }
        }
    }
}
