//! The relay is killed (SIGKILL) at each step of a page and of a take-over: whatever the step, nothing is
//! lost and nothing stands in a stream twice.

use outbox_testkit::{Direction, Hold, Matcher, Process, Proxy, RelayStep as Step, eventually};

use crate::pair::{DEADLINE, Pair};

/// A backlog of several pages: the relay reads ahead and writes checkpoints between them.
const BACKLOG: i64 = 2_400;
const PAGE_ROWS: &str = "300";

struct Proxies {
    postgres: Proxy,
    redis: Proxy,
}

impl Proxies {
    async fn before(pair: &Pair) -> Self {
        Proxies {
            postgres: Proxy::start(pair.postgres.port()).await.unwrap(),
            redis: Proxy::start(pair.redis.port()).await.unwrap(),
        }
    }

    /// Stops the relay when it is at this step for the n-th time.
    fn hold(&self, step: Step, nth: usize) -> Hold {
        let proxy = if step.is_of_redis() {
            &self.redis
        } else {
            &self.postgres
        };
        proxy.hold(step.matcher().nth(nth), step.direction())
    }

    fn relay(&self, pair: &Pair) -> Process {
        pair.relay_via(self.postgres.port(), self.redis.port())
            .args(["--page-rows", PAGE_ROWS, "--checkpoint-interval", "10ms"])
            .spawn()
            .unwrap()
    }
}

/// Kills a relay at a step, once with a single message and once within a backlog, and starts another.
async fn killed_at(step: Step) {
    for (count, nth) in [(1, 1), (BACKLOG, 3)] {
        let pair = Pair::start().await;
        let proxies = Proxies::before(&pair).await;
        let first = proxies.relay(&pair);
        pair.leads(&first).await;
        pair.write("before", "before", 10).await;
        pair.all_published(DEADLINE).await;
        let hold = proxies.hold(step, nth);
        for (topic, part) in [("orders", count), ("audit", count / 2)] {
            pair.write(topic, topic, part).await;
        }
        hold.reached().await.unwrap();
        first.kill9();
        hold.drop_it();
        let second = pair.relay().spawn().unwrap();
        pair.assert_exactly_once_after(&second).await;
    }
}

#[tokio::test]
async fn killed_after_a_page_was_read_loses_and_doubles_nothing() {
    killed_at(Step::PageRead).await;
}

#[tokio::test]
async fn killed_while_the_script_is_on_its_way_loses_and_doubles_nothing() {
    killed_at(Step::PageSent).await;
}

#[tokio::test]
async fn killed_before_the_scripts_reply_loses_and_doubles_nothing() {
    killed_at(Step::PageRun).await;
}

#[tokio::test]
async fn killed_before_the_checkpoint_loses_and_doubles_nothing() {
    killed_at(Step::CheckpointSent).await;
}

#[tokio::test]
async fn killed_after_the_checkpoint_loses_and_doubles_nothing() {
    killed_at(Step::CheckpointWritten).await;
}

#[tokio::test]
async fn a_page_of_a_dead_relay_that_arrives_late_does_nothing() {
    let pair = Pair::start().await;
    let proxies = Proxies::before(&pair).await;
    let first = proxies.relay(&pair);
    pair.leads(&first).await;
    let hold = proxies.hold(Step::PageSent, 1);
    pair.write("orders", "orders", BACKLOG).await;
    hold.reached().await.unwrap();
    first.kill9();
    let second = pair.relay().spawn().unwrap();
    pair.all_published(DEADLINE).await;
    // The server answers the late page on a connection of its own; another command on it comes after.
    hold.release();
    eventually(DEADLINE, "the dead relay's connections to end", || async {
        proxies.redis.connections() == 0
    })
    .await
    .unwrap();
    pair.assert_exactly_once_after(&second).await;
}

#[tokio::test]
async fn a_page_of_a_dead_relay_that_arrives_before_the_next_one_leads_counts() {
    let pair = Pair::start().await;
    let proxies = Proxies::before(&pair).await;
    let first = proxies.relay(&pair);
    pair.leads(&first).await;
    let hold = proxies.hold(Step::PageSent, 2);
    pair.write("orders", "orders", BACKLOG).await;
    hold.reached().await.unwrap();
    first.kill9();
    let before = pair.count("orders").await;
    hold.release();
    pair.reaches("orders", before + 1, DEADLINE).await;
    let second = pair.relay().spawn().unwrap();
    pair.assert_exactly_once_after(&second).await;
}

#[tokio::test]
async fn a_checkpoint_of_a_dead_relay_that_arrives_late_does_nothing() {
    let pair = Pair::start().await;
    let proxies = Proxies::before(&pair).await;
    let first = proxies.relay(&pair);
    pair.leads(&first).await;
    let hold = proxies.hold(Step::CheckpointSent, 1);
    pair.write("orders", "orders", BACKLOG).await;
    hold.reached().await.unwrap();
    first.kill9();
    // The server still sees the dead relay's session, as after a crash of its whole machine.
    let second = pair.relay().spawn().unwrap();
    pair.all_published(DEADLINE).await;
    hold.release();
    pair.assert_exactly_once_after(&second).await;
}

/// The step of a take-over at which the relay dies: it has a marker of a new epoch and an old checkpoint.
async fn killed_while_taking_over(matcher: Matcher, direction: Direction) {
    let pair = Pair::start().await;
    let proxies = Proxies::before(&pair).await;
    let first = proxies.relay(&pair);
    pair.leads(&first).await;
    let held = proxies.hold(Step::CheckpointSent, 1);
    pair.write("orders", "orders", BACKLOG).await;
    held.reached().await.unwrap();
    first.kill9();
    held.drop_it();
    let old = pair.checkpoint().await;

    let redis = direction == Direction::Reply;
    let hold = if redis {
        &proxies.redis
    } else {
        &proxies.postgres
    }
    .hold(matcher, direction);
    let second = proxies.relay(&pair);
    hold.reached().await.unwrap();
    second.kill9();
    hold.drop_it();
    let (marker, checkpoint) = (pair.marker().await, pair.checkpoint().await);
    assert_eq!(checkpoint, old);
    assert!(
        marker.unwrap().0 > checkpoint.unwrap().0,
        "{marker:?} {checkpoint:?}"
    );

    let third = pair.relay().spawn().unwrap();
    pair.assert_exactly_once_after(&third).await;
}

#[tokio::test]
async fn killed_after_taking_the_marker_loses_and_doubles_nothing() {
    killed_while_taking_over(Matcher::redis("EVAL"), Direction::Reply).await;
}

#[tokio::test]
async fn killed_between_marker_and_checkpoint_loses_and_doubles_nothing() {
    killed_while_taking_over(
        Matcher::sql("INSERT INTO outbox.checkpoint"),
        Direction::Request,
    )
    .await;
}

#[tokio::test]
async fn killed_before_the_new_checkpoints_commit_loses_and_doubles_nothing() {
    killed_while_taking_over(Matcher::bytes(b"COMMIT\0"), Direction::Request).await;
}
