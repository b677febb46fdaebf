//! Failure injection across all crates: each scenario strikes real servers and processes with one kind of fault, once
//! while naive code carries the messages (the *control*) and once while the outbox does, and counts what came of it.
//!
//! The files in reading order:
//!
//! 1. `scenarios/`: the faults, a file for each kind; `scenarios/mod.rs` lists them all.
//! 2. `scenario.rs`: how one is run: load, strike, recovery, evidence, verdict.
//! 3. `stage.rs`: the servers and processes of a run; `link.rs` is the network before one process, `order.rs` what the
//!    shop writes.
//! 4. `evidence.rs`: what is counted, `stream.rs`: what stands in the stream, and `report.rs`: the table.
//! 5. `programs/`: what runs as processes of its own: the shop, the naive code, and the consumer.
//!
//! `make failures` runs all of it, `tests/failures.rs` a short form of each. The suite's other tests are in
//! `end_to_end/`. The code of the README is compiled here, too.

mod evidence;
pub mod link;
mod order;
pub mod programs;
mod report;
mod scenario;
pub mod scenarios;
mod stage;
mod stream;

pub use crate::{
    evidence::{Column, Counts},
    order::Way,
    programs::{OwnConsumer, OwnConsumerFlags, Program},
    report::Report,
    scenario::{Forgets, Naive, Outcome, Scale, Scenario, Shows, Strike},
    stage::{Actor, Arm, Servers, Setting, Stage, Suite},
};

/// What stops a run: a server that does not start, a condition that is not met in time. Not the finding that a
/// message was lost, which is counted.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The result of a step of a run.
pub type Result<T = ()> = std::result::Result<T, Error>;

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
