//! Members that are killed at random, handlers that fail at random, messages that never succeed: each message has one
//! effect or is a dead letter, in the order of its key.

use std::{
    collections::{BTreeMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use outbox_consumer::{HandlerError, Message, Transaction};
use outbox_testkit::{Process, eventually};

use crate::{
    ordered::note,
    shop::{Shop, consumer_at, pool_of},
};

const PARTITIONS: u32 = 8;
const MEMBERS: u64 = 4;
const KEYS: u64 = 50;
/// How long members are killed, in seconds, unless `OUTBOX_CHAOS_SECONDS` says otherwise.
const SECONDS: u64 = 20;

/// The same number for the same things, in each process.
fn dice(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

fn is_poison(message_key: &str) -> bool {
    dice(("poison", message_key)).is_multiple_of(1_000)
}

/// Not a test of its own: one member, as a process that may be killed at any time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chaos_member_process() {
    let (Ok(postgres), Ok(redis)) = (
        std::env::var("CHAOS_POSTGRES"),
        std::env::var("CHAOS_REDIS"),
    ) else {
        return;
    };
    let handler = async |tx: &Transaction<'_>, message: &Message| {
        note(tx, message).await?;
        if is_poison(message.message_key()) {
            return Err(HandlerError::from("poison"));
        }
        let call = (std::process::id(), message.attempt());
        if dice((message.message_key(), call)).is_multiple_of(100) {
            return Err(HandlerError::from("bad luck"));
        }
        Ok(())
    };
    let builder = consumer_at(&postgres, &redis)
        .topic("orders")
        // A message that is redelivered after several kills has done nothing wrong.
        .max_attempts(12)
        .forget_members_after(Duration::from_secs(5));
    let consumer = builder.lanes(2).build().unwrap();
    consumer.run(handler, std::future::pending()).await.unwrap();
}

fn member(shop: &Shop) -> Process {
    Process::builder(std::env::current_exe().unwrap())
        .args(["--exact", "chaos::chaos_member_process", "--nocapture"])
        .env("CHAOS_POSTGRES", &shop.postgres_url)
        .env("CHAOS_REDIS", shop.redis.url())
        .spawn()
        .unwrap()
}

/// Publishes numbers under all keys until it is told to stop, and returns how many of each.
async fn publish(shop: &Shop, stop: &AtomicBool) -> i64 {
    let keys: Vec<String> = (0..KEYS).map(|n| format!("key-{n}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let mut next = 0;
    let mut tick = tokio::time::interval(Duration::from_millis(250));
    while !stop.load(Ordering::Relaxed) {
        tick.tick().await;
        shop.publish_keyed(PARTITIONS, &keys, next..next + 2).await;
        next += 2;
    }
    next
}

/// Kills a random member every second or two, and starts another one. Returns how many.
async fn kill_at_random(shop: &Shop, members: &mut [Process], time: Duration) -> u64 {
    let started = Instant::now();
    let mut kills = 0;
    while started.elapsed() < time {
        let pause = Duration::from_millis(800 + dice((kills, std::process::id())) % 1_000);
        let _ = tokio::time::timeout(pause, std::future::pending::<()>()).await;
        let victim = (dice((kills, members[0].pid())) % MEMBERS) as usize;
        members[victim].kill9();
        members[victim] = member(shop);
        kills += 1;
    }
    kills
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_kills_errors_and_poison_leave_one_effect_or_a_dead_letter_of_each_message() {
    let seconds = std::env::var("OUTBOX_CHAOS_SECONDS").map_or(SECONDS, |s| s.parse().unwrap());
    let shop = Arc::new(Shop::open().await.keeping_sequence().await);
    shop.set_partitions("orders", &PARTITIONS.to_string()).await;
    let mut members: Vec<Process> = (0..MEMBERS).map(|_| member(&shop)).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let (publisher, told) = (Arc::clone(&shop), Arc::clone(&stop));
    let publisher = tokio::spawn(async move { publish(&publisher, &told).await });

    let kills = kill_at_random(&shop, &mut members, Duration::from_secs(seconds)).await;
    stop.store(true, Ordering::Relaxed);
    let published = publisher.await.unwrap();

    let all = published * KEYS as i64;
    let settled =
        "SELECT (SELECT count(*) FROM sequence) + (SELECT count(*) FROM inbox.dead_letters)";
    eventually(Duration::from_secs(90), "each message settled", || async {
        let settled = shop.count(settled).await;
        if settled >= all {
            Ok(())
        } else {
            Err((settled, all))
        }
    })
    .await
    .unwrap();
    nothing_pending(&shop).await;
    let dead: HashSet<String> = shop
        .dead_letters()
        .await
        .into_iter()
        .filter_map(|(key, ..)| key)
        .collect();
    let mut expected = BTreeMap::new();
    for key in (0..KEYS).map(|n| format!("key-{n}")) {
        let numbers = (0..published).filter(|n| !dead.contains(&format!("{key}-{n}")));
        expected.insert(key.clone(), numbers.collect::<Vec<i64>>());
    }
    let sequences = shop.sequences().await;
    for (key, expected) in &expected {
        assert_eq!(&sequences[key], expected, "of {key}");
    }
    let innocent = dead.iter().filter(|key| !is_poison(key)).count();
    println!(
        "{all} messages, {kills} kills, {} dead letters, {innocent} of them not poison",
        dead.len()
    );
    let poison = |key: &String| {
        (0..published)
            .filter(|n| is_poison(&format!("{key}-{n}")))
            .count()
    };
    let poisoned: usize = expected.keys().map(poison).sum();
    assert_eq!(dead.len() - innocent, poisoned);
    for member in members {
        member.kill9();
    }
}

async fn nothing_pending(shop: &Shop) {
    // The last acknowledgements may still be under way.
    for partition in 0..PARTITIONS {
        eventually(Duration::from_secs(30), "nothing pending", || async {
            match shop.pending(&format!("orders:{partition}")).await {
                0 => Ok(()),
                pending => Err(pending),
            }
        })
        .await
        .unwrap();
    }
}

/// Restarts under new names, half of them by a kill: no name stays, and none goes while it holds something.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarts_leave_neither_names_nor_entries_behind() {
    let shop = Shop::open().await.keeping_sequence().await;
    let builder = || {
        let builder = shop.consumer_on(pool_of(&shop.postgres_url, 4));
        builder
            .lease(Duration::from_millis(400))
            .forget_members_after(Duration::from_secs(5))
    };
    for round in 0..20_i64 {
        shop.publish_keyed(1, &["a"], round * 5..round * 5 + 5)
            .await;
        let consumer = crate::shop::run(builder(), note);
        eventually(crate::shop::DEADLINE, "progress", || async {
            shop.count("SELECT count(*) FROM sequence").await > round * 5
        })
        .await
        .unwrap();
        if round % 2 == 0 {
            consumer.stop().await;
        } else {
            consumer.crash();
        }
    }

    let last = crate::shop::run(builder(), note);

    shop.in_order(&["a"], 100).await;
    shop.nothing_pending().await;
    eventually(crate::shop::DEADLINE, "no names but the last", || async {
        let members = shop.members().await;
        if members.len() <= 1 {
            Ok(())
        } else {
            Err(members)
        }
    })
    .await
    .unwrap();
    assert!(shop.dead_letters().await.is_empty());
    last.stop().await;
}
