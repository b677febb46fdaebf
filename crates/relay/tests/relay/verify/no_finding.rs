//! What is no finding: messages on their way, what was purged, trimmed or set aside, what is out of the range; and what
//! cannot be compared.

use std::time::Instant;

use outbox_testkit::{Output, Redis, eventually};

use super::{
    FAILED, FINDINGS, GROUP, NOTHING_WRONG, Said, USAGE, add, assert_says, command, entry_ids,
    publish, published, redis, stop, stream, verify, write,
};
use crate::support::{DEADLINE, Outbox, insert, leading};

#[tokio::test]
async fn nothing_is_found_where_everything_arrived_once() {
    let outbox = published(2_500).await;
    let said = verify(&outbox, &[]).await;
    said.found(&[]);
    for kind in ["rows", "entries", "published", "to_id"] {
        assert_eq!(said.count(kind), 2_500, "{kind}");
    }
    assert_eq!(said.report["wrong"], false);
    // For people.
    let run = command(&outbox, &[]).spawn().unwrap();
    assert_eq!(run.wait(DEADLINE).await.unwrap().code(), NOTHING_WRONG);
    let lines = run.lines();
    for line in [
        "ids                 1 to 2500",
        "published           2500",
        "missing             0",
        "nothing is wrong",
    ] {
        assert!(lines.iter().any(|l| l == line), "{line:?}: {lines:#?}");
    }
}

#[tokio::test]
async fn an_empty_outbox_agrees_with_an_empty_redis() {
    let outbox = Outbox::open().await;
    let said = verify(&outbox, &[]).await;
    said.found(&[]);
    assert_eq!((said.count("rows"), said.count("streams")), (0, 0));
}

#[tokio::test]
async fn what_a_stream_was_trimmed_of_is_told_apart() {
    let outbox = published(20).await;
    let ids = entry_ids(&outbox).await;
    let gone: i64 = redis(&outbox, &["XTRIM", &stream(), "MINID", "=", &ids[5]]).await;
    assert_eq!(gone, 5);
    let said = verify(&outbox, &[]).await;
    said.found(&[]);
    assert_eq!((said.count("trimmed"), said.count("published")), (5, 15));
    assert_eq!(said.example("trimmed")["message_key"], "row-1");
    let _: i64 = redis(&outbox, &["XTRIM", &stream(), "MAXLEN", "=", "0"]).await;
    let said = verify(&outbox, &[]).await;
    said.found(&[]);
    assert_eq!(said.count("trimmed"), 20);
}

#[tokio::test]
async fn what_the_relay_has_still_to_publish_is_no_finding_unless_asked_for() {
    let outbox = published(5).await;
    write(&outbox, "waits", 7).await;
    let said = verify(&outbox, &[]).await;
    said.found(&[]);
    assert_eq!(
        (said.count("not_yet_published"), said.count("above_cursor")),
        (7, 7)
    );
    assert_eq!(verify(&outbox, &["--complete"]).await.code, FINDINGS);

    // A row in a gap: the relay is killed before its transaction commits.
    let late = outbox.client().await;
    late.batch_execute("BEGIN").await.unwrap();
    insert(&late, "late").await;
    outbox.insert("ahead").await;
    let relay = outbox.leader(&[]).await;
    outbox.settles_but_for_gaps(DEADLINE).await;
    relay.kill9();
    relay.wait(DEADLINE).await.unwrap();
    late.batch_execute("COMMIT").await.unwrap();
    let said = verify(&outbox, &[]).await;
    said.found(&[]);
    assert_eq!(
        (said.count("not_yet_published"), said.count("in_gaps")),
        (1, 1)
    );
    publish(&outbox, "more", 1).await;
    let said = verify(&outbox, &["--complete"]).await;
    said.found(&[]);
    assert_eq!(said.count("published"), 15);
}

#[tokio::test]
async fn a_stream_that_refuses_holds_its_messages_back() {
    let outbox = Outbox::open().await;
    let _: () = redis(&outbox, &["SET", "outbox:refused", "no stream"]).await;
    let relay = outbox.leader(&[]).await;
    let refused = "INSERT INTO outbox.messages (topic, payload) VALUES ('refused', '{}')";
    outbox.db.batch_execute(refused).await.unwrap();
    outbox.insert("row").await;
    outbox.arrives("row").await;
    eventually(DEADLINE, "the blocked stream", async || {
        let said = verify(&outbox, &[]).await;
        (said.count("held_back") == 1).then_some(said)
    })
    .await
    .unwrap()
    .found(&[]);
    stop(relay).await;
}

#[tokio::test]
async fn a_message_that_redis_refuses_is_set_aside_and_not_missing() {
    let redis = Redis::builder()
        .arg("--proto-max-bulk-len", "1mb")
        .start()
        .await
        .unwrap();
    let postgres = outbox_testkit::Postgres::shared().await.unwrap();
    let outbox = Outbox::open_on(postgres, redis).await;
    let relay = outbox.leader(&[]).await;
    let large = "INSERT INTO outbox.messages (topic, message_key, payload)
        VALUES ('orders', 'large', to_json(repeat('x', 2000000)))";
    outbox.db.batch_execute(large).await.unwrap();
    outbox.insert("row").await;
    outbox.arrives("row").await;
    outbox.settles().await;
    let said = verify(&outbox, &["--complete"]).await;
    said.found(&[]);
    assert_eq!((said.count("set_aside"), said.count("published")), (1, 1));
    stop(relay).await;
}

#[tokio::test]
async fn an_entry_whose_row_was_purged_is_no_phantom() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&["--retention", "1s"]).await;
    write(&outbox, "row", 200).await;
    outbox.settles().await;
    let left = "SELECT count(*) FROM outbox.messages WHERE id <= 200";
    eventually(DEADLINE, "the purge", async || {
        // It works by what was published when, and that is recorded while messages flow.
        outbox
            .db
            .batch_execute("INSERT INTO outbox.messages (topic, payload) VALUES ('orders', '{}')")
            .await
            .unwrap();
        let count: i64 = outbox.db.query_one(left, &[]).await.unwrap().get(0);
        (count == 0).then_some(())
    })
    .await
    .unwrap();
    outbox.settles().await;
    stop(relay).await;
    let said = verify(&outbox, &[]).await;
    said.found(&[]);
    assert!(said.count("from_id") > 200);
    // Ids that were purged are compared with each other only.
    add(&outbox, &["id", "3", "message_key", "row-3"]).await;
    verify(&outbox, &[]).await.found(&[]);
    let said = verify(&outbox, &["--from-id", "1"]).await;
    said.found(&[("doubled", 1)]);
    assert!(said.count("entries") > 200);
}

#[tokio::test]
async fn a_range_is_all_that_is_compared() {
    let outbox = published(30).await;
    let ids = entry_ids(&outbox).await;
    for gone in [4, 24] {
        let _: i64 = redis(&outbox, &["XDEL", &stream(), &ids[gone]]).await;
    }
    let said = verify(&outbox, &["--from-id", "6", "--to-id", "24"]).await;
    said.found(&[]);
    assert_eq!((said.count("rows"), said.count("entries")), (19, 19));
    let said = verify(&outbox, &["--to-id", "24"]).await;
    said.found(&[("missing", 1)]);
    assert_eq!(said.example("missing")["id"], 5);
    let said = verify(&outbox, &["--since", "1h"]).await;
    said.found(&[("missing", 2)]);
    // Nothing was published since the last record of what was published when.
    let marked = "INSERT INTO outbox.milestones (high, published_at)
        SELECT high, clock_timestamp() - interval '1 minute' FROM outbox.checkpoint
        ON CONFLICT (high) DO UPDATE SET published_at = excluded.published_at";
    outbox.db.batch_execute(marked).await.unwrap();
    let said = verify(&outbox, &["--since", "30s"]).await;
    said.found(&[]);
    assert_eq!(said.count("rows"), 0);
}

#[tokio::test]
async fn many_messages_are_compared_in_little_memory() {
    const ROWS: u64 = 200_000;
    let outbox = Outbox::open().await;
    let insert = "INSERT INTO outbox.messages (topic, ordering_key, payload)
        SELECT 'orders', 'key-' || n % 50000, '{}' FROM generate_series(1, $1::bigint) AS n";
    outbox
        .db
        .execute(insert, &[&ROWS.cast_signed()])
        .await
        .unwrap();
    let relay = leading(outbox.relay().args(["--page-rows", "10000"])).await;
    outbox.settles_within(8 * DEADLINE).await;
    stop(relay).await;
    // One entry early in the stream is moved to its end, so that orders have to be looked at.
    let entry = &outbox_entry(&outbox, 7).await;
    add(
        &outbox,
        &entry.iter().map(String::as_str).collect::<Vec<_>>(),
    )
    .await;

    let begun = Instant::now();
    let run = command(&outbox, &["--json"]).spawn().unwrap();
    // The peak can be asked for as long as it runs.
    let peak = std::cell::Cell::new(0);
    eventually(8 * DEADLINE, "the end of the run", async || {
        peak.set(run.peak_rss_bytes().unwrap_or(0).max(peak.get()));
        run.exit_status().is_some()
    })
    .await
    .unwrap();
    let (code, peak) = (run.wait(DEADLINE).await.unwrap().code(), peak.get());
    eprintln!("{ROWS} rows: {:?}, {} MiB", begun.elapsed(), peak >> 20);
    let report = serde_json::from_str(&run.lines_of(Output::Stdout)[0]).unwrap();
    let said = Said { code, report };
    said.found(&[("out_of_order", 1)]);
    assert_eq!(said.count("published"), ROWS);
    assert!(peak < 100 << 20, "{} MiB", peak >> 20);
}

/// Takes an entry out of the stream, by its place, and returns its fields.
async fn outbox_entry(outbox: &Outbox<'_>, place: usize) -> Vec<String> {
    let count = (place + 1).to_string();
    let found: Vec<(String, Vec<String>)> =
        redis(outbox, &["XRANGE", &stream(), "-", "+", "COUNT", &count]).await;
    let (entry, fields) = found.into_iter().next_back().unwrap();
    let _: i64 = redis(outbox, &["XDEL", &stream(), &entry]).await;
    fields
}

#[tokio::test]
async fn what_it_cannot_work_with_is_said_in_one_line() {
    let outbox = published(1).await;
    let (bare, inbox) = (
        outbox.postgres.fresh_database().await.unwrap(),
        outbox.postgres.fresh_inbox().await.unwrap(),
    );
    let url = |database: &str| outbox.postgres.url(database);

    let no_schema = command(&outbox, &[]).env("DATABASE_URL", url(&bare));
    assert_says(
        no_schema,
        FAILED,
        &["no schema \"outbox\"", "outbox-relay migrate"],
    )
    .await;
    let no_inbox = command(&outbox, &["--group", GROUP]);
    assert_says(
        no_inbox,
        FAILED,
        &["no schema \"inbox\"", "--inbox-database-url"],
    )
    .await;
    let no_group = command(&outbox, &["--group", GROUP]).env("INBOX_DATABASE_URL", url(&inbox));
    assert_says(no_group, FAILED, &["has a group \"packing\"", "--group"]).await;
    let another = outbox.postgres.fresh_outbox().await.unwrap();
    let another = command(&outbox, &[]).env("DATABASE_URL", url(&another));
    assert_says(another, FAILED, &["belongs to outbox", "--stream-prefix"]).await;
    let turned = command(&outbox, &["--from-id", "2", "--to-id", "1"]);
    assert_says(turned, USAGE, &["--from-id", "--to-id"]).await;
    assert_says(
        command(&outbox, &["--limit", "1001"]),
        USAGE,
        &["--limit", "1000"],
    )
    .await;

    let role = format!("auditor_{}", outbox.database);
    let create = format!("CREATE ROLE {role} LOGIN");
    outbox.db.batch_execute(&create).await.unwrap();
    let as_role = outbox
        .postgres_url()
        .replace("postgres@", &format!("{role}@"));
    let audit = || command(&outbox, &["--json"]).env("DATABASE_URL", &as_role);
    assert_says(audit(), FAILED, &["permission denied", "grant"]).await;

    outbox.redis.kill9().await.unwrap();
    assert_says(command(&outbox, &[]), FAILED, &["Redis", "--redis-url"]).await;
}
