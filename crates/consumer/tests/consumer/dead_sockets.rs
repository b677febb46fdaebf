//! Sockets that are dead without FIN or RST: only the silence tells, and the server keeps what the dead one had locked.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use outbox_consumer::{HandlerError, Message, Transaction};
use outbox_testkit::{Direction, Matcher, Postgres, Proxy, eventually};
use tokio::sync::Notify;

use crate::shop::{DEADLINE, Shop, consumer_at, run, ship, unharmed};

/// A shop, and a way to its Postgres that can die.
async fn shop_and_way() -> (Shop, Proxy, String) {
    let postgres = Postgres::shared().await.unwrap();
    let shop = Shop::open().await;
    let way = Proxy::start(postgres.port()).await.unwrap();
    let url = postgres.url_via(way.port(), &shop.database);
    (shop, way, url)
}

/// All sockets die once a statement with this text has been carried out. Returns the sessions that are left with
/// something locked.
async fn die_after(shop: &Shop, way: &Proxy, statement: &str) -> Vec<i32> {
    let hold = way.hold(Matcher::sql(statement), Direction::Reply);
    hold.reached().await.unwrap();
    way.blackhole().await.unwrap();
    let left = with_locks(shop).await;
    assert!(!left.is_empty(), "{statement}");
    left
}

/// Sessions that have something locked and do nothing. One that has only begun has no more than its own number.
async fn with_locks(shop: &Shop) -> Vec<i32> {
    let sql = "SELECT pid FROM pg_stat_activity AS a
               WHERE datname = current_database() AND state = 'idle in transaction'
                 AND EXISTS (SELECT FROM pg_locks AS l WHERE l.pid = a.pid AND locktype <> 'virtualxid')";
    let rows = shop.db.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// The server has ended the sessions, and with them what they had locked.
async fn ended(shop: &Shop, sessions: &[i32]) {
    eventually(DEADLINE, "the end of dead sessions", || async {
        let left = with_locks(shop).await;
        !left.iter().any(|session| sessions.contains(session))
    })
    .await
    .unwrap();
}

/// No FIN, no RST: only the silence tells.
#[tokio::test]
async fn half_open_sockets_to_both_servers_are_found() {
    let postgres = Postgres::shared().await.unwrap();
    let shop = Shop::open().await;
    let (to_postgres, to_redis) = (
        Proxy::start(postgres.port()).await.unwrap(),
        Proxy::start(shop.redis.port()).await.unwrap(),
    );
    let builder = consumer_at(
        &postgres.url_via(to_postgres.port(), &shop.database),
        &shop.redis.url_via(to_redis.port()),
    );
    shop.publish("orders", "a").await;
    let consumer = run(builder.topic("orders"), ship);
    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;

    to_postgres.blackhole().await.unwrap();
    to_redis.blackhole().await.unwrap();
    shop.publish_many(20).await;

    shop.single_effects(21).await;
    shop.nothing_pending().await;
    unharmed(&consumer);
    consumer.stop().await;
}

/// The handler's statement has been answered, but the answer never comes; nothing limits the handler itself.
#[tokio::test]
async fn a_half_open_socket_under_a_handlers_statement_is_found() {
    let postgres = Postgres::shared().await.unwrap();
    let shop = Shop::open().await;
    let proxy = Proxy::start(postgres.port()).await.unwrap();
    let url = postgres.url_via(proxy.port(), &shop.database);
    let (begun, runs) = (Arc::new(Notify::new()), Arc::new(AtomicU32::new(0)));
    let (began, run_number) = (Arc::clone(&begun), Arc::clone(&runs));
    let builder = consumer_at(&url, &shop.redis.url()).topic("orders");
    let consumer = run(
        builder.response_timeout(Duration::from_secs(1)),
        async move |tx: &Transaction<'_>, message: &Message| {
            if run_number.fetch_add(1, Ordering::SeqCst) == 0 {
                began.notify_one();
                tx.execute("SELECT pg_sleep(1)", &[]).await?;
            }
            ship(tx, message).await
        },
    );
    shop.publish("orders", "a").await;
    begun.notified().await;
    proxy.blackhole().await.unwrap();

    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;
    assert_eq!(runs.load(Ordering::SeqCst), 2);
    unharmed(&consumer);
    consumer.stop().await;
}

/// The claim time is of no matter here: the lease would be lost long before.
#[tokio::test]
async fn a_keeper_whose_socket_died_with_its_rows_locked_keeps_its_streams() {
    for statement in ["INSERT INTO inbox.members", "UPDATE inbox.leases AS l"] {
        let (shop, way, url) = shop_and_way().await;
        let builder = consumer_at(&url, &shop.redis.url()).topic("orders");
        let consumer = run(builder.claim_after(Duration::from_secs(600)), ship);
        shop.publish("orders", "a").await;
        shop.effects_are(&["a"]).await;

        let dead = die_after(&shop, &way, statement).await;
        let leases = "SELECT count(*) FROM inbox.leases WHERE expires_at > clock_timestamp()";
        eventually(DEADLINE, "the end of the lease", || async {
            shop.count(leases).await == 0
        })
        .await
        .unwrap();
        // A read that was waiting then may still bring the first.
        shop.publish("orders", "b").await;
        shop.publish("orders", "c").await;

        shop.effects_are(&["a", "b", "c"]).await;
        shop.nothing_pending().await;
        ended(&shop, &dead).await;
        unharmed(&consumer);
        consumer.stop().await;
    }
}

#[tokio::test]
async fn members_start_although_one_died_while_it_compared_histories() {
    let (shop, way, url) = shop_and_way().await;
    let builder = consumer_at(&url, &shop.redis.url()).topic("orders");
    let consumer = run(builder.name("one"), ship);
    shop.publish("orders", "a").await;
    shop.effects_are(&["a"]).await;

    let dead = die_after(&shop, &way, "pg_try_advisory_xact_lock").await;
    let other = run(shop.consumer().name("two"), ship);
    consumer.crash();
    shop.publish("orders", "b").await;

    shop.effects_are(&["a", "b"]).await;
    ended(&shop, &dead).await;
    other.stop().await;
}

#[tokio::test]
async fn a_dead_letter_whose_delivery_died_with_its_socket_is_delivered_again() {
    let (shop, way, url) = shop_and_way().await;
    let repaired = Arc::new(AtomicBool::new(false));
    let is_repaired = Arc::clone(&repaired);
    let consumer = run(
        consumer_at(&url, &shop.redis.url())
            .topic("orders")
            .max_attempts(1),
        async move |tx: &Transaction<'_>, message: &Message| {
            if !is_repaired.load(Ordering::SeqCst) {
                return Err(HandlerError::from("out of boxes"));
            }
            ship(tx, message).await.map_err(HandlerError::from)
        },
    );
    shop.publish("orders", "a").await;
    shop.dead_letter_count(1).await;
    repaired.store(true, Ordering::SeqCst);

    let retry = "UPDATE inbox.dead_letters SET state = 'retry', not_before = now()";
    let died = die_after(&shop, &way, "FROM inbox.dead_letters WHERE id = ");
    let (dead, retried) = tokio::join!(died, shop.db.execute(retry, &[]));
    assert_eq!(retried.unwrap(), 1);

    shop.effects_are(&["a"]).await;
    ended(&shop, &dead).await;
    consumer.stop().await;
}

/// A message as old as the tests' asks what was purged, and the purge waits for its transaction.
#[tokio::test]
async fn a_batch_whose_socket_died_while_it_was_sorted_out_holds_up_no_purge() {
    let (shop, way, url) = shop_and_way().await;
    let purged = "INSERT INTO inbox.purged (consumer_group) VALUES ('shipping')";
    shop.db.execute(purged, &[]).await.unwrap();
    let builder = consumer_at(&url, &shop.redis.url()).topic("orders");
    let consumer = run(builder, ship);
    let died = die_after(&shop, &way, "FROM inbox.purged");
    let (dead, _) = tokio::join!(died, shop.publish("orders", "a"));

    shop.effects_are(&["a"]).await;
    shop.nothing_pending().await;
    ended(&shop, &dead).await;
    let purge = "SELECT inbox.purge('shipping', interval '1 day', 10)";
    let purge = shop.db.query_one(purge, &[]);
    tokio::time::timeout(DEADLINE, purge)
        .await
        .unwrap()
        .unwrap();
    unharmed(&consumer);
    consumer.stop().await;
}
