//! Old entries are trimmed once every group has acknowledged them, and nothing else is.

use outbox_testkit::{Process, eventually, relay_binary};

use crate::group::{Group, ask};
use crate::http::{LISTEN, metrics};
use crate::support::{DEADLINE, Outbox, TOPIC, insert, leading};

const AGE: [&str; 2] = ["--stream-max-age", "1s"];

/// Commits and publishes messages, and then one more on a page of its own: what the last page published may be looked
/// for by the next take-over, and stays.
async fn published(outbox: &Outbox<'_>, count: usize) {
    let fill = format!(
        "INSERT INTO outbox.messages (topic, message_key, payload)
         SELECT 'orders', 'row-' || n, '{{}}' FROM generate_series(1, {count}) AS n"
    );
    outbox.db.batch_execute(&fill).await.unwrap();
    outbox.settles().await;
    outbox.insert("last").await;
    outbox.arrives("last").await;
}

/// Waits until the stream begins with this message and has so many entries.
async fn begins_with(outbox: &Outbox<'_>, message_key: &str, count: usize) {
    eventually(DEADLINE, &format!("{count} from {message_key}"), || async {
        let keys = outbox.message_keys(TOPIC).await;
        let first = keys.first().cloned().unwrap_or_default();
        if (first.as_str(), keys.len()) == (message_key, count) {
            Ok(())
        } else {
            Err((first, keys.len()))
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn entries_go_when_every_group_has_acknowledged_them() {
    let outbox = Outbox::open().await;
    let relay = leading(outbox.relay().args(AGE).args(LISTEN)).await;
    published(&outbox, 1_000).await;
    let fast = Group::made(&outbox, "fast").await;
    let slow = Group::made(&outbox, "slow").await;
    fast.handles(1_001).await;
    slow.handles(300).await;
    let pending = slow.reads(100).await;
    begins_with(&outbox, "row-301", 701).await;

    slow.acknowledges(&pending[1..]).await;
    slow.handles(600).await;
    // One that is pending for long keeps what came after it.
    begins_with(&outbox, "row-301", 701).await;
    slow.acknowledges(&pending[..1]).await;
    // The last one that a group was given stays with it.
    begins_with(&outbox, "row-1000", 2).await;

    slow.handles(1).await;
    begins_with(&outbox, "last", 1).await;
    eventually(DEADLINE, "what was trimmed to be counted", || async {
        let values = metrics(&relay).await;
        assert_eq!(values["outbox_relay_streams_without_group"], 0.0);
        values["outbox_relay_trimmed_entries_total"] == 1_000.0
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_stream_without_a_group_is_kept_whole_and_named() {
    let outbox = Outbox::open().await;
    let relay = leading(outbox.relay().args(AGE).args(LISTEN)).await;
    published(&outbox, 1_000).await;
    let line = relay
        .wait_for_line("a stream without a group", DEADLINE)
        .await;
    assert!(line.unwrap().contains("outbox:orders"));
    assert_eq!(outbox.entry_count(TOPIC).await, 1_001);
    eventually(DEADLINE, "the stream to be counted", || async {
        let values = metrics(&relay).await;
        values.get("outbox_relay_streams_without_group") == Some(&1.0)
    })
    .await
    .unwrap();
    let values = metrics(&relay).await;
    assert_eq!(values["outbox_relay_trimmed_entries_total"], 0.0);
    // A group that comes late is given everything.
    let late = Group::made(&outbox, "late").await;
    assert_eq!(late.reads(2_000).await.len(), 1_001);
}

#[tokio::test]
async fn young_entries_and_streams_of_others_stay() {
    let outbox = Outbox::open().await;
    // Acknowledged and old enough for any age, but no message of a relay.
    for n in 0..3 {
        let id = format!("1-{n}");
        let _: String = ask(
            &outbox,
            &["XADD", "outbox:foreign", &id[..], "field", "value"],
        )
        .await;
    }
    let _: String = ask(
        &outbox,
        &["XGROUP", "CREATE", "outbox:foreign", "theirs", "$"],
    )
    .await;
    let relay = outbox.leader(&["--stream-max-age", "0"]).await;
    published(&outbox, 10).await;
    let group = Group::made(&outbox, "packing").await;
    group.handles(11).await;
    drop(relay);
    let patient = ["--stream-max-age", "1h"];
    let relay = leading(outbox.relay().args(patient).args(LISTEN)).await;
    eventually(DEADLINE, "a round over the streams", || async {
        let values = metrics(&relay).await;
        values.contains_key("outbox_relay_streams_without_group")
    })
    .await
    .unwrap();
    assert_eq!(outbox.entry_count(TOPIC).await, 11);
    drop(relay);
    let relay = leading(outbox.relay().args(AGE)).await;
    begins_with(&outbox, "last", 1).await;
    let foreign: usize = ask(&outbox, &["XLEN", "outbox:foreign"]).await;
    assert_eq!(foreign, 3);
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn consumers_are_told_how_long_entries_stay() {
    let outbox = Outbox::open().await;
    for (age, told) in [
        ("3d", Some(259_200_000_u64)),
        ("0", None),
        ("1h", Some(3_600_000)),
    ] {
        let relay = outbox.leader(&["--stream-max-age", age]).await;
        let marker = ["HGET", "outbox:relay:marker", "stream_max_age_ms"];
        assert_eq!(ask::<Option<u64>>(&outbox, &marker).await, told, "{age}");
        drop(relay);
    }
}

/// A row that commits late stands behind rows with higher ids. When those were trimmed, `verify` must not miss them.
#[tokio::test]
async fn verify_misses_nothing_in_a_stream_that_begins_with_a_late_row() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&AGE).await;
    let mut writer = outbox.client().await;
    let late = writer.transaction().await.unwrap();
    insert(&late, "late").await;
    for n in 0..20 {
        outbox.insert(&format!("row-{n}")).await;
    }
    outbox.arrives("row-19").await;
    late.commit().await.unwrap();
    outbox.arrives("late").await;
    outbox.insert("last").await;
    outbox.arrives("last").await;
    let group = Group::made(&outbox, "packing").await;
    group.handles(21).await;
    begins_with(&outbox, "late", 2).await;
    let verify = Process::builder(relay_binary())
        .arg("verify")
        .env("DATABASE_URL", outbox.postgres_url())
        .env("REDIS_URL", outbox.redis.url())
        .spawn()
        .unwrap();
    let code = verify.wait(DEADLINE).await.unwrap().code();
    let lines = verify.lines();
    assert_eq!(code, Some(0), "{lines:#?}");
    assert!(
        lines.iter().any(|line| line == "trimmed             20"),
        "{lines:#?}"
    );
    assert!(relay.exit_status().is_none());
}
