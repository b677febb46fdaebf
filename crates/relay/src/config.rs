//! Configuration: raw flags in, checked settings out.

mod flags;

use std::net::SocketAddr;
use std::time::Duration;

pub use self::flags::{Hold, OnRedisLossFlag, RunFlags, ServerFlags};

use crate::error::{Error, Result};
use crate::health::Health;
use crate::postgres::PostgresTarget;
use crate::protocol::start::OnRedisLoss;
use crate::publisher::{RedisTarget, RedisTls};

/// Checked settings of [`crate::run`].
#[derive(Clone, Debug)]
pub struct Config {
    /// Where Postgres is.
    pub postgres: PostgresTarget,
    /// Where Redis is.
    pub redis: RedisTarget,
    /// Prefix of all keys in Redis.
    pub stream_prefix: String,
    /// Name of this relay.
    pub name: String,
    /// Most rows in a page.
    pub page_rows: u32,
    /// Most bytes in a page, unless one message is larger.
    pub page_bytes: u32,
    /// Longest sleep.
    pub poll_interval: Duration,
    /// Time between checkpoints while messages flow.
    pub checkpoint_interval: Duration,
    /// How long published messages are kept.
    pub retention: Duration,
    /// How long an entry stays in its stream at least; none means that streams are never trimmed.
    pub stream_max_age: Option<Duration>,
    /// Percent of Redis' `maxmemory` at which publishing pauses; none is no ceiling.
    pub redis_memory_ceiling: Option<u32>,
    /// Groups that must have acknowledged a message before it is purged.
    pub hold_until_acked: Vec<Hold>,
    /// What to do when Redis comes back empty.
    pub on_redis_loss: OnRedisLoss,
    /// Messages per second while replaying; none is no limit.
    pub replay_rate: Option<u32>,
    /// Limit of a call to Redis.
    pub redis_timeout: Duration,
    /// Limit of a statement.
    pub postgres_timeout: Duration,
    /// First wait after a failure.
    pub backoff_first: Duration,
    /// Longest wait between two tries.
    pub backoff_max: Duration,
    /// How long servers may be missing at start.
    pub start_timeout: Duration,
    /// Where HTTP requests are answered, by [`crate::serve_http`].
    pub listen: Option<SocketAddr>,
    /// Where spans are sent to, by what the caller of [`crate::run`] sets up for it.
    pub otlp_endpoint: Option<String>,
    /// What the relay says of itself; clone it before the configuration is given away.
    pub health: Health,
}

impl ServerFlags {
    /// Where Postgres is.
    ///
    /// # Errors
    ///
    /// A URL that is missing, given twice, or not understood, or a file that cannot be read.
    pub fn postgres(&self) -> Result<PostgresTarget> {
        match (&self.database_url, &self.database_url_file) {
            (Some(url), None) => PostgresTarget::parse(url),
            (None, Some(file)) => PostgresTarget::from_file(file),
            (Some(_), Some(_)) => Err(given_twice("--database-url-file", "--database-url")),
            (None, None) => Err(Error::Config {
                field: "--database-url",
                problem: "is missing; give it, or set DATABASE_URL, e.g. postgres://user:password@host:5432/database".into(),
            }),
        }
    }

    /// Where Redis is.
    ///
    /// # Errors
    ///
    /// A URL that is missing, given twice, or not understood, a file that cannot be read, or TLS settings for a connection
    /// without TLS.
    pub fn redis(&self) -> Result<RedisTarget> {
        let tls = || RedisTls {
            mode: self.redis_tls_mode,
            ca_file: self.redis_ca_file.clone(),
            client_cert: self.redis_cert_file.clone(),
            client_key: self.redis_key_file.clone(),
        };
        let target = match (&self.redis_url, &self.redis_url_file) {
            (Some(url), None) => RedisTarget::parse(url, tls()),
            (None, Some(file)) => RedisTarget::from_file(file, tls()),
            (Some(_), Some(_)) => Err(given_twice("--redis-url-file", "--redis-url")),
            (None, None) => Err(Error::Config {
                field: "--redis-url",
                problem: "is missing; give it, or set REDIS_URL, e.g. redis://host:6379".into(),
            }),
        };
        Ok(target?.for_prefix(&self.prefix()?))
    }

    /// The prefix of all keys.
    ///
    /// # Errors
    ///
    /// A prefix that is too long or not printable.
    pub fn prefix(&self) -> Result<String> {
        if self.stream_prefix.len() > 200
            || !self.stream_prefix.bytes().all(|b| b.is_ascii_graphic())
        {
            return Err(Error::Config {
                field: "--stream-prefix",
                problem: "must be up to 200 printable ASCII characters without spaces".into(),
            });
        }
        Ok(self.stream_prefix.clone())
    }
}

impl Config {
    /// Checks the flags.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] names the first flag that is out of its bounds.
    pub fn new(servers: &ServerFlags, run: RunFlags) -> Result<Self> {
        let second = Duration::from_secs(1);
        let ms = Duration::from_millis(1);
        bounded("--page-rows", run.page_rows, 1, 10_000)?;
        bounded("--page-bytes", run.page_bytes, 64 << 10, 64 << 20)?;
        bounded_time("--poll-interval", run.poll_interval, 10 * ms, 600 * second)?;
        bounded_time(
            "--checkpoint-interval",
            run.checkpoint_interval,
            10 * ms,
            60 * second,
        )?;
        bounded_time(
            "--retention",
            run.retention,
            second,
            3_650 * 86_400 * second,
        )?;
        let longest = 3_650 * 86_400 * second;
        if !run.stream_max_age.is_zero() {
            bounded_time("--stream-max-age", run.stream_max_age, second, longest)?;
        }
        bounded("--redis-memory-ceiling", run.redis_memory_ceiling, 0, 100)?;
        bounded_time("--redis-timeout", run.redis_timeout, 100 * ms, 60 * second)?;
        bounded_time(
            "--postgres-timeout",
            run.postgres_timeout,
            second,
            600 * second,
        )?;
        bounded_time("--backoff-first", run.backoff_first, ms, 10 * second)?;
        bounded_time("--backoff-max", run.backoff_max, 10 * ms, 60 * second)?;
        if run.backoff_first > run.backoff_max {
            return Err(Error::Config {
                field: "--backoff-first",
                problem: "must not be longer than --backoff-max".into(),
            });
        }
        bounded_time(
            "--start-timeout",
            run.start_timeout,
            Duration::ZERO,
            3_600 * second,
        )?;
        if run.name.is_empty() || run.name.len() > 63 {
            return Err(Error::Config {
                field: "--name",
                problem: "must be 1 to 63 bytes".into(),
            });
        }
        Ok(Config {
            postgres: servers.postgres()?,
            redis: servers.redis()?,
            stream_prefix: servers.prefix()?,
            name: run.name,
            page_rows: run.page_rows,
            page_bytes: run.page_bytes,
            poll_interval: run.poll_interval,
            checkpoint_interval: run.checkpoint_interval,
            retention: run.retention,
            stream_max_age: (!run.stream_max_age.is_zero()).then_some(run.stream_max_age),
            redis_memory_ceiling: (run.redis_memory_ceiling > 0)
                .then_some(run.redis_memory_ceiling),
            hold_until_acked: run.hold_until_acked,
            on_redis_loss: match run.on_redis_loss {
                OnRedisLossFlag::Replay => OnRedisLoss::Replay,
                OnRedisLossFlag::Resume => OnRedisLoss::Resume,
            },
            replay_rate: (run.replay_rate > 0).then_some(run.replay_rate),
            redis_timeout: run.redis_timeout,
            postgres_timeout: run.postgres_timeout,
            backoff_first: run.backoff_first,
            backoff_max: run.backoff_max,
            start_timeout: run.start_timeout,
            listen: run.listen,
            otlp_endpoint: run.otlp_endpoint,
            health: Health::default(),
        })
    }
}

/// That an address and a file of it are both given.
pub(crate) fn given_twice(file: &'static str, plain: &str) -> Error {
    Error::Config {
        field: file,
        problem: format!(
            "and {plain} are both set, by a flag, the environment or --config; drop one of them"
        ),
    }
}

fn bounded(field: &'static str, value: u32, min: u32, max: u32) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::Config {
        field,
        problem: format!("{value} is out of bounds; it must be {min} to {max}"),
    })
}

fn bounded_time(field: &'static str, value: Duration, min: Duration, max: Duration) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    let [value, min, max] = [value, min, max].map(humantime::format_duration);
    Err(Error::Config {
        field,
        problem: format!("{value} is out of bounds; it must be {min} to {max}"),
    })
}
