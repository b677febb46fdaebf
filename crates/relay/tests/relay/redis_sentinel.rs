//! Redis Sentinel: the relay follows a failover to the new primary, where each message stands once.

use outbox_testkit::{Postgres, Redis, Sentinels, eventually};
use redis::AsyncCommands;

use crate::pair::entries_of;
use crate::support::{DEADLINE, Outbox, insert, leading};

/// Each message of the database stands in the stream of this server, once, in the order of ids, and nothing else.
async fn published_once(outbox: &Outbox<'_>, redis: &Redis) {
    let db = outbox.client().await;
    let rows = db
        .query("SELECT id FROM outbox.messages ORDER BY id", &[])
        .await
        .unwrap();
    let written: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    eventually(DEADLINE, "all messages in the stream", || async {
        let mut connection = redis.connect().await.map_err(|e| e.to_string())?;
        let length: usize = connection
            .xlen("outbox:orders")
            .await
            .map_err(|e| e.to_string())?;
        if length >= written.len() {
            Ok(())
        } else {
            Err(format!("{length} of {}", written.len()))
        }
    })
    .await
    .unwrap();
    let entries = entries_of(redis, "outbox:orders").await;
    let standing: Vec<i64> = entries.iter().map(|entry| entry.id).collect();
    assert_eq!(standing, written);
}

#[tokio::test]
async fn a_failover_is_followed_and_nothing_is_lost_or_doubled() {
    let postgres = Postgres::shared().await.unwrap();
    let outbox = Outbox::open_on(postgres, Redis::start().await.unwrap()).await;
    let replica = outbox.redis.replica().await.unwrap();
    let sentinels = Sentinels::watch(&outbox.redis, 1).await.unwrap();
    let relay = leading(outbox.relay_between(&outbox.postgres_url(), &sentinels.url())).await;
    for n in 0..50 {
        outbox.insert(&format!("before-{n}")).await;
    }
    outbox.settles().await;

    // One of the sentinels goes as well: the other two are enough, for them and for the relay.
    outbox.redis.kill9().await.unwrap();
    sentinels.kill9(0);
    let db = outbox.client().await;
    for n in 0..50 {
        insert(&db, &format!("during-{n}")).await;
    }
    sentinels.agree_on(&replica).await.unwrap();
    for n in 0..50 {
        insert(&db, &format!("after-{n}")).await;
    }
    published_once(&outbox, &replica).await;

    // The old primary comes back and still takes itself for one; the relay connects anew, and not to it.
    outbox.redis.start_again().await.unwrap();
    let mut connection = replica.connect().await.unwrap();
    redis::cmd("CLIENT")
        .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
        .exec_async(&mut connection)
        .await
        .unwrap();
    for n in 0..50 {
        insert(&db, &format!("later-{n}")).await;
    }
    published_once(&outbox, &replica).await;
    assert_eq!(entries_of(&outbox.redis, "outbox:orders").await, []);
    assert_eq!(relay.exit_status(), None);
}

#[tokio::test]
async fn a_name_that_no_sentinel_knows_is_refused_in_one_line() {
    let outbox = Outbox::open().await;
    let sentinels = Sentinels::watch(&outbox.redis, 0).await.unwrap();
    let url = sentinels.url().replace("/shop/", "/other/");
    let run = outbox
        .relay_between(&outbox.postgres_url(), &url)
        .spawn()
        .unwrap();
    assert_eq!(run.wait(DEADLINE).await.unwrap().code(), Some(1));
    let lines = run.lines();
    let [line] = lines.as_slice() else {
        panic!("not one line: {lines:?}")
    };
    assert!(line.contains("knows no primary named \"other\""), "{line}");
    assert!(line.contains("--redis-url"), "{line}");
}
