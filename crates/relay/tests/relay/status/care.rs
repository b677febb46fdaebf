//! How Redis is looked after, as `outbox-relay status` shows it: memory and ceiling, rows that are held, trimming.

use outbox_testkit::eventually;
use serde_json::Value;

use super::{json, status, value};
use crate::group::{Group, ask};
use crate::memory::use_percent;
use crate::support::{DEADLINE, Outbox};

/// Writes and publishes messages with two pages at least: what the last page published is kept for the next take-over.
async fn published(outbox: &Outbox<'_>, keys: &[&str]) {
    for key in keys {
        outbox.insert(key).await;
        outbox.arrives(key).await;
    }
    outbox.settles().await;
}

/// Waits until the JSON at this path is so.
async fn shows(outbox: &Outbox<'_>, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    eventually(DEADLINE, what, || async {
        let shown = json(outbox, &[]).await;
        if is_so(&shown) { Ok(shown) } else { Err(shown) }
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn the_ceiling_is_the_running_leader_s_and_a_pause_by_it_is_told() {
    let outbox = Outbox::open().await;
    let lines = status(&outbox).await;
    assert!(
        value(&lines, "Redis memory").contains("no limit"),
        "{lines:#?}"
    );
    assert!(value(&lines, "memory ceiling").starts_with("not known"));
    assert!(value(&lines, "rows held").starts_with("not known"));

    let relay = outbox
        .leader(&["--redis-memory-ceiling", "80", "--name", "one"])
        .await;
    use_percent(&outbox, 50).await;
    let shown = shows(&outbox, "the leader's ceiling", |shown| {
        shown["caretaker"]["memory_ceiling_percent"] == 80
    })
    .await;
    assert_eq!(shown["caretaker"]["relay"], "one");
    assert_eq!(shown["caretaker"]["paused_by_ceiling"], false);
    assert_eq!(shown["caretaker"]["holds"], serde_json::json!([]));
    let percent = shown["redis_memory"]["used_percent"].as_f64().unwrap();
    assert!((40.0..70.0).contains(&percent), "{percent}");

    use_percent(&outbox, 90).await;
    shows(&outbox, "the pause", |shown| {
        shown["caretaker"]["paused_by_ceiling"] == true
    })
    .await;
    let lines = status(&outbox).await;
    assert_eq!(
        value(&lines, "memory ceiling"),
        "80 % of maxmemory: publishing is PAUSED until Redis has room"
    );
    assert!(value(&lines, "Redis memory").contains(" % of maxmemory, "));
    assert!(value(&lines, "rows held").starts_with("for no group"));
    use_percent(&outbox, 40).await;
    shows(&outbox, "the end of the pause", |shown| {
        shown["caretaker"]["paused_by_ceiling"] == false
    })
    .await;
    assert!(relay.exit_status().is_none());
}

/// A relay that is gone says nothing any more: what it said is forgotten by itself.
#[tokio::test]
async fn what_a_leader_says_is_forgotten_after_it() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    shows(&outbox, "the report", |shown| {
        shown["caretaker"].is_object()
    })
    .await;
    let life: i64 = ask(&outbox, &["TTL", "outbox:relay:caretaker"]).await;
    assert!((1..=60).contains(&life), "{life}");
    drop(relay);
    let _: i64 = ask(&outbox, &["EXPIRE", "outbox:relay:caretaker", "0"]).await;
    assert_eq!(json(&outbox, &[]).await["caretaker"], Value::Null);
}

#[tokio::test]
async fn whom_rows_are_held_for_is_told() {
    let outbox = Outbox::open().await;
    let holds = [
        "--hold-until-acked",
        "packing",
        "--hold-until-acked",
        "billing=invoices",
        "--retention",
        "3s",
    ];
    let relay = outbox.leader(&holds).await;
    published(&outbox, &["one", "two"]).await;
    let shown = shows(&outbox, "the missing group", |shown| {
        shown["caretaker"]["holds"][0]["state"] == "absent"
    })
    .await;
    let holds = &shown["caretaker"]["holds"];
    assert_eq!(holds[0]["group"], "packing");
    assert_eq!(holds[0]["stream"], "outbox:orders");
    assert_eq!(holds[1]["topics"], serde_json::json!(["invoices"]));
    assert_eq!(holds[1]["state"], "acknowledged");
    assert_eq!(shown["caretaker"]["hold_floor_id"], 0);

    let group = Group::made(&outbox, "packing").await;
    let given = group.reads(2).await;
    group.acknowledges(&given[..1]).await;
    let shown = shows(&outbox, "the group that is behind", |shown| {
        shown["caretaker"]["holds"][0]["state"] == "behind"
    })
    .await;
    assert!(
        shown["caretaker"]["holds"][0]["oldest_seconds"]
            .as_f64()
            .unwrap()
            < 600.0
    );
    let lines = status(&outbox).await;
    assert!(value(&lines, "rows held").ends_with(", for:"), "{lines:#?}");
    let held = value(&lines, "group packing: has");
    assert!(held.starts_with("not acknowledged an entry of "), "{held}");

    group.acknowledges(&given[1..]).await;
    shows(&outbox, "the group to be through", |shown| {
        shown["caretaker"]["holds"][0]["state"] == "acknowledged"
            && shown["caretaker"]["hold_floor_id"].as_i64() >= Some(1)
    })
    .await;
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn why_a_stream_is_not_trimmed_is_told() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&["--stream-max-age", "1s"]).await;
    published(&outbox, &["one", "two", "three"]).await;
    let trimming = |shown: &Value| shown["streams"]["streams"][0]["trimming"].clone();
    let state = |shown: &Value| trimming(shown)["state"].clone();
    let shown = shows(&outbox, "no group", |shown| state(shown) == "no_group").await;
    assert_eq!(shown["retention"]["stream_max_age_seconds"], 1.0);
    assert!(trimming(&shown)["overdue_seconds"].as_f64().unwrap() < 600.0);
    let oldest = &shown["streams"]["streams"][0]["oldest_entry_seconds"];
    assert!(oldest.as_f64().unwrap() > 1.0, "{shown}");
    let lines = status(&outbox).await;
    assert!(value(&lines, "trimming:").ends_with("no group reads the stream"));

    let group = Group::made(&outbox, "packing").await;
    let given = group.reads(3).await;
    let shown = shows(&outbox, "the slow group", |shown| state(shown) == "held").await;
    assert_eq!(trimming(&shown)["group"], "packing");
    group.acknowledges(&given).await;
    shows(&outbox, "the last entry", |shown| {
        state(shown) == "last_entry" && shown["streams"]["streams"][0]["entries"] == 1
    })
    .await;
    drop(relay);
    let relay = outbox.leader(&["--stream-max-age", "0"]).await;
    shows(&outbox, "trimming to be off", |shown| state(shown) == "off").await;
    assert!(relay.exit_status().is_none());
}
