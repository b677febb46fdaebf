//! What each test starts with: a database with an inbox and a table of effects, and a Redis.

use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use outbox_consumer::{Builder, Consumer, Counters, Error, Message, RedisAddress, Transaction};
use outbox_testkit::{Postgres, Redis, eventually};
use redis::aio::MultiplexedConnection;
use tokio::{sync::oneshot, task::JoinHandle};
use tokio_postgres::{Client, NoTls};

/// Longer than anything takes on a busy machine; a test that waits this long has failed.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) const GROUP: &str = "shipping";

/// The stream of the topic `orders`, as long as it has one partition.
pub(crate) const ORDERS: &str = "outbox:orders";

/// No unique key: double effects show.
pub(crate) const SHOP_TABLES: &str = "CREATE TABLE effects (grp text NOT NULL, key text NOT NULL);
    CREATE TABLE counter (n integer NOT NULL); INSERT INTO counter VALUES (0)";

pub(crate) struct Shop {
    pub(crate) redis: Redis,
    pub(crate) postgres_url: String,
    pub(crate) database: String,
    pub(crate) db: Client,
}

impl Shop {
    /// On the shared Postgres, with a Redis of its own that keeps nothing.
    pub(crate) async fn open() -> Self {
        Self::open_on(
            Postgres::shared().await.unwrap(),
            Redis::start().await.unwrap(),
        )
        .await
    }

    pub(crate) async fn open_on(postgres: &Postgres, redis: Redis) -> Self {
        let database = postgres.fresh_inbox().await.unwrap();
        let db = postgres.connect(&database).await.unwrap();
        db.batch_execute(SHOP_TABLES).await.unwrap();
        Self {
            redis,
            postgres_url: postgres.url(&database),
            database,
            db,
        }
    }

    /// A consumer of the topic `orders` that gives up and claims quickly.
    pub(crate) fn consumer(&self) -> Builder {
        consumer_at(&self.postgres_url, &self.redis.url()).topic("orders")
    }

    /// The same with a pool of another size.
    pub(crate) fn consumer_on(&self, pool: Pool) -> Builder {
        quickly(Consumer::builder(
            pool,
            redis::Client::open(self.redis.url()).unwrap(),
            GROUP,
        ))
        .topic("orders")
    }

    pub(crate) async fn redis(&self) -> MultiplexedConnection {
        self.redis.connect().await.unwrap()
    }

    /// Publishes one message as the relay does.
    pub(crate) async fn publish(&self, topic: &str, key: &str) -> String {
        let mut connection = self.redis().await;
        entry(&stream(topic), key, "{}")
            .query_async(&mut connection)
            .await
            .unwrap()
    }

    /// Publishes `order-0`, `order-1` and so on to `orders`.
    pub(crate) async fn publish_many(&self, count: usize) {
        let mut pipeline = redis::pipe();
        for n in 0..count {
            pipeline.add_command(entry(ORDERS, &format!("order-{n}"), "{}"));
        }
        let mut connection = self.redis().await;
        pipeline
            .query_async::<Vec<String>>(&mut connection)
            .await
            .unwrap();
    }

    /// The keys of all effects, sorted, as often as they took effect.
    pub(crate) async fn effects(&self) -> Vec<String> {
        let rows = self
            .db
            .query("SELECT key FROM effects ORDER BY key COLLATE \"C\"", &[])
            .await
            .unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    pub(crate) async fn count(&self, sql: &str) -> i64 {
        self.db.query_one(sql, &[]).await.unwrap().get(0)
    }

    pub(crate) async fn effects_are(&self, expected: &[&str]) {
        eventually(DEADLINE, "the effects", || async {
            let effects = self.effects().await;
            if effects == expected {
                Ok(())
            } else {
                Err(effects)
            }
        })
        .await
        .unwrap();
    }

    /// Waits for `count` effects, and that each is there once.
    pub(crate) async fn single_effects(&self, count: usize) {
        eventually(DEADLINE, "single effects", || async {
            let all = self.count("SELECT count(*) FROM effects").await;
            let distinct = self
                .count("SELECT count(DISTINCT (grp, key)) FROM effects")
                .await;
            if all == count as i64 && distinct == all {
                Ok(())
            } else {
                Err((all, distinct))
            }
        })
        .await
        .unwrap();
    }

    /// Waits for some effects.
    pub(crate) async fn effects_begin(&self, count: i64) {
        eventually(DEADLINE, "the first effects", || async {
            let all = self.count("SELECT count(*) FROM effects").await;
            if all >= count { Ok(()) } else { Err(all) }
        })
        .await
        .unwrap();
    }

    pub(crate) async fn pending(&self, topic: &str) -> usize {
        let mut connection = self.redis().await;
        let summary: redis::RedisResult<redis::Value> = redis::cmd("XPENDING")
            .arg(stream(topic))
            .arg(GROUP)
            .query_async(&mut connection)
            .await;
        let summary = match summary {
            Ok(summary) => summary,
            // No group yet.
            Err(error) if error.code() == Some("NOGROUP") => return 0,
            Err(error) => panic!("{error}"),
        };
        let redis::Value::Array(parts) = summary else {
            panic!("{summary:?}")
        };
        let redis::Value::Int(count) = parts[0] else {
            panic!("{parts:?}")
        };
        usize::try_from(count).unwrap()
    }

    pub(crate) async fn nothing_pending(&self) {
        eventually(DEADLINE, "no pending entries", || async {
            match self.pending("orders").await {
                0 => Ok(()),
                pending => Err(pending),
            }
        })
        .await
        .unwrap();
    }

    pub(crate) async fn members(&self) -> Vec<String> {
        let mut connection = self.redis().await;
        let reply: redis::streams::StreamInfoConsumersReply = redis::cmd("XINFO")
            .arg("CONSUMERS")
            .arg(ORDERS)
            .arg(GROUP)
            .query_async(&mut connection)
            .await
            .unwrap();
        reply
            .consumers
            .into_iter()
            .map(|consumer| consumer.name)
            .collect()
    }

    /// Key, attempts and reason of each dead letter.
    pub(crate) async fn dead_letters(&self) -> Vec<(Option<String>, i32, String)> {
        let sql = "SELECT message_key, attempts, reason FROM inbox.dead_letters ORDER BY id";
        let rows = self.db.query(sql, &[]).await.unwrap();
        rows.iter()
            .map(|row| (row.get(0), row.get(1), row.get(2)))
            .collect()
    }

    pub(crate) async fn dead_letter_count(&self, count: usize) {
        eventually(DEADLINE, "dead letters", || async {
            let letters = self.dead_letters().await;
            if letters.len() == count {
                Ok(())
            } else {
                Err(letters)
            }
        })
        .await
        .unwrap();
    }

    /// Gives pending entries to another member, as if it had read them `idle` ago and done nothing since.
    pub(crate) async fn held_by(&self, member: &str, count: usize, idle: Duration) -> Vec<String> {
        let mut connection = self.redis().await;
        let _: redis::RedisResult<()> = redis::cmd("XGROUP")
            .arg(&["CREATE", ORDERS, GROUP, "0", "MKSTREAM"])
            .query_async(&mut connection)
            .await;
        let reply: redis::streams::StreamReadReply = redis::cmd("XREADGROUP")
            .arg(&["GROUP", GROUP, member, "COUNT"])
            .arg(count)
            .arg(&["STREAMS", ORDERS, ">"])
            .query_async(&mut connection)
            .await
            .unwrap();
        let ids: Vec<String> = reply.keys[0].ids.iter().map(|id| id.id.clone()).collect();
        assert_eq!(ids.len(), count);
        let idle_ms = u64::try_from(idle.as_millis()).unwrap();
        redis::cmd("XCLAIM")
            .arg(&[ORDERS, GROUP, member, "0"])
            .arg(&ids)
            .arg("IDLE")
            .arg(idle_ms)
            .arg("JUSTID")
            .query_async::<Vec<String>>(&mut connection)
            .await
            .unwrap();
        ids
    }
}

pub(crate) fn pool(postgres_url: &str) -> Pool {
    pool_of(postgres_url, 8)
}

pub(crate) fn pool_of(postgres_url: &str, connections_max: usize) -> Pool {
    let manager = Manager::from_config(
        postgres_url.parse().unwrap(),
        NoTls,
        ManagerConfig {
            recycling_method: RecyclingMethod::Fast,
        },
    );
    Pool::builder(manager)
        .max_size(connections_max)
        .build()
        .unwrap()
}

pub(crate) fn consumer_at(postgres_url: &str, redis_url: &str) -> Builder {
    let redis = RedisAddress::parse(redis_url).unwrap();
    quickly(Consumer::builder(pool(postgres_url), redis, GROUP))
}

fn quickly(builder: Builder) -> Builder {
    let ms = Duration::from_millis;
    builder
        .batch(10)
        .claim_after(ms(2_000))
        .retry_backoff(ms(5), ms(20))
        .outage_backoff(ms(10), ms(100))
        .response_timeout(ms(2_000))
        .lease(ms(1_000))
}

/// Nothing of an outage counts for a message.
pub(crate) fn unharmed(consumer: &Running) {
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.failed, counts.dead, counts.lost), (0, 0, 0));
}

/// The stream of a topic that has one partition.
pub(crate) fn stream(topic: &str) -> String {
    format!("outbox:{topic}")
}

/// An entry by the contract of the stream's fields; the outbox id is of no matter here.
pub(crate) fn entry(stream: &str, key: &str, payload: &str) -> redis::Cmd {
    let mut command = redis::cmd("XADD");
    command
        .arg(stream)
        .arg("*")
        .arg("id")
        .arg(7)
        .arg("message_key")
        .arg(key);
    command
        .arg("created_at")
        .arg("2026-02-03T04:05:06.789012Z")
        .arg("payload")
        .arg(payload);
    command
}

/// The plain handler: one effect for each message.
pub(crate) async fn ship(
    tx: &Transaction<'_>,
    message: &Message,
) -> Result<(), tokio_postgres::Error> {
    let sql = "INSERT INTO effects (grp, key) VALUES ('shipping', $1)";
    tx.execute(sql, &[&message.message_key()]).await.map(drop)
}

/// A consumer that runs in the background.
pub(crate) struct Running {
    pub(crate) counters: Counters,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), Error>>,
}

impl Running {
    /// Ends it as a crash does: nothing is released, nobody is told.
    pub(crate) fn crash(self) {
        self.task.abort();
    }

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

pub(crate) fn run<F, E>(builder: Builder, handler: F) -> Running
where
    F: AsyncFn(&Transaction<'_>, &Message) -> Result<(), E> + Send + 'static,
    E: Into<outbox_consumer::HandlerError> + 'static,
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
