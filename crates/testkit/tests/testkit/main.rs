//! The kit does to servers, connections and processes what it says.

#![allow(clippy::unwrap_used, reason = "test helpers fail the test as tests do")]

mod cleanup;
mod holds;
mod postgres;
mod process;
mod proxy;
mod redis;
mod standby;
mod tls;
mod waiting;

use std::time::Duration;

/// Long enough for anything on a busy machine; only a failure waits this long.
const DEADLINE: Duration = Duration::from_secs(20);

/// Long enough to see that nothing arrives where it would arrive at once.
const QUIET: Duration = Duration::from_millis(200);
