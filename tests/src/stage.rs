//! One run: its servers, and what is known about it so far. `stage/actors.rs` are its processes.

mod actors;

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::atomic::AtomicUsize,
    time::{Duration, Instant},
};

use outbox_testkit::{Postgres, PostgresBuilder, Redis, RedisBuilder, eventually};
use tempfile::TempDir;
use tokio_postgres::Client;

use crate::{
    Error, OwnConsumer, Result,
    order::{KEY_LEN, SHOP_TABLES, Way},
    programs::EFFECTS_TABLE,
    scenario::{Naive, Scale},
};

pub use self::actors::Actor;
pub(crate) use self::actors::failed;

/// Longer than anything takes on a busy machine; a run that waits this long for one step has failed.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// What the names of all relays begin with, also in Postgres; the rest is a number.
pub(crate) const RELAY_NAME: &str = "relay-";

/// Who carries the messages in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// The naive code that the scenario names.
    Control,
    /// Outbox, relay and consumer.
    Outbox,
}

impl Arm {
    /// How long anything to happen is waited for. Naive code may hang for ever, and 6 s are more than it takes otherwise.
    pub(crate) fn patience(self) -> Duration {
        match self {
            Arm::Control => Duration::from_secs(6),
            Arm::Outbox => DEADLINE,
        }
    }
}

/// Where things are. A fault may put another server in the place of one.
#[derive(Debug)]
pub struct Servers {
    /// The shop's.
    pub postgres: Postgres,
    /// Everybody's.
    pub redis: Redis,
    /// The shop's database.
    pub shop: String,
    /// A server that no scenario faults.
    pub warehouse_server: &'static Postgres,
    /// The warehouse's database.
    pub warehouse: String,
}

/// What stays the same over all runs of a suite.
#[derive(Clone, Debug)]
pub struct Suite {
    /// The binary of this package, which also is every naive program.
    pub programs: PathBuf,
    /// A consumer of the user's in the place of ours.
    pub own_consumer: Option<OwnConsumer>,
    /// How large the runs are.
    pub scale: Scale,
    /// What random faults are drawn from.
    pub seed: u64,
    /// How long the soak strikes.
    pub soak: Duration,
}

/// How the servers of a scenario are set up and what its processes are told beyond the usual.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Options of the shop's Postgres.
    pub postgres: fn(PostgresBuilder) -> PostgresBuilder,
    /// Options of Redis.
    pub redis: fn(RedisBuilder) -> RedisBuilder,
    /// Further arguments of the relay, besides its defaults.
    pub relay: &'static [&'static str],
    /// Further arguments of the shop.
    pub shop: &'static [&'static str],
    /// Further arguments of the consumer, ours and the naive one, not one of the user's.
    pub consumer: &'static [&'static str],
}

impl Setting {
    /// Servers and processes with their defaults.
    pub const USUAL: Self = Self {
        postgres: |builder| builder,
        redis: |builder| builder,
        relay: &[],
        shop: &[],
        consumer: &[],
    };
}

/// One run: its servers, its processes, and what is known about it so far.
#[derive(Debug)]
pub struct Stage {
    /// Who carries the messages.
    pub arm: Arm,
    /// The servers.
    pub servers: Servers,
    /// The shop's processes; none after [`kill_shops`](Self::kill_shops).
    pub shops: Vec<Actor>,
    /// Relays, or the naive programs in their place.
    pub carriers: Vec<Actor>,
    /// Consumers; none where the naive code has none.
    pub consumers: Vec<Actor>,
    /// The suite's settings.
    pub suite: Suite,
    /// Facts that were committed and that Postgres may forget: see [`witness`](Self::witness).
    pub(crate) witnessed: HashSet<String>,
    /// Keys that the consumer must set aside, for a scenario whose handler cannot succeed for them.
    pub(crate) poison: HashSet<String>,
    /// Measurements that belong into the report.
    pub(crate) notes: Vec<String>,
    pub(crate) struck: Option<Instant>,
    /// The time to recover, where a strike has measured it.
    pub(crate) recovery: Option<Duration>,
    /// Processes that were started so far.
    started: AtomicUsize,
    naive: Naive,
    setting: Setting,
    files: TempDir,
}

impl Stage {
    /// Starts the servers, and nothing else.
    pub(crate) async fn open(
        arm: Arm,
        naive: Naive,
        setting: Setting,
        suite: Suite,
    ) -> Result<Self> {
        let postgres = (setting.postgres)(Postgres::builder()).start().await?;
        let redis = (setting.redis)(Redis::builder()).start().await?;
        let warehouse_server = Postgres::shared().await?;
        let shop = postgres.fresh_outbox().await?;
        let warehouse = warehouse_server.fresh_inbox().await?;
        let servers = Servers {
            postgres,
            redis,
            shop,
            warehouse_server,
            warehouse,
        };
        let stage = Self {
            arm,
            servers,
            shops: Vec::new(),
            carriers: Vec::new(),
            consumers: Vec::new(),
            suite,
            witnessed: HashSet::new(),
            poison: HashSet::new(),
            notes: Vec::new(),
            struck: None,
            recovery: None,
            started: AtomicUsize::new(0),
            naive,
            setting,
            files: TempDir::new()?,
        };
        stage
            .shop_client()
            .await?
            .batch_execute(SHOP_TABLES)
            .await?;
        let effects = match &stage.suite.own_consumer {
            Some(own) => own.setup_sql.clone(),
            None => EFFECTS_TABLE.to_owned(),
        };
        stage
            .warehouse_client()
            .await?
            .batch_execute(&effects)
            .await?;
        Ok(stage)
    }

    /// How the shop's messages get on their way in this run.
    #[must_use]
    pub fn way(&self) -> Way {
        match self.arm {
            Arm::Control => self.naive.way(),
            Arm::Outbox => Way::Outbox,
        }
    }

    /// Waits until the shops have acknowledged this many orders more.
    ///
    /// # Errors
    ///
    /// They do not in time.
    pub async fn orders_acknowledged(&self, more: usize) -> Result {
        let wanted = self.acknowledged_count() + more;
        let what = format!("{wanted} acknowledged orders");
        eventually(DEADLINE, &what, || async {
            let count = self.acknowledged_count();
            if count >= wanted { Ok(()) } else { Err(count) }
        })
        .await?;
        Ok(())
    }

    /// Notes the moment from which recovery is measured; without it, that is when the strike has ended.
    pub fn mark_struck(&mut self) {
        self.struck = Some(Instant::now());
    }

    /// Adds a measurement to the report.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Remembers all orders that the shop's Postgres has now. What of them is gone in the end was forgotten by Postgres:
    /// call it when nothing more will be committed on a server that then falls back.
    ///
    /// # Errors
    ///
    /// The server cannot be asked.
    pub async fn witness(&mut self) -> Result {
        let client = self.shop_client().await?;
        self.remember(&client).await
    }

    /// The same with the orders that another server has: the one that was the shop's until it fell.
    ///
    /// # Errors
    ///
    /// The server cannot be asked.
    pub async fn witness_on(&mut self, server: &Postgres) -> Result {
        let client = server.connect(&self.servers.shop).await?;
        self.remember(&client).await
    }

    async fn remember(&mut self, client: &Client) -> Result {
        let rows = client.query("SELECT key FROM orders", &[]).await?;
        self.witnessed
            .extend(rows.iter().map(|row| row.get::<_, String>(0)));
        Ok(())
    }

    /// Puts another Redis in the place of the present one, which is returned; everybody's connections go to the new one
    /// from their next connection on.
    ///
    /// # Errors
    ///
    /// A proxy fails.
    pub async fn put_redis(&mut self, redis: Redis) -> Result<Redis> {
        for link in self.links() {
            link.redis.retarget(redis.port()).await?;
        }
        Ok(std::mem::replace(&mut self.servers.redis, redis))
    }

    /// Puts another Postgres in the place of the shop's, which is returned. Open connections stay where they are.
    ///
    /// # Errors
    ///
    /// A proxy fails.
    pub async fn put_postgres(&mut self, postgres: Postgres) -> Result<Postgres> {
        for actor in self.shops.iter().chain(&self.carriers) {
            actor.link.postgres.retarget(postgres.port()).await?;
        }
        Ok(std::mem::replace(&mut self.servers.postgres, postgres))
    }

    /// A connection to the shop's database, not through a proxy.
    ///
    /// # Errors
    ///
    /// The server cannot be reached.
    pub async fn shop_client(&self) -> Result<Client> {
        Ok(self.servers.postgres.connect(&self.servers.shop).await?)
    }

    /// A connection to the warehouse's database, not through a proxy.
    ///
    /// # Errors
    ///
    /// The server cannot be reached.
    pub async fn warehouse_client(&self) -> Result<Client> {
        let server = self.servers.warehouse_server;
        Ok(server.connect(&self.servers.warehouse).await?)
    }

    /// Whether effects can be counted in this run.
    #[must_use]
    pub fn has_consumer(&self) -> bool {
        self.arm == Arm::Outbox || self.naive.consumer().is_some()
    }

    pub(crate) fn naive(&self) -> Naive {
        self.naive
    }

    /// How many orders the shops have acknowledged.
    #[must_use]
    pub fn acknowledged_count(&self) -> usize {
        // Before the first shop there is no file.
        let bytes = std::fs::metadata(self.acknowledged_file()).map_or(0, |file| file.len());
        usize::try_from(bytes).unwrap_or(usize::MAX) / (KEY_LEN + 1)
    }

    /// The keys of all orders that a shop has acknowledged.
    pub(crate) fn acknowledged(&self) -> Result<HashSet<String>> {
        let keys = std::fs::read_to_string(self.acknowledged_file())?;
        Ok(keys.lines().map(str::to_owned).collect())
    }

    fn acknowledged_file(&self) -> PathBuf {
        Path::join(self.files.path(), "acknowledged")
    }
}

/// Waits for a condition. A look that fails counts as one that saw nothing: servers are down in between.
///
/// # Errors
///
/// Not in time.
pub(crate) async fn until<F: Future<Output = Result<bool>>>(
    deadline: Duration,
    what: &str,
    mut condition: impl FnMut() -> F,
) -> Result {
    eventually(deadline, what, || {
        let holds = condition();
        async move {
            match holds.await {
                Ok(true) => Ok(()),
                Ok(false) => Err("not yet".to_owned()),
                Err(e) => Err(Error::to_string(&e)),
            }
        }
    })
    .await?;
    Ok(())
}
