//! `outbox-relay verify`: each finding provoked for real, and nothing found where nothing is wrong.

mod group;
mod no_finding;

use outbox_testkit::{Output, Process, ProcessBuilder, relay_binary};
use serde_json::Value;

use crate::support::{DEADLINE, Outbox, PREFIX, TOPIC, insert_ordered};

const GROUP: &str = "packing";

const NOTHING_WRONG: Option<i32> = Some(0);
const FAILED: Option<i32> = Some(1);
const FINDINGS: Option<i32> = Some(2);
const USAGE: Option<i32> = Some(64);

/// What a run said.
struct Said {
    code: Option<i32>,
    report: Value,
}

impl Said {
    fn count(&self, kind: &str) -> u64 {
        let value = &self.report[kind];
        let count = value.as_u64().or_else(|| value["count"].as_u64());
        count.unwrap_or_else(|| panic!("no {kind} in {}", self.report))
    }

    fn of_group(&self, kind: &str) -> u64 {
        let value = &self.report["group"][kind];
        let count = value.as_u64().or_else(|| value["count"].as_u64());
        count.unwrap_or_else(|| panic!("no {kind} of the group in {}", self.report))
    }

    /// Asserts these findings and no others; the code follows from them.
    fn found(&self, expected: &[(&str, u64)]) {
        for kind in ["missing", "doubled", "out_of_order", "phantom"] {
            let wanted = expected.iter().find(|(name, _)| *name == kind);
            assert_eq!(
                self.count(kind),
                wanted.map_or(0, |(_, count)| *count),
                "{kind}: {}",
                self.report
            );
        }
        let code = if expected.is_empty() {
            NOTHING_WRONG
        } else {
            FINDINGS
        };
        assert_eq!(self.code, code, "{}", self.report);
    }

    fn example(&self, kind: &str) -> &Value {
        &self.report[kind]["examples"][0]
    }
}

fn command(outbox: &Outbox<'_>, args: &[&str]) -> ProcessBuilder {
    Process::builder(relay_binary())
        .arg("verify")
        .args(args)
        .env("DATABASE_URL", outbox.postgres_url())
        .env("REDIS_URL", outbox.redis.url())
}

async fn verify(outbox: &Outbox<'_>, args: &[&str]) -> Said {
    said(command(outbox, args)).await
}

async fn said(command: ProcessBuilder) -> Said {
    let run = command.arg("--json").spawn().unwrap();
    let code = run.wait(DEADLINE).await.unwrap().code();
    assert_eq!(run.lines_of(Output::Stderr), [""; 0]);
    let lines = run.lines_of(Output::Stdout);
    assert_eq!(lines.len(), 1, "{lines:?}");
    let report = serde_json::from_str(&lines[0]).unwrap();
    Said { code, report }
}

/// Asserts the exit code and one line with all of these in it.
async fn assert_says(command: ProcessBuilder, code: Option<i32>, parts: &[&str]) {
    let run = command.spawn().unwrap();
    assert_eq!(run.wait(DEADLINE).await.unwrap().code(), code);
    let lines = run.lines();
    let [line] = lines.as_slice() else {
        panic!("not one line: {lines:?}")
    };
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
}

/// An outbox with so many published messages of the keys `row-1` and so on, and the relay stopped.
async fn published(count: i64) -> Outbox<'static> {
    let outbox = Outbox::open().await;
    publish(&outbox, "row", count).await;
    outbox
}

async fn publish(outbox: &Outbox<'_>, prefix: &str, count: i64) {
    let relay = outbox.leader(&[]).await;
    write(outbox, prefix, count).await;
    outbox.settles().await;
    stop(relay).await;
}

async fn write(outbox: &Outbox<'_>, prefix: &str, count: i64) {
    let sql = "INSERT INTO outbox.messages (topic, message_key, ordering_key, payload)
        SELECT $1, $2 || '-' || n, 'k' || n % 7, '{}' FROM generate_series(1, $3::bigint) AS n";
    let params: [&(dyn tokio_postgres::types::ToSql + Sync); 3] = [&TOPIC, &prefix, &count];
    outbox.db.execute(sql, &params).await.unwrap();
}

async fn stop(relay: Process) {
    relay.terminate();
    assert!(relay.wait(DEADLINE).await.unwrap().success());
}

/// Runs a command of Redis, given in words.
async fn redis<T: redis::FromRedisValue>(outbox: &Outbox<'_>, words: &[&str]) -> T {
    let mut connection = outbox.redis.connect().await.unwrap();
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]);
    command.query_async(&mut connection).await.unwrap()
}

fn stream() -> String {
    format!("{PREFIX}{TOPIC}")
}

/// Adds an entry with these fields, and returns where it stands.
async fn add(outbox: &Outbox<'_>, fields: &[&str]) -> String {
    let stream = stream();
    let mut words = vec!["XADD", &stream, "*"];
    words.extend(fields);
    redis(outbox, &words).await
}

async fn entry_ids(outbox: &Outbox<'_>) -> Vec<String> {
    let entries = outbox.entries(TOPIC).await;
    entries.into_iter().map(|entry| entry.stream_id).collect()
}

#[tokio::test]
async fn a_deleted_entry_is_missing() {
    let outbox = published(20).await;
    let ids = entry_ids(&outbox).await;
    let gone: i64 = redis(&outbox, &["XDEL", &stream(), &ids[9]]).await;
    assert_eq!(gone, 1);
    let said = verify(&outbox, &[]).await;
    said.found(&[("missing", 1)]);
    let example = said.example("missing");
    assert_eq!(
        (&example["id"], &example["message_key"]),
        (&10.into(), &"row-10".into())
    );
    let run = command(&outbox, &[]).spawn().unwrap();
    assert_eq!(run.wait(DEADLINE).await.unwrap().code(), FINDINGS);
    let line = run.wait_for_line("row-10", DEADLINE).await.unwrap();
    assert!(line.contains(&stream()), "{line}");
    run.wait_for_line("something is wrong", DEADLINE)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_stream_that_is_gone_misses_all_its_messages() {
    let outbox = published(30).await;
    let _: i64 = redis(&outbox, &["DEL", &stream()]).await;
    let said = verify(&outbox, &["--limit", "3"]).await;
    said.found(&[("missing", 30)]);
    let examples = said.report["missing"]["examples"].as_array().unwrap();
    assert_eq!(examples.len(), 3);
}

#[tokio::test]
async fn a_second_entry_of_a_message_is_doubled_and_disorders_nothing() {
    let outbox = published(20).await;
    let first = entry_ids(&outbox).await[2].clone();
    // With its ordering key, of which id 17 stands before the copy.
    let copy = [
        "id",
        "3",
        "message_key",
        "row-3",
        "ordering_key",
        "k3",
        "payload",
        "{}",
    ];
    let second = add(&outbox, &copy).await;
    let said = verify(&outbox, &[]).await;
    said.found(&[("doubled", 1)]);
    let example = said.example("doubled");
    assert_eq!(
        (&example["id"], &example["message_key"]),
        (&3.into(), &"row-3".into())
    );
    assert_eq!(example["entry_id"], second.as_str());
    assert!(example["note"].as_str().unwrap().contains(&first));
}

#[tokio::test]
async fn an_entry_without_its_row_is_a_phantom() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    outbox.insert("first").await;
    outbox
        .db
        .batch_execute(
            "BEGIN; INSERT INTO outbox.messages (topic, payload) VALUES ('orders', '{}'); ROLLBACK",
        )
        .await
        .unwrap();
    outbox.insert("third").await;
    outbox.settles().await;
    stop(relay).await;
    verify(&outbox, &[]).await.found(&[]);

    // Of the rolled back transaction, of a message with another key, and what is no message.
    let rolled_back = add(&outbox, &["id", "2", "message_key", "second"]).await;
    let said = verify(&outbox, &[]).await;
    said.found(&[("phantom", 1)]);
    let example = said.example("phantom");
    assert_eq!(example["entry_id"], rolled_back.as_str());
    assert_eq!(example["message_key"], "second");
    add(&outbox, &["id", "3", "message_key", "other"]).await;
    add(&outbox, &["hello", "world"]).await;
    add(&outbox, &["id", "many", "message_key", "third"]).await;
    let elsewhere = format!("{PREFIX}refunds");
    let _: String = redis(
        &outbox,
        &["XADD", &elsewhere, "*", "id", "1", "message_key", "first"],
    )
    .await;
    let said = verify(&outbox, &[]).await;
    said.found(&[("phantom", 5)]);
    // The one in a stream of another topic.
    let of_refunds = verify(&outbox, &["--topic", "refunds"]).await;
    of_refunds.found(&[("phantom", 1)]);
    assert_eq!(of_refunds.count("rows"), 0);
}

#[tokio::test]
async fn an_entry_after_one_of_its_ordering_key_with_a_higher_id_is_out_of_order() {
    let outbox = published(21).await;
    // Row 10 of the key k3 goes behind row 17 of that key; a key of its own has no order to break.
    let entry = outbox.entries(TOPIC).await[9].clone();
    let _: i64 = redis(&outbox, &["XDEL", &stream(), &entry.stream_id]).await;
    let words: Vec<String> = entry
        .fields
        .iter()
        .flat_map(|(name, value)| [name.clone(), String::from_utf8(value.clone()).unwrap()])
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let moved = add(&outbox, &words).await;
    let said = verify(&outbox, &[]).await;
    said.found(&[("out_of_order", 1)]);
    let example = said.example("out_of_order");
    assert_eq!(
        (&example["id"], &example["entry_id"]),
        (&10.into(), &moved.as_str().into())
    );
    assert!(example["note"].as_str().unwrap().contains("17"));
}

/// A row of another key that committed late stands behind higher ids, as it must.
#[tokio::test]
async fn a_late_commit_is_in_order_unless_its_ordering_key_went_on_without_it() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    for (key, expected) in [("alone", &[][..]), ("shared", &[("out_of_order", 1)])] {
        let late = outbox.client().await;
        late.batch_execute("BEGIN").await.unwrap();
        insert_ordered(&late, &format!("late-{key}"), key).await;
        insert_ordered(&outbox.db, &format!("ahead-{key}"), "shared").await;
        outbox.arrives(&format!("ahead-{key}")).await;
        // The producer took no lock for its ordering key.
        late.batch_execute("COMMIT").await.unwrap();
        outbox.settles().await;
        verify(&outbox, &[]).await.found(expected);
    }
    stop(relay).await;
}

#[tokio::test]
async fn a_topic_of_several_partitions_is_compared_as_one() {
    let outbox = Outbox::open().await;
    let set = Process::builder(relay_binary())
        .args(["topics", "set", TOPIC, "--partitions", "4"])
        .env("DATABASE_URL", outbox.postgres_url())
        .spawn()
        .unwrap();
    assert!(set.wait(DEADLINE).await.unwrap().success());
    publish(&outbox, "row", 300).await;
    let said = verify(&outbox, &[]).await;
    said.found(&[]);
    assert_eq!(said.count("entries"), 300);
    let streams: Vec<String> = redis(&outbox, &["KEYS", &format!("{}:*", stream())]).await;
    assert_eq!(said.count("streams"), streams.len() as u64);
    assert!(streams.len() > 1);
    // A copy in another partition, and an entry that is gone.
    let copy = ["id", "5", "message_key", "row-5"];
    for stream in &streams {
        let mut words = vec!["XADD", stream, "*"];
        words.extend(copy);
        let _: String = redis(&outbox, &words).await;
    }
    let found: Vec<(String, Vec<String>)> =
        redis(&outbox, &["XRANGE", &streams[0], "-", "+", "COUNT", "2"]).await;
    let _: i64 = redis(&outbox, &["XDEL", &streams[0], &found[1].0]).await;
    let said = verify(&outbox, &[]).await;
    said.found(&[("doubled", 1), ("missing", 1)]);
    assert_eq!(said.example("missing")["stream"], streams[0].as_str());
}
