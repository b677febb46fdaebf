//! Redis refuses one stream, or one message: the rest goes on, and nothing is lost, doubled or out of order.

use std::time::Duration;

use outbox_testkit::{Process, Redis, eventually, relay};
use redis::aio::MultiplexedConnection;

use crate::pair::{DEADLINE, Pair};

/// Blocked streams are tried again every three seconds.
const CAUGHT_UP: Duration = Duration::from_secs(20);

/// What flows beside a blocked stream is not slowed down by it.
const AT_ONCE: Duration = Duration::from_secs(8);

async fn command(redis: &mut MultiplexedConnection, line: &str) {
    let mut words = line.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    for word in words {
        command.arg(word);
    }
    command.exec_async(redis).await.unwrap();
}

/// A relay that logs in as a user of its own, whose rights a test can change.
fn relay_as_user(pair: &Pair) -> Process {
    let url = format!("redis://publisher:pw@127.0.0.1:{}/0", pair.redis.port());
    relay(&pair.postgres.url(&pair.database), &url)
        .spawn()
        .unwrap()
}

/// A stream that refuses entries, by the rules `block`, until `lift`: beside it another stream goes on, also
/// over a crash of the relay, and it catches up in order.
async fn one_stream_refuses(user: &str, block: &str, lift: &str, reason: &str) {
    let pair = Pair::start().await;
    let mut redis = pair.redis.connect().await.unwrap();
    command(&mut redis, user).await;
    let relay = relay_as_user(&pair);
    pair.leads(&relay).await;

    command(&mut redis, block).await;
    // Both streams in each page.
    let both = "INSERT INTO outbox.messages (topic, message_key, ordering_key, payload)
        SELECT CASE n % 2 WHEN 0 THEN 'orders' ELSE 'audit' END, $1 || '-' || n, 'k' || n % 6, '{}'
        FROM generate_series(1, 400) AS n";
    pair.sql.execute(both, &[&"first"]).await.unwrap();
    pair.reaches("audit", 200, DEADLINE).await;
    pair.sql.execute(both, &[&"second"]).await.unwrap();
    pair.reaches("audit", 400, AT_ONCE).await;
    let status = pair.status().await;
    assert!(
        status.contains("blocked stream      outbox:orders") && status.contains(reason),
        "{status}"
    );

    relay.kill9();
    let relay = relay_as_user(&pair);
    pair.sql.execute(both, &[&"third"]).await.unwrap();
    pair.reaches("audit", 600, DEADLINE).await;
    pair.leads(&relay).await;
    pair.sql.execute(both, &[&"fourth"]).await.unwrap();
    pair.reaches("audit", 800, AT_ONCE).await;
    assert!(pair.status().await.contains("outbox:orders"));
    let sent = "SELECT count(*) FROM outbox.message_status WHERE topic = 'orders' AND sent";
    let sent: i64 = pair.sql.query_one(sent, &[]).await.unwrap().get(0);
    assert_eq!(sent, 0);

    command(&mut redis, lift).await;
    pair.reaches("orders", 800, CAUGHT_UP).await;
    pair.sql.execute(both, &[&"fifth"]).await.unwrap();
    pair.all_published(DEADLINE).await;
    let free = || async { !pair.status().await.contains("blocked") };
    eventually(DEADLINE, "no stream to be blocked", free)
        .await
        .unwrap();
    pair.assert_exactly_once_after(&relay).await;
    assert_eq!(pair.count("audit").await, 1_000);
}

const ALL_RIGHTS: &str = "ACL SETUSER publisher reset on >pw ~* +@all";

#[tokio::test]
async fn a_stream_whose_command_an_acl_refuses_is_held_back_alone() {
    one_stream_refuses(
        ALL_RIGHTS,
        "ACL SETUSER publisher -xadd (+xadd ~outbox:audit)",
        ALL_RIGHTS,
        "NOPERM",
    )
    .await;
}

#[tokio::test]
async fn a_stream_whose_key_an_acl_refuses_is_held_back_alone() {
    one_stream_refuses(
        ALL_RIGHTS,
        "ACL SETUSER publisher resetkeys ~outbox:audit ~outbox:relay:*",
        ALL_RIGHTS,
        "NOPERM",
    )
    .await;
}

#[tokio::test]
async fn a_stream_whose_key_is_something_else_is_held_back_alone() {
    one_stream_refuses(
        ALL_RIGHTS,
        "SET outbox:orders mine",
        "DEL outbox:orders",
        "WRONGTYPE",
    )
    .await;
}

#[tokio::test]
async fn a_stream_whose_ids_are_used_up_is_held_back_alone() {
    one_stream_refuses(
        ALL_RIGHTS,
        "XADD outbox:orders 18446744073709551615-18446744073709551615 by hand",
        "DEL outbox:orders",
        "exhausted",
    )
    .await;
}

#[tokio::test]
async fn a_message_that_redis_refuses_for_its_size_is_set_aside_alone() {
    let redis = Redis::builder().arg("--proto-max-bulk-len", "1mb");
    let pair = Pair::with_redis(redis.start().await.unwrap()).await;
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    let rows = "INSERT INTO outbox.messages (topic, message_key, ordering_key, payload)
        SELECT 'orders', 'row-' || n, 'k' || n,
               CASE n WHEN 11 THEN to_json(repeat('x', 1200000)) ELSE '{}' END
        FROM generate_series(1, 21) AS n";
    pair.sql.execute(rows, &[]).await.unwrap();
    pair.reaches("orders", 20, DEADLINE).await;
    let letter = || async {
        let sql =
            "SELECT message_key, reason, octet_length(payload::text) FROM outbox.dead_letters";
        pair.sql.query_opt(sql, &[]).await.unwrap()
    };
    let letter = eventually(DEADLINE, "the dead letter", letter)
        .await
        .unwrap();
    assert_eq!(letter.get::<_, String>(0), "row-11");
    let reason: String = letter.get(1);
    assert!(
        reason.contains("1200005 bytes") && reason.contains("proto-max-bulk-len"),
        "{reason}"
    );
    assert_eq!(letter.get::<_, i32>(2), 1_200_002);

    // New rows flow, and the message is not tried again.
    pair.write("orders", "after", 10).await;
    pair.reaches("orders", 30, AT_ONCE).await;
    pair.assert_exactly_once_after(&relay).await;
    assert_eq!(pair.count("orders").await, 30);
    assert!(pair.status().await.contains("dead letters        1"));

    // Nor by the next relay, nor by a replay.
    let mut redis = pair.redis.connect().await.unwrap();
    redis::cmd("FLUSHALL").exec_async(&mut redis).await.unwrap();
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    pair.all_published(DEADLINE).await;
    pair.write("orders", "again", 10).await;
    pair.reaches("orders", 40, DEADLINE).await;
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn a_message_past_the_size_in_a_stream_that_was_held_back_is_set_aside_alone() {
    let redis = Redis::builder().arg("--proto-max-bulk-len", "1mb");
    let pair = Pair::with_redis(redis.start().await.unwrap()).await;
    let mut redis = pair.redis.connect().await.unwrap();
    command(&mut redis, "SET outbox:orders mine").await;
    let relay = pair.relay().spawn().unwrap();
    pair.leads(&relay).await;
    let rows = "INSERT INTO outbox.messages (topic, message_key, ordering_key, payload)
        SELECT 'orders', 'row-' || n, 'k' || n % 3,
               CASE n WHEN 33 THEN to_json(repeat('x', 1200000)) ELSE '{}' END
        FROM generate_series(1, 200) AS n";
    pair.sql.execute(rows, &[]).await.unwrap();
    pair.write("audit", "audit", 10).await;
    pair.reaches("audit", 10, DEADLINE).await;

    command(&mut redis, "DEL outbox:orders").await;
    // Others go on while the message is looked for.
    for n in 0..20 {
        pair.write("audit", &format!("meanwhile-{n}"), 10).await;
        pair.reaches("audit", 20 + 10 * n, DEADLINE).await;
    }
    pair.reaches("orders", 199, DEADLINE).await;
    let letter = "SELECT message_key FROM outbox.dead_letters";
    let letter = pair.sql.query(letter, &[]).await.unwrap();
    assert_eq!(letter.len(), 1);
    assert_eq!(letter[0].get::<_, String>(0), "row-33");
    pair.write("orders", "after", 10).await;
    pair.assert_exactly_once_after(&relay).await;
    assert_eq!(pair.count("orders").await, 209);
}

/// A page that could not note where it began must not take the entries of the page before for its own, and delete them.
#[tokio::test]
async fn a_right_that_goes_while_the_relay_leads_costs_no_entry() {
    let pair = Pair::start().await;
    let mut redis = pair.redis.connect().await.unwrap();
    command(&mut redis, ALL_RIGHTS).await;
    let relay = relay_as_user(&pair);
    pair.leads(&relay).await;
    pair.write("orders", "before", 10).await;
    pair.all_published(DEADLINE).await;
    command(&mut redis, "ACL SETUSER publisher -hset").await;
    pair.write("orders", "without", 5).await;
    relay
        .wait_for_line("is interrupted", DEADLINE)
        .await
        .unwrap();
    let standing = pair.counts("orders").await;
    let kept = standing.keys().filter(|key| key.starts_with("before"));
    assert_eq!(kept.count(), 10, "{standing:?}");
    command(&mut redis, ALL_RIGHTS).await;
    eventually(DEADLINE, "all messages", || async {
        pair.counts("orders").await.len() == 15
    })
    .await
    .unwrap();
}
