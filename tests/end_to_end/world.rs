//! Two databases, a Redis, a relay and a consumer, as two services have them.

use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use outbox_consumer::{
    Builder, Consumer, Counters, Message, RedisAddress, Tls, TlsCheck, Transaction,
};
use outbox_producer::write;
use outbox_testkit::{Postgres, Process, ProcessBuilder, Redis, eventually};
use tokio::{sync::oneshot, task::JoinHandle};
use tokio_postgres::{Client, NoTls};

/// Longer than anything takes on a busy machine; a test that waits this long has failed.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// The relay's default prefix and the topic of all tests.
pub(crate) const STREAM: &str = "outbox:orders";

const TOPIC: &str = "orders";

/// Neither table has a unique key on what is counted: double effects show.
const SHOP_TABLES: &str = "CREATE TABLE orders (key text NOT NULL)";
const WAREHOUSE_TABLES: &str = "CREATE TABLE effects (key text NOT NULL)";

pub(crate) struct World {
    pub(crate) redis: Redis,
    /// What relay and consumers are told of it.
    pub(crate) redis_url: String,
    /// Whom they trust, where that address is with TLS.
    pub(crate) redis_tls: Tls,
    shop_url: String,
    warehouse_url: String,
    pub(crate) shop: Client,
    pub(crate) warehouse: Client,
}

impl World {
    /// Both databases on the shared Postgres, and a Redis of its own that keeps nothing.
    pub(crate) async fn open() -> Self {
        Self::open_with(Redis::start().await.unwrap()).await
    }

    /// Both databases on the shared Postgres, with a Redis as it is given.
    pub(crate) async fn open_with(redis: Redis) -> Self {
        let postgres = Postgres::shared().await.unwrap();
        let shop_database = postgres.fresh_outbox().await.unwrap();
        let warehouse_database = postgres.fresh_inbox().await.unwrap();
        let shop = postgres.connect(&shop_database).await.unwrap();
        shop.batch_execute(SHOP_TABLES).await.unwrap();
        let warehouse = postgres.connect(&warehouse_database).await.unwrap();
        warehouse.batch_execute(WAREHOUSE_TABLES).await.unwrap();
        Self {
            redis_url: redis.url(),
            redis_tls: Tls::default(),
            redis,
            shop_url: postgres.url(&shop_database),
            warehouse_url: postgres.url(&warehouse_database),
            shop,
            warehouse,
        }
    }

    /// One more connection to the shop's database.
    pub(crate) async fn cashier(&self) -> Client {
        let (client, connection) = tokio_postgres::connect(&self.shop_url, NoTls)
            .await
            .unwrap();
        tokio::spawn(connection);
        client
    }

    /// The relay's binary with its default settings.
    pub(crate) fn relay(&self) -> Process {
        self.relay_command().spawn().unwrap()
    }

    /// The same before it is started, for settings of the test's own.
    pub(crate) fn relay_command(&self) -> ProcessBuilder {
        let relay = outbox_testkit::relay(&self.shop_url, &self.redis_url);
        let relay = match self.redis_tls.check {
            TlsCheck::Full => relay,
            TlsCheck::Ca => relay.args(["--redis-tls-mode", "verify-ca"]),
            TlsCheck::Nothing => relay.args(["--redis-tls-mode", "require"]),
        };
        match &self.redis_tls.ca_file {
            Some(file) => relay.arg("--redis-ca-file").arg(file),
            None => relay,
        }
    }

    /// The same, for a test of what Redis refuses when it is full: nothing pauses before.
    pub(crate) fn relay_without_ceiling(&self) -> Process {
        let relay = self.relay_command();
        let relay = relay.args(["--redis-memory-ceiling", "0"]);
        relay.spawn().unwrap()
    }

    /// A consumer that writes one effect for each message.
    pub(crate) fn consumer(&self) -> Running {
        self.consumer_with(ship)
    }

    /// A consumer with a handler of the test's own.
    pub(crate) fn consumer_with<F>(&self, handler: F) -> Running
    where
        F: AsyncFn(&Transaction<'_>, &Message) -> Result<(), tokio_postgres::Error>
            + Send
            + 'static,
    {
        run(self.builder("warehouse", TOPIC), handler)
    }

    /// The settings of a consumer of this group and topic.
    pub(crate) fn builder(&self, group: &str, topic: &str) -> Builder {
        let manager = Manager::new(self.warehouse_url.parse().unwrap(), NoTls);
        let pool = Pool::builder(manager).max_size(4).build().unwrap();
        let mut redis = RedisAddress::parse(&self.redis_url).unwrap();
        if redis.is_with_tls() {
            redis = redis.with_tls(self.redis_tls.clone()).unwrap();
        }
        Consumer::builder(pool, redis, group)
            .topic(topic)
            .stream_prefix("outbox:")
            .outage_backoff(Duration::from_millis(10), Duration::from_millis(200))
    }

    /// Runs a command of the relay's binary to its end with success, and returns its lines.
    pub(crate) async fn command(&self, args: &[&str]) -> Vec<String> {
        let process = Process::builder(outbox_testkit::relay_binary())
            .args(args.iter().copied())
            .env("DATABASE_URL", &self.shop_url)
            .env("REDIS_URL", &self.redis_url)
            .spawn()
            .unwrap();
        let status = process.wait(DEADLINE).await.unwrap();
        assert!(status.success(), "{args:?}: {:?}", process.lines());
        process.lines()
    }

    /// The keys of all orders that were committed, sorted.
    pub(crate) async fn orders(&self) -> Vec<String> {
        keys(&self.shop, "SELECT key FROM orders").await
    }

    /// The keys of all effects, sorted, as often as they took effect.
    pub(crate) async fn effects(&self) -> Vec<String> {
        keys(&self.warehouse, "SELECT key FROM effects").await
    }

    /// Waits until every message that was committed is marked as sent.
    pub(crate) async fn everything_sent(&self) {
        let unsent = "SELECT count(*) FROM outbox.message_status WHERE NOT sent";
        eventually(DEADLINE, "no message left to send", || async {
            let unsent: i64 = self.shop.query_one(unsent, &[]).await.unwrap().get(0);
            if unsent == 0 { Ok(()) } else { Err(unsent) }
        })
        .await
        .unwrap();
    }

    /// Waits until each order has an effect and the group has settled all that is in the stream, then sees that
    /// orders and effects are the same, each once.
    pub(crate) async fn one_effect_for_each_order(&self) {
        let orders = self.orders().await;
        eventually(DEADLINE, "an effect of each order", || async {
            let mut effects = self.effects().await;
            effects.dedup();
            let missing = orders
                .iter()
                .filter(|key| effects.binary_search(key).is_err());
            match missing.count() {
                0 => Ok(()),
                missing => Err(missing),
            }
        })
        .await
        .unwrap();
        self.stream_settled().await;
        assert_eq!(self.effects().await, orders);
    }

    /// Waits until the group has been given and has acknowledged everything in the stream.
    pub(crate) async fn stream_settled(&self) {
        eventually(DEADLINE, "a group with nothing left to do", || async {
            let mut redis = self.redis.connect().await.unwrap();
            let (stream, groups): (
                redis::streams::StreamInfoStreamReply,
                redis::streams::StreamInfoGroupsReply,
            ) = redis::pipe()
                .cmd("XINFO")
                .arg("STREAM")
                .arg(STREAM)
                .cmd("XINFO")
                .arg("GROUPS")
                .arg(STREAM)
                .query_async(&mut redis)
                .await
                .map_err(|e| e.to_string())?;
            let group = groups.groups.first().ok_or("no group")?;
            if group.pending == 0 && group.last_delivered_id == stream.last_generated_id {
                Ok(())
            } else {
                Err(format!("{group:?}"))
            }
        })
        .await
        .unwrap();
    }

    /// The message key of each entry in the stream, in the stream's order; none where there is no stream.
    pub(crate) async fn stream_keys(&self) -> Vec<String> {
        let mut redis = self.redis.connect().await.unwrap();
        let range: redis::streams::StreamRangeReply = redis::cmd("XRANGE")
            .arg(&[STREAM, "-", "+"])
            .query_async(&mut redis)
            .await
            .unwrap();
        range
            .ids
            .iter()
            .map(|entry| entry.get("message_key").unwrap())
            .collect()
    }
}

/// Runs a consumer in the background.
pub(crate) fn run<F>(builder: Builder, handler: F) -> Running
where
    F: AsyncFn(&Transaction<'_>, &Message) -> Result<(), tokio_postgres::Error> + Send + 'static,
{
    let consumer = builder.build().unwrap();
    let counters = consumer.counters();
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(consumer.run(handler, async move {
        let _ = stopped.await;
    }));
    Running {
        counters,
        stop,
        task,
    }
}

/// A consumer that runs in the background.
pub(crate) struct Running {
    pub(crate) counters: Counters,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), outbox_consumer::Error>>,
}

impl Running {
    /// Tells it to stop, and waits until it has.
    pub(crate) async fn stop(self) {
        let _ = self.stop.send(());
        tokio::time::timeout(DEADLINE, self.task)
            .await
            .expect("the consumer stops")
            .unwrap()
            .unwrap();
    }
}

/// Writes an order and its message into the transaction; what becomes of both is the caller's.
pub(crate) async fn write_order(transaction: &tokio_postgres::Transaction<'_>, key: &str) {
    transaction
        .execute("INSERT INTO orders (key) VALUES ($1)", &[&key])
        .await
        .unwrap();
    let message = outbox_producer::Message::raw_json(TOPIC, "{}").message_key(key);
    write(transaction, &message).await.unwrap();
}

/// An order in a transaction of its own.
pub(crate) async fn place_order(client: &mut Client, key: &str) {
    let transaction = client.transaction().await.unwrap();
    write_order(&transaction, key).await;
    transaction.commit().await.unwrap();
}

/// The handler of [`World::consumer`].
pub(crate) async fn ship(
    tx: &Transaction<'_>,
    message: &Message,
) -> Result<(), tokio_postgres::Error> {
    let sql = "INSERT INTO effects (key) VALUES ($1)";
    tx.execute(sql, &[&message.message_key()]).await.map(drop)
}

async fn keys(client: &Client, sql: &str) -> Vec<String> {
    let rows = client.query(sql, &[]).await.unwrap();
    let mut keys: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    keys.sort();
    keys
}
