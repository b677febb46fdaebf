//! Behind PgBouncer: with `pool_mode=transaction` every command says so in one line, with `session` everything works.

use std::time::Duration;

use outbox_testkit::PgBouncer;
use tokio_postgres::{NoTls, SimpleQueryMessage};

use crate::commands::run;
use crate::support::{DEADLINE, Outbox};

const REFUSED: [&str; 2] = [
    "pooler that changes its backend",
    "point --database-url at Postgres itself",
];

/// An outbox and a pooler before its Postgres.
async fn pooled(pool_mode: &str, pool_size: u32) -> (Outbox<'static>, PgBouncer, String) {
    let outbox = Outbox::open().await;
    let bouncer = PgBouncer::start(outbox.postgres, pool_mode, pool_size)
        .await
        .unwrap();
    let url = outbox.postgres.url_via(bouncer.port(), &outbox.database);
    (outbox, bouncer, url)
}

#[tokio::test]
async fn every_command_refuses_a_pool_of_transactions_in_one_line() {
    let (outbox, _bouncer, url) = pooled("transaction", 2).await;
    let commands: [&[&str]; 8] = [
        &["run"],
        &["status"],
        &["pause"],
        &["topics", "list"],
        &["adopt"],
        &["migrate"],
        &["verify"],
        &["dead-letters", "list"],
    ];
    for args in commands {
        run(&url, &outbox.redis.url(), args)
            .await
            .refused(1, &REFUSED);
    }
    // Nothing was set on the backends that others use next.
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    let messages = client
        .simple_query("SELECT current_setting('idle_session_timeout')")
        .await
        .unwrap();
    let setting = messages.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    assert_eq!(setting, Some("0"));
}

/// A pool of one, one of many, and one that ends at each statement.
#[tokio::test]
async fn every_kind_of_such_a_pool_is_known() {
    for (pool_mode, pool_size) in [("transaction", 1), ("transaction", 20), ("statement", 2)] {
        let (outbox, _bouncer, url) = pooled(pool_mode, pool_size).await;
        for _ in 0..3 {
            run(&url, &outbox.redis.url(), &["run"])
                .await
                .refused(1, &REFUSED);
        }
    }
}

/// The leader and what observes it connect at the same time, to a pool that has idle backends already.
#[tokio::test]
async fn a_pool_with_idle_backends_is_known() {
    let (outbox, _bouncer, url) = pooled("transaction", 5).await;
    let mut others = Vec::new();
    for _ in 0..3 {
        let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
        tokio::spawn(connection);
        client.batch_execute("BEGIN").await.unwrap();
        others.push(client);
    }
    for other in &others {
        other.batch_execute("COMMIT").await.unwrap();
    }
    for _ in 0..10 {
        run(&url, &outbox.redis.url(), &["run"])
            .await
            .refused(1, &REFUSED);
    }
}

/// Others use the pool at the same time.
#[tokio::test]
async fn a_busy_pool_of_transactions_is_known() {
    let (outbox, bouncer, url) = pooled("transaction", 3).await;
    let mut others = Vec::new();
    for _ in 0..4 {
        let url = outbox.postgres.url_via(bouncer.port(), &outbox.database);
        others.push(tokio::spawn(async move {
            let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
            tokio::spawn(connection);
            while client.simple_query("SELECT pg_sleep(0.002)").await.is_ok() {}
        }));
    }
    for _ in 0..5 {
        run(&url, &outbox.redis.url(), &["run"])
            .await
            .refused(1, &REFUSED);
    }
    for other in others {
        other.abort();
    }
}

#[tokio::test]
async fn a_pool_of_sessions_carries_the_relay() {
    let (outbox, _bouncer, url) = pooled("session", 10).await;
    let relay = outbox
        .relay_between(&url, &outbox.redis.url())
        .args(["--poll-interval", "1m"])
        .spawn()
        .unwrap();
    relay.wait_for_line("leading", DEADLINE).await.unwrap();
    outbox.leader_sleeps().await;
    outbox.insert("row").await;
    // Long before the next poll: the notification came through.
    outbox.arrives_within(Duration::from_secs(20), "row").await;
    relay.kill9();
    let next = outbox
        .relay_between(&url, &outbox.redis.url())
        .spawn()
        .unwrap();
    next.wait_for_line("leading", DEADLINE).await.unwrap();
    outbox.insert("after").await;
    outbox.arrives("after").await;
    next.terminate();
    assert!(next.wait(DEADLINE).await.unwrap().success());
}

/// Without a second connection it cannot be found out, and that stops nobody.
#[tokio::test]
async fn a_role_with_one_connection_is_not_refused() {
    let outbox = Outbox::open().await;
    let role = format!("single_{}", outbox.database);
    let sql = format!(
        "CREATE ROLE {role} LOGIN CONNECTION LIMIT 1; GRANT ALL ON SCHEMA outbox TO {role};
        GRANT ALL ON ALL TABLES IN SCHEMA outbox TO {role}"
    );
    outbox.db.batch_execute(&sql).await.unwrap();
    let url = outbox
        .postgres_url()
        .replace("postgres@", &format!("{role}@"));
    run(&url, &outbox.redis.url(), &["topics", "list"])
        .await
        .done();
}

/// Producers may use the pool that a relay may not; the pooler lets go of all its backends in between.
#[tokio::test]
async fn producers_work_through_a_pool_of_transactions() {
    let (outbox, bouncer, url) = pooled("transaction", 2).await;
    let relay = outbox.leader(&["--poll-interval", "1m"]).await;
    let connect = async |url: &str| {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    };
    let admin_url = outbox.postgres.url_via(bouncer.port(), "pgbouncer");
    let admin = connect(&admin_url).await;
    let producers = [
        connect(&url).await,
        connect(&url).await,
        connect(&url).await,
    ];
    for n in 0..300 {
        if n == 150 {
            admin.simple_query("RECONNECT").await.unwrap();
        }
        let sql = format!(
            "BEGIN; SELECT outbox.publish('orders', '{{}}', message_key => 'row-{n}'); COMMIT"
        );
        producers[n % 3].simple_query(&sql).await.unwrap();
    }
    outbox.settles().await;
    assert_eq!(outbox.published_exactly_once("orders").await, 300);
    outbox.leader_sleeps().await;
    let sql = "SELECT outbox.publish('orders', '{}', message_key => 'last')";
    producers[0].simple_query(sql).await.unwrap();
    // Long before the next poll: the notification went through the pool.
    outbox.arrives_within(Duration::from_secs(20), "last").await;
    assert!(relay.exit_status().is_none());
}
