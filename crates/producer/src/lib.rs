#![doc = include_str!("../README.md")]
//!
//! # Reading order
//!
//! `message.rs` (what is written), `row.rs` (the checks before the round trip), `limits.rs` (their
//! bounds), `trace.rs` (the trace that a message carries on), `write.rs` (the way into the transaction), `queries.rs` (the SQL), `error.rs`.

mod error;
pub mod limits;
mod message;
mod queries;
mod row;
#[cfg(feature = "opentelemetry")]
mod trace;
mod write;

pub use error::{Error, Result};
pub use message::Message;
pub use write::{ORDERED_LOCK_CLASS, Outcome, Written, write, write_all, write_once};
