//! The promises of the consumer, against real servers.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of a test fail like the test"
)]

mod delivery;
mod failures;
mod outages;
mod processes;
mod recovery;
mod shop;
mod starting;
mod stopping;
