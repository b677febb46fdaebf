//! Publishes committed outbox messages from Postgres into Redis Streams.
pub mod protocol;

mod adopt;
mod backoff;
mod checkpoint;
mod config;
mod elect;
mod error;
mod janitor;
mod leader;
mod migrate;
mod postgres;
mod progress;
mod publisher;
mod reader;
mod run;
mod status;
mod takeover;
mod telemetry;

pub use adopt::adopt;
pub use config::{Config, OnRedisLossFlag, RunFlags, ServerFlags};
pub use error::{Error, Result};
pub use migrate::{Migrated, Schema, migrate};
pub use postgres::{PostgresTarget, TlsMode, TlsSettings};
pub use publisher::RedisTarget;
pub use run::run;
pub use status::{Holder, Status, status};
pub use telemetry::{LogFormat, log_to_stderr};
