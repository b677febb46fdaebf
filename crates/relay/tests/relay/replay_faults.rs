//! A replay beside outages, gaps, held streams and a Redis that falls back.

use outbox_testkit::{Process, Proxy, eventually, relay_binary};

use crate::commands::run_on;
use crate::replay::{keys, published, redis, replay, replayed, with_rows};
use crate::support::{DEADLINE, Outbox, TOPIC, insert, insert_ordered};

#[tokio::test]
async fn an_outage_is_met_by_trying_again() {
    let (outbox, relay) = with_rows(1_000).await;
    let proxy = Proxy::start(outbox.redis.port()).await.unwrap();
    let slow = Process::builder(relay_binary())
        .args(["replay", "--name", "outage", "--all", "--rate", "500"])
        .env("DATABASE_URL", outbox.postgres_url())
        .env("REDIS_URL", outbox.redis.url_via(proxy.port()))
        .spawn()
        .unwrap();
    eventually(DEADLINE, "the first step", || async {
        !replayed(&outbox, TOPIC, "outage").await.is_empty()
    })
    .await
    .unwrap();
    proxy.refuse().await.unwrap();
    slow.wait_for_line("the replay is interrupted; trying again", DEADLINE)
        .await
        .unwrap();
    proxy.pass().await.unwrap();
    slow.wait_for_line("published 1000 messages again", DEADLINE)
        .await
        .unwrap();
    assert_eq!(replayed(&outbox, TOPIC, "outage").await, keys(1..=1_000));
    assert!(relay.exit_status().is_none());
}

/// A primary that was replaced takes the rest of a replay from a connection that is still open; nobody will read it there.
#[tokio::test]
async fn a_replay_that_ended_on_a_replaced_primary_goes_on_at_the_new_one() {
    let (outbox, _relay) = with_rows(1_000).await;
    let new = outbox.redis.replica().await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("redis-url");
    std::fs::write(&file, outbox.redis.url()).unwrap();
    let replay = Process::builder(relay_binary())
        .args(["replay", "--name", "failover", "--all", "--rate", "500"])
        .env("DATABASE_URL", outbox.postgres_url())
        .env("REDIS_URL_FILE", file.to_str().unwrap())
        .spawn()
        .unwrap();
    let mut connection = new.connect().await.unwrap();
    eventually(DEADLINE, "a step to reach the replica", || async {
        let mut connection = connection.clone();
        let next = redis::cmd("HGET")
            .arg(&["outbox:relay:replay:failover", "next"])
            .query_async::<Option<i64>>(&mut connection)
            .await;
        next.unwrap().is_some()
    })
    .await
    .unwrap();
    redis::cmd("REPLICAOF")
        .arg(&["NO", "ONE"])
        .exec_async(&mut connection)
        .await
        .unwrap();
    std::fs::write(&file, new.url()).unwrap();
    replay
        .wait_for_line("published 1000 messages again", DEADLINE)
        .await
        .unwrap();
    assert!(replay.wait(DEADLINE).await.unwrap().success());
    let outbox = outbox.moved_to(new).await;
    assert_eq!(replayed(&outbox, TOPIC, "failover").await, keys(1..=1_000));
}

/// What the cursor has not passed is the relay's.
#[tokio::test]
async fn gaps_and_held_streams_are_left_to_the_relay() {
    let outbox = Outbox::open().await;
    let () = redis(&outbox, &["SET", "outbox:refused", "something else"]).await;
    let relay = outbox.leader(&[]).await;
    let late = outbox.client().await;
    late.batch_execute("BEGIN").await.unwrap();
    insert(&late, "late").await;
    outbox.insert("row-2").await;
    let refused = "INSERT INTO outbox.messages (topic, message_key, payload) VALUES ('refused', 'held', '{}')";
    outbox.db.batch_execute(refused).await.unwrap();
    outbox.insert("row-4").await;
    outbox.settles_but_for_gaps(DEADLINE).await;
    let pause = ["pause", "--reason", "a test"];
    run_on(&outbox, &pause).await.done();
    relay
        .wait_for_line("publishing is paused", DEADLINE)
        .await
        .unwrap();
    late.batch_execute("COMMIT").await.unwrap();
    outbox.insert("row-5").await;
    replay(&outbox, &["--name", "rest", "--all"]).await;
    assert_eq!(replayed(&outbox, TOPIC, "rest").await, keys([2, 4]));
    let () = redis(&outbox, &["DEL", "outbox:refused"]).await;
    run_on(&outbox, &["resume"]).await.done();
    outbox.settles().await;
    eventually(DEADLINE, "the held message", || async {
        outbox.entry_count("refused").await == 1
    })
    .await
    .unwrap();
    assert_eq!(published(&outbox, TOPIC).await, 4);
}

/// A replay goes to the streams of the present count, and none into a topic that its groups are draining.
#[tokio::test]
async fn a_topic_whose_partitions_change_is_waited_for() {
    let (outbox, relay) = with_rows(10).await;
    let () = redis(
        &outbox,
        &["XGROUP", "CREATE", "outbox:orders", "packing", "0"],
    )
    .await;
    let set = ["topics", "set", TOPIC, "--partitions", "2"];
    run_on(&outbox, &set).await.done();
    relay.wait_for_line("is held back", DEADLINE).await.unwrap();
    let replay = Process::builder(relay_binary())
        .args(["replay", "--name", "moved", "--all"])
        .env("DATABASE_URL", outbox.postgres_url())
        .env("REDIS_URL", outbox.redis.url())
        .spawn()
        .unwrap();
    replay
        .wait_for_line("waiting: the topic", DEADLINE)
        .await
        .unwrap();
    assert_eq!(outbox.entry_count(TOPIC).await, 10);
    let () = redis(&outbox, &["XGROUP", "DESTROY", "outbox:orders", "packing"]).await;
    assert!(replay.wait(DEADLINE).await.unwrap().success());
    let mut all = replayed(&outbox, "orders:0", "moved").await;
    all.extend(replayed(&outbox, "orders:1", "moved").await);
    all.sort_by_key(|key| key[4..].parse::<i64>().unwrap());
    assert_eq!(all, keys(1..=10));
    assert_eq!(outbox.entry_count(TOPIC).await, 10);
}

/// Entries of a replay beside an emptied Redis must not pass for what the relay published.
#[tokio::test]
async fn a_replay_proves_nothing_to_the_relay() {
    let (outbox, relay) = with_rows(5).await;
    replay(&outbox, &["--name", "proof", "--all"]).await;
    relay.terminate();
    assert!(relay.wait(DEADLINE).await.unwrap().success());
    for entry in outbox.entries(TOPIC).await {
        if entry.field("replay").is_none() {
            let _: i64 = redis(&outbox, &["XDEL", "outbox:orders", &entry.stream_id]).await;
        }
    }
    let () = redis(
        &outbox,
        &["DEL", "outbox:relay:marker", "outbox:relay:gaps"],
    )
    .await;
    let said = run_on(&outbox, &["replay", "--name", "more", "--all"]).await;
    said.refused(1, &["has no marker of this outbox", "--on-redis-loss"]);
    let next = outbox.relay().spawn().unwrap();
    eventually(DEADLINE, "all that was published", || async {
        published(&outbox, TOPIC).await == 5
    })
    .await
    .unwrap();
    assert_eq!(replayed(&outbox, TOPIC, "proof").await.len(), 5);
    // The history is another by now, as far as anybody can tell.
    let again = run_on(&outbox, &["replay", "--name", "proof", "--all"]).await;
    assert!(again.done()[0].starts_with("was done before"));
    assert!(next.exit_status().is_none());
}

/// A Redis that falls back takes the replay along.
#[tokio::test]
async fn a_redis_that_loses_its_tail_gets_exactly_what_it_lost() {
    let (outbox, relay) = with_rows(1_000).await;
    let args = ["--name", "tail", "--all", "--rate", "0"];
    let first = ["--name", "tail-1", "--to-id", "10"];
    replay(&outbox, &first).await;
    let before = outbox.redis.keys().await.unwrap();
    replay(&outbox, &args).await;
    assert_eq!(replayed(&outbox, TOPIC, "tail").await.len(), 1_000);
    outbox.redis.set_back(&before).await.unwrap();
    assert!(replayed(&outbox, TOPIC, "tail").await.is_empty());
    replay(&outbox, &args).await;
    replay(&outbox, &first).await;
    assert_eq!(replayed(&outbox, TOPIC, "tail").await, keys(1..=1_000));
    assert_eq!(replayed(&outbox, TOPIC, "tail-1").await, keys(1..=10));
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_stream_that_refuses_leaves_nothing_and_is_gone_on_with() {
    let (outbox, relay) = with_rows(5).await;
    insert_ordered(&outbox.db, "row-6", "k").await;
    outbox.settles().await;
    let () = redis(&outbox, &["SET", "outbox:taken", "something else"]).await;
    let args = [
        "replay",
        "--name",
        "refused",
        "--all",
        "--stream",
        "outbox:taken",
    ];
    let said = run_on(&outbox, &args).await;
    said.refused(
        1,
        &["outbox:taken", "WRONGTYPE", "goes on where it stopped"],
    );
    let () = redis(&outbox, &["DEL", "outbox:taken"]).await;
    run_on(&outbox, &args).await.done();
    assert_eq!(replayed(&outbox, "taken", "refused").await, keys(1..=6));
    assert!(relay.exit_status().is_none());
}
