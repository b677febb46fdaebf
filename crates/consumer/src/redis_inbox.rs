//! A consumer group for handlers without Postgres: its inbox is a key per message in Redis, and its promise is weaker.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use outbox_redis_address::RedisAddress;

use crate::{
    Counters, Error, HandlerError, Message,
    backoff::Pace,
    builder::{check, check_name, check_topic, default_name, refused},
    own_thread::on_own_thread,
    redis_inbox::member::Member,
};

mod member;
mod store;

const CLAIM_AFTER_MIN: Duration = Duration::from_millis(100);

/// A consumer group whose inbox is in Redis, for handlers that do not write to Postgres: those that send mail, call a
/// service, or fill a cache.
///
/// # What it promises
///
/// Each message is handled **at least once, and rarely twice**. A key per message says that it was handled; it is set in
/// the same atomic step as the acknowledgement, after the handler has returned. So:
///
/// - A message that is published again, or delivered again, is not handled again, for as long as its key lives
///   ([`retention`](Self::retention)).
/// - While a member handles a message, it holds the key for the claim time and renews it. No other member begins
///   the same message meanwhile.
/// - **A crash after the handler's effect and before that step handles the message again.** Nothing can tell the two
///   apart: the effect is not in Redis. The same holds for a process that is frozen for longer than the claim time, and
///   for a Redis that loses its latest writes (a failover, a crash without `appendfsync always`).
/// - A crash before the effect loses nothing: the message is handled after the claim time.
///
/// A handler that writes to Postgres should be a [`Consumer`](crate::Consumer) instead, which applies each message once.
/// For the rest: give the service that you call the [`message_key`](Message::message_key) as its idempotency key.
///
/// Members take messages one at a time and without regard to ordering keys; there is no `Order::PerKey` here, since
/// nothing but a lock in the handler's own database could enforce it. After `max_attempts` a message goes to the
/// stream `<prefix>group:<group>:dead-letters`, with all its fields, `reason` and `attempts`; every begin of the handler
/// counts as an attempt, so that one that kills the process ends there too. Nothing trims that stream.
///
/// ```no_run
/// use outbox_consumer::{HandlerError, Message, RedisAddress, RedisInbox};
///
/// # async fn send_mail(_: &str, _: &[u8]) -> Result<(), HandlerError> { Ok(()) }
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let redis = RedisAddress::parse("redis://localhost")?;
/// let shutdown = async { tokio::signal::ctrl_c().await.unwrap_or_default() };
/// RedisInbox::new(redis, "mailing")
///     .topic("orders")
///     .run(async |message: &Message| send_mail(message.message_key(), message.payload()).await, shutdown)
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "nothing is consumed until it is run"]
pub struct RedisInbox {
    redis: RedisAddress,
    group: String,
    topics: Vec<String>,
    stream_prefix: String,
    name: Option<String>,
    claim_after: Duration,
    retention: Duration,
    max_attempts: u32,
    retry: Pace,
    outage: Pace,
    response_timeout: Duration,
    grace: Duration,
    counters: Counters,
}

/// Checked settings.
pub(crate) struct Settings {
    redis: RedisAddress,
    group: String,
    topics: Vec<String>,
    stream_prefix: String,
    name: String,
    claim_after: Duration,
    retention: Duration,
    max_attempts: u32,
    retry: Pace,
    outage: Pace,
    response_timeout: Duration,
    grace: Duration,
    counters: Counters,
}

impl RedisInbox {
    /// A member of this group, 1 to 200 bytes. `redis` is a [`RedisAddress`], or a `redis::Client` for one server.
    pub fn new(redis: impl Into<RedisAddress>, group: impl Into<String>) -> Self {
        let group = group.into();
        let ms = Duration::from_millis;
        Self {
            redis: redis.into(),
            counters: Counters::new(&group),
            group,
            topics: Vec::new(),
            stream_prefix: "outbox:".to_owned(),
            name: None,
            claim_after: ms(60_000),
            retention: Duration::from_secs(14 * 24 * 60 * 60),
            max_attempts: 5,
            retry: Pace {
                initial: ms(200),
                cap: ms(30_000),
            },
            outage: Pace {
                initial: ms(100),
                cap: ms(5_000),
            },
            response_timeout: ms(5_000),
            grace: ms(8_000),
        }
    }

    /// Consumes this topic, besides those named before. At least one is needed.
    pub fn topic(mut self, topic: impl Into<String>) -> Self {
        self.topics.push(topic.into());
        self
    }

    /// The relay's `--stream-prefix`. Default: `outbox:`, which is the relay's too.
    pub fn stream_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.stream_prefix = prefix.into();
        self
    }

    /// The name of this member, 1 to 200 bytes, different for each running process. Default: host name, process id and
    /// a random part.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// How long a member that says nothing keeps a message before another one takes it over, at least 100 ms. A running
    /// handler is renewed meanwhile. Default: 60 s.
    pub fn claim_after(mut self, idle: Duration) -> Self {
        self.claim_after = idle;
        self
    }

    /// How long the key of a handled message lives, longer than the claim time. Each takes about 150 bytes of Redis'
    /// memory. Default: 14 days.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// After how many begun attempts a message is set aside, at least 1. Default: 5.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// The wait after a failed attempt: it starts at `initial`, doubles up to `cap`, and is spread by half. The
    /// member waits with it. Default: 200 ms and 30 s.
    pub fn retry_backoff(mut self, initial: Duration, cap: Duration) -> Self {
        self.retry = Pace { initial, cap };
        self
    }

    /// How long Redis may take to answer before the connection counts as lost. Default: 5 s.
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// How long a running handler may go on after the stop signal. Default: 8 s.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// The counts of this member, to be kept while it runs.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters.clone()
    }

    /// Calls `handler` for each message until `shutdown` is done. What the handler may return is what [`HandlerError`]
    /// says, but nothing is rolled back. Its future need not be [`Send`].
    ///
    /// # Errors
    ///
    /// At the start: a setting is out of its bounds, or Redis refuses the credentials. A Redis that is down is
    /// waited for.
    ///
    /// # Panics
    ///
    /// If it is not called within a Tokio runtime.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the handler at its next await, and others take its message over after the claim time.
    pub async fn run<F, E>(
        self,
        handler: F,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Error>
    where
        F: AsyncFn(&Message) -> Result<(), E> + Send + 'static,
        E: Into<HandlerError> + 'static,
    {
        let settings = self.check()?;
        on_own_thread(
            move |stop, abandoned, _| async move {
                let mut member = Member::new(settings, handler, stop);
                tokio::select! {
                    biased;
                    () = abandoned.cancelled() => Ok(()),
                    result = member.run() => result,
                }
            },
            shutdown,
        )
        .await
    }

    fn check(self) -> Result<Settings, Error> {
        check_name("group", &self.group)?;
        let name = self.name.unwrap_or_else(default_name);
        check_name("name", &name)?;
        if self.topics.is_empty() {
            return Err(refused("topic", "at least one is needed"));
        }
        for topic in &self.topics {
            check_topic(topic)?;
        }
        check(
            "claim_after",
            self.claim_after >= CLAIM_AFTER_MIN,
            "must be at least 100 ms",
        )?;
        check(
            "retention",
            self.retention > self.claim_after,
            "must be longer than claim_after",
        )?;
        check("max_attempts", self.max_attempts >= 1, "must be at least 1")?;
        check(
            "response_timeout",
            !self.response_timeout.is_zero(),
            "must be longer than 0",
        )?;
        let topics: BTreeSet<String> = self.topics.into_iter().collect();
        Ok(Settings {
            redis: self.redis,
            group: self.group,
            topics: topics.into_iter().collect(),
            stream_prefix: self.stream_prefix,
            name,
            claim_after: self.claim_after,
            retention: self.retention,
            max_attempts: self.max_attempts,
            retry: self.retry,
            outage: self.outage,
            response_timeout: self.response_timeout,
            grace: self.grace,
            counters: self.counters,
        })
    }
}

impl std::fmt::Debug for RedisInbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisInbox")
            .field("group", &self.group)
            .field("topics", &self.topics)
            .finish_non_exhaustive()
    }
}

/// A stream that a member of this kind reads: no owner, hence no epoch.
fn source(topic: &str, stream: String) -> Arc<crate::message::Source> {
    Arc::new(crate::message::Source {
        topic: topic.to_owned(),
        stream,
        epoch: None,
    })
}
