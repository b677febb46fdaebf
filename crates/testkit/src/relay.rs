//! The relay's daemon as a process: which binary, and with what.

use std::path::PathBuf;

use crate::{Process, ProcessBuilder};

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
    if let Some(path) = std::env::var_os(RELAY_VARIABLE).map(PathBuf::from) {
        assert!(
            path.is_file(),
            "{RELAY_VARIABLE} names {}, which is no file",
            path.display()
        );
        return path;
    }
    let program = std::env::current_exe().expect("the system knows the path of a running program");
    // Tests are in `deps/` of the directory in which the binaries are.
    let found = program
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join("outbox-relay"))
        .find(|path| path.is_file());
    found.unwrap_or_else(|| {
        panic!(
            "there is no outbox-relay beside {}: run `cargo build -p outbox-relay` with the same profile first, or \
             name the binary in {RELAY_VARIABLE}",
            program.display(),
        )
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
