//! What runs a consumer and stops it.

use std::time::Duration;

use deadpool_postgres::{Pool, Transaction};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    Builder, Counters, Error, HandlerError, Message, RedisAddress,
    builder::Settings,
    handler::{Apply, Closure, Handler, PerBatch, PerMessage},
    member::Member,
    own_thread::on_own_thread,
    patience::Patience,
};

/// One member of a consumer group, ready to run.
///
/// A handler writes with the transaction it is given and nothing else: what it does elsewhere is not
/// undone when the transaction is, and is done again when the message comes again. It must not commit
/// or roll back that transaction. If it fails, all of the transaction is rolled back.
///
/// A member applies one batch at a time for each of its [lanes](Builder::lanes), and uses one connection of the pool for
/// each, which it keeps as long as it runs (so that the pool does not clean it in between), and three more. For more
/// throughput, run several members, or more lanes.
#[must_use = "a consumer does nothing until it is run"]
pub struct Consumer {
    settings: Settings,
    counters: Counters,
}

impl Consumer {
    /// Starts the settings of a consumer: `pool` leads to the database with the schema `inbox` and the
    /// handler's tables, `redis` to the server the relay publishes to, and `group` names the consumer group,
    /// 1 to 200 bytes. Each group gets each message once.
    ///
    /// `redis` is a [`RedisAddress`], which may name sentinels or the nodes of a cluster, or a `redis::Client` for one
    /// server.
    pub fn builder(
        pool: Pool,
        redis: impl Into<RedisAddress>,
        group: impl Into<String>,
    ) -> Builder {
        Builder::new(pool, redis.into(), group.into())
    }

    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            counters: Counters::new(&settings.group),
            settings,
        }
    }

    /// The counts of this consumer, to be kept while it runs.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters.clone()
    }

    /// The name of this member in its group.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// Calls `handler` for each message until `shutdown` is done.
    ///
    /// The handler is an async function or closure. Its future need not be [`Send`]: it runs on a thread
    /// of its own, with the I/O and timers of the runtime this is called in. Of tokio's two ways to block, only
    /// `spawn_blocking` works there; `block_in_place` panics, as on every runtime of one thread. It is called with the fresh
    /// messages of a batch one after the other, all in one transaction; when one fails, the batch is rolled
    /// back and its messages run again, each in a transaction of its own.
    ///
    /// After `shutdown` the running batch is finished and acknowledged if the grace period allows; all else
    /// stays pending for the other members. That is `Ok`.
    ///
    /// # Errors
    ///
    /// At the start: the inbox schema is missing or of another version, or a server refuses the
    /// credentials. Later: only if the pool is closed. Servers that are down are waited for.
    ///
    /// # Panics
    ///
    /// If it is not called within a Tokio runtime.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future breaks the running batch off at its next await: it is rolled back and stays
    /// pending. Nothing is lost or doubled, but others take over only after the claim time.
    pub async fn run<F, E>(
        self,
        handler: F,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Error>
    where
        F: AsyncFn(&Transaction<'_>, &Message) -> Result<(), E> + Send + 'static,
        E: Into<HandlerError> + 'static,
    {
        self.run_handler(Closure::new(handler), shutdown).await
    }

    /// Like [`run`](Self::run), with a handler that is a type of its own, such as a [`Router`](crate::Router).
    ///
    /// # Errors
    ///
    /// As for [`run`](Self::run).
    ///
    /// # Panics
    ///
    /// As for [`run`](Self::run).
    ///
    /// # Cancel safety
    ///
    /// As for [`run`](Self::run).
    pub async fn run_handler<H>(
        self,
        handler: H,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Error>
    where
        H: Handler + Send + 'static,
    {
        let handler = PerMessage::new(handler, self.counters.clone());
        self.drive(handler, shutdown).await
    }

    /// Like [`run`](Self::run), but calls `handler` once with all fresh messages of a batch: 1 up to the
    /// batch size, of one topic, in the order of the stream. An error is an error of the whole batch, which
    /// then comes again message by message, as slices of one.
    ///
    /// # Errors
    ///
    /// As for [`run`](Self::run).
    ///
    /// # Panics
    ///
    /// As for [`run`](Self::run).
    ///
    /// # Cancel safety
    ///
    /// As for [`run`](Self::run).
    pub async fn run_batches<F, E>(
        self,
        handler: F,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Error>
    where
        F: AsyncFn(&Transaction<'_>, &[Message]) -> Result<(), E> + Send + 'static,
        E: Into<HandlerError> + 'static,
    {
        let handler = PerBatch::new(handler, self.counters.clone());
        self.drive(handler, shutdown).await
    }

    async fn drive<A>(self, handler: A, shutdown: impl Future<Output = ()>) -> Result<(), Error>
    where
        A: Apply + Send + 'static,
    {
        on_own_thread(
            move |stop, abandoned, here| self.supervise(handler, stop, abandoned, here),
            shutdown,
        )
        .await
    }

    async fn supervise<A: Apply>(
        self,
        handler: A,
        stop: CancellationToken,
        abandoned: CancellationToken,
        here: Handle,
    ) -> Result<(), Error> {
        let grace = self.settings.grace;
        let patience = Patience {
            pace: self.settings.outage,
            stop: stop.clone(),
            counters: self.counters.clone(),
        };
        let mut member = Member::new(self.settings, handler, patience, here);
        let result = tokio::select! {
            biased;
            () = abandoned.cancelled() => return Ok(()),
            result = member.work() => result,
            () = grace_is_over(stop, grace) => {
                warn!(grace_ms = grace.as_millis(), "the running batch is broken off and stays pending");
                Ok(())
            }
        };
        member.leave().await;
        result
    }
}

async fn grace_is_over(stop: CancellationToken, grace: Duration) {
    stop.cancelled().await;
    tokio::time::sleep(grace).await;
}

impl std::fmt::Debug for Consumer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Consumer")
            .field("group", &self.settings.group)
            .field("name", &self.settings.name)
            .finish_non_exhaustive()
    }
}
