//! An outbox and its Redis, both of which may be faulted, and the comparison of what they hold.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;
use std::time::Duration;

use outbox_testkit::{Postgres, Process, ProcessBuilder, Redis, eventually, relay};
use redis::AsyncCommands;
use redis::streams::StreamRangeReply;
use tokio_postgres::Client;

/// Long enough for anything on a busy machine; only a failure waits this long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// A relay that is told to stop is gone within this time.
pub(crate) const STOP: Duration = Duration::from_secs(10);

/// The marker's key under the default prefix.
pub(crate) const MARKER: &str = "outbox:relay:marker";

/// The Postgres of a test: the one that all share, or one that may be faulted.
pub(crate) enum Server {
    Shared(&'static Postgres),
    Own(Box<Postgres>),
}

impl Deref for Server {
    type Target = Postgres;

    fn deref(&self) -> &Postgres {
        match self {
            Server::Shared(postgres) => postgres,
            Server::Own(postgres) => postgres,
        }
    }
}

/// A producer's database and the Redis that its messages go to. Unlike `support::Outbox` it can own its Postgres.
pub(crate) struct Pair {
    pub(crate) postgres: Server,
    pub(crate) database: String,
    /// A session past all proxies.
    pub(crate) sql: Client,
    pub(crate) redis: Redis,
}

/// An entry of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) stream_id: String,
    pub(crate) id: i64,
    pub(crate) message_key: String,
    pub(crate) ordering_key: Option<String>,
    pub(crate) payload: Vec<u8>,
}

/// Where a cursor stands: epoch, page and `high`.
pub(crate) type Position = (i64, i64, i64);

impl Pair {
    /// A fresh database on the shared Postgres, and a Redis of its own.
    pub(crate) async fn start() -> Self {
        Self::with_redis(Redis::start().await.unwrap()).await
    }

    /// A fresh database on the shared Postgres.
    pub(crate) async fn with_redis(redis: Redis) -> Self {
        Self::on(Server::Shared(Postgres::shared().await.unwrap()), redis).await
    }

    /// A Postgres that may be faulted, and a Redis.
    pub(crate) async fn with_own_postgres() -> Self {
        let postgres = Postgres::start().await.unwrap();
        Self::on(
            Server::Own(Box::new(postgres)),
            Redis::start().await.unwrap(),
        )
        .await
    }

    /// A fresh database on a certain server.
    pub(crate) async fn on(postgres: Server, redis: Redis) -> Self {
        let database = postgres.fresh_outbox().await.unwrap();
        let sql = postgres.connect(&database).await.unwrap();
        Pair {
            postgres,
            database,
            sql,
            redis,
        }
    }

    /// Connects anew, after the server was restarted or replaced.
    pub(crate) async fn reconnect(&mut self) {
        self.sql = self.postgres.connect(&self.database).await.unwrap();
    }

    /// The relay, about to be started.
    pub(crate) fn relay(&self) -> ProcessBuilder {
        self.relay_via(self.postgres.port(), self.redis.port())
    }

    /// The relay on its way through proxies, or to other servers.
    pub(crate) fn relay_via(&self, postgres_port: u16, redis_port: u16) -> ProcessBuilder {
        relay(
            &self.postgres.url_via(postgres_port, &self.database),
            &self.redis.url_via(redis_port),
        )
    }

    /// Writes messages in one transaction, with the keys `{prefix}-1` and so on, over eight ordering keys.
    pub(crate) async fn write(&self, topic: &str, prefix: &str, count: i64) {
        self.sql
            .execute(
                "INSERT INTO outbox.messages (topic, message_key, ordering_key, payload)
                 SELECT $1, $2 || '-' || n, 'k' || n % 8, json_build_object('n', n)
                 FROM generate_series(1, $3::bigint) AS n",
                &[&topic, &prefix, &count],
            )
            .await
            .unwrap();
    }

    /// All entries of a topic's stream, in its order.
    pub(crate) async fn entries(&self, topic: &str) -> Vec<Entry> {
        entries_of(&self.redis, &format!("outbox:{topic}")).await
    }

    /// How many entries the topic's stream has.
    pub(crate) async fn count(&self, topic: &str) -> usize {
        let mut redis = self.redis.connect().await.unwrap();
        redis.xlen(format!("outbox:{topic}")).await.unwrap()
    }

    /// How often each message key stands in a topic's stream.
    pub(crate) async fn counts(&self, topic: &str) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for entry in self.entries(topic).await {
            *counts.entry(entry.message_key).or_default() += 1;
        }
        counts
    }

    /// Waits until the topic's stream has this many entries at least.
    pub(crate) async fn reaches(&self, topic: &str, count: usize, deadline: Duration) {
        eventually(deadline, &format!("{count} entries of {topic}"), || async {
            let mut redis = self.redis.connect().await.map_err(|e| e.to_string())?;
            match redis.xlen::<_, usize>(format!("outbox:{topic}")).await {
                Ok(seen) if seen >= count => Ok(()),
                Ok(seen) => Err(format!("{seen} entries")),
                Err(error) => Err(error.to_string()),
            }
        })
        .await
        .unwrap();
    }

    /// The messages of the database by topic, without dead letters: id, message key, ordering key.
    async fn messages(&self) -> BTreeMap<String, Vec<(i64, String, Option<String>)>> {
        let rows = self
            .sql
            .query(
                "SELECT topic, id, message_key, ordering_key FROM outbox.messages AS m
                 WHERE NOT EXISTS (SELECT FROM outbox.dead_letters AS d WHERE d.id = m.id) ORDER BY id",
                &[],
            )
            .await
            .unwrap();
        let mut messages: BTreeMap<String, Vec<_>> = BTreeMap::new();
        for row in rows {
            messages
                .entry(row.get(0))
                .or_default()
                .push((row.get(1), row.get(2), row.get(3)));
        }
        messages
    }

    /// Waits until every message of the database stands in its stream.
    pub(crate) async fn all_published(&self, deadline: Duration) {
        let messages = self.messages().await;
        eventually(deadline, "every message in its stream", || async {
            for (topic, rows) in &messages {
                let mut redis = self.redis.connect().await.map_err(|e| e.to_string())?;
                let entries: usize = redis
                    .xlen(format!("outbox:{topic}"))
                    .await
                    .map_err(|e| e.to_string())?;
                if entries < rows.len() {
                    return Err(format!("{entries} of {} in {topic}", rows.len()));
                }
                let missing = missing(rows, &self.entries(topic).await);
                if !missing.is_empty() {
                    return Err(format!("{} missing in {topic}", missing.len()));
                }
            }
            Ok(())
        })
        .await
        .unwrap();
    }

    /// Each message of the database stands in its stream exactly once, nothing else does, and each
    /// ordering key is in the order of ids. True for good only while no relay runs.
    pub(crate) async fn assert_exactly_once(&self) {
        for (topic, rows) in self.messages().await {
            let entries = self.entries(&topic).await;
            let lost = missing(&rows, &entries);
            assert!(lost.is_empty(), "lost in {topic}: {lost:?}");
            let mut once = HashMap::new();
            for entry in &entries {
                if let Some(earlier) = once.insert(entry.id, entry) {
                    panic!("doubled in {topic}: {earlier:?} and {entry:?}");
                }
            }
            assert_eq!(entries.len(), rows.len(), "foreign entries in {topic}");
            assert_in_order(&topic, &entries);
        }
    }

    /// Stops a relay and compares both ends: exactly once, and the checkpoint where the marker is.
    pub(crate) async fn assert_exactly_once_after(&self, relay: &Process) {
        self.leads(relay).await;
        self.all_published(DEADLINE).await;
        stop(relay).await;
        self.assert_exactly_once().await;
        assert_eq!(self.checkpoint().await, self.marker().await);
    }

    /// Waits until a relay leads: its take-over is complete in both servers.
    pub(crate) async fn leads(&self, relay: &Process) {
        let line = relay.wait_for_line(" epoch=", DEADLINE).await.unwrap();
        let epoch = line.split_once(" epoch=").unwrap().1;
        let epoch: i64 = epoch.split(' ').next().unwrap().parse().unwrap();
        eventually(DEADLINE, "the take-over to be complete", || async {
            let checkpoint = self.checkpoint().await;
            if checkpoint.is_some_and(|(of, _, _)| of >= epoch) {
                Ok(())
            } else {
                Err(checkpoint)
            }
        })
        .await
        .unwrap();
    }

    /// The marker in Redis.
    pub(crate) async fn marker(&self) -> Option<Position> {
        marker_of(&self.redis).await
    }

    /// The checkpoint in Postgres.
    pub(crate) async fn checkpoint(&self) -> Option<Position> {
        let row = self
            .sql
            .query_opt("SELECT epoch, page, high FROM outbox.checkpoint", &[])
            .await
            .unwrap();
        row.map(|row| (row.get(0), row.get(1), row.get(2)))
    }

    /// What `outbox-relay status` prints.
    pub(crate) async fn status(&self) -> String {
        let status = self.command(["status"]).await;
        assert!(
            status.exit_status().unwrap().success(),
            "{:?}",
            status.lines()
        );
        status.lines().join("\n")
    }

    /// Runs a command of the relay's binary to its end.
    pub(crate) async fn command<const N: usize>(&self, args: [&str; N]) -> Process {
        let process = Process::builder(outbox_testkit::relay_binary())
            .args(args)
            .env("DATABASE_URL", self.postgres.url(&self.database))
            .env("REDIS_URL", self.redis.url())
            .spawn()
            .unwrap();
        process.wait(DEADLINE).await.unwrap();
        process
    }
}

/// All entries of a stream of a certain Redis, in its order.
pub(crate) async fn entries_of(redis: &Redis, stream: &str) -> Vec<Entry> {
    let mut redis = redis.connect().await.unwrap();
    let range: StreamRangeReply = redis.xrange_all(stream).await.unwrap();
    range
        .ids
        .into_iter()
        .map(|entry| Entry {
            id: entry.get("id").unwrap(),
            message_key: entry.get("message_key").unwrap(),
            ordering_key: entry.get("ordering_key"),
            payload: entry.get("payload").unwrap(),
            stream_id: entry.id,
        })
        .collect()
}

/// The marker of a certain Redis.
pub(crate) async fn marker_of(redis: &Redis) -> Option<Position> {
    let mut redis = redis.connect().await.unwrap();
    let (epoch, page, high): (Option<i64>, Option<i64>, Option<i64>) = redis
        .hmget(MARKER, &["epoch", "page", "high"])
        .await
        .unwrap();
    Some((epoch?, page?, high?))
}

/// Each ordering key stands in the order of ids.
pub(crate) fn assert_in_order(topic: &str, entries: &[Entry]) {
    let mut last: HashMap<&str, i64> = HashMap::new();
    for entry in entries {
        let Some(key) = &entry.ordering_key else {
            continue;
        };
        if let Some(before) = last.insert(key, entry.id) {
            assert!(
                before < entry.id,
                "{topic}: {key} has {} after {before}",
                entry.id
            );
        }
    }
}

/// Stops a relay gracefully.
pub(crate) async fn stop(relay: &Process) {
    relay.terminate();
    let status = relay.wait(STOP).await.unwrap();
    assert!(status.success(), "{status}: {:#?}", relay.lines());
}

fn missing(rows: &[(i64, String, Option<String>)], entries: &[Entry]) -> Vec<(i64, String)> {
    let standing: std::collections::HashSet<(i64, &str)> = entries
        .iter()
        .map(|entry| (entry.id, entry.message_key.as_str()))
        .collect();
    rows.iter()
        .filter(|(id, key, _)| !standing.contains(&(*id, key)))
        .map(|(id, key, _)| (*id, key.clone()))
        .collect()
}
