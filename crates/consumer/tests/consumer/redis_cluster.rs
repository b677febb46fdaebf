//! Redis Cluster: a consumer works with the node that owns the outbox's slot, whichever it is told of and wherever the
//! slot goes; without a hash tag it says what to write.

use outbox_consumer::Builder;
use outbox_testkit::{Postgres, Redis, RedisCluster, eventually};
use tokio_postgres::Client;

use crate::shop::{DEADLINE, SHOP_TABLES, consumer_at, entry, run, ship};

const PREFIX: &str = "{shop}:";

struct Shop {
    cluster: RedisCluster,
    url: String,
    db: Client,
}

impl Shop {
    async fn open(nodes: u16) -> Self {
        let postgres = Postgres::shared().await.unwrap();
        let database = postgres.fresh_inbox().await.unwrap();
        let db = postgres.connect(&database).await.unwrap();
        db.batch_execute(SHOP_TABLES).await.unwrap();
        Self {
            cluster: RedisCluster::start(nodes).await.unwrap(),
            url: postgres.url(&database),
            db,
        }
    }

    fn consumer(&self, seed: &Redis) -> Builder {
        consumer_at(&self.url, &seed.url())
            .topics(["orders", "audit"])
            .stream_prefix(PREFIX)
    }

    /// Publishes as many messages to each of two topics, where their slot is now.
    async fn publish(&self, prefix: &str, count: usize) {
        let (owner, _) = self.cluster.owner(PREFIX).await.unwrap();
        let mut redis = owner.connect().await.unwrap();
        for topic in ["orders", "audit"] {
            for n in 0..count {
                entry(
                    &format!("{PREFIX}{topic}"),
                    &format!("{topic}-{prefix}-{n}"),
                    "{}",
                )
                .exec_async(&mut redis)
                .await
                .unwrap();
            }
        }
    }

    /// Waits for as many effects, and that each is there once.
    async fn single_effects(&self, count: i64) {
        eventually(DEADLINE, "the effects", || async {
            let sql = "SELECT count(*), count(DISTINCT key) FROM effects";
            let row = self.db.query_one(sql, &[]).await.unwrap();
            let effects: (i64, i64) = (row.get(0), row.get(1));
            if effects == (count, count) {
                Ok(())
            } else {
                Err(effects)
            }
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn one_node_with_all_slots_is_consumed() {
    let shop = Shop::open(1).await;
    shop.publish("first", 20).await;
    let consumer = run(shop.consumer(&shop.cluster.nodes()[0]), ship);
    shop.single_effects(40).await;
    shop.publish("second", 20).await;
    shop.single_effects(80).await;
    consumer.stop().await;
}

#[tokio::test]
async fn of_two_nodes_the_owner_is_found_from_either_and_after_the_slot_has_moved() {
    let shop = Shop::open(2).await;
    let (owner, others) = shop.cluster.owner(PREFIX).await.unwrap();
    shop.publish("before", 20).await;
    let one = run(shop.consumer(owner), ship);
    let two = run(shop.consumer(others[0]), ship);
    shop.single_effects(40).await;
    shop.publish("more", 20).await;
    shop.cluster.move_slot(PREFIX, others[0]).await.unwrap();
    shop.publish("after", 20).await;
    shop.single_effects(120).await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test]
async fn without_a_hash_tag_the_start_is_refused() {
    let shop = Shop::open(2).await;
    // Of these keys each node has some: `refunds` is in the lower half of the slots, the marker in the upper one.
    for node in shop.cluster.nodes() {
        let consumer = shop
            .consumer(node)
            .topic("refunds")
            .stream_prefix("outbox:")
            .build()
            .unwrap();
        let ended = tokio::time::timeout(DEADLINE, consumer.run(ship, std::future::pending()));
        let error = ended.await.expect("it ends").unwrap_err().to_string();
        assert!(
            error.contains("cluster") && error.contains("{shop}:"),
            "{error}"
        );
    }
}
