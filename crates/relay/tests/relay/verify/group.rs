//! What a consumer group has made of the messages.

use std::time::{Duration, Instant};

use super::{
    FINDINGS, GROUP, NOTHING_WRONG, command, entry_ids, published, redis, said, stream, verify,
    write,
};
use crate::support::{DEADLINE, Outbox, TOPIC, insert_ordered};

/// A consumer's database, and a group that was given half of ten messages.
async fn with_group() -> (Outbox<'static>, String, tokio_postgres::Client) {
    let outbox = published(10).await;
    let database = outbox.postgres.fresh_inbox().await.unwrap();
    let inbox = outbox.postgres.connect(&database).await.unwrap();
    let stream = stream();
    let _: () = redis(&outbox, &["XGROUP", "CREATE", &stream, GROUP, "0"]).await;
    let read = [
        "XREADGROUP",
        "GROUP",
        GROUP,
        "one",
        "COUNT",
        "5",
        "STREAMS",
        &stream,
        ">",
    ];
    let _: redis::Value = redis(&outbox, &read).await;
    let url = outbox.postgres.url(&database);
    (outbox, url, inbox)
}

async fn apply(inbox: &tokio_postgres::Client, keys: &[&str]) {
    inbox
        .execute("SELECT inbox.claim($1, $2, $3)", &[&GROUP, &TOPIC, &keys])
        .await
        .unwrap();
}

async fn acknowledge(outbox: &Outbox<'_>, entry: &str) {
    let acknowledged: i64 = redis(outbox, &["XACK", &stream(), GROUP, entry]).await;
    assert_eq!(acknowledged, 1);
}

#[tokio::test]
async fn what_a_group_has_not_applied_yet_is_told_by_how_far_it_has_come() {
    let (outbox, url, inbox) = with_group().await;
    apply(&inbox, &["row-1", "row-2"]).await;
    acknowledge(&outbox, &entry_ids(&outbox).await[0]).await;
    let group = ["--group", GROUP, "--inbox-database-url", &url];
    let said = verify(&outbox, &group).await;
    said.found(&[]);
    let counts = [
        "applied",
        "pending",
        "not_given",
        "dead_letters",
        "lost_effect",
    ];
    assert_eq!(counts.map(|kind| said.of_group(kind)), [2, 3, 5, 0, 0]);
    let complete = [&group[..], &["--complete"]].concat();
    assert_eq!(verify(&outbox, &complete).await.code, FINDINGS);
    // The same in the environment, for people.
    let run = command(&outbox, &["--group", GROUP]).env("INBOX_DATABASE_URL", &url);
    let run = run.spawn().unwrap();
    assert_eq!(run.wait(DEADLINE).await.unwrap().code(), NOTHING_WRONG);
    run.wait_for_line("not yet applied     8 (pending 3, not given 5)", DEADLINE)
        .await
        .unwrap();
}

#[tokio::test]
async fn an_acknowledged_message_without_its_effect_is_found() {
    let (outbox, url, inbox) = with_group().await;
    let group = ["--group", GROUP, "--inbox-database-url", &url];
    apply(&inbox, &["row-1"]).await;
    let entries = entry_ids(&outbox).await;
    for entry in &entries[..3] {
        acknowledge(&outbox, entry).await;
    }
    // The second was set aside, the third is lost.
    let letter = "INSERT INTO inbox.dead_letters (consumer_group, stream, entry_id, topic, message_id, message_key, payload,
                                    attempts, reason) VALUES ($1, $2, $3, $4, 2, 'row-2', '{}', 3, 'it failed')";
    let params: [&(dyn tokio_postgres::types::ToSql + Sync); 4] =
        [&GROUP, &stream(), &entries[1], &TOPIC];
    inbox.execute(letter, &params).await.unwrap();
    let said = verify(&outbox, &group).await;
    assert_eq!(said.code, FINDINGS);
    let counts = [
        "applied",
        "pending",
        "not_given",
        "dead_letters",
        "lost_effect",
    ];
    assert_eq!(counts.map(|kind| said.of_group(kind)), [1, 2, 5, 1, 1]);
    let example = &said.report["group"]["lost_effect"]["examples"][0];
    assert_eq!(example["message_key"], "row-3");
    assert_eq!(example["entry_id"], entries[2].as_str());

    // Skipped without a delivery, which is a loss as well.
    let _: () = redis(&outbox, &["XGROUP", "SETID", &stream(), GROUP, "$"]).await;
    let said = verify(&outbox, &group).await;
    assert_eq!(said.of_group("lost_effect"), 6);

    // What the inbox may have forgotten cannot be judged.
    let purged = "INSERT INTO inbox.purged VALUES ($1, now() + interval '1 hour')";
    inbox.execute(purged, &[&GROUP]).await.unwrap();
    let said = verify(&outbox, &group).await;
    assert_eq!(said.code, NOTHING_WRONG);
    assert_eq!(
        (said.of_group("lost_effect"), said.of_group("beyond_inbox")),
        (0, 6)
    );
}

/// Redis keeps deleted entries in the list of pending ones.
#[tokio::test]
async fn pending_entries_that_were_deleted_hide_no_others() {
    let outbox = published(2_000).await;
    let inbox = outbox.postgres.fresh_inbox().await.unwrap();
    let url = outbox.postgres.url(&inbox);
    let stream = stream();
    let _: () = redis(&outbox, &["XGROUP", "CREATE", &stream, GROUP, "0"]).await;
    let read = ["XREADGROUP", "GROUP", GROUP, "one", "STREAMS", &stream, ">"];
    let _: redis::Value = redis(&outbox, &read).await;
    let ids = entry_ids(&outbox).await;
    let mut delete = vec!["XDEL", &stream];
    delete.extend(ids[1..1_990].iter().map(String::as_str));
    let _: i64 = redis(&outbox, &delete).await;
    let said = verify(&outbox, &["--group", GROUP, "--inbox-database-url", &url]).await;
    said.found(&[("missing", 1_989)]);
    assert_eq!(
        (said.of_group("pending"), said.of_group("lost_effect")),
        (11, 0)
    );
}

/// Writers that roll back and commit late, a relay that publishes and a group that applies, while it compares.
#[tokio::test]
async fn traffic_meanwhile_gives_no_false_alarm() {
    let outbox = Outbox::open().await;
    let database = outbox.postgres.fresh_inbox().await.unwrap();
    let url = outbox.postgres.url(&database);
    let relay = outbox.leader(&[]).await;
    write(&outbox, "row", 2_000).await;
    outbox.settles().await;
    let _: () = redis(&outbox, &["XGROUP", "CREATE", &stream(), GROUP, "0"]).await;
    let ended = std::sync::atomic::AtomicBool::new(false);
    let going = || !ended.load(std::sync::atomic::Ordering::Relaxed);
    let writer = async |number: usize| {
        let db = outbox.client().await;
        let mut round = 0;
        while going() {
            round += 1;
            let end = if round % 3 == 0 { "ROLLBACK" } else { "COMMIT" };
            db.batch_execute("BEGIN").await.unwrap();
            for n in 0..5 {
                let key = format!("w{number}-{round}-{n}");
                insert_ordered(&db, &key, &format!("k{number}")).await;
            }
            db.batch_execute(end).await.unwrap();
        }
        round
    };
    let consumer = async {
        let inbox = outbox.postgres.connect(&database).await.unwrap();
        let mut connection = outbox.redis.connect().await.unwrap();
        let mut applied = 0;
        while going() {
            let read: redis::streams::StreamReadReply = redis::cmd("XREADGROUP")
                .arg(&[
                    "GROUP",
                    GROUP,
                    "one",
                    "COUNT",
                    "50",
                    "STREAMS",
                    &stream(),
                    ">",
                ])
                .query_async(&mut connection)
                .await
                .unwrap();
            for entry in read.keys.iter().flat_map(|key| &key.ids) {
                let key: String = entry.get("message_key").unwrap();
                apply(&inbox, &[&key]).await;
                acknowledge(&outbox, &entry.id).await;
                applied += 1;
            }
            tokio::task::yield_now().await;
        }
        applied
    };
    let verifier = async {
        let begun = Instant::now();
        let mut runs = 0;
        while runs < 5 || begun.elapsed() < Duration::from_secs(5) {
            let said = verify(&outbox, &["--group", GROUP, "--inbox-database-url", &url]).await;
            said.found(&[]);
            assert_eq!(said.of_group("lost_effect"), 0);
            runs += 1;
        }
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        runs
    };
    let (runs, rounds, _, applied) = tokio::join!(verifier, writer(1), writer(2), consumer);
    assert!(
        runs >= 5 && rounds > 10 && applied > 50,
        "{runs} {rounds} {applied}"
    );
    outbox.settles().await;
    verify(&outbox, &["--complete"]).await.found(&[]);
    assert!(relay.exit_status().is_none());
}

/// The rights that the README names are enough, and they cannot write.
#[tokio::test]
async fn the_rights_to_read_are_enough() {
    let (outbox, url, inbox) = with_group().await;
    let role = format!("auditor_{}", outbox.database);
    let grant = |schema: &str| {
        format!(
            "GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}"
        )
    };
    let create = format!("CREATE ROLE {role} LOGIN; {}", grant("outbox"));
    outbox.db.batch_execute(&create).await.unwrap();
    inbox.batch_execute(&grant("inbox")).await.unwrap();
    let readme = include_str!("../../../../../README.md");
    let (_, rights) = readme.split_once("and a Redis user with `").unwrap();
    let (rights, _) = rights.split_once('`').unwrap();
    let rights: Vec<String> = rights
        .split_whitespace()
        .map(|command| format!("+{}", command.to_lowercase()))
        .collect();
    let mut user = vec!["ACL", "SETUSER", "auditor", "on", ">secret", "~outbox:*"];
    user.extend(rights.iter().map(String::as_str));
    let _: () = redis(&outbox, &user).await;
    let of = |url: &str| url.replace("postgres@", &format!("{role}@"));
    let audit = command(&outbox, &["--group", GROUP])
        .env("DATABASE_URL", of(&outbox.postgres_url()))
        .env("INBOX_DATABASE_URL", of(&url))
        .env(
            "REDIS_URL",
            outbox
                .redis
                .url()
                .replace("redis://", "redis://auditor:secret@"),
        );
    let said = said(audit).await;
    said.found(&[]);
    assert_eq!(said.of_group("not_given"), 5);
}
