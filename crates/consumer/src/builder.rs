//! The settings of a consumer: raw in the builder, checked and complete afterwards.

use std::time::Duration;

use deadpool_postgres::Pool;
use outbox_redis_address::RedisAddress;

use crate::{Consumer, Error, backoff::Pace, gate::Gate};

/// Longest wait of one read, so that a stop and the walk for dead members' entries are never far.
const BLOCK_MAX: Duration = Duration::from_secs(2);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

mod bounds;

pub(crate) use bounds::{check, check_name, check_topic, default_name, refused};

/// Which messages of a group wait for each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// Messages with the same ordering key take effect in the order of their stream. Each partition of a topic has one
    /// owner in the group at a time, so that no more members have work than there are partitions.
    #[default]
    PerKey,
    /// Members compete for the entries of each stream, and only messages that the same member was given keep the order
    /// of their keys.
    None,
}

/// Settings of a [`Consumer`], each with its default; made by [`Consumer::builder`].
#[derive(Clone)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct Builder {
    pool: Pool,
    redis: RedisAddress,
    group: String,
    topics: Vec<String>,
    stream_prefix: String,
    name: Option<String>,
    order: Order,
    lanes: usize,
    lease: Duration,
    forget_members_after: Duration,
    batch: usize,
    claim_after: Duration,
    max_attempts: u32,
    retry: Pace,
    outage: Pace,
    response_timeout: Duration,
    grace: Duration,
    inbox_retention: Duration,
    dead_letter_retention: Duration,
    on_dead_letter: OnDeadLetter,
}

/// What becomes of later messages with the same ordering key when one becomes a dead letter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnDeadLetter {
    /// They are applied without it.
    #[default]
    Continue,
    /// They wait, in the table of dead letters, until it is retried with success, discarded, or its retention is over.
    /// Then they are applied from there, in their order, before any newer one. Messages without an ordering key never
    /// wait.
    HoldKey,
}

/// Checked settings.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) pool: Pool,
    pub(crate) redis: RedisAddress,
    pub(crate) group: String,
    pub(crate) topics: Vec<String>,
    pub(crate) stream_prefix: String,
    pub(crate) order: Order,
    pub(crate) lanes: usize,
    pub(crate) lease: Duration,
    pub(crate) forget_members_after: Duration,
    pub(crate) name: String,
    pub(crate) batch: usize,
    pub(crate) claim_after: Duration,
    pub(crate) block: Duration,
    pub(crate) max_attempts: u32,
    pub(crate) retry: Pace,
    pub(crate) outage: Pace,
    pub(crate) response_timeout: Duration,
    pub(crate) grace: Duration,
    pub(crate) gate: Gate,
    pub(crate) dead_letter_retention: Duration,
}

impl Builder {
    pub(crate) fn new(pool: Pool, redis: RedisAddress, group: String) -> Self {
        Self {
            pool,
            redis,
            group,
            topics: Vec::new(),
            stream_prefix: "outbox:".to_owned(),
            name: None,
            order: Order::default(),
            lanes: 1,
            lease: Duration::from_secs(3),
            forget_members_after: Duration::from_secs(10 * 60),
            batch: 100,
            claim_after: Duration::from_secs(60),
            max_attempts: 5,
            retry: Pace {
                initial: Duration::from_millis(200),
                cap: Duration::from_secs(30),
            },
            outage: Pace {
                initial: Duration::from_millis(100),
                cap: Duration::from_secs(5),
            },
            response_timeout: Duration::from_secs(5),
            grace: Duration::from_secs(8),
            inbox_retention: 14 * DAY,
            dead_letter_retention: 7 * DAY,
            on_dead_letter: OnDeadLetter::default(),
        }
    }

    /// Consumes this topic, besides those named before. At least one is needed.
    pub fn topic(mut self, topic: impl Into<String>) -> Self {
        self.topics.push(topic.into());
        self
    }

    /// Consumes these topics, besides those named before.
    pub fn topics<T: Into<String>>(mut self, topics: impl IntoIterator<Item = T>) -> Self {
        self.topics.extend(topics.into_iter().map(Into::into));
        self
    }

    /// What stands before the topic in the key of its stream: the relay's `--stream-prefix`.
    /// Default: `outbox:`, as the relay's.
    pub fn stream_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.stream_prefix = prefix.into();
        self
    }

    /// The name of this member in its group, 1 to 200 bytes, different for each running process. A name
    /// that stays the same over restarts lets a member take up its own pending entries at once instead of
    /// after [`claim_after`](Self::claim_after). Default: host name, process id and a random part.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Whether messages with the same ordering key keep their order over all members of the group. All members must
    /// say the same. Default: [`Order::PerKey`].
    pub fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// How many transactions this member has open at a time, 1 to 1,000. Messages with the same ordering key run one
    /// after the other, in their order; the others run at the same time as the lanes allow. All lanes share
    /// one thread, so they help handlers that wait, not those that compute. The pool must have three
    /// connections more than this. Default: 1.
    pub fn lanes(mut self, lanes: usize) -> Self {
        self.lanes = lanes;
        self
    }

    /// With [`Order::PerKey`]: after how long without a sign of life a member loses its streams to the others, 200 ms
    /// to 10 min. A live member gives four signs in that time. Default: 3 s.
    pub fn lease(mut self, term: Duration) -> Self {
        self.lease = term;
        self
    }

    /// After how long the name of a silent member is deleted from the group in Redis, 5 s to 365 days. Only a name that
    /// holds no entries is. Default: 10 min.
    pub fn forget_members_after(mut self, idle: Duration) -> Self {
        self.forget_members_after = idle;
        self
    }

    /// The most messages that one transaction applies, 1 to 10,000. Their payloads (up to 8 MiB each) are in
    /// memory together. Default: 100.
    pub fn batch(mut self, messages_max: usize) -> Self {
        self.batch = messages_max;
        self
    }

    /// How long a member may be silent before what it has in hand goes to others, 100 ms to a day. A live member gives
    /// three signs in that time, however long its handlers take. With [`Order::None`] it is when an entry is claimed by
    /// another member; with [`Order::PerKey`] the longest time for which a process that is frozen in the middle of a
    /// batch keeps its partition from the next owner. Default: 60 s.
    pub fn claim_after(mut self, idle: Duration) -> Self {
        self.claim_after = idle;
        self
    }

    /// After how many counted attempts a message becomes a dead letter, at least 1. Default: 5.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// The wait after a failed attempt: it starts at `initial`, doubles up to `cap`, and is spread by half.
    /// Default: 200 ms and 30 s.
    pub fn retry_backoff(mut self, initial: Duration, cap: Duration) -> Self {
        self.retry = Pace { initial, cap };
        self
    }

    /// The wait between tries while a server is out, in the same form. Default: 100 ms and 5 s.
    pub fn outage_backoff(mut self, initial: Duration, cap: Duration) -> Self {
        self.outage = Pace { initial, cap };
        self
    }

    /// How long a server may take to accept a connection or to answer a statement of this crate before
    /// the connection counts as lost. Handlers are not limited. Default: 5 s.
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// How long a running batch may go on after the stop signal; then it is broken off and stays pending.
    /// One more second may pass until the consumer has left its group. Default: 8 s.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// How long the inbox keeps the keys of applied messages, at least; they are purged after that. It must cover all
    /// the time in which a message can come again: the longer of the relay's `--retention` and `--stream-max-age`, plus
    /// [`dead_letter_retention`](Self::dead_letter_retention), plus a day. It is refused at the start otherwise. An
    /// entry that is older than what was purged is set aside as a dead letter, not applied. Default: 14 days.
    pub fn inbox_retention(mut self, retention: Duration) -> Self {
        self.inbox_retention = retention;
        self
    }

    /// How long a dead letter waits for a person before it is deleted, 1 s to 10 years. Default: 7 days.
    pub fn dead_letter_retention(mut self, retention: Duration) -> Self {
        self.dead_letter_retention = retention;
        self
    }

    /// What becomes of later messages of the same ordering key when one becomes a dead letter. All members of a group
    /// must say the same. `HoldKey` needs [`Order::PerKey`]. Default: [`OnDeadLetter::Continue`].
    pub fn on_dead_letter(mut self, then: OnDeadLetter) -> Self {
        self.on_dead_letter = then;
        self
    }

    /// Checks the settings. Connects to nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] names the first setting that is missing or out of its bounds.
    pub fn build(self) -> Result<Consumer, Error> {
        self.check_bounds()?;
        check_name("group", &self.group)?;
        let name = self.name.unwrap_or_else(default_name);
        check_name("name", &name)?;
        if self.topics.is_empty() {
            return Err(refused("topic", "at least one is needed"));
        }
        let mut topics: Vec<String> = Vec::with_capacity(self.topics.len());
        for topic in self.topics {
            check_topic(&topic)?;
            if !topics.contains(&topic) {
                topics.push(topic);
            }
        }
        Ok(Consumer::new(Settings {
            pool: self.pool,
            redis: self.redis,
            group: self.group,
            topics,
            stream_prefix: self.stream_prefix,
            order: self.order,
            lanes: self.lanes,
            lease: self.lease,
            forget_members_after: self.forget_members_after,
            name,
            batch: self.batch,
            claim_after: self.claim_after,
            block: (self.claim_after / 2).min(BLOCK_MAX),
            max_attempts: self.max_attempts,
            retry: self.retry,
            outage: self.outage,
            response_timeout: self.response_timeout,
            grace: self.grace,
            gate: Gate {
                inbox_retention: self.inbox_retention,
                on_dead_letter: self.on_dead_letter,
            },
            dead_letter_retention: self.dead_letter_retention,
        }))
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("group", &self.group)
            .field("topics", &self.topics)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use deadpool_postgres::Manager;

    use super::*;

    fn builder() -> Builder {
        let manager = Manager::new(tokio_postgres::Config::new(), tokio_postgres::NoTls);
        let pool = Pool::builder(manager).build().unwrap();
        Builder::new(
            pool,
            RedisAddress::parse("redis://localhost").unwrap(),
            "shipping".to_owned(),
        )
    }

    #[test]
    fn a_setting_out_of_bounds_is_named() {
        let ms = Duration::from_millis;
        let good = || builder().topic("orders");
        let cases: [(Builder, &str); 10] = [
            (builder(), "topic"),
            (builder().topic("no:colon"), "topic"),
            (good().name(""), "name"),
            (good().name("x".repeat(201)), "name"),
            (good().batch(0), "batch"),
            (good().claim_after(ms(99)), "claim_after"),
            (good().max_attempts(0), "max_attempts"),
            (good().retry_backoff(ms(0), ms(1)), "retry_backoff"),
            (good().outage_backoff(ms(2), ms(1)), "outage_backoff"),
            (good().response_timeout(ms(0)), "response_timeout"),
        ];
        for (builder, expected) in cases {
            match builder.build() {
                Err(Error::Setting { field, .. }) => assert_eq!(field, expected),
                other => panic!("{expected}: {other:?}"),
            }
        }
        assert!(good().build().is_ok());
    }

    #[test]
    fn default_names_differ() {
        assert_ne!(default_name(), default_name());
    }
}
