//! Publishes committed outbox messages from Postgres into Redis Streams: in order, each once, and after
//! any single fault.
//!
//! [`run`] is the daemon; [`migrate`], [`StatusLooker`] and [`adopt`] are the other commands of the binary. All of it
//! needs a Tokio runtime.
//!
//! The files in reading order:
//!
//! 1. `run.rs`: stand by, lead, begin again. `elect.rs` is how a relay becomes the leader.
//! 2. `leader.rs`: the loop. `leader/` holds its other duties and how it gets over a failure of Redis.
//! 3. `reader.rs`: reads a page; `protocol/log.rs` says which rows may be taken.
//! 4. `progress.rs`: publishes a page and moves the cursor of `protocol/cursor.rs`; `checkpoint.rs` writes it to
//!    Postgres.
//! 5. `publisher/`: all that is said to Redis. `page.rs` is where a message becomes published.
//! 6. `takeover.rs`: what to go on from; `protocol/start.rs` decides it.
//! 7. `janitor.rs`: the purge. `caretaker.rs`: trims the streams and watches the memory of Redis.
//! 8. `postgres/`: where Postgres is, TLS, the session, and all SQL.
//! 9. `config.rs`, `secret_file.rs`, `config_check.rs`, `error.rs`, `backoff.rs`, `telemetry.rs`, `migrate.rs`, `status.rs`, `topics.rs`,
//!    `adopt.rs`: the rest.
//! 10. `health.rs`, `observer.rs`, `metric_names.rs`, `http.rs`: what the relay says of itself.
//! 11. `pause.rs`: publishing stops on a person's word; `leader/pausing.rs` is the leader's side of it.
//!     `replay.rs`: messages go out again. `dead_letters.rs`, `rewind.rs`: commands for consumer groups.
//! 12. `trace.rs`: follows one message. `verify.rs`: holds rows, entries and inbox against each other.
//! 13. `grants.rs`: who needs which rights. `doctor.rs`: whether all is set up as it should be.
//!
//! The binary is `main.rs`; `settings/` reads the file of `--config` and says where each setting comes from.

pub mod metric_names;
pub mod protocol;

mod adopt;
mod backoff;
mod caretaker;
mod checkpoint;
mod config;
mod config_check;
mod dead_letters;
mod doctor;
mod elect;
mod error;
mod grants;
mod health;
mod http;
mod janitor;
mod leader;
mod migrate;
mod observer;
mod pause;
mod postgres;
mod progress;
mod publisher;
mod reader;
mod replay;
mod rewind;
mod run;
mod secret_file;
mod status;
mod takeover;
mod telemetry;
mod topics;
mod trace;
#[cfg(feature = "otlp")]
mod traces;
mod verify;

pub use adopt::adopt;
pub use config::{Config, Hold, OnRedisLossFlag, RunFlags, ServerFlags};
pub use config_check::{ServersChecked, check_servers};
pub use dead_letters::{DeadLettersCommand, InboxFlags, LetterChoice, LetterFilter, dead_letters};
pub use doctor::{DoctorFlags, DoctorReport, Finding, Level, doctor};
pub use error::{Error, Result};
pub use grants::{GrantsFlags, grants};
pub use health::{Health, Readiness};
pub use http::{ask_readiness, serve_http};
pub use migrate::{Migrated, Schema, migrate};
pub use pause::{Pause, pause, resume};
pub use postgres::{PostgresTarget, TlsMode, TlsSettings};
pub use publisher::{RedisTarget, RedisTls};
pub use replay::{ReplayFlags, Replayed, TopicCount, replay};
pub use rewind::{RewindFlags, Rewound, Since, rewind};
pub use run::run;
pub use status::{
    Backlog, BlockedStream, CaretakerShown, CursorShown, GroupShown, HoldShown, HoldStanding,
    Holder, Leader, MarkerShown, MemoryShown, Rate, RedisLoss, RedisLosses, Retention, Status,
    StatusFlags, StatusLooker, StreamShown, StreamsShown, TrimmingShown,
};
pub use telemetry::{LogFormat, log_to_stderr};
pub use topics::{TopicPartitions, list_topics, set_partitions};
pub use trace::{GroupTrace, Trace, TraceFlags, TracedEntry, TracedMessage, trace};
#[cfg(feature = "otlp")]
pub use traces::{TraceExport, export_traces};
pub use verify::{Example, Findings, GroupReport, VerifyFlags, VerifyReport, verify};
