//! `outbox-relay doctor` finds what is wrong with real servers.

use outbox_testkit::{Fsync, Persistence, PgBouncer, Postgres, Redis, eventually};
use serde_json::Value;

use crate::commands::{run, run_on};
use crate::support::{DEADLINE, Outbox, insert};

/// The findings, as JSON, of a command with this exit code.
async fn findings(outbox: &Outbox<'_>, code: i32) -> Vec<Value> {
    findings_at(&outbox.postgres_url(), &outbox.redis.url(), code, &[]).await
}

/// A notification that a busy machine holds up is no finding of these tests, so they look again.
async fn findings_at(postgres: &str, redis: &str, code: i32, args: &[&str]) -> Vec<Value> {
    let mut command = vec!["doctor", "--json"];
    command.extend(args);
    eventually(DEADLINE, "a notification that came in time", || async {
        let said = run(postgres, redis, &command).await;
        let report: Value = serde_json::from_str(&said.out.join("\n"))
            .unwrap_or_else(|error| panic!("{error}: {said:?}"));
        let findings = report["findings"].as_array().unwrap().clone();
        let late =
            |finding: &Value| finding["check"] == "notification" && finding["level"] == "warning";
        if findings.iter().any(late) {
            return Err("late");
        }
        assert_eq!(said.code, Some(code), "{findings:#?}");
        Ok(findings)
    })
    .await
    .unwrap()
}

/// The worst finding of a check.
fn finding<'f>(findings: &'f [Value], area: &str, check: &str) -> &'f Value {
    let of_check = findings
        .iter()
        .filter(|finding| finding["area"] == area && finding["check"] == check);
    let rank = |finding: &&Value| {
        ["ok", "note", "warning", "error"]
            .iter()
            .position(|level| finding["level"] == *level)
    };
    of_check
        .max_by_key(rank)
        .unwrap_or_else(|| panic!("no {area} {check} in {findings:#?}"))
}

/// Asserts the level of a check, and that what was found contains a text; a fault has a meaning and a remedy.
fn assert_found(findings: &[Value], (area, check): (&str, &str), level: &str, part: &str) {
    let finding = finding(findings, area, check);
    assert_eq!(finding["level"], level, "{finding:#}");
    assert!(
        finding["found"].as_str().unwrap().contains(part),
        "{finding:#}"
    );
    if ["warning", "error"].contains(&level) {
        for field in ["means", "remedy"] {
            assert!(
                finding[field].as_str().is_some_and(|text| !text.is_empty()),
                "{finding:#}"
            );
        }
    }
}

async fn redis_call(outbox: &Outbox<'_>, line: &str) {
    let mut connection = outbox.redis.connect().await.unwrap();
    let mut words = line.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    for word in words {
        command.arg(word);
    }
    command.exec_async(&mut connection).await.unwrap();
}

async fn outbox_with_file() -> Outbox<'static> {
    let redis = Redis::builder().persistence(Persistence::Aof(Fsync::EverySecond));
    Outbox::open_on(
        Postgres::shared().await.unwrap(),
        redis.start().await.unwrap(),
    )
    .await
}

#[tokio::test]
async fn a_set_up_without_fault_is_called_so() {
    let outbox = outbox_with_file().await;
    let relay = outbox.leader(&[]).await;
    outbox.insert("row").await;
    outbox.settles().await;
    redis_call(&outbox, "XGROUP CREATE outbox:orders packing $").await;
    let all = findings(&outbox, 0).await;
    for check in [
        "pooler",
        "schema",
        "trigger",
        "notification",
        "autovacuum",
        "synchronous_commit",
        "wraparound",
        "disk",
        "clock",
        "replication slots",
        "dead rows",
    ] {
        assert_found(&all, ("postgres", check), "ok", "");
    }
    for check in [
        "version",
        "cluster",
        "maxmemory-policy",
        "memory",
        "rights",
        "clock",
        "persistence",
    ] {
        assert_found(&all, ("redis", check), "ok", "");
    }
    assert_found(&all, ("postgres", "rights"), "note", "superuser");
    assert_found(&all, ("streams", "groups"), "ok", "1 groups");
    let said = run_on(&outbox, &["doctor"]).await.done();
    assert!(
        said.iter()
            .any(|line| line.starts_with("ok      postgres  schema: ")),
        "{said:#?}"
    );
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_pooler_is_found_and_asked_nothing_more() {
    let outbox = outbox_with_file().await;
    let bouncer = PgBouncer::start(outbox.postgres, "transaction", 2)
        .await
        .unwrap();
    let url = outbox.postgres.url_via(bouncer.port(), &outbox.database);
    let all = findings_at(&url, &outbox.redis.url(), 3, &[]).await;
    assert_found(
        &all,
        ("postgres", "pooler"),
        "error",
        "pool_mode=transaction",
    );
    assert_eq!(
        all.iter()
            .filter(|finding| finding["area"] == "postgres")
            .count(),
        1
    );
    assert_found(&all, ("redis", "version"), "ok", "");
}

#[tokio::test]
async fn what_a_relay_would_refuse_is_an_error() {
    let outbox = Outbox::open().await;
    let change = "ALTER TABLE outbox.messages ALTER COLUMN id SET CACHE 10;
        ALTER TABLE outbox.messages DISABLE TRIGGER wake_relay";
    outbox.db.batch_execute(change).await.unwrap();
    let policy = "CONFIG SET maxmemory-policy allkeys-lru";
    redis_call(&outbox, policy).await;
    let all = findings(&outbox, 3).await;
    assert_found(&all, ("postgres", "schema"), "error", "cache 10");
    assert_found(&all, ("postgres", "trigger"), "warning", "wake_relay");
    assert_found(&all, ("redis", "maxmemory-policy"), "error", "allkeys-lru");
}

#[tokio::test]
async fn rights_that_are_missing_are_named() {
    let outbox = Outbox::open().await;
    let role = format!("doctor_{}", outbox.database);
    let grants = run_on(&outbox, &["grants", "--relay", &role]).await.done();
    let sql = format!(
        "CREATE ROLE {role} LOGIN; {}; REVOKE DELETE ON outbox.messages FROM {role}",
        grants.join("\n")
    );
    outbox.db.batch_execute(&sql).await.unwrap();
    let lines = run_on(&outbox, &["grants", "--redis", "--relay", "poor"])
        .await
        .done();
    for line in [
        lines[0].replace(" +xadd", "").replace('"', "").as_str(),
        "ACL SETUSER poor >secret",
    ] {
        redis_call(&outbox, line).await;
    }
    let postgres = outbox
        .postgres_url()
        .replace("postgres@", &format!("{role}@"));
    let redis = outbox
        .redis
        .url()
        .replace("redis://", "redis://poor:secret@");
    let all = findings_at(&postgres, &redis, 3, &[]).await;
    assert_found(
        &all,
        ("postgres", "rights"),
        "error",
        "DELETE on outbox.messages",
    );
    assert_found(&all, ("redis", "rights"), "error", "lacks +xadd");
    assert_found(&all, ("redis", "persistence"), "note", "cannot be seen");

    redis_call(&outbox, "ACL SETUSER poor -evalsha").await;
    let all = findings_at(&postgres, &redis, 3, &[]).await;
    assert_found(&all, ("redis", "rights"), "error", "may not run scripts");
    redis_call(&outbox, "ACL SETUSER poor +evalsha +xadd").await;
    outbox
        .db
        .batch_execute(&format!("GRANT DELETE ON outbox.messages TO {role}"))
        .await
        .unwrap();
    let all = findings_at(&postgres, &redis, 0, &[]).await;
    assert_found(&all, ("postgres", "rights"), "note", "pg_read_all_stats");
    assert_found(&all, ("redis", "rights"), "ok", "");
}

#[tokio::test]
async fn settings_that_lose_or_hold_up_messages() {
    let postgres = Postgres::builder()
        .setting("fsync", "off")
        .setting("autovacuum", "off")
        .setting("synchronous_commit", "off")
        .start()
        .await
        .unwrap();
    let redis = Redis::start().await.unwrap();
    let outbox = Outbox::open_on(&postgres, redis).await;
    let change = "CREATE ROLE hasty; ALTER ROLE hasty SET synchronous_commit = off;
        ALTER TABLE outbox.messages SET (autovacuum_enabled = off)";
    outbox.db.batch_execute(change).await.unwrap();
    let all = findings(&outbox, 3).await;
    assert_found(&all, ("postgres", "fsync"), "error", "fsync is off");
    assert_found(
        &all,
        ("postgres", "autovacuum"),
        "error",
        "autovacuum is off",
    );
    assert_found(&all, ("postgres", "synchronous_commit"), "warning", "off");
    assert!(
        all.iter()
            .any(|finding| finding["found"] == "off for role hasty"),
        "{all:#?}"
    );
    assert_found(
        &all,
        ("redis", "persistence"),
        "warning",
        "comes back empty",
    );
}

/// The age of a prepared transaction is not this test's to wait for: what is old is judged apart.
#[tokio::test]
async fn a_transaction_that_wrote_a_message_is_seen() {
    let outbox = outbox_with_file().await;
    let open = outbox.client().await;
    open.batch_execute("BEGIN").await.unwrap();
    insert(&open, "open").await;
    let all = findings(&outbox, 0).await;
    assert_found(&all, ("postgres", "open writers"), "ok", "1, none older");
}

#[tokio::test]
async fn a_redis_that_takes_no_entries() {
    let outbox = Outbox::open().await;
    redis_call(&outbox, "CONFIG SET min-replicas-to-write 1").await;
    redis_call(&outbox, "CONFIG SET maxmemory 1mb").await;
    let all = findings(&outbox, 3).await;
    assert_found(&all, ("redis", "replication"), "error", "0 replicas");
    assert_found(&all, ("redis", "memory"), "error", "maxmemory");
    redis_call(&outbox, "CONFIG SET maxmemory 0").await;
    let replica = outbox.redis.replica().await.unwrap();
    let all = findings_at(&outbox.postgres_url(), &replica.url(), 3, &[]).await;
    assert_found(&all, ("redis", "replication"), "error", "this is a replica");
}

#[tokio::test]
async fn a_cluster_and_a_prefix_without_a_hash_tag() {
    let redis = Redis::builder().arg("--cluster-enabled", "yes");
    let outbox = Outbox::open_on(
        Postgres::shared().await.unwrap(),
        redis.start().await.unwrap(),
    )
    .await;
    redis_call(&outbox, "CLUSTER ADDSLOTSRANGE 0 16383").await;
    let (postgres, redis) = (outbox.postgres_url(), outbox.redis.url());
    let all = findings_at(&postgres, &redis, 3, &[]).await;
    assert_found(&all, ("redis", "cluster"), "error", "hash tag");
    let tagged = ["--stream-prefix", "{shop}:"];
    let all = findings_at(&postgres, &redis, 2, &tagged).await;
    assert_found(&all, ("redis", "cluster"), "ok", "one slot");
}

#[tokio::test]
async fn streams_that_nobody_reads_and_groups_that_are_left_alone() {
    let outbox = outbox_with_file().await;
    let mut connection = outbox.redis.connect().await.unwrap();
    let fill = "for _ = 1, 10000 do redis.call('XADD', KEYS[1], '*', 'a', 'b') end";
    redis::cmd("EVAL")
        .arg(fill)
        .arg(1)
        .arg("outbox:unread")
        .exec_async(&mut connection)
        .await
        .unwrap();
    redis_call(&outbox, "XADD outbox:orders * a b").await;
    redis_call(&outbox, "XGROUP CREATE outbox:orders packing 0").await;
    let all = findings(&outbox, 2).await;
    assert_found(
        &all,
        ("streams", "unread streams"),
        "warning",
        "outbox:unread (10000 entries)",
    );
    assert_found(
        &all,
        ("streams", "groups"),
        "warning",
        "packing on outbox:orders (pending 0, not delivered 1)",
    );
    redis_call(&outbox, "DEL outbox:unread").await;
    // A member that asked just now is there.
    redis_call(
        &outbox,
        "XREADGROUP GROUP packing one STREAMS outbox:orders >",
    )
    .await;
    let all = findings(&outbox, 0).await;
    assert_found(&all, ("streams", "groups"), "ok", "");
}

/// The time for streams is bounded, and what was not looked at is told.
#[tokio::test]
async fn ten_thousand_streams_are_not_all_looked_at() {
    let outbox = outbox_with_file().await;
    let mut connection = outbox.redis.connect().await.unwrap();
    let fill = "for n = 1, 10000 do redis.call('XADD', KEYS[1] .. n, '*', 'a', 'b') end";
    let mut script = redis::cmd("EVAL");
    script.arg(fill).arg(1).arg("outbox:t");
    script.exec_async(&mut connection).await.unwrap();
    let all = findings(&outbox, 0).await;
    assert_found(&all, ("streams", "unread streams"), "note", " more");
}
