//! The raw flags, as clap reads them from command line and environment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use secrecy::SecretString;

use crate::postgres::TlsMode;

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
    /// is the primary's; behind a ? may stand sentinel_user and sentinel_password. Of a cluster, any node, or
    /// several, of which the first that answers is taken: redis://user:password@host1:6379,host2:6379.
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
    /// GROUP is held to every stream, GROUP=TOPIC,TOPIC to those of these topics; in the variable several stand with spaces
    /// between. While a stream lacks the group, nothing is purged.
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
