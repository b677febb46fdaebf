//! The promises of the consumer, against real servers.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of a test fail like the test"
)]

mod acknowledging;
mod chaos;
mod conflicts;
mod database_restores;
mod dead_sockets;
mod delivery;
mod failover;
mod failures;
mod inbox_window;
mod lanes;
mod ordered;
mod outages;
mod outcomes;
mod own_thread;
mod ownership;
mod partitions;
mod processes;
mod recovery;
mod redis_cluster;
mod redis_inbox;
mod redis_sentinel;
mod retried_letters;
mod rights;
mod shop;
mod starting;
mod stopping;
mod terminations;
