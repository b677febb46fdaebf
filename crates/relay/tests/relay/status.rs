//! `outbox-relay status` in the states that an operator meets.

mod care;

use outbox_testkit::{Output, Process, eventually, relay_binary};
use serde_json::Value;

use crate::commands::{run, run_on};
use crate::support::{DEADLINE, Outbox, TOPIC, insert};

/// The lines of the status, by what they start with.
async fn status(outbox: &Outbox<'_>) -> Vec<String> {
    run_on(outbox, &["status"]).await.done()
}

async fn json(outbox: &Outbox<'_>, args: &[&str]) -> Value {
    let args: Vec<&str> = ["status", "--json"]
        .into_iter()
        .chain(args.iter().copied())
        .collect();
    let lines = run_on(outbox, &args).await.done();
    assert_eq!(lines.len(), 1, "{lines:?}");
    serde_json::from_str(&lines[0]).unwrap()
}

/// The rest of the line that starts with a name.
fn value<'l>(lines: &'l [String], name: &str) -> &'l str {
    let line = lines
        .iter()
        .find_map(|line| line.trim_start().strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name:?} in {lines:#?}"))
        .trim()
}

#[tokio::test]
async fn before_anything_was_published() {
    let outbox = Outbox::open().await;
    outbox.insert("row").await;
    let lines = status(&outbox).await;
    assert!(value(&lines, "leader").starts_with("none"));
    assert_eq!(value(&lines, "standbys"), "0");
    assert!(value(&lines, "checkpoint").starts_with("none"));
    assert!(value(&lines, "marker").starts_with("none"));
    assert_eq!(value(&lines, "backlog"), "1 messages, 2 bytes");
    assert_eq!(value(&lines, "Redis losses"), "none on record");
    assert_eq!(value(&lines, "streams"), "0");
    assert_ne!(value(&lines, "oldest unpublished"), "none");
    assert_eq!(value(&lines, "dead letters"), "0");
}

#[tokio::test]
async fn with_a_leader_and_a_standby_and_nothing_left_to_do() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&["--name", "relay one"]).await;
    let standby = outbox.relay().args(["--name", "two"]).spawn().unwrap();
    standby
        .wait_for_line("standing by", DEADLINE)
        .await
        .unwrap();
    for n in 0..3 {
        outbox.insert(&format!("row-{n}")).await;
    }
    outbox.settles().await;
    let lines = status(&outbox).await;
    assert!(value(&lines, "leader").starts_with("relay one (backend "));
    assert_eq!(value(&lines, "standbys"), "1");
    let place = value(&lines, "checkpoint");
    assert!(place.starts_with("high 3, epoch 1, page "), "{place}");
    assert!(place.ends_with(", no gaps"), "{place}");
    assert_eq!(value(&lines, "marker"), place);
    assert_eq!(value(&lines, "backlog"), "0 messages, 0 bytes");
    assert_eq!(value(&lines, "oldest unpublished"), "none");
    assert!(!lines.iter().any(|line| line.starts_with("open writer")));
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn with_open_and_prepared_writers_that_hold_gaps() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let open = outbox.client().await;
    open.batch_execute("SET application_name = 'slow job'; BEGIN")
        .await
        .unwrap();
    insert(&open, "open").await;
    outbox.insert("between").await;
    let prepared = outbox.client().await;
    let prepare = format!("BEGIN; SET LOCAL outbox.notify = 'off';
        INSERT INTO outbox.messages (topic, payload) VALUES ('{TOPIC}', '{{}}'); PREPARE TRANSACTION '{}'", outbox.database);
    prepared.batch_execute(&prepare).await.unwrap();
    outbox.insert("row").await;
    outbox.settles_but_for_gaps(DEADLINE).await;
    let lines = status(&outbox).await;
    let place = value(&lines, "checkpoint");
    assert!(place.ends_with(", 2 gaps from id 1"), "{place}");
    let writers: Vec<&String> = lines
        .iter()
        .filter(|line| line.starts_with("open writer"))
        .collect();
    assert_eq!(writers.len(), 2, "{lines:#?}");
    assert!(writers.iter().any(|line| line.contains("(slow job)")));
    let name = format!("prepared transaction {:?}", outbox.database);
    assert!(writers.iter().any(|line| line.contains(&name)));
    let rollback = format!("ROLLBACK PREPARED '{}'", outbox.database);
    prepared.batch_execute(&rollback).await.unwrap();
    open.batch_execute("ROLLBACK").await.unwrap();
    outbox.settles().await;
    let lines = status(&outbox).await;
    assert!(value(&lines, "checkpoint").ends_with(", no gaps"));
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn with_a_stream_that_refuses() {
    let outbox = Outbox::open().await;
    let mut redis = outbox.redis.connect().await.unwrap();
    redis::cmd("SET")
        .arg("outbox:refused")
        .arg("not a stream")
        .exec_async(&mut redis)
        .await
        .unwrap();
    let relay = outbox.leader(&[]).await;
    outbox.insert("first").await;
    outbox.arrives("first").await;
    let refused = "INSERT INTO outbox.messages (topic, payload) VALUES ('refused', '{}')";
    outbox.db.batch_execute(refused).await.unwrap();
    let lines = eventually(DEADLINE, "the blocked stream", || async {
        let lines = status(&outbox).await;
        let shown = lines.iter().any(|line| line.starts_with("blocked stream"));
        if shown { Ok(lines) } else { Err(lines) }
    })
    .await
    .unwrap();
    let blocked = value(&lines, "blocked stream");
    assert!(
        blocked.starts_with("outbox:refused since id 1: "),
        "{blocked}"
    );
    assert!(blocked.contains("WRONGTYPE"), "{blocked}");
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn with_a_key_of_somebody_else_in_the_place_of_the_marker() {
    let outbox = Outbox::open().await;
    let mut redis = outbox.redis.connect().await.unwrap();
    redis::cmd("SET")
        .arg("outbox:relay:marker")
        .arg("theirs")
        .exec_async(&mut redis)
        .await
        .unwrap();
    let lines = status(&outbox).await;
    assert!(value(&lines, "marker").contains("something else"));
}

#[tokio::test]
async fn the_json_tells_streams_groups_and_what_is_kept() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&["--retention", "1h"]).await;
    let mut redis = outbox.redis.connect().await.unwrap();
    for n in 0..5 {
        outbox.insert(&format!("row-{n}")).await;
    }
    outbox.settles().await;
    let (): () = redis::pipe()
        .cmd("XGROUP")
        .arg(&["CREATE", "outbox:orders", "packing", "0"])
        .cmd("XREADGROUP")
        .arg(&[
            "GROUP",
            "packing",
            "one",
            "COUNT",
            "2",
            "STREAMS",
            "outbox:orders",
            ">",
        ])
        .query_async(&mut redis)
        .await
        .map(|_: (String, redis::Value)| ())
        .unwrap();
    let pause = ["pause", "--reason", "a \u{1b}[31mred reason"];
    run_on(&outbox, &pause).await.done();
    let shown = json(&outbox, &[]).await;
    assert_eq!(shown["leader"]["name"], "outbox-relay");
    assert_eq!(shown["marker"]["state"], "present");
    assert_eq!(shown["marker"]["high"], 5);
    assert_eq!(shown["checkpoint"]["high"], 5);
    assert_eq!(shown["checkpoint"]["gap_ranges"], 0);
    assert_eq!(shown["backlog"]["messages"], 0);
    assert_eq!(shown["backlog"]["is_complete"], true);
    assert_eq!(shown["published"]["ids_per_second"], 0.0);
    assert!(shown["published"]["over_seconds"].as_f64().unwrap() >= 0.5);
    assert_eq!(shown["paused"]["reason"], "a \u{1b}[31mred reason");
    assert_eq!(shown["retention"]["seconds"], 3_600.0);
    assert_eq!(shown["retention"]["oldest_id"], 1);
    assert_eq!(shown["retention"]["purgeable_ids"], 0);
    assert_eq!(shown["redis_losses"]["count"], 0);
    let stream = &shown["streams"]["streams"][0];
    assert_eq!(stream["stream"], "outbox:orders");
    assert_eq!(stream["entries"], 5);
    assert!(stream["memory_bytes"].as_u64().unwrap() > 100);
    let group = &stream["groups"][0];
    assert_eq!(group["group"], "packing");
    assert_eq!(group["lag"], 3);
    assert_eq!(group["pending"], 2);
    assert!(group["oldest_pending_seconds"].as_f64().unwrap() < 600.0);
    let lines = status(&outbox).await;
    let paused = value(&lines, "paused");
    assert!(
        paused.contains("by postgres: a \u{fffd}[31mred"),
        "{paused}"
    );
    assert!(value(&lines, "outbox:orders").starts_with(": 5 entries, "));
    assert!(value(&lines, "group packing").starts_with(": lag 3, pending 2, "));
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn losses_of_redis_stay_on_record() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    outbox.insert("row").await;
    outbox.settles().await;
    let mut redis = outbox.redis.connect().await.unwrap();
    let (): () = redis::cmd("DEL")
        .arg("outbox:relay:marker")
        .query_async(&mut redis)
        .await
        .unwrap();
    relay
        .wait_for_line("publishing again", DEADLINE)
        .await
        .unwrap();
    let (): () = redis::cmd("FLUSHALL")
        .query_async(&mut redis)
        .await
        .unwrap();
    outbox.insert("next").await;
    outbox.arrives("next").await;
    let shown = json(&outbox, &[]).await;
    assert_eq!(shown["redis_losses"]["count"], 2, "{shown}");
    let [all, marker] = shown["redis_losses"]["latest"]
        .as_array()
        .unwrap()
        .as_slice()
    else {
        panic!("{shown}")
    };
    assert_eq!(
        (&all["lost"], &marker["lost"]),
        (&"all".into(), &"marker".into())
    );
    assert_eq!(marker["checkpoint_high"], 1);
    assert_eq!(all["marker_high"], Value::Null);
    let lines = status(&outbox).await;
    assert_eq!(value(&lines, "Redis losses"), "2 on record, the latest:");
}

#[tokio::test]
async fn of_many_streams_the_longest_are_shown_and_the_rest_is_named() {
    let outbox = Outbox::open().await;
    let mut redis = outbox.redis.connect().await.unwrap();
    let mut pipe = redis::pipe();
    for n in 0..3_000 {
        for _ in 0..=(n / 2_900) {
            pipe.cmd("XADD")
                .arg(format!("outbox:topic-{n}"))
                .arg(&["*", "id", "1"])
                .ignore();
        }
    }
    let () = pipe.query_async(&mut redis).await.unwrap();
    let shown = json(&outbox, &[]).await;
    let streams = shown["streams"]["streams"].as_array().unwrap();
    assert_eq!(shown["streams"]["is_complete"], false);
    assert!(streams.len() <= 100);
    // On a machine that is very busy the time is over before all of them are found.
    let longest = if shown["streams"]["found"] == 3_000 {
        2
    } else {
        1
    };
    assert!(
        streams[0]["entries"].as_u64().unwrap() >= longest,
        "{shown}"
    );
    let one = json(&outbox, &["--topic", "topic-7"]).await;
    assert_eq!(one["streams"]["found"], 1);
    assert_eq!(one["streams"]["is_complete"], true);
    let lines = status(&outbox).await;
    assert!(value(&lines, "streams").contains("longest of these are shown"));
}

/// A user with the relay's rights may see less, and sees that.
#[tokio::test]
async fn what_a_user_may_not_ask_is_unknown() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    outbox.insert("row").await;
    outbox.settles().await;
    let mut redis = outbox.redis.connect().await.unwrap();
    let user = |name: &str, rights: &[&str]| {
        let mut command = redis::cmd("ACL");
        command.arg(&["SETUSER", name, "on", ">pw", "~outbox:*", "+@all"]);
        command.arg(rights).clone()
    };
    for (name, rights) in [("no-memory", ["-memory"]), ("no-scan", ["-scan"])] {
        let () = user(name, &rights).query_async(&mut redis).await.unwrap();
    }
    let url = |name: &str| format!("redis://{name}:pw@127.0.0.1:{}", outbox.redis.port());
    let shown = run(&outbox.postgres_url(), &url("no-memory"), &["status"]).await;
    let lines = shown.done();
    assert!(value(&lines, "outbox:orders").contains("memory unknown"));
    let shown = run(&outbox.postgres_url(), &url("no-scan"), &["status"]).await;
    let lines = shown.done();
    assert!(value(&lines, "streams").starts_with("not shown: "));
    assert!(value(&lines, "marker").starts_with("high 1"));
    assert!(!lines.concat().contains("pw"));
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn watching_looks_again_and_ends_when_interrupted() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let watch = Process::builder(relay_binary())
        .args(["status", "--watch=500ms", "--json"])
        .env("DATABASE_URL", outbox.postgres_url())
        .env("REDIS_URL", outbox.redis.url())
        .spawn()
        .unwrap();
    watch.wait_for_line("\"high\":0", DEADLINE).await.unwrap();
    outbox.insert("row").await;
    watch.wait_for_line("\"high\":1", DEADLINE).await.unwrap();
    let moved = eventually(DEADLINE, "a rate", || async {
        watch.lines_of(Output::Stdout).iter().any(|line| {
            let shown: Value = serde_json::from_str(line).unwrap();
            shown["published"]["ids_per_second"].as_f64().unwrap() > 0.0
        })
    });
    moved.await.unwrap();
    // A server that goes away for a while does not end it.
    outbox.redis.kill9().await.unwrap();
    watch
        .wait_for_line("check host and port", DEADLINE)
        .await
        .unwrap();
    watch.interrupt();
    assert!(watch.wait(DEADLINE).await.unwrap().success());
    assert_eq!(watch.lines_of(Output::Stderr), [""; 0]);
    run_on(&outbox, &["status", "--watch=1ms"])
        .await
        .refused(64, &["--watch", "500ms to 1h"]);
    assert!(relay.exit_status().is_none());
}
