//! Redis Sentinel: a consumer follows a failover to the new primary, and what it has applied it does not apply again.

use outbox_consumer::Error;
use outbox_testkit::{Postgres, Redis, Sentinels};

use crate::redis_inbox::{Mails, inbox_at, mailer, run as run_inbox};
use crate::shop::{DEADLINE, Shop, consumer_at, run, ship};

/// Closes the connections of all clients: they connect anew.
async fn disconnect_clients(redis: &Redis) {
    redis::cmd("CLIENT")
        .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
        .exec_async(&mut redis.connect().await.unwrap())
        .await
        .unwrap();
}

async fn publish(shop: &Shop, prefix: &str) {
    for n in 0..50 {
        shop.publish("orders", &format!("{prefix}-{n}")).await;
    }
}

/// The replica has all entries, and what it knows of the group is as old as its link happened to be.
#[tokio::test]
async fn a_failover_under_a_consumer_at_work_loses_and_doubles_nothing() {
    let password = Redis::builder().password("secret");
    let redis = password.start().await.unwrap();
    let mut shop = Shop::open_on(Postgres::shared().await.unwrap(), redis).await;
    let replica = shop.redis.replica().await.unwrap();
    let sentinels = Sentinels::watch(&shop.redis, 1).await.unwrap();
    let url = sentinels.url();
    let builder = consumer_at(&shop.postgres_url, &url).topic("orders");
    let mails = Mails::default();
    let mailing = run_inbox(inbox_at(&url), mailer(&mails));
    publish(&shop, "before").await;
    replica.caught_up_with(&shop.redis).await.unwrap();
    let consumer = run(builder.batch(2), ship);
    shop.effects_begin(10).await;

    // One of the sentinels goes as well: the other two are enough, for them and for the consumer.
    shop.redis.kill9().await.unwrap();
    sentinels.kill9(0);
    sentinels.agree_on(&replica).await.unwrap();
    let old = std::mem::replace(&mut shop.redis, replica);
    publish(&shop, "after").await;
    shop.single_effects(100).await;
    shop.nothing_pending().await;
    mails.are(100).await;

    // The old primary comes back and still takes itself for one; what connects anew goes past it.
    old.start_again().await.unwrap();
    disconnect_clients(&shop.redis).await;
    publish(&shop, "later").await;
    shop.single_effects(150).await;
    shop.nothing_pending().await;
    mails.are(150).await;
    let counts = consumer.counters.snapshot();
    assert_eq!((counts.failed, counts.dead, counts.lost), (0, 0, 0));
    consumer.stop().await;
    mailing.stop().await;
}

#[tokio::test]
async fn a_name_that_no_sentinel_knows_is_refused_at_the_start() {
    let shop = Shop::open().await;
    let sentinels = Sentinels::watch(&shop.redis, 0).await.unwrap();
    let url = sentinels.url().replace("/shop/", "/other/");
    let consumer = consumer_at(&shop.postgres_url, &url).topic("orders");
    let run = consumer.build().unwrap().run(ship, std::future::pending());
    let ended = tokio::time::timeout(DEADLINE, run).await.expect("it ends");
    let inbox = run_inbox(inbox_at(&url), mailer(&Mails::default()));
    let inbox_ended = tokio::time::timeout(DEADLINE, inbox.task).await;
    for ended in [ended, inbox_ended.expect("it ends").unwrap()] {
        let error = ended.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("knows no primary named \"other\""), "{text}");
    }
}
