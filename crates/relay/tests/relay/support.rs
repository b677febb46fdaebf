//! What each test starts with: an outbox in a fresh database, a Redis of its own, and the real relay between.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use outbox_testkit::{Postgres, Process, ProcessBuilder, Proxy, Redis, eventually, relay};
use redis::aio::MultiplexedConnection;
use tokio_postgres::{Client, GenericClient};

/// Longer than anything takes on a busy machine; a test that waits this long has failed.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// The topic of every message that is not about topics.
pub(crate) const TOPIC: &str = "orders";

/// Names a stream together with the topic, as the relay does unless told otherwise.
pub(crate) const PREFIX: &str = "outbox:";

/// True once the checkpoint has passed every committed row and no gap is left.
const SETTLED: &str = "SELECT coalesce((SELECT max(id) FROM outbox.messages), 0)
        <= coalesce((SELECT high FROM outbox.checkpoint), 0)
    AND NOT EXISTS (SELECT FROM outbox.checkpoint_gaps)";

/// True while the leader of this database holds the lock that makes producers notify it.
const ASLEEP: &str = "SELECT EXISTS (SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND classid = 1869968482 AND objid = 2 AND mode = 'ExclusiveLock' AND granted
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";

/// One outbox with its Redis.
pub(crate) struct Outbox<'p> {
    pub(crate) postgres: &'p Postgres,
    pub(crate) redis: Redis,
    pub(crate) database: String,
    /// A session of the test itself. It is lost when the test faults Postgres; see [`Outbox::client`].
    pub(crate) db: Client,
    stream: MultiplexedConnection,
}

impl Outbox<'static> {
    /// On the shared Postgres, with a Redis that keeps nothing.
    pub(crate) async fn open() -> Self {
        Self::open_on(
            Postgres::shared().await.unwrap(),
            Redis::start().await.unwrap(),
        )
        .await
    }
}

impl<'p> Outbox<'p> {
    pub(crate) async fn open_on(postgres: &'p Postgres, redis: Redis) -> Self {
        let database = postgres.fresh_outbox().await.unwrap();
        let db = postgres.connect(&database).await.unwrap();
        let stream = redis.connect().await.unwrap();
        Self {
            postgres,
            redis,
            database,
            db,
            stream,
        }
    }

    /// The same outbox with a new session, after Postgres was restarted.
    pub(crate) async fn reopened(self) -> Self {
        let db = self.client().await;
        Self { db, ..self }
    }

    /// The same outbox with another Redis, after a failover. The old one is ended.
    pub(crate) async fn moved_to(self, redis: Redis) -> Self {
        let stream = redis.connect().await.unwrap();
        Self {
            redis,
            stream,
            ..self
        }
    }

    /// One more session.
    pub(crate) async fn client(&self) -> Client {
        self.postgres.connect(&self.database).await.unwrap()
    }

    pub(crate) fn postgres_url(&self) -> String {
        self.postgres.url(&self.database)
    }

    /// The relay's daemon, not started yet; it polls every 500 ms unless told otherwise.
    pub(crate) fn relay(&self) -> ProcessBuilder {
        self.relay_between(&self.postgres_url(), &self.redis.url())
    }

    /// The same with a proxy before Postgres.
    pub(crate) fn relay_via(&self, postgres: &Proxy) -> ProcessBuilder {
        let url = self.postgres.url_via(postgres.port(), &self.database);
        self.relay_between(&url, &self.redis.url())
    }

    /// The same with both addresses given.
    pub(crate) fn relay_between(&self, postgres_url: &str, redis_url: &str) -> ProcessBuilder {
        relay(postgres_url, redis_url).env("OUTBOX_POLL_INTERVAL", "500ms")
    }

    /// A relay with these further arguments, that leads.
    pub(crate) async fn leader(&self, args: &[&str]) -> Process {
        leading(self.relay().args(args)).await
    }

    /// Commits a message of [`TOPIC`].
    pub(crate) async fn insert(&self, message_key: &str) -> i64 {
        insert(&self.db, message_key).await
    }

    /// All entries of a topic's stream, oldest first.
    pub(crate) async fn entries(&self, topic: &str) -> Vec<Entry> {
        let mut stream = self.stream.clone();
        let raw: Vec<(String, Fields)> = redis::cmd("XRANGE")
            .arg(format!("{PREFIX}{topic}"))
            .arg("-")
            .arg("+")
            .query_async(&mut stream)
            .await
            .unwrap();
        raw.into_iter()
            .map(|(stream_id, fields)| Entry { stream_id, fields })
            .collect()
    }

    /// How many entries a topic's stream has.
    pub(crate) async fn entry_count(&self, topic: &str) -> usize {
        let mut stream = self.stream.clone();
        redis::cmd("XLEN")
            .arg(format!("{PREFIX}{topic}"))
            .query_async(&mut stream)
            .await
            .unwrap()
    }

    /// The message keys in a topic's stream, oldest first.
    pub(crate) async fn message_keys(&self, topic: &str) -> Vec<String> {
        let entries = self.entries(topic).await;
        entries.iter().map(Entry::message_key).collect()
    }

    /// How many entries each message key of a topic has.
    pub(crate) async fn count_by_key(&self, topic: &str) -> HashMap<String, usize> {
        let mut counts = HashMap::new();
        for key in self.message_keys(topic).await {
            *counts.entry(key).or_default() += 1;
        }
        counts
    }

    /// Waits until a message of [`TOPIC`] stands in its stream.
    pub(crate) async fn arrives(&self, message_key: &str) {
        self.arrives_within(DEADLINE, message_key).await;
    }

    /// The same with a deadline that is part of the claim.
    pub(crate) async fn arrives_within(&self, deadline: Duration, message_key: &str) {
        eventually(deadline, &format!("{message_key} in Redis"), || async {
            let keys = self.message_keys(TOPIC).await;
            if keys.iter().any(|key| key == message_key) {
                Ok(())
            } else {
                Err(format!("{} others", keys.len()))
            }
        })
        .await
        .unwrap();
    }

    /// Waits until the checkpoint has passed every committed row and no gap is left.
    pub(crate) async fn settles(&self) {
        self.settles_within(DEADLINE).await;
    }

    /// The same for a backlog that takes longer.
    pub(crate) async fn settles_within(&self, deadline: Duration) {
        let db = self.client().await;
        eventually(deadline, "nothing left to publish", || async {
            let row = db.query_one(SETTLED, &[]).await.unwrap();
            if row.get(0) {
                return Ok(());
            }
            let progress = "SELECT (SELECT max(id) FROM outbox.messages), (SELECT high FROM outbox.checkpoint),
                ARRAY(SELECT lo || '-' || hi FROM outbox.checkpoint_gaps ORDER BY lo LIMIT 9)";
            let row = db.query_one(progress, &[]).await.unwrap();
            let (last, high): (Option<i64>, Option<i64>) = (row.get(0), row.get(1));
            Err((last, high, row.get::<_, Vec<String>>(2)))
        })
        .await
        .unwrap();
    }

    /// Waits until the checkpoint has passed every committed row, with gaps or without.
    pub(crate) async fn settles_but_for_gaps(&self, deadline: Duration) {
        let passed = "SELECT max(id) <= (SELECT high FROM outbox.checkpoint) FROM outbox.messages";
        eventually(deadline, "every row to be read", || async {
            let row = self.db.query_one(passed, &[]).await.unwrap();
            row.get::<_, Option<bool>>(0).unwrap_or(false)
        })
        .await
        .unwrap();
    }

    /// Waits until the leader sleeps, so that whoever writes from now on notifies it.
    pub(crate) async fn leader_sleeps(&self) {
        eventually(DEADLINE, "the leader to sleep", || async {
            self.db
                .query_one(ASLEEP, &[])
                .await
                .unwrap()
                .get::<_, bool>(0)
        })
        .await
        .unwrap();
    }

    /// Waits until everything is published, and then compares: every committed row has one entry, and
    /// nothing else has. Returns how many there are.
    pub(crate) async fn published_exactly_once(&self, topic: &str) -> usize {
        self.settles().await;
        let db = self.client().await;
        let rows = db
            .query(
                "SELECT id, message_key FROM outbox.messages WHERE topic = $1",
                &[&topic],
            )
            .await
            .unwrap();
        let mut difference: BTreeMap<(i64, String), i64> = rows
            .iter()
            .map(|row| ((row.get(0), row.get(1)), -1))
            .collect();
        for entry in self.entries(topic).await {
            *difference
                .entry((entry.id(), entry.message_key()))
                .or_default() += 1;
        }
        difference.retain(|_, n| *n != 0);
        let shown: Vec<_> = difference.iter().take(20).collect();
        assert!(
            difference.is_empty(),
            "{} messages are lost (-1), doubled or phantom (1): {shown:?}",
            difference.len()
        );
        rows.len()
    }
}

/// Starts a relay and waits until it leads.
pub(crate) async fn leading(relay: ProcessBuilder) -> Process {
    let relay = relay.spawn().unwrap();
    relay.wait_for_line("leading", DEADLINE).await.unwrap();
    relay
}

/// Writes a message of [`TOPIC`] with this client or in this transaction, and returns its id.
pub(crate) async fn insert(db: &impl GenericClient, message_key: &str) -> i64 {
    let sql = "INSERT INTO outbox.messages (topic, message_key, payload) VALUES ($1, $2, '{}') RETURNING id";
    db.query_one(sql, &[&TOPIC, &message_key])
        .await
        .unwrap()
        .get(0)
}

/// The same with an ordering key.
pub(crate) async fn insert_ordered(
    db: &impl GenericClient,
    message_key: &str,
    ordering_key: &str,
) -> i64 {
    let sql = "INSERT INTO outbox.messages (topic, message_key, ordering_key, payload)
        VALUES ($1, $2, $3, '{}') RETURNING id";
    db.query_one(sql, &[&TOPIC, &message_key, &ordering_key])
        .await
        .unwrap()
        .get(0)
}

/// Names and values, in the order of the entry.
pub(crate) type Fields = Vec<(String, Vec<u8>)>;

/// One entry of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) stream_id: String,
    pub(crate) fields: Fields,
}

impl Entry {
    pub(crate) fn field(&self, name: &str) -> Option<&[u8]> {
        let field = self.fields.iter().find(|(of, _)| of == name);
        field.map(|(_, value)| value.as_slice())
    }

    /// A field that is text.
    pub(crate) fn text(&self, name: &str) -> String {
        let value = self
            .field(name)
            .unwrap_or_else(|| panic!("{self:?} has no {name}"));
        String::from_utf8(value.to_vec()).unwrap()
    }

    pub(crate) fn id(&self) -> i64 {
        self.text("id").parse().unwrap()
    }

    pub(crate) fn message_key(&self) -> String {
        self.text("message_key")
    }
}
