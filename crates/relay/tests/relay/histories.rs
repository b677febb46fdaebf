//! Postgres comes back with another past: a storage snapshot put back, a standby promoted, a dump restored.
//! What Postgres still has goes out and stands in the streams once.

use outbox_testkit::{
    Direction, Persistence, Postgres, Process, Proxy, Redis, RelayStep, eventually,
};

use crate::pair::{DEADLINE, Pair, Server, stop};
use crate::start_table::refuses;

impl Pair {
    /// Every message of the database stands in its stream once, and no key at all stands there twice.
    async fn assert_each_key_once(&self, topic: &str) {
        let counts = self.counts(topic).await;
        let rows = self
            .sql
            .query(
                "SELECT message_key FROM outbox.messages WHERE topic = $1",
                &[&topic],
            )
            .await
            .unwrap();
        let lost: Vec<String> = rows
            .iter()
            .map(|row| row.get(0))
            .filter(|key: &String| !counts.contains_key(key))
            .collect();
        assert!(lost.is_empty(), "lost: {lost:?}");
        let doubled: Vec<_> = counts.iter().filter(|(_, n)| **n > 1).collect();
        assert!(doubled.is_empty(), "doubled: {doubled:?}");
    }

    /// The same once a relay has published everything and was stopped.
    async fn assert_each_key_once_after(&self, relay: &Process, topics: &[&str]) {
        self.all_published(DEADLINE).await;
        stop(relay).await;
        for topic in topics {
            self.assert_each_key_once(topic).await;
        }
        assert_eq!(self.checkpoint().await, self.marker().await);
    }

    /// Messages that are published while the checkpoint stays where it is.
    async fn publish_without_checkpoint(&self, topic: &str, prefix: &str, count: i64) {
        let relay = self.relay().spawn().unwrap();
        self.leads(&relay).await;
        let before = self.checkpoint().await;
        let lock = self.postgres.connect(&self.database).await.unwrap();
        lock.batch_execute("BEGIN; LOCK TABLE outbox.checkpoint IN EXCLUSIVE MODE")
            .await
            .unwrap();
        self.write(topic, prefix, count).await;
        self.all_published(DEADLINE).await;
        relay.kill9();
        // The relay's session waits for the lock and notices its end only then.
        self.sql
            .execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'outbox-relay'",
                &[],
            )
            .await
            .unwrap();
        lock.batch_execute("ROLLBACK").await.unwrap();
        let (checkpoint, marker) = (self.checkpoint().await, self.marker().await);
        assert_eq!(checkpoint, before);
        assert_eq!(marker.unwrap().2 - checkpoint.unwrap().2, count);
    }
}

#[tokio::test]
async fn a_snapshot_put_back_under_a_running_relay_loses_and_doubles_no_surviving_row() {
    let mut pair = Pair::with_own_postgres().await;
    pair.publish("orders", "kept", 200).await;
    let snapshot = pair.postgres.snapshot().await.unwrap();
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    pair.write("orders", "lost", 100).await;
    pair.all_published(DEADLINE).await;
    pair.postgres.restore(&snapshot).await.unwrap();
    pair.reconnect().await;
    // More than were lost, so that the sequence is past the marker again.
    pair.write("orders", "new", 150).await;
    pair.assert_each_key_once_after(&relay, &["orders"]).await;
}

#[tokio::test]
async fn a_snapshot_put_back_between_two_relays_loses_and_doubles_no_surviving_row() {
    // With fewer, as many and more new rows than were lost.
    for new in [40, 100, 150] {
        let mut pair = Pair::with_own_postgres().await;
        pair.publish("audit", "kept", 100).await;
        // These survive, and neither the snapshot's checkpoint nor the ids alone tell that they are published.
        pair.publish_without_checkpoint("orders", "survives", 120)
            .await;
        let snapshot = pair.postgres.snapshot().await.unwrap();
        pair.publish("orders", "lost", 100).await;
        let before = pair.entries("orders").await;
        pair.postgres.restore(&snapshot).await.unwrap();
        pair.reconnect().await;
        pair.write("orders", "new", new).await;
        pair.write("audit", "new-too", 10).await;
        let relay = pair.relay().spawn().unwrap();
        pair.leads(&relay).await;
        pair.assert_each_key_once_after(&relay, &["orders", "audit"])
            .await;
        assert_eq!(pair.entries("orders").await[..before.len()], before[..]);

        // The same database and Redis are one history from here on.
        pair.write("orders", "later", 50).await;
        let relay = pair.relay().spawn().unwrap();
        relay
            .wait_for_line("going on behind the marker", DEADLINE)
            .await
            .unwrap();
        pair.assert_each_key_once_after(&relay, &["orders", "audit"])
            .await;
    }
}

#[tokio::test]
async fn a_crash_while_surviving_rows_are_compared_doubles_nothing() {
    for direction in [Direction::Request, Direction::Reply] {
        let mut pair = Pair::with_own_postgres().await;
        pair.publish("orders", "kept", 100).await;
        pair.publish_without_checkpoint("orders", "survives", 200)
            .await;
        let snapshot = pair.postgres.snapshot().await.unwrap();
        pair.publish("orders", "lost", 50).await;
        pair.postgres.restore(&snapshot).await.unwrap();
        pair.reconnect().await;
        pair.write("orders", "new", 80).await;

        // The take-over is the first script; then come pages of 20. It dies twice, the second time later.
        for nth in [4, 6] {
            let proxy = Proxy::start(pair.redis.port()).await.unwrap();
            let hold = proxy.hold(RelayStep::PageSent.matcher().nth(nth), direction);
            let relay = pair.relay_via(pair.postgres.port(), proxy.port());
            let relay = relay.args(["--page-rows", "20"]).spawn().unwrap();
            hold.reached().await.unwrap();
            relay.kill9();
            hold.drop_it();
        }
        let relay = pair.relay().spawn().unwrap();
        pair.leads(&relay).await;
        pair.assert_each_key_once_after(&relay, &["orders"]).await;
    }
}

#[tokio::test]
async fn both_servers_fall_back_at_once() {
    for redis_fell_further in [true, false] {
        let redis = Redis::builder().persistence(Persistence::Rdb);
        let postgres = Box::new(Postgres::start().await.unwrap());
        let mut pair = Pair::on(Server::Own(postgres), redis.start().await.unwrap()).await;
        pair.publish("orders", "first", 100).await;
        let (rows, entries);
        if redis_fell_further {
            pair.redis.save().await.unwrap();
            entries = pair.redis.snapshot().await.unwrap();
            pair.publish("orders", "second", 60).await;
            rows = pair.postgres.snapshot().await.unwrap();
        } else {
            rows = pair.postgres.snapshot().await.unwrap();
            pair.publish("orders", "second", 60).await;
            pair.redis.save().await.unwrap();
            entries = pair.redis.snapshot().await.unwrap();
        }
        let relay = pair.relay().spawn().unwrap();
        pair.leads(&relay).await;
        pair.write("orders", "third", 60).await;
        pair.all_published(DEADLINE).await;
        let (postgres, redis) =
            tokio::join!(pair.postgres.restore(&rows), pair.redis.restore(&entries));
        postgres.unwrap();
        redis.unwrap();
        pair.reconnect().await;
        pair.write("orders", "new", 200).await;
        pair.assert_each_key_once_after(&relay, &["orders"]).await;
        let third = |key: &&String| key.starts_with("third");
        assert_eq!(pair.counts("orders").await.keys().find(third), None);
    }
}

/// Waits until the relay has said that it cannot work here, and why.
async fn works_not(relay: &Process, why: &str) {
    let line = relay.wait_for_line("cannot work", DEADLINE).await.unwrap();
    assert!(line.contains("ERROR") && line.contains(why), "{line}");
}

#[tokio::test]
async fn a_standby_that_lost_rows_is_gone_on_with_and_the_old_primary_is_refused() {
    let mut pair = Pair::with_own_postgres().await;
    let proxy = Proxy::start(pair.postgres.port()).await.unwrap();
    let standby = pair.postgres.standby().await.unwrap();
    let relay = pair.relay_via(proxy.port(), pair.redis.port());
    let relay = relay.spawn().unwrap();
    pair.leads(&relay).await;
    pair.write("orders", "kept", 100).await;
    pair.all_published(DEADLINE).await;
    standby.caught_up_with(&pair.postgres).await.unwrap();
    standby.stop_receiving().await.unwrap();
    pair.write("orders", "lost", 60).await;
    pair.all_published(DEADLINE).await;
    let settled = || async { pair.checkpoint().await == pair.marker().await };
    eventually(DEADLINE, "the checkpoint to follow", settled)
        .await
        .unwrap();

    pair.postgres.kill9().await.unwrap();
    standby.promote().await.unwrap();
    proxy.retarget(standby.port()).await.unwrap();
    let primary = std::mem::replace(&mut pair.postgres, Server::Own(Box::new(standby)));
    pair.reconnect().await;
    // The ids of the lost rows are given out again, and some more.
    pair.write("orders", "new", 90).await;
    pair.all_published(DEADLINE).await;
    relay
        .wait_for_line("Postgres has another past", DEADLINE)
        .await
        .unwrap();

    // The old primary comes back with its lost rows, and somebody even writes there.
    primary.start_again().await.unwrap();
    let old = primary.connect(&pair.database).await.unwrap();
    old.execute(
        "INSERT INTO outbox.messages (topic, message_key, payload) VALUES ('orders', 'stray', '{}')",
        &[],
    )
    .await
    .unwrap();
    let another = pair.relay_via(primary.port(), pair.redis.port());
    let line = refuses(another.spawn().unwrap()).await;
    assert!(line.contains("an old primary that came back"), "{line}");

    // A relay that runs and is led there does not exit, publishes nothing, and works once it is led back.
    proxy.retarget(primary.port()).await.unwrap();
    proxy.reset_all().await.unwrap();
    works_not(&relay, "an old primary").await;
    proxy.retarget(pair.postgres.port()).await.unwrap();
    pair.write("orders", "later", 10).await;
    pair.assert_each_key_once_after(&relay, &["orders"]).await;
    assert!(!pair.counts("orders").await.contains_key("stray"));
}

#[tokio::test]
async fn another_cluster_is_refused_until_it_is_adopted() {
    let mut pair = Pair::with_own_postgres().await;
    pair.publish("orders", "kept", 100).await;
    let copy = Postgres::start().await.unwrap();
    let database = copy.fresh_database().await.unwrap();
    let tool = |name| pair.postgres.bin_dir().join(name).display().to_string();
    let pipe = format!(
        "{} '{}' | {} -q -v ON_ERROR_STOP=1 '{}'",
        tool("pg_dump"),
        pair.postgres.url(&pair.database),
        tool("psql"),
        copy.url(&database)
    );
    let dumped = Process::builder("sh").args(["-c", &pipe]).spawn().unwrap();
    let status = dumped.wait(DEADLINE).await.unwrap();
    assert!(status.success(), "{:#?}", dumped.lines());

    // The copy alone must not publish into production's Redis.
    let production = (
        std::mem::replace(&mut pair.postgres, Server::Own(Box::new(copy))),
        std::mem::replace(&mut pair.database, database),
    );
    pair.reconnect().await;
    pair.write("orders", "new", 50).await;
    let line = pair.refuses().await;
    assert!(
        line.contains("system id") && line.contains("outbox-relay adopt"),
        "{line}"
    );
    assert_eq!(pair.count("orders").await, 100);

    let adopted = pair.command(["adopt"]).await;
    assert!(
        adopted.exit_status().unwrap().success(),
        "{:?}",
        adopted.lines()
    );
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    pair.assert_each_key_once_after(&relay, &["orders"]).await;
    assert_eq!(pair.count("orders").await, 150);

    // And now the other one is the copy.
    let old = outbox_testkit::relay(&production.0.url(&production.1), &pair.redis.url());
    let line = refuses(old.spawn().unwrap()).await;
    assert!(line.contains("outbox-relay adopt"), "{line}");
}
