//! A message is published only when no crash of Postgres can take its row back.

use std::time::Duration;

use outbox_testkit::{Direction, Matcher, Postgres, Proxy, Redis, eventually};
use tokio_postgres::Client;

use crate::support::{DEADLINE, Outbox, TOPIC, insert, leading};

/// Keeps the log in memory as long as Postgres can be made to.
async fn postgres_that_flushes_late() -> Postgres {
    Postgres::builder()
        .setting("wal_writer_delay", "10s")
        .setting("autovacuum", "off")
        .start()
        .await
        .unwrap()
}

async fn asynchronous(outbox: &Outbox<'_>) -> Client {
    let db = outbox.client().await;
    db.batch_execute("SET synchronous_commit = off")
        .await
        .unwrap();
    db
}

#[tokio::test]
async fn a_published_row_is_still_there_after_postgres_was_killed() {
    let postgres = postgres_that_flushes_late().await;
    let mut outbox = Outbox::open_on(&postgres, Redis::start().await.unwrap()).await;
    let relay = outbox.leader(&[]).await;
    for round in 0..5 {
        let db = asynchronous(&outbox).await;
        for n in 0..20 {
            insert(&db, &format!("row-{round}-{n}")).await;
        }
        outbox.arrives(&format!("row-{round}-0")).await;
        postgres.kill9().await.unwrap();
        let published = outbox.message_keys(TOPIC).await;
        postgres.start_again().await.unwrap();
        outbox = outbox.reopened().await;
        let lost = "SELECT count(*) FROM unnest($1::text[]) AS published(message_key)
            WHERE message_key NOT IN (SELECT message_key FROM outbox.messages)";
        let row = outbox.db.query_one(lost, &[&published]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), 0, "round {round}");
        // The relay goes on by itself, also with what it had not published yet.
        outbox.insert(&format!("next-{round}")).await;
        outbox.arrives(&format!("next-{round}")).await;
    }
    outbox.published_exactly_once(TOPIC).await;
    assert!(relay.exit_status().is_none());
}

/// The relay sees the row, and dies with Postgres before the log is flushed: whether recovery brings the row
/// back or not, Redis and Postgres agree.
#[tokio::test]
async fn a_row_that_is_visible_but_not_flushed_is_not_published() {
    let postgres = postgres_that_flushes_late().await;
    let mut outbox = Outbox::open_on(&postgres, Redis::start().await.unwrap()).await;
    let proxy = Proxy::start(postgres.port()).await.unwrap();
    let relay = leading(outbox.relay_via(&proxy)).await;
    let mut taken_back = 0;
    for round in 0..5 {
        outbox.leader_sleeps().await;
        let db = asynchronous(&outbox).await;
        let flush = proxy.hold(Matcher::sql("pg_logical_emit_message"), Direction::Request);
        let key = format!("unflushed-{round}");
        insert(&db, &key).await;
        flush.reached().await.unwrap();
        assert!(!outbox.message_keys(TOPIC).await.contains(&key));
        postgres.kill9().await.unwrap();
        flush.drop_it();
        postgres.start_again().await.unwrap();
        outbox = outbox.reopened().await;
        let there = "SELECT count(*) FROM outbox.messages WHERE message_key = $1";
        let there: i64 = outbox.db.query_one(there, &[&key]).await.unwrap().get(0);
        taken_back += 1 - there;
        outbox.insert(&format!("flushed-{round}")).await;
        outbox.published_exactly_once(TOPIC).await;
    }
    assert!(
        taken_back > 0,
        "no crash took a row back: nothing was shown"
    );
    assert!(relay.exit_status().is_none());
}

/// The same row committed without a wait for the standby would be lost in a failover.
#[tokio::test]
async fn with_a_synchronous_standby_nothing_is_published_before_it_has_it() {
    let postgres = Postgres::start().await.unwrap();
    let outbox = Outbox::open_on(&postgres, Redis::start().await.unwrap()).await;
    let standby = postgres
        .standby_builder()
        .synchronous()
        .start()
        .await
        .unwrap();
    let relay = outbox.leader(&[]).await;
    outbox.insert("first").await;
    outbox.arrives("first").await;
    outbox.settles().await;

    standby.pause().await.unwrap();
    let local = outbox.client().await;
    local
        .batch_execute("SET synchronous_commit = local")
        .await
        .unwrap();
    insert(&local, "second").await;
    let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity
        WHERE wait_event = 'SyncRep' AND query LIKE '%pg_logical_emit_message%')";
    eventually(DEADLINE, "the relay to wait for the standby", || async {
        let row = outbox.db.query_one(waits, &[]).await.unwrap();
        row.get::<_, bool>(0)
    })
    .await
    .unwrap();
    assert_eq!(outbox.message_keys(TOPIC).await, ["first"]);
    standby.resume().await.unwrap();
    outbox
        .arrives_within(Duration::from_secs(10), "second")
        .await;
    outbox.published_exactly_once(TOPIC).await;
    assert!(relay.exit_status().is_none());
}
