//! The kit does to servers what it says.

use redis::AsyncCommands;

use outbox_testkit::{Postgres, Redis};

#[tokio::test]
async fn fresh_databases_have_the_schema_and_differ() {
    let postgres = Postgres::shared().await.unwrap();
    let outbox = postgres.fresh_outbox().await.unwrap();
    let inbox = postgres.fresh_inbox().await.unwrap();
    assert_ne!(outbox, inbox);
    let client = postgres.connect(&outbox).await.unwrap();
    client
        .query_one("SELECT count(*) FROM outbox.messages", &[])
        .await
        .unwrap();
    let client = postgres.connect(&inbox).await.unwrap();
    client
        .query_one("SELECT count(*) FROM inbox.applied", &[])
        .await
        .unwrap();
}

#[tokio::test]
async fn redis_comes_back_empty_without_persistence() {
    let redis = Redis::start().await.unwrap();
    let mut connection = redis.connect().await.unwrap();
    let _: () = connection.set("key", "value").await.unwrap();
    redis.kill9().await.unwrap();
    assert!(!redis.is_running());
    redis.start_again().await.unwrap();
    let mut connection = redis.connect().await.unwrap();
    assert_eq!(connection.exists("key").await, Ok(false));
}
