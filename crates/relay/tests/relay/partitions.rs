//! Topics over several streams, and the change of their number.

use std::collections::{BTreeMap, HashMap};

use outbox_testkit::{Output, Process, eventually, relay_binary};
use redis::AsyncCommands;

use crate::pair::{Entry, Pair, entries_of};
use crate::support::DEADLINE;

/// What the public contract says about the partition of an ordering key, computed apart from the relay.
fn partition(key: &str, partitions: u32) -> u32 {
    let mut crc = u32::MAX;
    for byte in key.bytes() {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    !crc % partitions
}

async fn set_partitions(pair: &Pair, partitions: &str, more: &[&str]) -> Vec<String> {
    let set = Process::builder(relay_binary())
        .args(["topics", "set", "orders", "--partitions", partitions])
        .args(more)
        .env("DATABASE_URL", pair.postgres.url(&pair.database))
        .spawn()
        .unwrap();
    assert!(
        set.wait(DEADLINE).await.unwrap().success(),
        "{:?}",
        set.lines()
    );
    set.lines_of(Output::Stdout)
}

/// Entries of each partition; of the only stream under the number 0.
async fn by_partition(pair: &Pair, partitions: u32) -> BTreeMap<u32, Vec<Entry>> {
    let mut all = BTreeMap::new();
    for number in 0..partitions {
        let name = if partitions == 1 {
            "outbox:orders".to_owned()
        } else {
            format!("outbox:orders:{number}")
        };
        all.insert(number, entries_of(&pair.redis, &name).await);
    }
    all
}

async fn partitions_hold(pair: &Pair, partitions: u32, count: usize) -> BTreeMap<u32, Vec<Entry>> {
    eventually(DEADLINE, "the entries in their partitions", || async {
        let found: usize = by_partition(pair, partitions)
            .await
            .values()
            .map(Vec::len)
            .sum();
        if found == count {
            Ok(())
        } else {
            Err(format!("{found} of {count}"))
        }
    })
    .await
    .unwrap();
    by_partition(pair, partitions).await
}

fn assert_in_place_and_in_order(partitions: &BTreeMap<u32, Vec<Entry>>, count: u32) {
    let mut last: HashMap<&str, i64> = HashMap::new();
    for (number, entries) in partitions {
        for entry in entries {
            let key = entry.ordering_key.as_deref().unwrap();
            assert_eq!(partition(key, count), *number, "{entry:?}");
            let before = last.insert(key, entry.id);
            assert!(
                before.is_none_or(|before| before < entry.id),
                "{entry:?} after {before:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_topic_that_nothing_was_published_of_changes_at_once() {
    let pair = Pair::start().await;
    set_partitions(&pair, "4", &[]).await;
    pair.write("orders", "a", 200).await;
    let relay = pair.relay().spawn().unwrap();
    let entries = partitions_hold(&pair, 4, 200).await;
    assert_in_place_and_in_order(&entries, 4);
    assert!(
        entries
            .values()
            .filter(|entries| !entries.is_empty())
            .count()
            > 1
    );
    drop(relay);
}

#[tokio::test]
async fn a_topic_is_held_back_until_every_group_has_drained_it_over_a_change_of_leader() {
    let pair = Pair::start().await;
    let mut redis = pair.redis.connect().await.unwrap();
    let relay = pair.relay().spawn().unwrap();
    pair.write("orders", "a", 100).await;
    pair.reaches("orders", 100, DEADLINE).await;
    let () = redis
        .xgroup_create("outbox:orders", "packing", "0")
        .await
        .unwrap();

    set_partitions(&pair, "4", &[]).await;
    relay
        .wait_for_line("the topic is held back", DEADLINE)
        .await
        .unwrap();
    pair.write("orders", "b", 100).await;
    pair.write("audit", "c", 10).await;
    pair.reaches("audit", 10, DEADLINE).await;
    relay.kill9();
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    pair.write("audit", "d", 10).await;
    pair.reaches("audit", 20, DEADLINE).await;
    assert_eq!(
        pair.count("orders").await,
        100,
        "nothing more of the topic while its group is behind"
    );
    assert!(by_partition(&pair, 4).await.values().all(Vec::is_empty));

    let read: redis::streams::StreamReadReply = redis::cmd("XREADGROUP")
        .arg(&[
            "GROUP",
            "packing",
            "one",
            "COUNT",
            "1000",
            "STREAMS",
            "outbox:orders",
            ">",
        ])
        .query_async(&mut redis)
        .await
        .unwrap();
    let ids: Vec<&str> = read.keys[0]
        .ids
        .iter()
        .map(|entry| entry.id.as_str())
        .collect();
    assert_eq!(ids.len(), 100);
    let () = redis.xack("outbox:orders", "packing", &ids).await.unwrap();

    let entries = partitions_hold(&pair, 4, 100).await;
    assert_in_place_and_in_order(&entries, 4);
    assert_eq!(pair.count("orders").await, 100);
    let layout: String = redis
        .hget("outbox:relay:marker", "topic:orders")
        .await
        .unwrap();
    assert_eq!(layout, "4,1");

    set_partitions(&pair, "2", &["--at-once"]).await;
    relay.wait_for_line("partitions=2", DEADLINE).await.unwrap();
    pair.write("orders", "e", 100).await;
    eventually(DEADLINE, "all of both layouts", || async {
        let two: usize = by_partition(&pair, 2).await.values().map(Vec::len).sum();
        let four: usize = by_partition(&pair, 4).await.values().map(Vec::len).sum();
        // Numbers 0 and 1 are counted in both.
        if four == 200 && two >= 100 {
            Ok(())
        } else {
            Err((two, four))
        }
    })
    .await
    .unwrap();
    let layout: String = redis
        .hget("outbox:relay:marker", "topic:orders")
        .await
        .unwrap();
    assert_eq!(layout, "2,4,1");
}

#[tokio::test]
async fn setting_the_present_number_takes_the_wish_back() {
    let pair = Pair::start().await;
    let mut redis = pair.redis.connect().await.unwrap();
    let relay = pair.relay().spawn().unwrap();
    pair.write("orders", "a", 10).await;
    pair.reaches("orders", 10, DEADLINE).await;
    let () = redis
        .xgroup_create("outbox:orders", "packing", "0")
        .await
        .unwrap();
    set_partitions(&pair, "4", &[]).await;
    relay
        .wait_for_line("the topic is held back", DEADLINE)
        .await
        .unwrap();
    pair.write("orders", "b", 10).await;
    set_partitions(&pair, "1", &[]).await;
    pair.reaches("orders", 20, DEADLINE).await;
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn streams_that_fall_back_to_an_earlier_number_lose_nothing() {
    let pair = Pair::start().await;
    let mut redis = pair.redis.connect().await.unwrap();
    let () = redis.set("outbox:orders", "no stream").await.unwrap();
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    pair.write("orders", "a", 20).await;
    relay
        .wait_for_line("refuses entries", DEADLINE)
        .await
        .unwrap();
    let old = pair.redis.keys().await.unwrap();
    let () = redis.del("outbox:orders").await.unwrap();
    pair.reaches("orders", 20, DEADLINE).await;
    set_partitions(&pair, "2", &[]).await;
    relay.wait_for_line("partitions=2", DEADLINE).await.unwrap();
    pair.write("orders", "b", 20).await;
    partitions_hold(&pair, 2, 20).await;

    pair.redis.set_back(&old).await.unwrap();
    let () = redis.del("outbox:orders").await.unwrap();
    eventually(DEADLINE, "each message in one of the streams", || async {
        let mut keys: Vec<String> = Vec::new();
        for name in ["outbox:orders", "outbox:orders:0", "outbox:orders:1"] {
            let entries = entries_of(&pair.redis, name).await;
            keys.extend(entries.into_iter().map(|entry| entry.message_key));
        }
        let all = keys.len();
        keys.sort();
        keys.dedup();
        if (all, keys.len()) == (40, 40) {
            Ok(())
        } else {
            Err((all, keys.len()))
        }
    })
    .await
    .unwrap();
    // The number that was in force is wanted again, and comes into force.
    eventually(DEADLINE, "the wish to be fulfilled", || async {
        let layout: Option<String> = redis
            .clone()
            .hget("outbox:relay:marker", "topic:orders")
            .await
            .unwrap();
        layout.as_deref() == Some("2,1")
    })
    .await
    .unwrap();
}
