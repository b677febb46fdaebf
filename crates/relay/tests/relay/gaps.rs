//! Gaps outlive relays and crashes of Postgres, and many of them slow nothing much.

use std::time::{Duration, Instant};

use outbox_testkit::{Postgres, Redis, eventually};
use tokio_postgres::Client;

use crate::support::{DEADLINE, Outbox, TOPIC, insert};

/// Waits until the checkpoint has so many gaps.
async fn gaps_are(outbox: &Outbox<'_>, expected: i64) {
    let gaps = "SELECT count(*) FROM outbox.checkpoint_gaps";
    eventually(DEADLINE, "gaps in the checkpoint", || async {
        let gaps: i64 = outbox.db.query_one(gaps, &[]).await.unwrap().get(0);
        if gaps == expected { Ok(()) } else { Err(gaps) }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn the_next_relay_waits_for_the_same_writers() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let (commits, rolls_back) = (outbox.client().await, outbox.client().await);
    for client in [&commits, &rolls_back] {
        client.batch_execute("BEGIN").await.unwrap();
    }
    insert(&commits, "late").await;
    outbox.insert("between").await;
    insert(&rolls_back, "never").await;
    outbox.insert("ahead").await;
    outbox.arrives("ahead").await;
    relay.kill9();
    let relay = outbox.leader(&[]).await;
    outbox.insert("next").await;
    outbox.arrives("next").await;
    gaps_are(&outbox, 2).await;
    rolls_back.batch_execute("ROLLBACK").await.unwrap();
    relay.kill9();
    commits.batch_execute("COMMIT").await.unwrap();
    let relay = outbox.leader(&[]).await;
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 4);
    gaps_are(&outbox, 0).await;
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn a_prepared_transaction_is_waited_for_over_a_crash_of_postgres() {
    let postgres = Postgres::builder()
        .setting("max_prepared_transactions", "5")
        .start()
        .await
        .unwrap();
    let outbox = Outbox::open_on(&postgres, Redis::start().await.unwrap()).await;
    let relay = outbox.leader(&[]).await;
    for (name, row) in [("commits", "late"), ("rolls_back", "never")] {
        let client = outbox.client().await;
        client
            .batch_execute("BEGIN; SET LOCAL outbox.notify = 'off'")
            .await
            .unwrap();
        insert(&client, row).await;
        outbox.insert(&format!("after-{row}")).await;
        let prepare = format!("PREPARE TRANSACTION '{name}'");
        client.batch_execute(&prepare).await.unwrap();
    }
    outbox.arrives("after-never").await;
    postgres.kill9().await.unwrap();
    postgres.start_again().await.unwrap();
    let outbox = outbox.reopened().await;
    for n in 0..3 {
        outbox.insert(&format!("next-{n}")).await;
        outbox.arrives(&format!("next-{n}")).await;
    }
    // A crash skips ids of the sequence that were logged in advance; those gaps close, these two stay.
    gaps_are(&outbox, 2).await;
    let end = |sql: &'static str| outbox.db.batch_execute(sql);
    end("ROLLBACK PREPARED 'rolls_back'").await.unwrap();
    end("COMMIT PREPARED 'commits'").await.unwrap();
    outbox.arrives("late").await;
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 6);
    gaps_are(&outbox, 0).await;
    assert!(relay.exit_status().is_none());
}

/// Writes a message once whoever holds the account lets it go.
async fn follow(follower: &Client) {
    follower
        .batch_execute("BEGIN; SELECT FROM account FOR UPDATE")
        .await
        .unwrap();
    insert(follower, "follower").await;
    follower.batch_execute("COMMIT").await.unwrap();
}

/// One transaction that stays open keeps the gap of every rollback after it open.
#[tokio::test]
async fn fifty_thousand_gaps_slow_nothing_much() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&[]).await;
    let held = outbox.client().await;
    outbox
        .db
        .batch_execute("CREATE TABLE account (id int); INSERT INTO account VALUES (1)")
        .await
        .unwrap();
    held.batch_execute("BEGIN; SELECT FROM account FOR UPDATE")
        .await
        .unwrap();
    insert(&held, "held").await;
    // To draw an id and not use it is what a rollback does.
    let every_second_is_missing = "DO $$ BEGIN
        FOR i IN 1..50000 LOOP
            PERFORM nextval('outbox.messages_id_seq');
            INSERT INTO outbox.messages (topic, payload) VALUES ('orders', '{}');
        END LOOP;
    END $$";
    outbox
        .db
        .batch_execute(every_second_is_missing)
        .await
        .unwrap();
    outbox.settles_but_for_gaps(DEADLINE).await;
    gaps_are(&outbox, 50_000).await;
    let mut latencies = Vec::new();
    for n in 0..9 {
        let begun = Instant::now();
        outbox.insert(&format!("row-{n}")).await;
        let entries = 50_001 + n;
        eventually(DEADLINE, "the next row", || async {
            outbox.entry_count(TOPIC).await == entries
        })
        .await
        .unwrap();
        latencies.push(begun.elapsed());
    }
    latencies.sort();
    // What the statement itself takes for 50,000 ranges is more than this.
    assert!(latencies[4] < Duration::from_millis(300), "{latencies:?}");

    // Whoever waits for the long transaction comes after it, also in the stream.
    let follower = outbox.client().await;
    let followed = follow(&follower);
    let commit = async {
        insert(&held, "held again").await;
        held.batch_execute("COMMIT").await.unwrap();
    };
    tokio::join!(followed, commit);
    outbox.arrives("follower").await;
    let keys = outbox.message_keys(TOPIC).await;
    let place = |key: &str| keys.iter().position(|other| other == key).unwrap();
    assert!(place("held") < place("held again") && place("held again") < place("follower"));
    assert_eq!(outbox.published_exactly_once(TOPIC).await, 50_012);
    assert!(relay.exit_status().is_none());
}

#[tokio::test]
async fn rows_behind_a_cut_come_before_what_follows_them_also_beside_a_long_transaction() {
    let outbox = Outbox::open().await;
    let relay = outbox.leader(&["--page-rows", "100"]).await;
    outbox
        .db
        .batch_execute("CREATE TABLE account (id int); INSERT INTO account VALUES (1)")
        .await
        .unwrap();
    let long = outbox.client().await;
    long.batch_execute("BEGIN").await.unwrap();
    insert(&long, "long").await;
    outbox
        .db
        .batch_execute(
            "DO $$ BEGIN FOR i IN 1..400 LOOP
                PERFORM nextval('outbox.messages_id_seq');
                INSERT INTO outbox.messages (topic, payload) VALUES ('orders', '{}');
            END LOOP; END $$",
        )
        .await
        .unwrap();
    // Each of these takes a trip at least: after them the long transaction counts as one.
    for n in 0..80 {
        let key = format!("trip-{n}");
        outbox.insert(&key).await;
        outbox.arrives(&key).await;
    }

    let many = outbox.client().await;
    many.batch_execute(
        "BEGIN; SELECT FROM account FOR UPDATE;
         INSERT INTO outbox.messages (topic, message_key, payload)
         SELECT 'orders', 'many-' || n, '{}' FROM generate_series(1, 350) AS n",
    )
    .await
    .unwrap();
    outbox.insert("above").await;
    outbox.arrives("above").await;
    let follower = outbox.client().await;
    let followed = follow(&follower);
    let commit = async { many.batch_execute("COMMIT").await.unwrap() };
    tokio::join!(followed, commit);
    outbox.arrives("follower").await;
    let keys = outbox.message_keys(TOPIC).await;
    let before = keys.iter().take_while(|key| *key != "follower");
    assert_eq!(
        before.filter(|key| key.starts_with("many-")).count(),
        350,
        "while the long transaction is open"
    );
    long.batch_execute("COMMIT").await.unwrap();
    outbox.published_exactly_once(TOPIC).await;
    assert!(relay.exit_status().is_none());
}
