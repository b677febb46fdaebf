//! `outbox-relay pause` and `resume`.

use outbox_testkit::{Process, eventually};

use crate::commands::run_on;
use crate::http::{LISTEN, becomes, metrics};
use crate::support::{DEADLINE, Outbox, TOPIC, leading};

async fn pause(outbox: &Outbox<'_>, reason: &str) {
    let said = run_on(outbox, &["pause", "--reason", reason]).await;
    assert!(said.done()[0].starts_with("paused"));
}

async fn resume(outbox: &Outbox<'_>) {
    let said = run_on(outbox, &["resume"]).await;
    assert!(said.done()[0].starts_with("publishing goes on after"));
}

/// Waits until the leader has looked twice for a pause, from now on.
async fn leader_has_looked(outbox: &Outbox<'_>) {
    let now = "SELECT clock_timestamp()::text";
    for _ in 0..2 {
        let begun: String = outbox.db.query_one(now, &[]).await.unwrap().get(0);
        let looked = "SELECT EXISTS (SELECT FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'outbox-relay'
              AND query LIKE '%outbox.pause%' AND query_start > $1::text::timestamptz)";
        eventually(DEADLINE, "the leader to look for a pause", || async {
            let row = outbox.db.query_one(looked, &[&begun]).await.unwrap();
            row.get::<_, bool>(0)
        })
        .await
        .unwrap();
    }
}

async fn is_paused(relay: &Process) {
    relay
        .wait_for_line("publishing is paused", DEADLINE)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_paused_leader_publishes_nothing_until_resumed() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    outbox.insert("before").await;
    outbox.settles().await;
    pause(&outbox, "moving Redis").await;
    is_paused(&relay).await;
    outbox.insert("paused-1").await;
    outbox.insert("paused-2").await;
    leader_has_looked(&outbox).await;
    assert_eq!(outbox.message_keys(TOPIC).await, ["before"]);
    let again = run_on(&outbox, &["pause", "--reason", "another"]).await;
    assert!(again.done()[0].starts_with("was paused already"));
    resume(&outbox).await;
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 3);
    let again = run_on(&outbox, &["resume"]).await;
    assert_eq!(again.done(), ["was not paused"]);
    // Its own last page, and nothing was read twice.
    relay.terminate();
    assert!(relay.wait(DEADLINE).await.unwrap().success());
    assert!(!relay.lines().iter().any(|line| line.contains("ERROR")));
}

#[tokio::test]
async fn a_leader_under_load_stops_in_the_middle_of_its_backlog() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&["--page-rows", "1"]).await;
    let fill = "INSERT INTO outbox.messages (topic, message_key, payload)
        SELECT 'orders', 'row-' || n, '{}' FROM generate_series(1, 50000) AS n";
    outbox.db.batch_execute(fill).await.unwrap();
    outbox.arrives("row-1").await;
    pause(&outbox, "").await;
    is_paused(&relay).await;
    leader_has_looked(&outbox).await;
    let stopped_at = outbox.entry_count(TOPIC).await;
    assert!(stopped_at < 50_000);
    leader_has_looked(&outbox).await;
    assert_eq!(outbox.entry_count(TOPIC).await, stopped_at);
    // One that is stopped meanwhile publishes nothing on its way out, and its successor nothing at its start.
    relay.terminate();
    assert!(relay.wait(DEADLINE).await.unwrap().success());
    let next = outbox.leader(&[]).await;
    is_paused(&next).await;
    leader_has_looked(&outbox).await;
    assert_eq!(outbox.entry_count(TOPIC).await, stopped_at);
    resume(&outbox).await;
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 50_000);
}

#[tokio::test]
async fn a_pause_outlives_the_leader_and_a_failure_of_redis() {
    let outbox = Outbox::open().await;
    let leader = outbox.leader(&[]).await;
    let standby = outbox.relay().spawn().unwrap();
    standby
        .wait_for_line("standing by", DEADLINE)
        .await
        .unwrap();
    pause(&outbox, "").await;
    is_paused(&leader).await;
    outbox.insert("row").await;
    leader.kill9();
    is_paused(&standby).await;
    // The leadership that was taken anew has lost nothing of it.
    let mut redis = outbox.redis.connect().await.unwrap();
    redis::cmd("DEL")
        .arg("outbox:relay:marker")
        .exec_async(&mut redis)
        .await
        .unwrap();
    standby
        .wait_for_line("publishing again", DEADLINE)
        .await
        .unwrap();
    leader_has_looked(&outbox).await;
    assert_eq!(outbox.entry_count(TOPIC).await, 0);
    resume(&outbox).await;
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 1);
}

#[tokio::test]
async fn a_blocked_stream_does_not_catch_up_while_it_is_paused() {
    let outbox = Outbox::open().await;
    let mut redis = outbox.redis.connect().await.unwrap();
    redis::cmd("SET")
        .arg("outbox:orders")
        .arg("not a stream")
        .exec_async(&mut redis)
        .await
        .unwrap();
    let relay = outbox.leader(&[]).await;
    outbox.insert("held").await;
    relay.wait_for_line("held back", DEADLINE).await.unwrap();
    pause(&outbox, "").await;
    is_paused(&relay).await;
    redis::cmd("DEL")
        .arg("outbox:orders")
        .exec_async(&mut redis)
        .await
        .unwrap();
    leader_has_looked(&outbox).await;
    assert_eq!(outbox.entry_count(TOPIC).await, 0);
    resume(&outbox).await;
    outbox.arrives("held").await;
}

#[tokio::test]
async fn a_paused_leader_is_ready_and_says_why() {
    let outbox = Outbox::open().await;
    let leader = leading(outbox.relay().args(LISTEN)).await;
    pause(&outbox, "moving Redis").await;
    becomes(&leader, 200, "leading; publishing is paused since ").await;
    becomes(&leader, 200, "by postgres: moving Redis").await;
    let shown = |value: f64| {
        let leader = &leader;
        async move {
            eventually(DEADLINE, "the metric", || async {
                metrics(leader).await.get("outbox_relay_paused") == Some(&value)
            })
            .await
            .unwrap();
        }
    };
    shown(1.0).await;
    resume(&outbox).await;
    shown(0.0).await;
    becomes(&leader, 200, "leading").await;
}

#[tokio::test]
async fn a_reason_that_is_too_long_is_refused() {
    let outbox = Outbox::open().await;
    let reason = "x".repeat(1_001);
    run_on(&outbox, &["pause", "--reason", &reason])
        .await
        .refused(64, &["--reason", "1001", "1000"]);
}
