//! Processes that die, with kill -9 or by a message.

use std::{path::PathBuf, time::Duration};

use outbox_consumer::HandlerError;
use outbox_testkit::{Process, eventually};
use tokio::signal::unix::{SignalKind, signal};

use crate::shop::{DEADLINE, Shop, consumer_at, run, ship};

/// What the process says once SIGTERM no longer just ends it.
pub(crate) const READY: &str = "the member is ready";

/// Not a test of its own: started by the others as a process with these variables, it consumes until it
/// is killed or told to stop by SIGTERM. It writes each start to a file, outside the transaction, and ends the process at `poison`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_process() {
    let (Ok(postgres), Ok(redis), Ok(starts)) = (
        std::env::var("MEMBER_POSTGRES"),
        std::env::var("MEMBER_REDIS"),
        std::env::var("MEMBER_STARTS"),
    ) else {
        return;
    };
    let consumer = consumer_at(&postgres, &redis)
        .topic("orders")
        .claim_after(Duration::from_millis(200))
        .build()
        .unwrap();
    let handler = async move |tx: &outbox_consumer::Transaction<'_>,
                              message: &outbox_consumer::Message| {
        use std::io::Write as _;
        let mut file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(&starts)?;
        writeln!(file, "{}", message.message_key())?;
        if message.message_key() == "poison" {
            std::process::abort();
        }
        ship(tx, message).await?;
        Ok::<_, HandlerError>(())
    };
    let mut terminate = signal(SignalKind::terminate()).unwrap();
    eprintln!("{READY}");
    let shutdown = async move {
        terminate.recv().await;
    };
    consumer.run(handler, shutdown).await.unwrap();
}

pub(crate) struct Starts(PathBuf);

impl Starts {
    pub(crate) fn new(shop: &Shop) -> Self {
        Self(shop.redis.data_dir().join("starts"))
    }

    fn of(&self, key: &str) -> usize {
        std::fs::read_to_string(&self.0)
            .unwrap_or_default()
            .lines()
            .filter(|line| *line == key)
            .count()
    }
}

pub(crate) fn member(shop: &Shop, starts: &Starts) -> Process {
    Process::builder(std::env::current_exe().unwrap())
        .args(["--exact", "processes::member_process", "--nocapture"])
        .env("MEMBER_POSTGRES", &shop.postgres_url)
        .env("MEMBER_REDIS", shop.redis.url())
        .env("MEMBER_STARTS", &starts.0)
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn a_crash_between_commit_and_acknowledgement_doubles_nothing() {
    let shop = Shop::open().await;
    let starts = Starts::new(&shop);
    shop.publish_many(10).await;
    let mut connection = shop.redis().await;
    // The acknowledgement is refused for now, so that the crash hits between the two.
    redis::cmd("ACL")
        .arg(&["SETUSER", "default", "-xack"])
        .query_async::<()>(&mut connection)
        .await
        .unwrap();
    let process = member(&shop, &starts);
    shop.single_effects(10).await;
    process.kill9();
    process.wait(DEADLINE).await.unwrap();
    assert_eq!(shop.pending("orders").await, 10);
    redis::cmd("ACL")
        .arg(&["SETUSER", "default", "+xack"])
        .query_async::<()>(&mut connection)
        .await
        .unwrap();

    let consumer = run(
        shop.consumer().claim_after(Duration::from_millis(200)),
        ship,
    );

    shop.nothing_pending().await;
    shop.single_effects(10).await;
    let counts = consumer.counters.snapshot();
    assert_eq!(
        (counts.applied, counts.repeated, counts.claimed),
        (0, 10, 10)
    );
    assert_eq!(shop.count("SELECT count(*) FROM inbox.attempts").await, 0);
    consumer.stop().await;
}

#[tokio::test]
async fn a_message_that_kills_the_process_ends_as_a_dead_letter_and_its_batch_mates_do_not() {
    let shop = Shop::open().await;
    let starts = Starts::new(&shop);
    shop.publish_many(4).await;
    shop.publish("orders", "poison").await;
    shop.publish("orders", "after").await;

    let mut process = member(&shop, &starts);
    for _ in 0..20 {
        let ended = tokio::select! {
            ended = process.wait(DEADLINE) => ended.is_ok(),
            () = shop.dead_letter_count(1) => false,
        };
        if !ended {
            break;
        }
        process = member(&shop, &starts);
    }

    shop.dead_letter_count(1).await;
    shop.single_effects(5).await;
    shop.nothing_pending().await;
    process.kill9();
    let letters = shop.dead_letters().await;
    assert_eq!((letters[0].0.as_deref(), letters[0].1), (Some("poison"), 5));
    assert_eq!(letters[0].2, "the process ended while the handler ran");
    // The first start was in its batch and is not counted; then it ran alone, five times.
    assert_eq!(starts.of("poison"), 6);
    assert_eq!(shop.count("SELECT count(*) FROM inbox.attempts").await, 0);
}

#[tokio::test]
async fn random_crashes_double_and_lose_nothing() {
    let shop = Shop::open().await;
    let starts = Starts::new(&shop);
    shop.publish_many(1_500).await;

    for round in 1..=5_i64 {
        let process = member(&shop, &starts);
        eventually(DEADLINE, "progress", || async {
            shop.count("SELECT count(*) FROM effects").await >= round * 150
        })
        .await
        .unwrap();
        process.kill9();
        process.wait(DEADLINE).await.unwrap();
    }
    let consumer = run(
        shop.consumer().claim_after(Duration::from_millis(200)),
        ship,
    );

    shop.single_effects(1_500).await;
    shop.nothing_pending().await;
    assert!(shop.dead_letters().await.is_empty());
    consumer.stop().await;
}

#[tokio::test]
async fn a_retried_dead_letter_that_kills_the_process_is_dead_again() {
    let shop = Shop::open().await;
    let starts = Starts::new(&shop);
    shop.db
        .batch_execute(
            "INSERT INTO inbox.dead_letters
                 (consumer_group, stream, entry_id, topic, message_key, payload, attempts, reason, state)
             VALUES ('shipping', 'outbox:orders', '1-0', 'orders', 'poison', '{}', 5, 'before', 'retry')",
        )
        .await
        .unwrap();
    let dead = async || {
        let sql = "SELECT count(*) FROM inbox.dead_letters WHERE state = 'dead'";
        eventually(DEADLINE, "a dead letter", || async {
            shop.count(sql).await == 1
        })
        .await
        .unwrap();
    };

    let mut process = member(&shop, &starts);
    for _ in 0..20 {
        let ended = tokio::select! {
            ended = process.wait(DEADLINE) => ended.is_ok(),
            () = dead() => false,
        };
        if !ended {
            break;
        }
        process = member(&shop, &starts);
    }

    dead().await;
    process.kill9();
    let letters = shop.dead_letters().await;
    assert_eq!(letters[0].1, 10);
    assert_eq!(letters[0].2, "the process ended while the handler ran");
    assert_eq!(starts.of("poison"), 5);
}
