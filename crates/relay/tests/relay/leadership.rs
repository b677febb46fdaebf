//! Two relays: one leads, the other takes over when it has to, and never are there two.

use std::time::{Duration, Instant};

use outbox_testkit::{Direction, Matcher, Process, Proxy, RelayStep, eventually};

use crate::pair::{DEADLINE, Pair, stop};

/// Take-over times: two and eight seconds are promised, and the rest is for a machine that runs other tests too.
const AFTER_CRASH: Duration = Duration::from_secs(2 + 3);
const AFTER_FREEZE: Duration = Duration::from_secs(8 + 3);

/// A relay with its own way to both servers.
struct Member {
    postgres: Proxy,
    redis: Proxy,
    process: Process,
}

impl Member {
    async fn start(pair: &Pair, name: &str, args: &[&str]) -> Self {
        let postgres = Proxy::start(pair.postgres.port()).await.unwrap();
        let redis = Proxy::start(pair.redis.port()).await.unwrap();
        let process = pair
            .relay_via(postgres.port(), redis.port())
            .args(["--name", name])
            .args(args)
            .spawn()
            .unwrap();
        Member {
            postgres,
            redis,
            process,
        }
    }

    async fn stands_by(&self) {
        let line = "standing by";
        self.process.wait_for_line(line, DEADLINE).await.unwrap();
    }
}

/// A leader and a standby, with one message published.
async fn leader_and_standby(pair: &Pair, args: &[&str]) -> (Member, Member) {
    let leader = Member::start(pair, "first", args).await;
    pair.leads(&leader.process).await;
    let standby = Member::start(pair, "second", args).await;
    standby.stands_by().await;
    pair.write("orders", "before", 1).await;
    pair.all_published(DEADLINE).await;
    (leader, standby)
}

/// Who leads, by name.
async fn leader_of(pair: &Pair) -> Option<String> {
    let row = pair
        .sql
        .query_opt(
            "SELECT a.application_name FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
             WHERE l.locktype = 'advisory' AND l.classid = 1869968482 AND l.objid = 1 AND l.granted
               AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            &[],
        )
        .await
        .unwrap();
    row.map(|row| row.get(0))
}

/// A message written now arrives within a time.
async fn arrives_within(pair: &Pair, limit: Duration) {
    let begun = Instant::now();
    let before = pair.count("orders").await;
    pair.write("orders", &format!("arrives-{before}"), 1).await;
    pair.reaches("orders", before + 1, limit.saturating_sub(begun.elapsed()))
        .await;
}

#[tokio::test]
async fn a_standby_takes_over_from_a_crashed_leader() {
    let pair = Pair::start().await;
    let (leader, standby) = leader_and_standby(&pair, &[]).await;
    leader.process.kill9();
    arrives_within(&pair, AFTER_CRASH).await;
    pair.assert_exactly_once_after(&standby.process).await;
}

#[tokio::test]
async fn a_standby_takes_over_from_a_leader_that_stops_at_once() {
    let pair = Pair::start().await;
    let (leader, standby) = leader_and_standby(&pair, &[]).await;
    stop(&leader.process).await;
    arrives_within(&pair, AFTER_CRASH).await;
    pair.assert_exactly_once_after(&standby.process).await;
}

#[tokio::test]
async fn a_standby_takes_over_from_a_frozen_leader() {
    let pair = Pair::start().await;
    let (leader, standby) = leader_and_standby(&pair, &[]).await;
    leader.process.pause();
    arrives_within(&pair, AFTER_FREEZE).await;
    leader.process.resume();
    leader.stands_by().await;
    assert_eq!(leader_of(&pair).await.as_deref(), Some("second"));
    stop(&leader.process).await;
    pair.assert_exactly_once_after(&standby.process).await;
}

#[tokio::test]
async fn a_standby_takes_over_from_a_leader_that_is_cut_off() {
    let pair = Pair::start().await;
    let (leader, standby) = leader_and_standby(&pair, &[]).await;
    tokio::try_join!(
        leader.postgres.blackhole_all(),
        leader.redis.blackhole_all()
    )
    .unwrap();
    arrives_within(&pair, AFTER_FREEZE).await;
    tokio::try_join!(leader.postgres.pass(), leader.redis.pass()).unwrap();
    leader.stands_by().await;
    stop(&leader.process).await;
    pair.assert_exactly_once_after(&standby.process).await;
}

#[tokio::test]
async fn a_standby_takes_over_from_a_leader_without_postgres() {
    let pair = Pair::start().await;
    let (leader, standby) = leader_and_standby(&pair, &[]).await;
    leader.postgres.blackhole_all().await.unwrap();
    arrives_within(&pair, AFTER_FREEZE).await;
    leader.postgres.pass().await.unwrap();
    leader.stands_by().await;
    stop(&leader.process).await;
    pair.assert_exactly_once_after(&standby.process).await;
}

#[tokio::test]
async fn a_leader_without_redis_makes_room_for_a_standby_that_reaches_it() {
    let pair = Pair::start().await;
    let args = ["--redis-timeout", "2s"];
    let (leader, standby) = leader_and_standby(&pair, &args).await;
    leader.redis.blackhole_all().await.unwrap();
    // It notices within a poll of the marker (5 s), waits for the reply (2 s) and then for Redis (10 s).
    arrives_within(&pair, DEADLINE).await;
    assert_eq!(leader_of(&pair).await.as_deref(), Some("second"));
    leader
        .process
        .wait_for_line("gave up the leadership", DEADLINE)
        .await
        .unwrap();
    leader.redis.pass().await.unwrap();
    leader.stands_by().await;
    stop(&leader.process).await;
    pair.assert_exactly_once_after(&standby.process).await;
}

#[tokio::test]
async fn a_leader_without_redis_keeps_the_lead_while_nobody_else_reaches_it() {
    let pair = Pair::start().await;
    let args = ["--redis-timeout", "1s"];
    let (leader, standby) = leader_and_standby(&pair, &args).await;
    tokio::try_join!(leader.redis.blackhole_all(), standby.redis.blackhole_all()).unwrap();
    pair.write("orders", "during", 100).await;
    // Past the ten seconds after which it would make room.
    let deadline = Instant::now() + Duration::from_secs(14);
    eventually(DEADLINE, "the leader to keep the lead", || async {
        assert_eq!(leader_of(&pair).await.as_deref(), Some("first"));
        Instant::now() > deadline
    })
    .await
    .unwrap();
    tokio::try_join!(leader.redis.pass(), standby.redis.pass()).unwrap();
    pair.all_published(DEADLINE).await;
    assert_eq!(leader_of(&pair).await.as_deref(), Some("first"));
    stop(&standby.process).await;
    pair.assert_exactly_once_after(&leader.process).await;
}

#[tokio::test]
async fn a_leader_frozen_in_the_middle_of_a_page_doubles_nothing_when_it_thaws() {
    for direction in [Direction::Request, Direction::Reply] {
        let pair = Pair::start().await;
        let (leader, standby) = leader_and_standby(&pair, &["--page-rows", "300"]).await;
        let hold = leader
            .redis
            .hold(RelayStep::PageSent.matcher().nth(3), direction);
        pair.write("orders", "backlog", 2_400).await;
        hold.reached().await.unwrap();
        leader.process.pause();
        // It is past every timeout when the standby has published everything.
        pair.leads(&standby.process).await;
        pair.all_published(DEADLINE).await;
        leader.process.resume();
        hold.release();
        leader.stands_by().await;
        pair.write("orders", "after", 10).await;
        pair.all_published(DEADLINE).await;
        stop(&leader.process).await;
        pair.assert_exactly_once_after(&standby.process).await;
    }
}

#[tokio::test]
async fn a_leader_whose_page_arrives_while_the_standby_takes_over_doubles_nothing() {
    let pair = Pair::start().await;
    let (leader, standby) = leader_and_standby(&pair, &["--page-rows", "300"]).await;
    let page = leader
        .redis
        .hold(RelayStep::PageSent.matcher().nth(3), Direction::Request);
    let take = standby
        .redis
        .hold(Matcher::redis("EVAL"), Direction::Request);
    pair.write("orders", "backlog", 2_400).await;
    page.reached().await.unwrap();
    leader.process.pause();
    // The standby has read the marker, and its take-over is on its way.
    take.reached().await.unwrap();
    let before = pair.count("orders").await;
    page.release();
    pair.reaches("orders", before + 300, DEADLINE).await;
    take.release();
    pair.all_published(DEADLINE).await;
    leader.process.resume();
    leader.stands_by().await;
    stop(&leader.process).await;
    pair.assert_exactly_once_after(&standby.process).await;
}

#[tokio::test]
async fn leaders_that_lose_their_sessions_or_freeze_under_load_lose_and_double_nothing() {
    let pair = Pair::start().await;
    let (first, second) = leader_and_standby(&pair, &[]).await;
    let writer = async {
        let mut pace = tokio::time::interval(Duration::from_millis(50));
        for n in 0..240 {
            pace.tick().await;
            pair.write("orders", &format!("load-{n}"), 10).await;
        }
    };
    let faults = async {
        pair.reaches("orders", 300, DEADLINE).await;
        let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                   WHERE application_name = 'first' AND datname = current_database()";
        pair.sql.execute(end, &[]).await.unwrap();
        pair.reaches("orders", 900, DEADLINE).await;
        let leader = leader_of(&pair).await;
        let leader = match leader.as_deref() {
            Some("second") => &second,
            _ => &first,
        };
        leader.process.pause();
        pair.reaches("orders", 2_000, DEADLINE).await;
        leader.process.resume();
    };
    tokio::join!(writer, faults);
    pair.all_published(DEADLINE).await;

    // Both live, one leads, and that stays so.
    let epoch = pair.marker().await.unwrap().0;
    let calm = Instant::now() + Duration::from_secs(5);
    eventually(DEADLINE, "the leadership to be calm", || async {
        assert_eq!(pair.marker().await.unwrap().0, epoch);
        Instant::now() > calm
    })
    .await
    .unwrap();
    stop(&second.process).await;
    pair.write("orders", "last", 1).await;
    pair.all_published(DEADLINE).await;
    stop(&first.process).await;
    pair.assert_exactly_once().await;
    assert_eq!(pair.checkpoint().await, pair.marker().await);
}
