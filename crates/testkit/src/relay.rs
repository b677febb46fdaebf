//! The relay's daemon as a process: which binary, and with what.

use std::path::{Path, PathBuf};

use crate::{Process, ProcessBuilder};

/// Names the relay's binary, for tests that are not built beside it.
const RELAY_VARIABLE: &str = "OUTBOX_RELAY_BIN";

/// The relay's binary: what `OUTBOX_RELAY_BIN` names, else `outbox-relay` beside the directory of the running
/// test binary, where cargo puts it. It is what the last build made: a test in another package does not build it.
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
    let test = std::env::current_exe().expect("the system knows the path of a running program");
    let dir = test
        .parent()
        .and_then(Path::parent)
        .expect("a test binary is below target/PROFILE");
    let path = dir.join("outbox-relay");
    assert!(
        path.is_file(),
        "there is no {}: run `cargo build -p outbox-relay` with the same profile first, or name the binary in \
         {RELAY_VARIABLE}",
        path.display(),
    );
    path
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
