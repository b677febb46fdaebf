//! What the producer promises, against a real Postgres.

mod database;
mod frameworks;
mod limits;
mod migrations;
mod ordered;
mod payloads;
mod sql;
mod wakeup;
mod writing;
