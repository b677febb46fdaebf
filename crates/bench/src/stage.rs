//! What the measures are taken on: a private Postgres, a private Redis for each arm, and the relay's process.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use outbox_testkit::{Postgres, Process, Redis, find_relay_binary};
use redis::aio::MultiplexedConnection;
use tokio::sync::OnceCell;
use tokio_postgres::Client;

use crate::{Error, backlog::Backlog, progress::Progress, rows::ONE_TOPIC, sizes::Sizes};

/// The relay promises to stop within 10 s.
const STOP_DEADLINE: Duration = Duration::from_secs(15);

/// Nothing here takes that long: past this it hangs.
const STALL_DEADLINE: Duration = Duration::from_secs(300);

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Not the defaults, and the same for all arms: enough memory, and neither a checkpoint of Postgres' own in the middle of an
/// arm nor the zeros of a new segment of the log before a commit (17 ms), which would fall into one of them by chance.
pub(crate) const POSTGRES_SETTINGS: [(&str, &str); 5] = [
    ("shared_buffers", "512MB"),
    ("max_wal_size", "4GB"),
    ("checkpoint_timeout", "1h"),
    ("wal_init_zero", "off"),
    ("max_connections", "100"),
];

/// Where the sandbox of the servers is, as the mount table says it.
const MOUNTS: &str = "/proc/self/mounts";

/// Clock ticks of a second in `/proc/PID/stat`, on every Linux.
const TICKS: f64 = 100.0;

/// The servers and what all measures share. Dropped, the servers are killed and their data is removed.
pub(crate) struct Stage {
    pub(crate) sizes: Sizes,
    pub(crate) progress: Progress,
    postgres: Postgres,
    relay_binary: PathBuf,
    backlog: OnceCell<Backlog>,
}

impl Stage {
    /// Starts Postgres.
    pub(crate) async fn set(sizes: Sizes, progress: Progress) -> Result<Self, Error> {
        let relay_binary = find_relay_binary()?;
        let mut builder = Postgres::builder();
        for (name, value) in POSTGRES_SETTINGS {
            builder = builder.setting(name, value);
        }
        Ok(Self {
            sizes,
            progress,
            postgres: builder.start().await?,
            relay_binary,
            backlog: OnceCell::new(),
        })
    }

    /// The backlog of one topic that several measures drain, each as if for the first time.
    pub(crate) async fn backlog(&self) -> Result<&Backlog, Error> {
        let rows = self.sizes.drain_rows;
        self.backlog
            .get_or_try_init(|| Backlog::load(self, rows, ONE_TOPIC))
            .await
    }

    /// Says what runs now, of so many repetitions.
    pub(crate) fn round(&self, what: &str, round: usize) {
        self.progress
            .step(format!("{what} ({} of {})", round + 1, self.sizes.repeats));
    }

    /// A session in a database.
    pub(crate) async fn connect(&self, database: &str) -> Result<Client, Error> {
        Ok(self.postgres.connect(database).await?)
    }

    /// The same for what runs beside Postgres.
    pub(crate) async fn connect_beside(&self, database: &str) -> Result<Client, Error> {
        Ok(self.postgres.connect_by_socket(database).await?)
    }

    pub(crate) async fn fresh_outbox(&self) -> Result<String, Error> {
        Ok(self.postgres.fresh_outbox().await?)
    }

    pub(crate) async fn fresh_inbox(&self) -> Result<String, Error> {
        Ok(self.postgres.fresh_inbox().await?)
    }

    /// Takes a database away, for the room that it needs.
    pub(crate) async fn drop_database(&self, database: &str) -> Result<(), Error> {
        let sql = format!("DROP DATABASE {database} WITH (FORCE)");
        Ok(self.connect("postgres").await?.batch_execute(&sql).await?)
    }

    /// How an application connects, which runs somewhere else.
    pub(crate) fn url(&self, database: &str) -> String {
        self.postgres.url(database)
    }

    /// How the relay connects, which runs beside Postgres: by its socket.
    pub(crate) fn url_beside(&self, database: &str) -> String {
        self.postgres.socket_url(database)
    }

    /// The same for another role.
    pub(crate) fn url_beside_as(&self, role: &str, database: &str) -> String {
        self.url_beside(database)
            .replacen("postgres@", &format!("{role}@"), 1)
    }

    /// How often Postgres' log has this text by now.
    pub(crate) fn logged(&self, text: &str) -> usize {
        self.postgres.log().matches(text).count()
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.postgres.data_dir()
    }

    /// Starts the relay between a database and a Redis, with its defaults but for `args`.
    pub(crate) fn relay(&self, url: &str, redis: &Redis, args: &[&str]) -> Result<Relay, Error> {
        let process = Process::builder(&self.relay_binary)
            .arg("run")
            .args(args.iter().copied())
            .env("DATABASE_URL", url)
            .env("REDIS_URL", redis.url())
            .env("OUTBOX_LOG", "warn")
            .spawn()?;
        Ok(Relay { process })
    }
}

/// A running relay.
pub(crate) struct Relay {
    process: Process,
}

impl Relay {
    /// Processor time so far, in seconds.
    pub(crate) fn cpu_s(&self) -> Result<f64, Error> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.process.pid()))?;
        // The name, in brackets, may have spaces.
        let fields = stat.rsplit(')').next().unwrap_or_default();
        let ticks: Vec<f64> = fields
            .split_whitespace()
            .skip(11)
            .take(2)
            .map_while(|t| t.parse().ok())
            .collect();
        Ok(ticks.iter().sum::<f64>() / TICKS)
    }

    /// The most memory it ever had, in megabytes.
    pub(crate) fn peak_rss_mb(&self) -> Result<f64, Error> {
        Ok(self.process.peak_rss_bytes()? as f64 / 1e6)
    }

    /// Asks it to stop, and waits until it has.
    pub(crate) async fn stop(self) -> Result<(), Error> {
        self.process.terminate();
        let status = self.process.wait(STOP_DEADLINE).await?;
        if status.success() {
            return Ok(());
        }
        let said = self.process.lines().join("\n");
        Err(format!("the relay was asked to stop and ended with {status}:\n{said}").into())
    }

    /// Waits until the marker has passed `id`.
    pub(crate) async fn published(
        &self,
        redis: &mut MultiplexedConnection,
        id: u64,
    ) -> Result<(), Error> {
        let begun = Instant::now();
        while published(redis).await? < id {
            if self.process.exit_status().is_some() || begun.elapsed() > STALL_DEADLINE {
                let said = self.process.lines().join("\n");
                return Err(format!("the relay did not get to message {id}:\n{said}").into());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }
}

/// How far the relay has published: the marker's `high`, 0 without one.
pub(crate) async fn published(redis: &mut MultiplexedConnection) -> Result<u64, Error> {
    let high: Option<u64> = redis::cmd("HGET")
        .arg("outbox:relay:marker")
        .arg("high")
        .query_async(redis)
        .await?;
    Ok(high.unwrap_or(0))
}

/// Processor time of a Redis so far, in seconds.
pub(crate) async fn redis_cpu_s(redis: &mut MultiplexedConnection) -> Result<f64, Error> {
    let info: String = redis::cmd("INFO").arg("cpu").query_async(redis).await?;
    let of = |name: &str| {
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|value| value.trim().parse::<f64>().ok())
    };
    of("used_cpu_sys")
        .zip(of("used_cpu_user"))
        .map(|(sys, user)| sys + user)
        .ok_or_else(|| "INFO cpu has no used_cpu".into())
}

/// The file system that holds `path`, as "type at mount point".
pub(crate) fn file_system_of(path: &Path) -> String {
    let mounts = fs::read_to_string(MOUNTS).unwrap_or_default();
    mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            Some((fields.next()?, fields.next()?))
        })
        .filter(|(point, _)| path.starts_with(point))
        .max_by_key(|(point, _)| point.len())
        .map_or_else(
            || "unknown".to_owned(),
            |(point, kind)| format!("{kind} at {point}"),
        )
}
