//! What the producer promises, against a real Postgres.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod database;
mod frameworks;
mod limits;
mod migrations;
mod ordered;
mod payloads;
mod refusals;
mod round_trips;
mod sql;
mod wakeup;
mod writing;
