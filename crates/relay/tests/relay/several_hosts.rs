//! `--database-url` with several hosts: the one that takes writes is used, whichever it is at the time.

use outbox_testkit::{Postgres, Redis, relay};
use tokio::net::TcpListener;

use crate::support::{DEADLINE, Outbox, insert, leading};

#[tokio::test]
async fn the_primary_is_found_behind_a_standby_and_after_a_failover() {
    let primary = Postgres::start().await.unwrap();
    let outbox = Outbox::open_on(&primary, Redis::start().await.unwrap()).await;
    let standby = primary.standby_builder().start().await.unwrap();
    let url = format!(
        "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/{}",
        standby.port(),
        primary.port(),
        outbox.database
    );
    let relay = leading(outbox.relay_between(&url, &outbox.redis.url())).await;
    for n in 0..20 {
        outbox.insert(&format!("before-{n}")).await;
    }
    outbox.settles().await;
    standby.caught_up_with(&primary).await.unwrap();
    primary.kill9().await.unwrap();
    standby.promote().await.unwrap();
    let db = standby.connect(&outbox.database).await.unwrap();
    for n in 0..20 {
        insert(&db, &format!("after-{n}")).await;
    }
    outbox.arrives("after-19").await;
    let counts = outbox.count_by_key("orders").await;
    assert_eq!(counts.len(), 40, "{counts:?}");
    assert!(counts.values().all(|count| *count == 1), "{counts:?}");
    assert_eq!(relay.exit_status(), None);
}

#[tokio::test]
async fn a_host_that_accepts_and_says_nothing_does_not_hide_the_next_one() {
    let outbox = Outbox::open().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!(
        "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/{}",
        silent.local_addr().unwrap().port(),
        outbox.postgres.port(),
        outbox.database
    );
    let run = outbox.relay_between(&url, &outbox.redis.url());
    let relay = leading(run.args(["--postgres-timeout", "1s"])).await;
    outbox.insert("row").await;
    outbox.arrives("row").await;
    assert_eq!(relay.exit_status(), None);
}

#[tokio::test]
async fn without_a_primary_the_start_ends_in_one_line() {
    let primary = Postgres::start().await.unwrap();
    let outbox = Outbox::open_on(&primary, Redis::start().await.unwrap()).await;
    let standby = primary.standby_builder().start().await.unwrap();
    primary.kill9().await.unwrap();
    let url = format!(
        "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/{}",
        primary.port(),
        standby.port(),
        outbox.database
    );
    let run = relay(&url, &outbox.redis.url()).args(["--start-timeout", "0s"]);
    let run = run.spawn().unwrap();
    let status = run.wait(DEADLINE).await.unwrap();
    assert_eq!(status.code(), Some(1));
    let lines = run.lines();
    let [line] = lines.as_slice() else {
        panic!("not one line: {lines:?}")
    };
    assert!(line.contains("--database-url"), "{line}");
}
