//! What the story is played on: a private Postgres with two databases, a private Redis, and the relay's process.

use std::{path::PathBuf, process::Stdio, time::Duration};

use deadpool_postgres::{Manager, Pool};
use outbox_testkit::{Postgres, Process, Redis, find_relay_binary};
use tokio::process::Command;
use tokio_postgres::NoTls;

use crate::{Error, shop, warehouse};

/// What the relay puts before a topic to name its stream; its default.
pub(crate) const STREAM_PREFIX: &str = "outbox:";

/// A migration of an empty database takes well under a second.
const COMMAND_DEADLINE: Duration = Duration::from_secs(30);

/// The relay promises to stop within 10 s.
const STOP_DEADLINE: Duration = Duration::from_secs(15);

/// Redis answers on the same machine, or is dead.
const LOOK_DEADLINE: Duration = Duration::from_secs(2);

const CREATE_SHOP: &str = "CREATE DATABASE shop";
const CREATE_WAREHOUSE: &str = "CREATE DATABASE warehouse";

/// The servers. Dropped, they are killed and their data is removed.
pub(crate) struct Stage {
    postgres: Postgres,
    redis: Redis,
    relay_binary: PathBuf,
}

impl Stage {
    /// Starts both servers, and makes the databases `shop` and `warehouse`, each with its schema.
    pub(crate) async fn set() -> Result<Self, Error> {
        let relay_binary = find_relay_binary()?;
        let (postgres, redis) = tokio::try_join!(Postgres::start(), Redis::start())?;
        let admin = postgres.connect("postgres").await?;
        admin.batch_execute(CREATE_SHOP).await?;
        admin.batch_execute(CREATE_WAREHOUSE).await?;
        Ok(Self {
            postgres,
            redis,
            relay_binary,
        })
    }

    /// Brings the schemas into both databases with `outbox-relay migrate`; returns what it said.
    pub(crate) async fn migrate(&self) -> Result<Vec<String>, Error> {
        let outbox = self.command(&["migrate"], "shop").await?;
        let inbox = self.command(&["migrate", "--inbox"], "warehouse").await?;
        Ok([outbox, inbox].concat())
    }

    /// `outbox-relay status`, as a person would ask.
    pub(crate) async fn status(&self) -> Result<Vec<String>, Error> {
        self.command(&["status"], "shop").await
    }

    /// Starts the relay as a process of its own.
    pub(crate) fn start_relay(&self) -> Result<Process, Error> {
        let relay = Process::builder(&self.relay_binary)
            .arg("run")
            .env("DATABASE_URL", self.postgres.url("shop"))
            .env("REDIS_URL", self.redis.url())
            .spawn()?;
        Ok(relay)
    }

    /// Asks the relay to stop, and waits until it has.
    pub(crate) async fn stop_relay(&self, relay: &Process) -> Result<(), Error> {
        relay.terminate();
        let status = relay.wait(STOP_DEADLINE).await?;
        if !status.success() {
            return Err(format!("the relay was asked to stop and ended with {status}").into());
        }
        Ok(())
    }

    /// Connections to the shop's database: one for each cashier, and one to look.
    pub(crate) fn shop_database(&self) -> Result<Pool, Error> {
        self.pool("shop", shop::CASHIERS + 1)
    }

    /// Connections to the warehouse's database, for the consumers and one to look.
    pub(crate) fn warehouse_database(&self) -> Result<Pool, Error> {
        self.pool("warehouse", 9)
    }

    pub(crate) fn redis_url(&self) -> String {
        self.redis.url()
    }

    /// Kills Redis with everything in it.
    pub(crate) async fn kill_redis(&self) -> Result<(), Error> {
        Ok(self.redis.kill9().await?)
    }

    /// Starts Redis again, on the same port and empty.
    pub(crate) async fn restart_redis(&self) -> Result<(), Error> {
        Ok(self.redis.start_again().await?)
    }

    /// Entries in the stream, and whether the warehouse's group has been given and has acknowledged all of
    /// them. An error where Redis is down or the stream does not exist yet.
    pub(crate) async fn stream(&self) -> Result<Stream, Error> {
        tokio::time::timeout(LOOK_DEADLINE, self.look_at_stream()).await?
    }

    async fn look_at_stream(&self) -> Result<Stream, Error> {
        let mut redis = self.redis.connect().await?;
        let key = format!("{STREAM_PREFIX}{}", shop::TOPIC);
        let (stream, groups): (
            redis::streams::StreamInfoStreamReply,
            redis::streams::StreamInfoGroupsReply,
        ) = redis::pipe()
            .cmd("XINFO")
            .arg("STREAM")
            .arg(&key)
            .cmd("XINFO")
            .arg("GROUPS")
            .arg(&key)
            .query_async(&mut redis)
            .await?;
        let group = groups.groups.iter().find(|g| g.name == warehouse::GROUP);
        Ok(Stream {
            entries: u64::try_from(stream.length)?,
            drained: group.is_some_and(|group| {
                group.pending == 0 && group.last_delivered_id == stream.last_generated_id
            }),
        })
    }

    /// Runs one of the relay's other commands to its end; returns what it said.
    async fn command(&self, args: &[&str], database: &str) -> Result<Vec<String>, Error> {
        let output = Command::new(&self.relay_binary)
            .args(args)
            .env("DATABASE_URL", self.postgres.url(database))
            .env("REDIS_URL", self.redis.url())
            .env("OUTBOX_LOG", "warn")
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(COMMAND_DEADLINE, output).await??;
        if output.status.success() {
            let said = String::from_utf8_lossy(&output.stdout);
            return Ok(said.lines().map(str::to_owned).collect());
        }
        let problem = String::from_utf8_lossy(&output.stderr);
        Err(format!("outbox-relay {} failed: {}", args.join(" "), problem.trim()).into())
    }

    fn pool(&self, database: &str, connections_max: usize) -> Result<Pool, Error> {
        let manager = Manager::new(self.postgres.url(database).parse()?, NoTls);
        Ok(Pool::builder(manager).max_size(connections_max).build()?)
    }
}

/// What [`Stage::stream`] saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stream {
    pub(crate) entries: u64,
    pub(crate) drained: bool,
}
