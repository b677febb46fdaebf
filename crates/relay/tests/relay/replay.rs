//! `outbox-relay replay` publishes again what is asked for, once, whatever interrupts it.

use outbox_testkit::{Direction, Matcher, Output, Process, Proxy, eventually, relay_binary};
use serde_json::Value;

use crate::commands::{run, run_on};
use crate::support::{DEADLINE, Entry, Outbox, TOPIC};

pub(crate) async fn redis<T: redis::FromRedisValue>(outbox: &Outbox<'_>, words: &[&str]) -> T {
    let mut connection = outbox.redis.connect().await.unwrap();
    redis::cmd(words[0])
        .arg(&words[1..])
        .query_async(&mut connection)
        .await
        .unwrap()
}

pub(crate) async fn replay(outbox: &Outbox<'_>, args: &[&str]) -> Vec<String> {
    let args: Vec<&str> = ["replay"].into_iter().chain(args.iter().copied()).collect();
    run_on(outbox, &args).await.done()
}

/// The message keys that a replay added to a topic's stream, in order.
pub(crate) async fn replayed(outbox: &Outbox<'_>, topic: &str, name: &str) -> Vec<String> {
    let entries = outbox.entries(topic).await;
    let of = |entry: &&Entry| entry.field("replay") == Some(name.as_bytes());
    entries.iter().filter(of).map(Entry::message_key).collect()
}

/// What a relay published, replays aside.
pub(crate) async fn published(outbox: &Outbox<'_>, topic: &str) -> usize {
    let entries = outbox.entries(topic).await;
    entries
        .iter()
        .filter(|e| e.field("replay").is_none())
        .count()
}

pub(crate) async fn verify(outbox: &Outbox<'_>) -> Value {
    let said = run_on(outbox, &["verify", "--json"]).await;
    serde_json::from_str(&said.done()[0]).unwrap()
}

pub(crate) fn keys(ids: impl IntoIterator<Item = i64>) -> Vec<String> {
    ids.into_iter().map(|id| format!("row-{id}")).collect()
}

/// Rows `row-1` and so on, published by a relay that leads on.
pub(crate) async fn with_rows(rows: i64) -> (Outbox<'static>, Process) {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let fill = "INSERT INTO outbox.messages (topic, message_key, ordering_key, payload)
        SELECT 'orders', 'row-' || n, 'k' || n % 7, '{}' FROM generate_series(1, $1::bigint) AS n";
    outbox.db.execute(fill, &[&rows]).await.unwrap();
    outbox.settles().await;
    (outbox, relay)
}

#[tokio::test]
async fn a_range_is_published_again_beside_a_leader_and_without_one() {
    let (outbox, relay) = with_rows(3_000).await;
    let range = ["--name", "range", "--from-id", "500", "--to-id", "2100"];
    let said = replay(&outbox, &range).await;
    assert_eq!(
        said,
        ["published 1601 messages again, of the ids 500 to 2100"]
    );
    assert_eq!(replayed(&outbox, TOPIC, "range").await, keys(500..=2_100));
    // Done once.
    let said = replay(&outbox, &range).await;
    assert!(said[0].starts_with("was done before: 1601 messages"));
    assert_eq!(replayed(&outbox, TOPIC, "range").await.len(), 1_601);
    // The relay is not disturbed, and neither is its successor nor who holds one against the other.
    outbox.insert("after").await;
    outbox.arrives("after").await;
    outbox.settles().await;
    relay.terminate();
    assert!(relay.wait(DEADLINE).await.unwrap().success());
    let said = replay(&outbox, &["--name", "without", "--from-id", "2999"]).await;
    assert!(said[0].starts_with("published 3 messages again"));
    let next = outbox.leader(&[]).await;
    outbox.insert("next").await;
    outbox.settles().await;
    assert_eq!(published(&outbox, TOPIC).await, 3_002);
    let report = verify(&outbox).await;
    assert_eq!(report["replayed"], 1_604);
    assert_eq!(report["published"], 3_002);
    assert!(next.exit_status().is_none());
}

/// But for the name of the replay, an entry is the one that the relay wrote.
#[tokio::test]
async fn an_entry_has_the_fields_that_it_had() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let rows = r#"INSERT INTO outbox.messages
            (topic, message_key, ordering_key, event_type, payload, payload_binary, content_type, headers)
        VALUES ('orders', 'all', 'key', 'placed', NULL, '\x00ff0a', 'application/x', '{"a": "b",  "c":"d"}'),
               ('orders', 'few', NULL, NULL, '{"n": 1.50,  "n": 2}', NULL, NULL, NULL)"#;
    outbox.db.batch_execute(rows).await.unwrap();
    outbox.settles().await;
    replay(&outbox, &["--name", "fields", "--all"]).await;
    let entries = outbox.entries(TOPIC).await;
    let (first, again) = entries.split_at(2);
    for (first, again) in first.iter().zip(again) {
        let mut expected = first.fields.clone();
        expected.push(("replay".to_owned(), b"fields".to_vec()));
        assert_eq!(again.fields, expected);
    }
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn filters_are_combined_and_a_dry_run_counts() {
    let (outbox, relay) = with_rows(100).await;
    let other = "INSERT INTO outbox.messages (topic, message_key, ordering_key, payload)
        VALUES ('audit', 'audit-1', 'k3', '{}'), ('audit', 'audit-2', 'k4', '{}')";
    outbox.db.batch_execute(other).await.unwrap();
    outbox.settles().await;
    let counted = replay(&outbox, &["--dry-run", "--ordering-key", "k3"]).await;
    let expected = [
        "audit: 1 messages, 4 bytes, ids 101 to 101",
        "orders: 14 messages, 56 bytes, ids 3 to 94",
        "15 messages in 2 topics",
    ];
    assert_eq!(counted, expected);
    assert_eq!(outbox.entry_count(TOPIC).await, 100);

    let some = [
        "--name",
        "some",
        "--ordering-key",
        "k3",
        "--from-id",
        "50",
        "--topic",
        "orders",
    ];
    replay(&outbox, &some).await;
    let expected = keys((50..=100).filter(|n| n % 7 == 3));
    assert_eq!(replayed(&outbox, TOPIC, "some").await, expected);

    let by_key = [
        "--name",
        "by-key",
        "--message-key",
        "row-90",
        "--message-key",
        "row-7",
    ];
    replay(&outbox, &by_key).await;
    assert_eq!(replayed(&outbox, TOPIC, "by-key").await, keys([7, 90]));
    assert!(replayed(&outbox, "audit", "by-key").await.is_empty());

    replay(
        &outbox,
        &["--name", "young", "--since", "1h", "--topic", "audit"],
    )
    .await;
    assert_eq!(
        replayed(&outbox, "audit", "young").await,
        ["audit-1", "audit-2"]
    );
    let old = ["--name", "old", "--until", "1h"];
    assert!(replay(&outbox, &old).await[0].starts_with("published 0 messages"));
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn another_stream_takes_them_in_the_place_of_their_own() {
    let (outbox, relay) = with_rows(20).await;
    let args = [
        "--name",
        "aside",
        "--to-id",
        "5",
        "--stream",
        "outbox:rebuilt",
    ];
    replay(&outbox, &args).await;
    assert_eq!(replayed(&outbox, "rebuilt", "aside").await, keys(1..=5));
    assert_eq!(outbox.entry_count(TOPIC).await, 20);
    let report = verify(&outbox).await;
    assert_eq!(report["replayed"], 5);
    assert!(relay.exit_status().is_none());
}

/// Killed with its step on the way, and again with the reply on its way.
#[tokio::test]
async fn one_that_was_killed_goes_on_where_it_was() {
    let (outbox, relay) = with_rows(5_000).await;
    let proxy = Proxy::start(outbox.redis.port()).await.unwrap();
    let via = outbox.redis.url_via(proxy.port());
    let args = ["replay", "--name", "killed", "--all", "--rate", "4000"];
    for direction in [Direction::Request, Direction::Reply] {
        let hold = proxy.hold(Matcher::redis("EVALSHA").nth(3), direction);
        let replay = Process::builder(relay_binary())
            .args(args)
            .env("DATABASE_URL", outbox.postgres_url())
            .env("REDIS_URL", &via)
            .spawn()
            .unwrap();
        hold.reached_within(DEADLINE).await.unwrap();
        replay.kill9();
        hold.drop_it();
    }
    let done = run(&outbox.postgres_url(), &outbox.redis.url(), &args)
        .await
        .done();
    assert_eq!(
        done,
        ["published 5000 messages again, of the ids 1 to 5000"]
    );
    assert_eq!(replayed(&outbox, TOPIC, "killed").await, keys(1..=5_000));
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn the_rate_is_kept_and_an_interrupt_stops_it() {
    let (outbox, relay) = with_rows(2_000).await;
    let args = ["replay", "--name", "slow", "--all", "--rate", "100"];
    let slow = Process::builder(relay_binary())
        .args(args)
        .env("DATABASE_URL", outbox.postgres_url())
        .env("REDIS_URL", outbox.redis.url())
        .spawn()
        .unwrap();
    eventually(DEADLINE, "a second step", || async {
        replayed(&outbox, TOPIC, "slow").await.len() >= 40
    })
    .await
    .unwrap();
    slow.interrupt();
    assert!(slow.wait(DEADLINE).await.unwrap().success());
    let said = slow.lines_of(Output::Stdout);
    assert_eq!(said, ["stopped; the same command goes on from there"]);
    let some = replayed(&outbox, TOPIC, "slow").await;
    assert!(some.len() < 2_000);
    assert_eq!(some, keys(1..=some.len() as i64));
    // The rate may be another one.
    replay(&outbox, &["--name", "slow", "--all"]).await;
    assert_eq!(replayed(&outbox, TOPIC, "slow").await, keys(1..=2_000));
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn wrong_input_is_refused() {
    let (outbox, relay) = with_rows(5).await;
    let cases: [(&[&str], &[&str]); 7] = [
        (&["--name", "x"], &["say which messages", "--all"]),
        (
            &["--name", "x", "--all", "--topic", "orders"],
            &["one of the two"],
        ),
        (&["--name", "x y", "--all"], &["--name", "1 to 100"]),
        (
            &["--name", "x", "--from-id", "3", "--to-id", "2"],
            &["--from-id", "3 is above"],
        ),
        (
            &["--name", "x", "--all", "--stream", "outbox:relay:marker"],
            &["--stream", "own keys"],
        ),
        (
            &["--name", "x", "--all", "--stream", "two words"],
            &["--stream", "without spaces"],
        ),
        (
            &[
                "--name",
                "x",
                "--all",
                "--stream",
                "orders",
                "--stream-prefix",
                "{shop}:",
            ],
            &["--stream", "{shop}"],
        ),
    ];
    for (args, parts) in cases {
        let args: Vec<&str> = ["replay"].into_iter().chain(args.iter().copied()).collect();
        run_on(&outbox, &args).await.refused(64, parts);
    }
    assert_eq!(run_on(&outbox, &["replay", "--all"]).await.code, Some(64));
    let missing = ["replay", "--name", "x", "--message-key", "nobody"];
    run_on(&outbox, &missing)
        .await
        .refused(1, &["1 of the 1 message keys", "trace"]);
    replay(&outbox, &["--name", "x", "--to-id", "3"]).await;
    let other = ["replay", "--name", "x", "--to-id", "4"];
    run_on(&outbox, &other)
        .await
        .refused(64, &["other flags", "\"to_id\":3"]);
    assert_eq!(replayed(&outbox, TOPIC, "x").await, keys(1..=3));
    assert!(relay.exit_status().is_none());
}
