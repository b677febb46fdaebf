//! What a leader goes on from, within one history of Postgres: each row of the start table on real servers.

use std::time::Duration;

use outbox_testkit::{Output, Persistence, Process, Redis, eventually};
use redis::AsyncCommands;

use crate::pair::{DEADLINE, MARKER, Pair, STOP, stop};

/// A relay that runs looks at both histories this often at the least, and a bit more.
pub(crate) const NOTICED: Duration = Duration::from_secs(15);

impl Pair {
    /// Publishes messages with a relay that is stopped afterwards.
    pub(crate) async fn publish(&self, topic: &str, prefix: &str, count: i64) {
        self.write(topic, prefix, count).await;
        let relay = self.relay().spawn().unwrap();
        self.assert_exactly_once_after(&relay).await;
    }

    /// Waits until Postgres has noticed the end of every relay. One that finds another's session stands by at
    /// first, and does not exit any more.
    pub(crate) async fn no_relay_is_left(&self) {
        let sessions = "SELECT count(*) FROM pg_stat_activity
            WHERE application_name = 'outbox-relay' AND datname = current_database()";
        eventually(DEADLINE, "the relays' sessions to end", || async {
            let row = self.sql.query_one(sessions, &[]).await.unwrap();
            row.get::<_, i64>(0) == 0
        })
        .await
        .unwrap();
    }

    /// A relay that refuses to start; its last line.
    pub(crate) async fn refuses(&self) -> String {
        self.no_relay_is_left().await;
        refuses(self.relay().spawn().unwrap()).await
    }
}

/// Waits for a relay to refuse, with one line that says why.
pub(crate) async fn refuses(relay: Process) -> String {
    let status = relay.wait(STOP).await.unwrap();
    let lines = relay.lines_of(Output::Stderr);
    assert_eq!(status.code(), Some(1), "{lines:#?}");
    let last = lines.last().unwrap().clone();
    assert!(last.starts_with("outbox-relay: "), "{last}");
    last
}

#[tokio::test]
async fn an_equal_marker_is_gone_on_from() {
    let pair = Pair::start().await;
    pair.publish("orders", "first", 200).await;
    pair.write("orders", "second", 100).await;
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    pair.assert_exactly_once_after(&relay).await;
    relay
        .wait_for_line("going on behind the marker", DEADLINE)
        .await
        .unwrap();
}

#[tokio::test]
async fn exactly_what_redis_lost_at_its_tail_goes_out_again() {
    for running in [true, false] {
        let redis = Redis::builder().persistence(Persistence::Rdb);
        let pair = Pair::with_redis(redis.start().await.unwrap()).await;
        pair.publish("orders", "kept", 300).await;
        pair.redis.save().await.unwrap();
        let old = pair.redis.snapshot().await.unwrap();
        let kept = pair.entries("orders").await;
        let relay = pair.relay().spawn().unwrap();
        pair.leads(&relay).await;
        pair.write("orders", "lost", 200).await;
        pair.write("audit", "lost-too", 100).await;
        pair.all_published(DEADLINE).await;
        if !running {
            stop(&relay).await;
        }
        pair.redis.restore(&old).await.unwrap();
        pair.write("orders", "new", 50).await;
        let next = pair.relay().spawn().unwrap();
        let relay = if running { &relay } else { &next };
        relay
            .wait_for_line("exactly those go out again", DEADLINE)
            .await
            .unwrap();
        pair.all_published(DEADLINE).await;
        if running {
            stop(&next).await;
        }
        pair.assert_exactly_once_after(relay).await;
        assert_eq!(pair.entries("orders").await[..kept.len()], kept[..]);
    }
}

#[tokio::test]
async fn an_empty_redis_is_filled_again() {
    for running in [true, false] {
        let pair = Pair::start().await;
        pair.publish("orders", "first", 400).await;
        let relay = pair.relay().spawn().unwrap();
        pair.leads(&relay).await;
        if !running {
            stop(&relay).await;
        }
        let mut redis = pair.redis.connect().await.unwrap();
        redis::cmd("FLUSHALL").exec_async(&mut redis).await.unwrap();
        pair.write("orders", "second", 100).await;
        let relay = if running {
            relay
        } else {
            pair.relay().spawn().unwrap()
        };
        relay
            .wait_for_line("all that the outbox has goes out again", DEADLINE)
            .await
            .unwrap();
        pair.assert_exactly_once_after(&relay).await;
    }
}

#[tokio::test]
async fn an_empty_redis_is_gone_on_with_where_that_is_wanted() {
    let pair = Pair::start().await;
    pair.publish("orders", "first", 400).await;
    let mut redis = pair.redis.connect().await.unwrap();
    redis::cmd("FLUSHALL").exec_async(&mut redis).await.unwrap();
    pair.write("orders", "second", 100).await;
    let relay = pair.relay().args(["--on-redis-loss", "resume"]);
    let relay = relay.spawn().unwrap();
    pair.reaches("orders", 100, DEADLINE).await;
    stop(&relay).await;
    let entries = pair.entries("orders").await;
    assert_eq!(entries.len(), 100);
    assert!(entries.iter().all(|e| e.message_key.starts_with("second-")));
}

#[tokio::test]
async fn a_replay_keeps_to_its_rate_and_what_is_new_does_not() {
    let pair = Pair::start().await;
    pair.publish("orders", "first", 400).await;
    let mut redis = pair.redis.connect().await.unwrap();
    redis::cmd("FLUSHALL").exec_async(&mut redis).await.unwrap();
    pair.write("orders", "second", 2_000).await;
    let relay = pair.relay().args(["--replay-rate", "200"]);
    let relay = relay.args(["--page-rows", "50"]).spawn().unwrap();
    pair.assert_exactly_once_after(&relay).await;
    let entries = pair.entries("orders").await;
    let ms = |n: usize| -> u64 {
        let id = &entries[n].stream_id;
        id.split_once('-').unwrap().0.parse().unwrap()
    };
    // Eight pages of 50 at 200 a second: seven pauses of 250 ms lie between the first and the last.
    let replay = ms(399) - ms(0);
    assert!((1_700..6_000).contains(&replay), "{replay} ms");
    let fresh = ms(2_399) - ms(450);
    assert!(fresh < 5_000, "{fresh} ms");
}

#[tokio::test]
async fn what_was_purged_and_lost_is_named() {
    let pair = Pair::start().await;
    pair.write("orders", "first", 300).await;
    let relay = pair.relay().args(["--retention", "1s"]).spawn().unwrap();
    eventually(DEADLINE, "the purge to take rows", || async {
        let sql = "SELECT count(*) FROM outbox.messages";
        let left: i64 = pair.sql.query_one(sql, &[]).await.unwrap().get(0);
        if left < 300 { Ok(()) } else { Err(left) }
    })
    .await
    .unwrap();
    stop(&relay).await;
    let purged: i64 = pair
        .sql
        .query_one("SELECT purged_to FROM outbox.purge", &[])
        .await
        .unwrap()
        .get(0);
    assert!(purged > 0);
    let mut redis = pair.redis.connect().await.unwrap();
    redis::cmd("FLUSHALL").exec_async(&mut redis).await.unwrap();
    pair.write("orders", "second", 10).await;
    let relay = pair.relay().spawn().unwrap();
    let line = relay.wait_for_line("ERROR", DEADLINE).await.unwrap();
    assert!(
        line.contains("first=1 ") && line.contains(&format!("last={purged}")),
        "{line}"
    );
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn another_outbox_in_the_same_redis_is_refused() {
    let redis = Redis::start().await.unwrap();
    let first = Pair::with_redis(redis).await;
    first.publish("orders", "first", 10).await;
    let id = "SELECT outbox_id::text FROM outbox.identity";
    let theirs: String = first.sql.query_one(id, &[]).await.unwrap().get(0);
    let second = Pair::with_redis(first.redis).await;
    let ours: String = second.sql.query_one(id, &[]).await.unwrap().get(0);
    second.write("orders", "second", 10).await;
    let line = second.refuses().await;
    assert!(line.contains(&theirs) && line.contains(&ours), "{line}");
    assert!(line.contains("--stream-prefix"), "{line}");
    assert_eq!(second.count("orders").await, 10);

    // Under a prefix of its own both live in one Redis.
    let relay = second.relay().args(["--stream-prefix", "shop:"]);
    let relay = relay.spawn().unwrap();
    second.leads(&relay).await;
    eventually(DEADLINE, "the second outbox's entries", || async {
        let mut redis = second.redis.connect().await.unwrap();
        redis.xlen::<_, usize>("shop:orders").await == Ok(10)
    })
    .await
    .unwrap();
    stop(&relay).await;
}

#[tokio::test]
async fn a_key_that_is_no_marker_is_refused_and_left_alone() {
    let pair = Pair::start().await;
    pair.write("orders", "first", 10).await;
    let mut redis = pair.redis.connect().await.unwrap();
    redis.set::<_, _, ()>(MARKER, "mine").await.unwrap();
    let line = pair.refuses().await;
    assert!(line.contains("holds something else"), "{line}");
    assert_eq!(redis.get(MARKER).await, Ok("mine".to_owned()));

    redis.del::<_, ()>(MARKER).await.unwrap();
    redis
        .hset::<_, _, _, ()>(MARKER, "name", "mine")
        .await
        .unwrap();
    let line = pair.refuses().await;
    assert!(line.contains("a hash without a version"), "{line}");

    redis
        .hset::<_, _, _, ()>(MARKER, "version", "2")
        .await
        .unwrap();
    let line = pair.refuses().await;
    assert!(line.contains("version 2"), "{line}");
    assert_eq!(redis.hget(MARKER, "name").await, Ok("mine".to_owned()));
    assert_eq!(pair.count("orders").await, 0);
}

#[tokio::test]
async fn a_redis_that_falls_back_unnoticed_gets_exactly_what_it_lost() {
    let pair = Pair::start().await;
    let relay = pair.relay().args(["--poll-interval", "10m"]);
    let relay = relay.spawn().unwrap();
    pair.leads(&relay).await;
    pair.write("orders", "kept", 100).await;
    pair.all_published(DEADLINE).await;
    let old = pair.redis.keys().await.unwrap();
    let kept = pair.entries("orders").await;
    pair.write("orders", "lost", 100).await;
    pair.all_published(DEADLINE).await;
    let settled = || async { pair.checkpoint().await == pair.marker().await };
    eventually(DEADLINE, "the checkpoint to follow", settled)
        .await
        .unwrap();

    // No client is disconnected, nobody writes, and the relay is idle.
    pair.redis.set_back(&old).await.unwrap();
    assert_eq!(pair.count("orders").await, 100);
    pair.all_published(NOTICED).await;
    pair.assert_exactly_once_after(&relay).await;
    assert_eq!(pair.entries("orders").await[..100], kept[..]);
}

#[tokio::test]
async fn a_redis_that_copies_an_older_one_gets_exactly_what_it_lost() {
    let pair = Pair::start().await;
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    pair.write("orders", "kept", 100).await;
    pair.all_published(DEADLINE).await;
    let older = pair.redis.replica().await.unwrap();
    older.caught_up_with(&pair.redis).await.unwrap();
    older.promote().await.unwrap();
    pair.write("orders", "lost", 100).await;
    pair.all_published(DEADLINE).await;

    // Back and forth, as a failover that is undone: the relay's connection may live through it.
    pair.redis.replica_of(older.port()).await.unwrap();
    pair.redis.in_sync().await.unwrap();
    assert!(pair.count("orders").await >= 100);
    pair.redis.promote().await.unwrap();
    pair.all_published(DEADLINE).await;
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn a_row_that_commits_late_arrives_once_whatever_happened_to_redis() {
    let nothing: fn(&mut redis::Pipeline) = |_| {};
    for (fault, do_it) in [
        ("nothing", nothing),
        ("the marker is deleted", |p| {
            p.del(MARKER);
        }),
        ("marker and gaps are deleted", |p| {
            p.del(MARKER).del("outbox:relay:gaps");
        }),
        ("all is deleted", |p| {
            p.cmd("FLUSHALL");
        }),
    ] {
        let pair = Pair::start().await;
        let relay = pair.relay().spawn().unwrap();
        pair.leads(&relay).await;
        pair.write("orders", "before", 20).await;
        let late = pair.postgres.connect(&pair.database).await.unwrap();
        late.batch_execute(
            "BEGIN; INSERT INTO outbox.messages (topic, message_key, payload) VALUES ('orders', 'late', '{}')",
        )
        .await
        .unwrap();
        pair.write("orders", "around", 20).await;
        pair.all_published(DEADLINE).await;
        relay.kill9();
        let mut pipe = redis::pipe();
        do_it(pipe.cmd("PING"));
        let mut redis = pair.redis.connect().await.unwrap();
        pipe.exec_async(&mut redis).await.unwrap();

        let relay = pair.relay().spawn().unwrap();
        pair.leads(&relay).await;
        pair.write("orders", "after", 20).await;
        pair.all_published(DEADLINE).await;
        assert_eq!(pair.counts("orders").await.get("late"), None, "{fault}");
        late.batch_execute("COMMIT").await.unwrap();
        pair.all_published(DEADLINE).await;
        pair.assert_exactly_once_after(&relay).await;
    }
}
