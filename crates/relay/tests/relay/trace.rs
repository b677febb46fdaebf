//! `outbox-relay trace` says where a message is, or why it is not there.

use outbox_testkit::Postgres;
use serde_json::Value;
use tokio_postgres::Client;

use crate::commands::run_on;
use crate::support::{DEADLINE, Outbox, TOPIC, insert};

const GROUP: &str = "packing";

async fn trace(outbox: &Outbox<'_>, args: &[&str]) -> Value {
    let args: Vec<&str> = ["trace", "--json"]
        .into_iter()
        .chain(args.iter().copied())
        .collect();
    let lines = run_on(outbox, &args).await.done();
    serde_json::from_str(&lines[0]).unwrap()
}

async fn line(outbox: &Outbox<'_>, args: &[&str], name: &str) -> String {
    let args: Vec<&str> = ["trace"].into_iter().chain(args.iter().copied()).collect();
    let lines = run_on(outbox, &args).await.done();
    let line = lines.iter().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name:?} in {lines:#?}"))
        .trim()
        .to_owned()
}

async fn redis<T: redis::FromRedisValue>(outbox: &Outbox<'_>, words: &[&str]) -> T {
    let mut connection = outbox.redis.connect().await.unwrap();
    redis::cmd(words[0])
        .arg(&words[1..])
        .query_async(&mut connection)
        .await
        .unwrap()
}

#[tokio::test]
async fn a_published_message_is_found_in_its_stream() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let fill = "INSERT INTO outbox.messages (topic, message_key, payload)
        SELECT 'orders', 'row-' || n, '{}' FROM generate_series(1, 30000) AS n";
    outbox.db.batch_execute(fill).await.unwrap();
    outbox.settles().await;
    let entries = outbox.entries(TOPIC).await;
    for key in ["row-1", "row-14999", "row-15001", "row-30000"] {
        let shown = trace(&outbox, &[key]).await;
        let entry = entries.iter().find(|e| e.message_key() == key).unwrap();
        assert_eq!(shown["entry"]["entry_id"], entry.stream_id);
        assert_eq!(shown["entry"]["stream"], "outbox:orders");
        assert_eq!(shown["message"]["id"], entry.id());
        assert_eq!(shown["not_published"], Value::Null);
        assert!(shown["entry"]["after_seconds"].as_f64().unwrap() > -1.0);
    }
    let shown = line(&outbox, &["row-14999"], "published").await;
    assert!(shown.starts_with("outbox:orders 1"), "{shown}");
    assert!(relay.exit_status().is_none());
}

/// Its entry stands behind those of higher ids, so that halving the stream does not find it.
#[tokio::test]
async fn a_message_that_was_committed_late_is_found_as_well() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let late = outbox.client().await;
    late.batch_execute("BEGIN").await.unwrap();
    insert(&late, "late").await;
    let fill = "INSERT INTO outbox.messages (topic, message_key, payload)
        SELECT 'orders', 'row-' || n, '{}' FROM generate_series(1, 30000) AS n";
    outbox.db.batch_execute(fill).await.unwrap();
    outbox.settles_but_for_gaps(DEADLINE).await;
    let waiting = run_on(&outbox, &["trace", "late"]).await;
    waiting.refused(1, &["no message has the key \"late\"", "never committed"]);
    late.batch_execute("COMMIT").await.unwrap();
    outbox.arrives("late").await;
    outbox.settles().await;
    let shown = trace(&outbox, &["late", "--scan"]).await;
    let last = outbox.entries(TOPIC).await.pop().unwrap();
    assert_eq!(shown["entry"]["entry_id"], last.stream_id, "{shown}");
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn why_a_message_is_not_published() {
    let outbox = Outbox::open().await;
    outbox.insert("row").await;
    assert_eq!(
        line(&outbox, &["row"], "not published").await,
        "no relay leads"
    );
    let pause = ["pause", "--reason", "moving"];
    run_on(&outbox, &pause).await.done();
    let shown = line(&outbox, &["row"], "not published").await;
    assert!(shown.starts_with("publishing is paused since "), "{shown}");
    run_on(&outbox, &["resume"]).await.done();

    let () = redis(&outbox, &["SET", "outbox:refused", "something else"]).await;
    let relay = outbox.leader(&[]).await;
    let refused = "INSERT INTO outbox.messages (topic, message_key, payload) VALUES ('refused', 'held', '{}')";
    outbox.db.batch_execute(refused).await.unwrap();
    outbox.settles().await;
    let shown = line(&outbox, &["held"], "not published").await;
    assert!(
        shown.starts_with("outbox:refused is held back: WRONGTYPE"),
        "{shown}"
    );
    let dead = "INSERT INTO outbox.dead_letters (id, topic, message_key, payload, created_at, reason)
        SELECT id, topic, message_key, payload, created_at, 'too large' FROM outbox.messages WHERE message_key = 'held'";
    outbox.db.batch_execute(dead).await.unwrap();
    let shown = line(&outbox, &["held"], "not published").await;
    assert!(shown.ends_with("Redis refuses it: too large"), "{shown}");
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn an_entry_that_is_gone_is_said_to_be() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    for key in ["first", "second"] {
        outbox.insert(key).await;
        outbox.arrives(key).await;
    }
    outbox.settles().await;
    let () = redis(&outbox, &["XTRIM", "outbox:orders", "MAXLEN", "1"]).await;
    let shown = line(&outbox, &["first"], "published").await;
    assert!(shown.contains("trimmed or deleted"), "{shown}");
    let () = redis(&outbox, &["DEL", "outbox:orders"]).await;
    let shown = line(&outbox, &["first"], "published").await;
    assert!(shown.contains("outbox:orders is empty or gone"), "{shown}");
    assert!(relay.exit_status().is_none());
}

/// The state that a trace shows for a group whose inbox is in this database.
async fn of_group(outbox: &Outbox<'_>, inbox: &str, key: &str) -> String {
    let args = [key, "--group", GROUP, "--inbox-database-url", inbox];
    line(outbox, &args, "group packing").await
}

async fn applied(inbox: &Client, key: &str) {
    let sql = "INSERT INTO inbox.applied (consumer_group, topic, message_key) VALUES ('packing', 'orders', $1)";
    inbox.execute(sql, &[&key]).await.unwrap();
}

#[tokio::test]
async fn what_a_group_has_made_of_it() {
    let outbox = Outbox::open().await;
    let postgres = Postgres::shared().await.unwrap();
    let database = postgres.fresh_inbox().await.unwrap();
    let (inbox, url) = (
        postgres.connect(&database).await.unwrap(),
        postgres.url(&database),
    );
    let relay = outbox.leader(&[]).await;
    for key in ["applied", "pending", "acked", "ahead"] {
        outbox.insert(key).await;
        outbox.arrives(key).await;
    }
    outbox.settles().await;
    assert!(
        of_group(&outbox, &url, "ahead")
            .await
            .starts_with("not read")
    );
    let () = redis(&outbox, &["XGROUP", "CREATE", "outbox:orders", GROUP, "0"]).await;
    assert_eq!(of_group(&outbox, &url, "ahead").await, "not given yet");
    let read = [
        "XREADGROUP",
        "GROUP",
        GROUP,
        "one",
        "COUNT",
        "3",
        "STREAMS",
        "outbox:orders",
        ">",
    ];
    let _: redis::Value = redis(&outbox, &read).await;
    let shown = of_group(&outbox, &url, "pending").await;
    assert!(
        shown.starts_with("pending, delivered 1 times, last to one "),
        "{shown}"
    );
    applied(&inbox, "applied").await;
    assert!(
        of_group(&outbox, &url, "applied")
            .await
            .starts_with("applied 20")
    );
    for key in ["applied", "acked"] {
        let entries = outbox.entries(TOPIC).await;
        let entry = entries.iter().find(|e| e.message_key() == key).unwrap();
        let _: i64 = redis(&outbox, &["XACK", "outbox:orders", GROUP, &entry.stream_id]).await;
        if key == "acked" {
            let shown = of_group(&outbox, &url, key).await;
            assert!(shown.starts_with("acknowledged without effect"), "{shown}");
            let dead = "INSERT INTO inbox.dead_letters (consumer_group, stream, entry_id, topic, message_key, payload,
                    attempts, reason)
                VALUES ('packing', 'outbox:orders', $1, 'orders', 'acked', '', 5, 'no such customer')";
            inbox.execute(dead, &[&entry.stream_id]).await.unwrap();
            let shown = of_group(&outbox, &url, key).await;
            assert!(
                shown.starts_with("dead letter, dead letter 1 set aside 20"),
                "{shown}"
            );
            assert!(shown.ends_with(": no such customer"), "{shown}");
        }
    }
    let args = ["applied", "--group", GROUP, "--inbox-database-url", &url];
    let shown = trace(&outbox, &args).await;
    assert_eq!(shown["group"]["state"], "applied");

    // The outbox has forgotten it, the inbox has not.
    outbox
        .db
        .batch_execute("DELETE FROM outbox.messages WHERE message_key = 'applied'")
        .await
        .unwrap();
    let args = [
        "trace",
        "applied",
        "--group",
        GROUP,
        "--inbox-database-url",
        &url,
    ];
    run_on(&outbox, &args)
        .await
        .refused(1, &["no message has the key", "--topic"]);
    let args = [
        "applied",
        "--group",
        GROUP,
        "--topic",
        TOPIC,
        "--inbox-database-url",
        &url,
    ];
    assert!(
        line(&outbox, &args, "group packing")
            .await
            .starts_with("applied 20")
    );
    assert!(
        line(&outbox, &args, "not published")
            .await
            .contains("or it was purged")
    );
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn wrong_input_is_refused_in_one_line() {
    let outbox = Outbox::open().await;
    outbox.insert("row").await;
    let args = ["trace", "row", "--group", GROUP];
    let said = run_on(&outbox, &args).await;
    said.refused(1, &["no schema \"inbox\"", "--inbox-database-url"]);
    let args = ["trace", "row", "--topic", TOPIC];
    assert_eq!(run_on(&outbox, &args).await.code, Some(64));
    assert_eq!(run_on(&outbox, &["trace"]).await.code, Some(64));
    let () = redis(&outbox, &["SET", "outbox:relay:marker", "theirs"]).await;
    let said = run_on(&outbox, &["trace", "row"]).await;
    said.refused(1, &["holds something else"]);
}
