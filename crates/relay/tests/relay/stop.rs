//! A relay that is told to stop is gone within ten seconds with exit code 0, whatever its servers do.

use std::time::{Duration, Instant};

use outbox_testkit::{Direction, Process, Proxy, RelayStep};

use crate::pair::{DEADLINE, Pair, STOP, stop};

/// A stop with nothing in its way.
const AT_ONCE: Duration = Duration::from_secs(5);

async fn stops_within(relay: &Process, limit: Duration) {
    let begun = Instant::now();
    stop(relay).await;
    assert!(begun.elapsed() < limit, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_relay_stopped_in_the_middle_of_a_backlog_leaves_the_checkpoint_at_the_marker() {
    let pair = Pair::start().await;
    let relay = pair.relay().args(["--page-rows", "5"]).spawn().unwrap();
    pair.leads(&relay).await;
    pair.write("orders", "backlog", 10_000).await;
    pair.reaches("orders", 500, DEADLINE).await;
    stops_within(&relay, AT_ONCE).await;
    let published = pair.count("orders").await;
    assert!(
        published < 10_000,
        "it published everything before it stopped"
    );
    let (checkpoint, marker) = (pair.checkpoint().await, pair.marker().await);
    assert_eq!(checkpoint, marker);
    assert_eq!(checkpoint.unwrap().2, i64::try_from(published).unwrap());

    let next = pair.relay().spawn().unwrap();
    pair.assert_exactly_once_after(&next).await;
}

#[tokio::test]
async fn an_idle_relay_and_a_standby_stop_at_once_also_by_ctrl_c() {
    let pair = Pair::start().await;
    let leader = pair.relay().args(["--poll-interval", "10m"]);
    let leader = leader.spawn().unwrap();
    pair.leads(&leader).await;
    let standby = pair.relay().spawn().unwrap();
    standby
        .wait_for_line("standing by", DEADLINE)
        .await
        .unwrap();
    stops_within(&standby, AT_ONCE).await;
    pair.write("orders", "one", 1).await;
    pair.all_published(DEADLINE).await;
    let begun = Instant::now();
    leader.interrupt();
    assert!(leader.wait(AT_ONCE).await.unwrap().success());
    assert!(begun.elapsed() < AT_ONCE);
    pair.assert_exactly_once().await;
    assert_eq!(pair.checkpoint().await, pair.marker().await);
}

#[tokio::test]
async fn a_relay_stops_while_redis_is_frozen() {
    // Idle, in the middle of a page, and while it stands by.
    for backlog in [0, 5_000] {
        let pair = Pair::start().await;
        let proxy = Proxy::start(pair.redis.port()).await.unwrap();
        let relay = pair.relay_via(pair.postgres.port(), proxy.port());
        let relay = relay.args(["--page-rows", "100"]).spawn().unwrap();
        pair.leads(&relay).await;
        let standby = pair.relay().spawn().unwrap();
        standby
            .wait_for_line("standing by", DEADLINE)
            .await
            .unwrap();
        let hold = proxy.hold(RelayStep::PageSent.matcher().nth(3), Direction::Request);
        if backlog > 0 {
            pair.write("orders", "backlog", backlog).await;
            hold.reached().await.unwrap();
        }
        pair.redis.pause().await.unwrap();
        hold.release();
        standby.terminate();
        stops_within(&relay, STOP).await;
        assert!(standby.wait(STOP).await.unwrap().success());
        pair.redis.resume().await.unwrap();
        let next = pair.relay().spawn().unwrap();
        pair.assert_exactly_once_after(&next).await;
    }
}

#[tokio::test]
async fn a_relay_stops_while_postgres_is_frozen() {
    for backlog in [0, 5_000] {
        let pair = Pair::with_own_postgres().await;
        let relay = pair.relay().args(["--page-rows", "10"]).spawn().unwrap();
        pair.leads(&relay).await;
        let standby = pair.relay().spawn().unwrap();
        standby
            .wait_for_line("standing by", DEADLINE)
            .await
            .unwrap();
        if backlog > 0 {
            pair.write("orders", "backlog", backlog).await;
            pair.reaches("orders", 100, DEADLINE).await;
        }
        pair.postgres.pause().await.unwrap();
        standby.terminate();
        stops_within(&relay, STOP).await;
        assert!(standby.wait(STOP).await.unwrap().success());
        pair.postgres.resume().await.unwrap();
        let next = pair.relay().spawn().unwrap();
        pair.assert_exactly_once_after(&next).await;
    }
}

#[tokio::test]
async fn a_relay_stops_while_a_server_is_down() {
    let pair = Pair::with_own_postgres().await;
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    pair.write("orders", "before", 10).await;
    pair.all_published(DEADLINE).await;
    pair.redis.kill9().await.unwrap();
    pair.write("orders", "during", 10).await;
    relay.wait_for_line("WARN", DEADLINE).await.unwrap();
    stops_within(&relay, AT_ONCE).await;
    pair.redis.start_again().await.unwrap();
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    pair.all_published(DEADLINE).await;
    pair.postgres.kill9().await.unwrap();
    relay.wait_for_line("out of reach", DEADLINE).await.unwrap();
    stops_within(&relay, AT_ONCE).await;
}
