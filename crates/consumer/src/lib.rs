//! Applies each outbox message once: consumer groups on Redis Streams, with the inbox in the handler's
//! own Postgres transaction.
//!
//! A message is delivered at least once by Redis and takes effect exactly once, because its key is
//! recorded in `inbox.applied` by the same transaction that the handler writes with. It is
//! acknowledged only after that transaction has been committed durably.
//!
//! ```no_run
//! use outbox_consumer::{Consumer, Message, RedisAddress, Transaction};
//! use tokio::signal::unix::{SignalKind, signal};
//!
//! async fn ship(tx: &Transaction<'_>, message: &Message) -> Result<(), tokio_postgres::Error> {
//!     let order = message.message_key();
//!     tx.execute("INSERT INTO shipments (order_key) VALUES ($1)", &[&order]).await?;
//!     Ok(())
//! }
//!
//! # async fn example(pool: deadpool_postgres::Pool) -> Result<(), Box<dyn std::error::Error>> {
//! let redis = RedisAddress::parse("redis://127.0.0.1:6379")?;
//! let consumer = Consumer::builder(pool, redis, "shipping").topic("orders").build()?;
//! let mut terminate = signal(SignalKind::terminate())?;
//! consumer.run(ship, async move { terminate.recv().await.unwrap_or_default() }).await?;
//! # Ok(())
//! # }
//! ```
//!
//! The files in the order of a message's way:
//!
//! 1. `builder.rs`, `consumer.rs`, `own_thread.rs`: the settings, and what runs a consumer and stops it.
//! 2. `member.rs`: one member of the group, made of the parts below.
//! 3. `keeper.rs`: what the member has. `topics.rs`, `layout.rs`: the streams there are; `leases.rs`, `spread.rs`: whose they
//!    are.
//! 4. `reader.rs`, `recovery.rs`, `link.rs`, `replies.rs`: what is handled next, and how it is had from Redis.
//! 5. `entry.rs`, `message.rs`, `headers.rs`: a stream entry, and the message that it is.
//! 6. `queue.rs`, `lane.rs`: what is in hand, and what of it may run at the same time.
//! 7. `worker.rs`: a batch until each of its messages is settled.
//! 8. `inbox.rs`, `gate.rs`, `handler.rs`, `trace.rs`, `silence.rs`: the transaction that makes a message take effect once.
//! 9. `failures.rs`, `dead_letters.rs`, `redelivery.rs`: attempts that are counted, what is set aside, and what is tried again.
//! 10. `upkeep.rs`, `survey.rs`, `history.rs`, `window.rs`: beside the messages: lag, restored databases, the purge.
//! 11. `redis_inbox.rs`: the inbox without Postgres.
//! 12. `decision.rs`: what an error means. `patience.rs`, `backoff.rs`, `trouble.rs`, `queries.rs`, `counters.rs`, `error.rs`.

mod backoff;
mod builder;
mod consumer;
mod counters;
mod dead_letters;
mod decision;
mod entry;
mod error;
mod failures;
mod gate;
mod handler;
mod handler_error;
mod handler_times;
mod headers;
mod history;
mod inbox;
mod keeper;
mod lane;
mod layout;
mod leases;
mod link;
mod member;
mod message;
pub mod metric_names;
mod opening;
mod own_connections;
mod own_thread;
mod patience;
mod queries;
mod queue;
mod reader;
mod recovery;
mod redelivery;
mod redis_inbox;
mod replies;
mod router;
mod silence;
mod spread;
mod survey;
mod topics;
#[cfg(feature = "opentelemetry")]
mod trace;
mod trouble;
mod upkeep;
mod window;
mod worker;

pub use crate::{
    builder::{Builder, OnDeadLetter, Order},
    consumer::Consumer,
    counters::{Counters, CountersSnapshot, Lag, StreamSnapshot},
    error::Error,
    handler::Handler,
    handler_error::HandlerError,
    handler_times::HandlerTimes,
    message::Message,
    redis_inbox::RedisInbox,
    router::Router,
};
/// The transaction that a handler writes with, which also records the message as applied.
pub use deadpool_postgres::Transaction;
/// Where Redis is.
pub use outbox_redis_address::{Error as RedisAddressError, RedisAddress};
/// How connections with TLS are protected (feature `tls`).
#[cfg(feature = "tls")]
pub use outbox_redis_address::{Tls, TlsCheck};

/// Compiles the code of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
