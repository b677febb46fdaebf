//! Redis Cluster: a consumer works with the node that owns the outbox's slot, whichever it is told of and wherever the
//! slot goes; without a hash tag it says what to write.

use outbox_consumer::{Builder, Error};
use outbox_testkit::{Postgres, Redis, RedisCluster, eventually};
use tokio_postgres::Client;

use crate::redis_inbox::{Mails, inbox_at, mailer, run as run_inbox};
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
        self.consumer_at(&seed.url())
    }

    fn consumer_at(&self, redis_url: &str) -> Builder {
        consumer_at(&self.url, redis_url)
            .topics(["orders", "audit"])
            .stream_prefix(PREFIX)
    }

    /// Publishes as many messages to each of two topics, where their slot is now.
    async fn publish(&self, prefix: &str, count: usize) {
        let (owner, _) = self.cluster.owner(PREFIX).await.unwrap();
        self.publish_at(owner, prefix, count).await;
    }

    async fn publish_at(&self, owner: &Redis, prefix: &str, count: usize) {
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

    /// Waits until a group has been given and has acknowledged all of both topics.
    async fn settled(&self, group: &str) {
        let (owner, _) = self.cluster.owner(PREFIX).await.unwrap();
        eventually(DEADLINE, "a group with nothing left to do", || async {
            let mut redis = owner.connect().await.unwrap();
            for topic in ["orders", "audit"] {
                let mut ask = redis::cmd("XINFO");
                ask.arg("GROUPS").arg(format!("{PREFIX}{topic}"));
                let reply: redis::RedisResult<redis::streams::StreamInfoGroupsReply> =
                    ask.query_async(&mut redis).await;
                let reply = reply.map_err(|e| e.to_string())?;
                let group = reply.groups.iter().find(|found| found.name == group);
                let group = group.ok_or("no such group")?;
                if group.pending > 0 || group.lag != Some(0) {
                    return Err(format!("{group:?}"));
                }
            }
            Ok(())
        })
        .await
        .unwrap();
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

#[tokio::test]
async fn of_several_nodes_one_that_lives_is_enough_for_a_start() {
    let shop = Shop::open(3).await;
    shop.cluster.serve_what_is_left().await.unwrap();
    let (owner, others) = shop.cluster.owner(PREFIX).await.unwrap();
    let url = RedisCluster::url_of(&[others[0], others[1], owner]);
    let early = run(shop.consumer_at(&url), ship);
    let mails = Mails::default();
    let mailing = inbox_at(&url).topic("audit").stream_prefix(PREFIX);
    let early_mails = run_inbox(mailing.clone(), mailer(&mails));
    shop.publish("before", 20).await;
    shop.single_effects(40).await;

    others[0].kill9().await.unwrap();
    shop.publish_at(owner, "after", 20).await;
    shop.single_effects(80).await;
    early.stop().await;
    early_mails.stop().await;
    let late = run(shop.consumer_at(&url), ship);
    let late_mails = run_inbox(mailing, mailer(&mails));
    shop.publish_at(owner, "late", 20).await;
    shop.single_effects(120).await;
    mails.are(120).await;
    late.stop().await;
    late_mails.stop().await;
}

#[tokio::test]
async fn several_servers_that_are_no_cluster_are_refused() {
    let shop = Shop::open(1).await;
    let alone = [Redis::start().await.unwrap(), Redis::start().await.unwrap()];
    let url = RedisCluster::url_of(&[&alone[0], &alone[1]]);
    let consumer = shop.consumer_at(&url).build().unwrap();
    let ended = tokio::time::timeout(DEADLINE, consumer.run(ship, std::future::pending()));
    let error = ended.await.expect("it ends").unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    assert!(error.to_string().contains("cluster"), "{error}");
}

#[tokio::test]
async fn an_inbox_in_redis_works_from_either_node_and_after_the_slot_has_moved() {
    let shop = Shop::open(2).await;
    let (owner, others) = shop.cluster.owner(PREFIX).await.unwrap();
    let mails = Mails::default();
    let members = [owner, others[0]].map(|seed| {
        let inbox = inbox_at(&seed.url()).topic("audit").stream_prefix(PREFIX);
        run_inbox(inbox, mailer(&mails))
    });
    shop.publish("before", 20).await;
    mails.are(40).await;
    shop.cluster.move_slot(PREFIX, others[0]).await.unwrap();
    // What was handled is known where the slot is now.
    shop.publish("before", 20).await;
    shop.publish("after", 20).await;
    mails.are(80).await;
    shop.settled("mailing").await;
    let counts = mails.counts();
    assert!(counts.values().all(|count| *count == 1), "{counts:?}");
    for member in members {
        member.stop().await;
    }
}

#[tokio::test]
async fn an_inbox_in_redis_is_refused_without_a_hash_tag() {
    let shop = Shop::open(2).await;
    for node in shop.cluster.nodes() {
        let inbox = inbox_at(&node.url());
        let run = run_inbox(inbox, mailer(&Mails::default()));
        let ended = tokio::time::timeout(DEADLINE, run.task);
        let error = ended.await.expect("it ends").unwrap().unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("cluster") && error.contains("{shop}:"),
            "{error}"
        );
    }
}
