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
        self.relay_at(&seed.url())
    }

    fn relay_at(&self, redis_url: &str) -> ProcessBuilder {
        relay(&self.postgres.url(&self.database), redis_url)
            .env("OUTBOX_STREAM_PREFIX", PREFIX)
            .env("OUTBOX_POLL_INTERVAL", "200ms")
    }

    /// A command that runs.
    fn begin(&self, seed: &Redis, args: &[&str]) -> Process {
        Process::builder(relay_binary())
            .args(args.iter().copied())
            .env("DATABASE_URL", self.postgres.url(&self.database))
            .env("REDIS_URL", seed.url())
            .env("OUTBOX_STREAM_PREFIX", PREFIX)
            .spawn()
            .unwrap()
    }

    /// Runs a command to its end with success, and returns its lines.
    async fn command(&self, seed: &Redis, args: &[&str]) -> String {
        let process = self.begin(seed, args);
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
        let (owner, _) = self.cluster.owner(PREFIX).await.unwrap();
        self.stream_at(owner, topic).await
    }

    async fn stream_at(&self, owner: &Redis, topic: &str) -> Vec<String> {
        let stream = format!("{PREFIX}{topic}");
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

    /// The message keys of a topic in the database.
    async fn written(&self, topic: &str) -> Vec<String> {
        let sql = "SELECT message_key FROM outbox.messages WHERE topic = $1 ORDER BY id";
        let rows = self.db.query(sql, &[&topic]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// Waits until every message stands in its stream; each does once, and nothing else does.
    async fn published_once(&self) {
        let (owner, _) = self.cluster.owner(PREFIX).await.unwrap();
        self.published_once_at(owner).await;
    }

    async fn published_once_at(&self, owner: &Redis) {
        for topic in ["orders", "audit"] {
            let written = self.written(topic).await;
            eventually(DEADLINE, "all of a topic", || async {
                let stream = self.stream_at(owner, topic).await;
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

#[tokio::test]
async fn of_several_nodes_one_that_lives_is_enough_for_a_start() {
    let shop = Shop::open(3).await;
    shop.cluster.serve_what_is_left().await.unwrap();
    let (owner, others) = shop.cluster.owner(PREFIX).await.unwrap();
    let url = RedisCluster::url_of(&[others[0], others[1], owner]);
    let early = leading(shop.relay_at(&url)).await;
    shop.write("before", 20).await;
    shop.published_once_at(owner).await;

    others[0].kill9().await.unwrap();
    shop.write("after", 20).await;
    shop.published_once_at(owner).await;
    early.terminate();
    assert!(early.wait(DEADLINE).await.unwrap().success());
    let late = leading(shop.relay_at(&url)).await;
    shop.write("late", 20).await;
    shop.published_once_at(owner).await;
    assert_eq!(late.exit_status(), None);
}

#[tokio::test]
async fn several_servers_that_are_no_cluster_are_refused_in_one_line() {
    let shop = Shop::open(1).await;
    let alone = [Redis::start().await.unwrap(), Redis::start().await.unwrap()];
    let url = RedisCluster::url_of(&[&alone[0], &alone[1]]);
    let run = shop.relay_at(&url).spawn().unwrap();
    assert_eq!(run.wait(DEADLINE).await.unwrap().code(), Some(1));
    let lines = run.lines();
    let [line] = lines.as_slice() else {
        panic!("not one line: {lines:?}")
    };
    assert!(line.contains("the nodes of a cluster"), "{line}");
    assert!(line.contains("redis+sentinel://"), "{line}");
}

#[tokio::test]
async fn commands_that_look_see_the_same_from_either_node() {
    let shop = Shop::open(2).await;
    let (owner, others) = shop.cluster.owner(PREFIX).await.unwrap();
    let relay = leading(shop.relay(others[0])).await;
    shop.write("row", 50).await;
    shop.published_once().await;
    let mut redis = owner.connect().await.unwrap();
    let mut group = redis::cmd("XGROUP");
    group
        .arg("CREATE")
        .arg(format!("{PREFIX}orders"))
        .arg(&["shipping", "0"]);
    group.exec_async(&mut redis).await.unwrap();
    for seed in [owner, others[0]] {
        let said = shop.command(seed, &["status", "--json"]).await;
        let status: serde_json::Value = serde_json::from_str(&said).unwrap();
        let streams = status["streams"]["streams"].as_array().unwrap();
        let mut names: Vec<_> = streams
            .iter()
            .map(|stream| {
                (
                    stream["stream"].as_str().unwrap(),
                    stream["entries"].as_i64(),
                )
            })
            .collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [("{shop}:audit", Some(50)), ("{shop}:orders", Some(50))]
        );
        let orders = streams
            .iter()
            .find(|stream| stream["stream"] == "{shop}:orders");
        let group = &orders.unwrap()["groups"][0];
        assert_eq!(
            (&group["group"], &group["lag"]),
            (&"shipping".into(), &50.into())
        );

        let traced = shop.command(seed, &["trace", "orders-row-7"]).await;
        assert!(traced.contains("{shop}:orders"), "{traced}");
        let doctor = shop.begin(seed, &["doctor", "--json"]);
        doctor.wait(DEADLINE).await.unwrap();
        let found = doctor.lines().join("\n");
        assert!(
            !found.contains("MOVED") && !found.contains("CROSSSLOT"),
            "{found}"
        );
    }
    assert_eq!(relay.exit_status(), None);
}

#[tokio::test]
async fn a_replay_goes_to_the_owner_and_goes_on_after_the_slot_has_moved() {
    let shop = Shop::open(2).await;
    let (owner, others) = shop.cluster.owner(PREFIX).await.unwrap();
    let relay = leading(shop.relay(owner)).await;
    shop.write("row", 200).await;
    shop.published_once().await;
    let aside = [
        "replay",
        "--name",
        "aside",
        "--topic",
        "orders",
        "--stream",
        "{shop}:rebuilt",
    ];
    let said = shop.command(others[0], &aside).await;
    assert!(said.contains("published 200 messages again"), "{said}");
    assert_eq!(shop.stream("rebuilt").await, shop.written("orders").await);
    let elsewhere = [
        "replay",
        "--name",
        "elsewhere",
        "--all",
        "--stream",
        "rebuilt",
    ];
    let refused = shop.begin(owner, &elsewhere);
    assert_eq!(refused.wait(DEADLINE).await.unwrap().code(), Some(64));

    let again = [
        "replay", "--name", "again", "--topic", "audit", "--rate", "100",
    ];
    let again = shop.begin(owner, &again);
    eventually(DEADLINE, "the first steps", || async {
        shop.stream("audit").await.len() > 220
    })
    .await
    .unwrap();
    shop.cluster.move_slot(PREFIX, others[0]).await.unwrap();
    let status = again.wait(DEADLINE).await.unwrap();
    assert!(status.success(), "{:?}", again.lines());
    let mut twice = shop.written("audit").await;
    twice.extend_from_within(..);
    assert_eq!(shop.stream("audit").await, twice);
    assert_eq!(relay.exit_status(), None);
}
