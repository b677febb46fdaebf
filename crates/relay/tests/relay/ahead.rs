//! A page is sent before the reply to the one before it. Whatever becomes of either, each message stands in its stream
//! once, and each ordering key in its order.

use std::collections::HashMap;
use std::time::Duration;

use outbox_testkit::{Direction, Hold, Process, Proxy, RelayStep as Step, eventually};
use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands, Value};
use tokio_postgres::types::ToSql;

use crate::outages::{command, used_memory};
use crate::pair::{DEADLINE, MARKER, Pair};

/// A backlog of several pages, and a page.
const BACKLOG: i64 = 2_400;
const PAGE_ROWS: usize = 300;

/// A page that is sent ahead has run within this time, unless a duty of the leader kept it from being sent.
const SENT_WITHIN: Duration = Duration::from_secs(3);
const TRIES: u32 = 5;

/// A relay that leads and has published one message of each topic: Redis has all scripts then, and each page is sent once.
async fn leading_via(pair: &Pair, redis: &Proxy) -> Process {
    let relay = pair
        .relay_via(pair.postgres.port(), redis.port())
        .args(["--page-rows", &PAGE_ROWS.to_string()])
        .args(["--redis-memory-ceiling", "0"]) // it would pause before Redis refuses
        .spawn()
        .unwrap();
    pair.leads(&relay).await;
    for topic in ["orders", "audit"] {
        pair.write(topic, &format!("first of {topic}"), 1).await;
        pair.all_published(DEADLINE).await;
    }
    relay
}

/// Writes a backlog and holds the replies of Redis from a page on, until the one behind it has run as well. The first page
/// after a notification is one message.
async fn two_pages_under_way(pair: &Pair, redis: &Proxy) -> Hold {
    for attempt in 1..=TRIES {
        let before = pair.count("orders").await;
        let hold = redis.hold(Step::PageRun.matcher().nth(2), Step::PageRun.direction());
        pair.write("orders", &format!("try-{attempt}"), BACKLOG)
            .await;
        hold.reached().await.unwrap();
        let run = before + 1 + 2 * PAGE_ROWS;
        let both = eventually(SENT_WITHIN, "both pages", || async {
            match pair.count("orders").await {
                count if count == run => Ok(()),
                count => Err(count),
            }
        });
        if both.await.is_ok() {
            return hold;
        }
        hold.release();
        pair.all_published(DEADLINE).await;
    }
    panic!("no page was sent before the reply to the one before it");
}

#[tokio::test]
async fn two_pages_are_under_way_at_a_time() {
    let pair = Pair::start().await;
    let redis = Proxy::start(pair.redis.port()).await.unwrap();
    let relay = leading_via(&pair, &redis).await;
    let hold = two_pages_under_way(&pair, &redis).await;
    hold.release();
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn killed_when_two_pages_have_run_loses_and_doubles_nothing() {
    let pair = Pair::start().await;
    let redis = Proxy::start(pair.redis.port()).await.unwrap();
    let first = leading_via(&pair, &redis).await;
    let hold = two_pages_under_way(&pair, &redis).await;
    first.kill9();
    hold.drop_it();
    let second = pair.relay().spawn().unwrap();
    pair.assert_exactly_once_after(&second).await;
}

#[tokio::test]
async fn a_connection_that_is_lost_when_two_pages_have_run_loses_and_doubles_nothing() {
    let pair = Pair::start().await;
    let redis = Proxy::start(pair.redis.port()).await.unwrap();
    let relay = leading_via(&pair, &redis).await;
    let hold = two_pages_under_way(&pair, &redis).await;
    redis.reset_all().await.unwrap();
    hold.drop_it();
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn a_page_behind_another_that_arrives_after_the_relays_death_does_nothing() {
    for page in 2..=4 {
        let pair = Pair::start().await;
        let redis = Proxy::start(pair.redis.port()).await.unwrap();
        let first = leading_via(&pair, &redis).await;
        let hold = redis.hold(Step::PageSent.matcher().nth(page), Direction::Request);
        pair.write("orders", "orders", BACKLOG).await;
        hold.reached().await.unwrap();
        first.kill9();
        let second = pair.relay().spawn().unwrap();
        pair.all_published(DEADLINE).await;
        hold.release();
        eventually(DEADLINE, "the dead relay's connections to end", || async {
            redis.connections() == 0
        })
        .await
        .unwrap();
        pair.assert_exactly_once_after(&second).await;
    }
}

/// Writes messages in one transaction: of those from `first` on, a page's worth, every other one is of another topic.
async fn write_both(pair: &Pair, prefix: &str, first: i64) {
    let sql = "INSERT INTO outbox.messages (topic, message_key, ordering_key, payload)
        SELECT CASE WHEN n BETWEEN $3 AND $3 + 297 AND n % 2 = 0 THEN 'audit' ELSE 'orders' END,
               $1 || '-' || n, 'k' || n % 8, '{}'
        FROM generate_series(1, $2::bigint) AS n";
    let params: [&(dyn ToSql + Sync); 3] = [&prefix, &BACKLOG, &first];
    pair.sql.execute(sql, &params).await.unwrap();
}

/// Of a backlog, and of the page that has messages of both topics, those of the topic that refuses nothing.
const ORDERS: usize = 2_251;
const ORDERS_OF_PAGE: usize = 151;

/// What the relay says of a stream that is held back.
const REFUSES: &str = "a stream refuses entries";

/// How many entries were ever added to the stream, those that were taken back among them.
async fn ever_added(redis: &MultiplexedConnection) -> usize {
    let mut info = redis::cmd("XINFO");
    info.arg("STREAM").arg("outbox:orders");
    let info: HashMap<String, Value> = info.query_async(&mut redis.clone()).await.unwrap();
    redis::from_redis_value_ref(&info["entries-added"]).unwrap()
}

/// Whether the marker says that a stream is held back.
async fn is_held_back(redis: &MultiplexedConnection) -> bool {
    let mut redis = redis.clone();
    redis.hexists(MARKER, "blocked:outbox:audit").await.unwrap()
}

/// A stream refuses its entries in a page. Returns whether that page and the one behind or before it had both run before the
/// relay had the reply to either; where the messages of that stream begin, `first`, chooses which of the two it is.
async fn round_of_refusal(pair: &Pair, redis: &Proxy, relay: &Process, first: i64) -> bool {
    let direct = pair.redis.connect().await.unwrap();
    let told = lines(relay, REFUSES);
    let (orders, added) = (pair.count("orders").await, ever_added(&direct).await);
    // It refuses before anything is written, so that nothing of it can come in time, however late the relay is.
    command(&direct, "RENAME outbox:audit aside").await;
    command(&direct, "SET outbox:audit no-stream").await;
    let hold = redis.hold(Step::PageRun.matcher().nth(2), Step::PageRun.direction());
    write_both(pair, &format!("after-{orders}"), first).await;
    hold.reached().await.unwrap();
    // What was taken back counts: of a page that was refused, or ran behind one that was, nothing else is to be seen.
    let both = eventually(SENT_WITHIN, "both pages", || async {
        match ever_added(&direct).await - added {
            run if run == 1 + ORDERS_OF_PAGE + PAGE_ROWS => Ok(()),
            run => Err(run),
        }
    });
    let both = both.await.is_ok();
    hold.release();
    eventually(DEADLINE, "the refusal in the log", || async {
        lines(relay, REFUSES) > told
    })
    .await
    .unwrap();
    // The others go on.
    pair.reaches("orders", orders + ORDERS, DEADLINE).await;
    command(&direct, "RENAME aside outbox:audit").await;
    pair.all_published(DEADLINE).await;
    eventually(DEADLINE, "no stream to be held back", || async {
        !is_held_back(&direct).await
    })
    .await
    .unwrap();
    both
}

/// Has a stream refuse entries of a page until that came to pass while two pages were under way.
async fn refused_while_two_are_under_way(first: i64) {
    let pair = Pair::start().await;
    let redis = Proxy::start(pair.redis.port()).await.unwrap();
    let relay = leading_via(&pair, &redis).await;
    let mut tries = 1;
    while !round_of_refusal(&pair, &redis, &relay, first).await {
        assert!(
            tries < TRIES,
            "no page was sent before the reply to the one before it"
        );
        tries += 1;
    }
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn a_stream_that_refuses_a_page_gets_it_before_the_page_behind_it() {
    refused_while_two_are_under_way(2).await;
}

#[tokio::test]
async fn a_stream_that_refuses_a_page_that_was_sent_ahead_gets_it_before_what_comes_later() {
    refused_while_two_are_under_way(2 + PAGE_ROWS as i64).await;
}

#[tokio::test]
async fn pages_that_a_full_redis_refuses_come_once_and_in_order_when_it_has_room() {
    let pair = Pair::start().await;
    let redis = Proxy::start(pair.redis.port()).await.unwrap();
    let direct = pair.redis.connect().await.unwrap();
    let relay = leading_via(&pair, &redis).await;
    for round in 0..4 {
        let told = lines(&relay, "is interrupted");
        // Room for a page or two.
        let limit = used_memory(&direct).await + 20_000;
        command(&direct, &format!("CONFIG SET maxmemory {limit}")).await;
        write_both(&pair, &format!("round-{round}"), 2).await;
        eventually(DEADLINE, "a page to be refused", || async {
            lines(&relay, "is interrupted") > told
        })
        .await
        .unwrap();
        command(&direct, "CONFIG SET maxmemory 0").await;
        pair.all_published(DEADLINE).await;
    }
    pair.assert_exactly_once_after(&relay).await;
}

/// How many lines of its log have this text.
fn lines(relay: &Process, text: &str) -> usize {
    let lines = relay.lines();
    lines.iter().filter(|line| line.contains(text)).count()
}

#[tokio::test]
async fn a_backlog_with_ids_that_were_never_committed_comes_once_and_in_order() {
    let pair = Pair::start().await;
    // Gaps of one id in each page, before the relay is there.
    let sql = "INSERT INTO outbox.messages (topic, message_key, ordering_key, payload)
        SELECT 'orders', $1 || '-' || n, 'k' || n % 8, '{}' FROM generate_series(1, 97) AS n";
    for part in 0..25 {
        let prefix = format!("part-{part}");
        pair.sql.execute(sql, &[&prefix]).await.unwrap();
        pair.sql
            .batch_execute("SELECT nextval('outbox.messages_id_seq')")
            .await
            .unwrap();
    }
    let redis = Proxy::start(pair.redis.port()).await.unwrap();
    let relay = leading_via(&pair, &redis).await;
    pair.assert_exactly_once_after(&relay).await;
}
