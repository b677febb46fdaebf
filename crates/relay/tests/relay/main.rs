//! The promises of the relay, against real servers.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of a test fail like the test"
)]

mod crash_points;
mod support;
