//! The promises of the consumer, against real servers.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of a test fail like the test"
)]

mod delivery;
mod failures;
mod lanes;
mod ordered;
mod outages;
mod ownership;
mod partitions;
mod processes;
mod recovery;
mod shop;
mod starting;
mod stopping;
