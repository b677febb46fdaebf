//! Configuration: raw flags in, checked settings out.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use secrecy::SecretString;

use crate::error::{Error, Result};
use crate::health::Health;
use crate::postgres::{PostgresTarget, TlsMode};
use crate::protocol::start::OnRedisLoss;
use crate::publisher::{RedisTarget, RedisTls};

/// Where the two servers are. Shared by all commands.
#[derive(Args, Clone)]
pub struct ServerFlags {
    /// Postgres, as postgres://user:password@host:port/database?sslmode=verify-full&sslrootcert=FILE
    ///
    /// sslmode is one of disable (the default), prefer, require, verify-ca, verify-full; naming sslrootcert or sslcert alone
    /// means verify-full. Of several hosts (host1:port1,host2:port2) the one that takes writes is used.
    #[arg(
        long,
        env = "DATABASE_URL",
        hide_env_values = true,
        global = true,
        value_name = "URL"
    )]
    pub database_url: Option<SecretString>,

    /// File that holds what --database-url would be given; read anew for each connection
    #[arg(long, env = "DATABASE_URL_FILE", global = true, value_name = "FILE")]
    pub database_url_file: Option<PathBuf>,

    /// Redis, as redis://user:password@host:port/db, or rediss:// for TLS
    ///
    /// With sentinels: redis+sentinel://user:password@host1:26379,host2:26379/NAME/db (rediss+sentinel:// for TLS), where NAME
    /// is the primary's; behind a ? may stand sentinel_user and sentinel_password. Of a cluster, any node.
    #[arg(
        long,
        env = "REDIS_URL",
        hide_env_values = true,
        global = true,
        value_name = "URL"
    )]
    pub redis_url: Option<SecretString>,

    /// File that holds what --redis-url would be given; read anew for each connection
    #[arg(long, env = "REDIS_URL_FILE", global = true, value_name = "FILE")]
    pub redis_url_file: Option<PathBuf>,

    /// How a rediss:// connection is checked: require, verify-ca or verify-full [default: verify-full]
    #[arg(
        long,
        env = "OUTBOX_REDIS_TLS_MODE",
        global = true,
        value_name = "MODE"
    )]
    pub redis_tls_mode: Option<TlsMode>,

    /// PEM file of the CAs that may sign Redis' certificate [default: the system's]
    #[arg(long, env = "OUTBOX_REDIS_CA_FILE", global = true, value_name = "FILE")]
    pub redis_ca_file: Option<PathBuf>,

    /// PEM file with the certificate that Redis is shown, where it asks for one (tls-auth-clients)
    #[arg(
        long,
        env = "OUTBOX_REDIS_CERT_FILE",
        global = true,
        value_name = "FILE"
    )]
    pub redis_cert_file: Option<PathBuf>,

    /// PEM file with the key to --redis-cert-file
    #[arg(
        long,
        env = "OUTBOX_REDIS_KEY_FILE",
        global = true,
        value_name = "FILE"
    )]
    pub redis_key_file: Option<PathBuf>,

    /// Name of a stream is this prefix and the topic; for a cluster with a hash tag, as {shop}:
    #[arg(
        long,
        env = "OUTBOX_STREAM_PREFIX",
        global = true,
        default_value = "outbox:",
        value_name = "TEXT"
    )]
    pub stream_prefix: String,
}

/// What a relay does when Redis comes back empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnRedisLossFlag {
    /// Publish again all that the outbox still has
    Replay,
    /// Go on after the last checkpoint
    Resume,
}

/// The settings of `run`.
#[derive(Args, Clone, Debug)]
pub struct RunFlags {
    /// Name of this relay in logs, status and Postgres' application_name [default: outbox-relay]
    #[arg(
        long,
        env = "OUTBOX_NAME",
        default_value = "outbox-relay",
        value_name = "TEXT"
    )]
    pub name: String,

    /// Most messages in one page, 1 to 10000
    #[arg(
        long,
        env = "OUTBOX_PAGE_ROWS",
        default_value_t = 1_000,
        value_name = "ROWS"
    )]
    pub page_rows: u32,

    /// Most bytes of payload, headers and ordering keys in one page, unless a single message is larger; 64 KiB to 64 MiB
    #[arg(long, env = "OUTBOX_PAGE_BYTES", default_value_t = 4 << 20, value_name = "BYTES")]
    pub page_bytes: u32,

    /// Longest wait before looking for messages when no notification comes, 10ms to 10m
    #[arg(long, env = "OUTBOX_POLL_INTERVAL", default_value = "1s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub poll_interval: Duration,

    /// How often the cursor is written to Postgres while messages flow, 10ms to 1m
    #[arg(long, env = "OUTBOX_CHECKPOINT_INTERVAL", default_value = "1s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub checkpoint_interval: Duration,

    /// How long a published message stays in the outbox, 1s to 10 years
    #[arg(long, env = "OUTBOX_RETENTION", default_value = "3d", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub retention: Duration,

    /// How long an entry stays in its stream at least, 1s to 10 years; 0 means that streams are never trimmed
    ///
    /// Older entries are trimmed once every group of the stream has acknowledged them. A stream without a group is not
    /// trimmed.
    #[arg(long, env = "OUTBOX_STREAM_MAX_AGE", default_value = "3d", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub stream_max_age: Duration,

    /// Percent of Redis' maxmemory at which publishing pauses until there is room again, 1 to 100; 0 means never
    #[arg(
        long,
        env = "OUTBOX_REDIS_MEMORY_CEILING",
        default_value_t = 90,
        value_name = "PERCENT"
    )]
    pub redis_memory_ceiling: u32,

    /// Keep published messages in the outbox until this consumer group has acknowledged them; may be given several times
    ///
    /// GROUP is held to every stream, GROUP=TOPIC,TOPIC to those of these topics. While a stream lacks the group, nothing is
    /// purged.
    #[arg(long, env = "OUTBOX_HOLD_UNTIL_ACKED", value_delimiter = ' ', value_parser = Hold::parse, value_name = "GROUP")]
    pub hold_until_acked: Vec<Hold>,

    /// What to do when Redis comes back without marker and streams
    #[arg(long, env = "OUTBOX_ON_REDIS_LOSS", default_value = "replay")]
    pub on_redis_loss: OnRedisLossFlag,

    /// Messages per second while replaying after a loss; 0 means as fast as Redis takes them
    #[arg(
        long,
        env = "OUTBOX_REPLAY_RATE",
        default_value_t = 0,
        value_name = "ROWS"
    )]
    pub replay_rate: u32,

    /// How long a call to Redis may take before it counts as an outage, 100ms to 1m
    #[arg(long, env = "OUTBOX_REDIS_TIMEOUT", default_value = "5s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub redis_timeout: Duration,

    /// How long a statement may take, and a dead connection go unnoticed, before it counts as an outage; 1s to 10m
    #[arg(long, env = "OUTBOX_POSTGRES_TIMEOUT", default_value = "10s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub postgres_timeout: Duration,

    /// First wait after a server failed; it doubles with each further failure, 1ms to 10s
    #[arg(long, env = "OUTBOX_BACKOFF_FIRST", default_value = "10ms", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub backoff_first: Duration,

    /// Longest wait between two tries during an outage, give or take 30%; 10ms to 1m
    #[arg(long, env = "OUTBOX_BACKOFF_MAX", default_value = "150ms", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub backoff_max: Duration,

    /// Address for HTTP requests, as 127.0.0.1:9464: /metrics, /healthz and /readyz. Without it there are none
    #[arg(long, env = "OUTBOX_LISTEN", value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,

    /// Collector that spans of publishing are sent to by OTLP over HTTP, as http://localhost:4318; only in a binary built with
    /// the feature otlp
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,

    /// How long to wait at start for servers that are not up yet, 0s to 1h
    #[arg(long, env = "OUTBOX_START_TIMEOUT", default_value = "10s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub start_timeout: Duration,
}

/// A consumer group that must have acknowledged a message before it is purged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Its name.
    pub group: String,
    /// The topics that it reads; all where there are none.
    pub topics: Vec<String>,
}

impl Hold {
    /// Reads `GROUP` or `GROUP=TOPIC,TOPIC`.
    fn parse(text: &str) -> std::result::Result<Self, String> {
        let (group, topics) = match text.rsplit_once('=') {
            Some((group, topics)) => (group, topics.split(',').map(str::to_owned).collect()),
            None => (text, Vec::new()),
        };
        if group.is_empty() || topics.iter().any(String::is_empty) {
            return Err("use GROUP, or GROUP=TOPIC,TOPIC".to_owned());
        }
        Ok(Hold {
            group: group.to_owned(),
            topics,
        })
    }
}

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

fn given_twice(file: &'static str, plain: &str) -> Error {
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
