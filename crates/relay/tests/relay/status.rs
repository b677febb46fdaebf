//! `outbox-relay status` in the states that an operator meets.

use outbox_testkit::{Output, Process, eventually, relay_binary};

use crate::support::{DEADLINE, Outbox, TOPIC, insert};

/// The lines of the status, by what they start with.
async fn status(outbox: &Outbox<'_>) -> Vec<String> {
    let status = Process::builder(relay_binary())
        .arg("status")
        .env("DATABASE_URL", outbox.postgres_url())
        .env("REDIS_URL", outbox.redis.url())
        .spawn()
        .unwrap();
    assert!(status.wait(DEADLINE).await.unwrap().success());
    assert_eq!(status.lines_of(Output::Stderr), [""; 0]);
    status.lines_of(Output::Stdout)
}

/// The rest of the line that starts with a name.
fn value<'l>(lines: &'l [String], name: &str) -> &'l str {
    let line = lines.iter().find_map(|line| line.strip_prefix(name));
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
    assert_eq!(value(&lines, "backlog"), "1 messages");
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
    assert_eq!(value(&lines, "backlog"), "0 messages");
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
