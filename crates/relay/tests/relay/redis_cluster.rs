//! Redis Cluster: the relay works with the node that owns the outbox's slot, whichever it is told of and wherever the slot
//! goes; without a hash tag it refuses to start.

use outbox_testkit::{
    Postgres, Process, ProcessBuilder, Redis, RedisCluster, eventually, relay, relay_binary,
};
use tokio_postgres::Client;

use crate::support::{DEADLINE, Fields, leading};

const PREFIX: &str = "{shop}:";

/// An outbox before a cluster.
struct Shop {
    postgres: &'static Postgres,
    database: String,
    db: Client,
    cluster: RedisCluster,
}

impl Shop {
    async fn open(nodes: u16) -> Self {
        let postgres = Postgres::shared().await.unwrap();
        let database = postgres.fresh_outbox().await.unwrap();
        Self {
            db: postgres.connect(&database).await.unwrap(),
            cluster: RedisCluster::start(nodes).await.unwrap(),
            postgres,
            database,
        }
    }

    fn relay(&self, seed: &Redis) -> ProcessBuilder {
        relay(&self.postgres.url(&self.database), &seed.url())
            .env("OUTBOX_STREAM_PREFIX", PREFIX)
            .env("OUTBOX_POLL_INTERVAL", "200ms")
    }

    /// Runs a command to its end with success, and returns its lines.
    async fn command(&self, seed: &Redis, args: &[&str]) -> String {
        let process = Process::builder(relay_binary())
            .args(args.iter().copied())
            .env("DATABASE_URL", self.postgres.url(&self.database))
            .env("REDIS_URL", seed.url())
            .env("OUTBOX_STREAM_PREFIX", PREFIX)
            .spawn()
            .unwrap();
        let status = process.wait(DEADLINE).await.unwrap();
        let lines = process.lines().join("\n");
        assert!(status.success(), "{args:?}: {lines}");
        lines
    }

    /// Commits as many messages of two topics.
    async fn write(&self, prefix: &str, count: i64) {
        for topic in ["orders", "audit"] {
            let sql = "INSERT INTO outbox.messages (topic, message_key, payload)
                SELECT $1, $1 || '-' || $2 || '-' || n, '{}' FROM generate_series(1, $3::bigint) AS n";
            let params: [&(dyn tokio_postgres::types::ToSql + Sync); 3] = [&topic, &prefix, &count];
            self.db.execute(sql, &params).await.unwrap();
        }
    }

    /// The message keys in a topic's stream.
    async fn stream(&self, topic: &str) -> Vec<String> {
        let stream = format!("{PREFIX}{topic}");
        let (owner, _) = self.cluster.owner(&stream).await.unwrap();
        let mut redis = owner.connect().await.unwrap();
        let mut range = redis::cmd("XRANGE");
        range.arg(&stream).arg("-").arg("+");
        let entries: Vec<(String, Fields)> = range.query_async(&mut redis).await.unwrap();
        let key = |(_, fields): &(String, Fields)| {
            let (_, key) = fields
                .iter()
                .find(|(name, _)| name == "message_key")
                .unwrap();
            String::from_utf8(key.clone()).unwrap()
        };
        entries.iter().map(key).collect()
    }

    /// Waits until every message stands in its stream; each does once, and nothing else does.
    async fn published_once(&self) {
        for topic in ["orders", "audit"] {
            let sql = "SELECT message_key FROM outbox.messages WHERE topic = $1 ORDER BY id";
            let rows = self.db.query(sql, &[&topic]).await.unwrap();
            let written: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
            eventually(DEADLINE, "all of a topic", || async {
                let stream = self.stream(topic).await;
                if stream == written {
                    Ok(())
                } else {
                    Err(stream.len())
                }
            })
            .await
            .unwrap();
        }
    }
}

#[tokio::test]
async fn one_node_with_all_slots_carries_several_topics() {
    let shop = Shop::open(1).await;
    let node = &shop.cluster.nodes()[0];
    let relay = leading(shop.relay(node)).await;
    shop.write("row", 50).await;
    shop.published_once().await;
    assert!(shop.command(node, &["status"]).await.contains("no gaps"));
    shop.command(node, &["verify", "--complete"]).await;
    assert_eq!(relay.exit_status(), None);
}

#[tokio::test]
async fn of_two_nodes_the_owner_is_found_from_either_and_after_the_slot_has_moved() {
    let shop = Shop::open(2).await;
    let (owner, others) = shop.cluster.owner(PREFIX).await.unwrap();
    let relay = leading(shop.relay(others[0])).await;
    shop.write("before", 50).await;
    shop.published_once().await;
    for seed in [owner, others[0]] {
        assert!(shop.command(seed, &["status"]).await.contains("no gaps"));
        shop.command(seed, &["verify", "--complete"]).await;
        let check = shop.command(seed, &["config", "check"]).await;
        assert_eq!(check.matches("nothing is wrong").count(), 2, "{check}");
    }

    // Messages come in while the keys go over, one after the other.
    let moving = shop.cluster.move_slot(PREFIX, others[0]);
    let writing = async {
        for n in 0..20 {
            shop.write(&format!("during-{n}"), 5).await;
        }
    };
    let (moved, ()) = tokio::join!(moving, writing);
    moved.unwrap();
    shop.write("after", 50).await;
    shop.published_once().await;
    shop.command(owner, &["verify", "--complete"]).await;
    assert_eq!(relay.exit_status(), None);
}

#[tokio::test]
async fn without_a_hash_tag_the_start_is_refused_and_nothing_counts_as_sent() {
    let shop = Shop::open(2).await;
    shop.write("row", 5).await;
    for node in shop.cluster.nodes() {
        for (prefix, remedy) in [("outbox:", "'{outbox}:'"), ("a:b:", "'{a:b}:'")] {
            let run = shop.relay(node).env("OUTBOX_STREAM_PREFIX", prefix);
            let run = run.spawn().unwrap();
            let status = run.wait(DEADLINE).await.unwrap();
            assert_eq!(status.code(), Some(1));
            let lines = run.lines();
            let [line] = lines.as_slice() else {
                panic!("not one line: {lines:?}")
            };
            assert!(line.contains("cluster"), "{line}");
            assert!(
                line.contains(&format!("--stream-prefix {remedy}")),
                "{line}"
            );
        }
    }
    let sent = "SELECT count(*) FROM outbox.message_status WHERE sent";
    let sent: i64 = shop.db.query_one(sent, &[]).await.unwrap().get(0);
    assert_eq!(sent, 0);
}
