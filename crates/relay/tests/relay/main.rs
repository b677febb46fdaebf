//! The promises of the relay, against real servers and the real binary.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of a test fail like the test"
)]

mod ahead;
mod bad_input;
mod client_certificates;
mod commands;
mod configuration;
mod crash_points;
mod deleted_markers;
mod doctor;
mod durability;
mod gaps;
mod group;
mod histories;
mod holds;
mod http;
mod late_commits;
mod leadership;
mod limits;
mod manual;
mod memory;
mod migrate;
mod ordering;
#[cfg(feature = "otlp")]
mod otlp;
mod outages;
mod pair;
mod partitions;
mod pause;
mod payloads;
mod plans;
mod pooler;
mod purge;
mod redis_cluster;
mod redis_sentinel;
mod refusals;
mod replay;
mod replay_faults;
mod several_hosts;
mod start_table;
mod status;
mod stop;
mod streams;
mod support;
mod sweep;
mod trace;
mod trimming;
mod verify;
mod wake_up;
