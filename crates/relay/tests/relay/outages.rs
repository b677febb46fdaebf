//! A server refuses for a while, or goes away and comes back: nothing is lost, nothing doubled, the relay
//! neither exits nor hammers, and what waits arrives soon after.

use std::time::{Duration, Instant};

use outbox_testkit::{
    Direction, Fsync, Persistence, Process, Proxy, Redis, RelayStep, Shutdown, eventually,
};
use redis::aio::MultiplexedConnection;
use tokio::net::TcpListener;

use crate::pair::{DEADLINE, Pair};

/// Messages that waited arrive within this time of the server's return: tenths of a second where the machine has
/// nothing else to do.
const RETURN: Duration = Duration::from_secs(8);

pub(crate) async fn command(redis: &MultiplexedConnection, line: &str) {
    let mut words = line.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    for word in words {
        command.arg(word);
    }
    command.exec_async(&mut redis.clone()).await.unwrap();
}

/// Open connections to Redis, the test's own among them.
async fn clients(redis: &MultiplexedConnection) -> usize {
    let mut list = redis::cmd("CLIENT");
    list.arg("LIST");
    let list: String = list.query_async(&mut redis.clone()).await.unwrap();
    list.lines().count()
}

/// A relay that leads, with some messages published.
async fn working(pair: &Pair) -> Process {
    // What is looked at is what Redis refuses, so nothing pauses before it.
    let relay = pair.relay().args(["--redis-memory-ceiling", "0"]);
    let relay = relay.spawn().unwrap();
    pair.leads(&relay).await;
    pair.write("orders", "before", 50).await;
    pair.all_published(DEADLINE).await;
    relay
}

/// Redis refuses writes from `refuse` until `lift` while messages come in; it has refused the relay for a
/// while when it is lifted.
async fn writes_are_refused(redis: Redis, refuse: &str, lift: &str, said: &str) {
    let pair = Pair::with_redis(redis).await;
    let redis = pair.redis.connect().await.unwrap();
    let relay = working(&pair).await;
    command(&redis, refuse).await;
    let before = clients(&redis).await;
    for n in 0..4 {
        pair.write("orders", &format!("during-{n}"), 50).await;
        pair.write("audit", &format!("during-audit-{n}"), 5).await;
    }
    let line = relay.wait_for_line(said, DEADLINE).await.unwrap();
    assert!(!line.contains("ERROR"), "{line}");
    // The relay tries again and again, and no connection is left behind by it.
    let until = Instant::now() + Duration::from_secs(3);
    eventually(DEADLINE, "the outage to last", || async {
        assert!(clients(&redis).await < before + 3);
        Instant::now() > until
    })
    .await
    .unwrap();
    assert_eq!(pair.count("orders").await, 50);
    command(&redis, lift).await;
    pair.all_published(RETURN).await;
    pair.assert_exactly_once_after(&relay).await;
    assert!(!relay.lines().iter().any(|line| line.contains("ERROR")));
}

#[tokio::test]
async fn a_full_redis_costs_nothing_but_time() {
    writes_are_refused(
        Redis::start().await.unwrap(),
        "CONFIG SET maxmemory 1mb",
        "CONFIG SET maxmemory 0",
        "OOM",
    )
    .await;
}

/// Redis counts what a transaction waits to run, too: the memory may run out before, in the middle of, or behind it.
#[tokio::test]
async fn memory_that_runs_out_anywhere_in_a_page_leaves_all_of_it_or_nothing() {
    const PAGE: usize = 500;
    let pair = Pair::start().await;
    let redis = pair.redis.connect().await.unwrap();
    let relay = working(&pair).await;
    let interruptions = || {
        let lines = relay.lines();
        lines
            .iter()
            .filter(|line| line.contains("is interrupted"))
            .count()
    };
    let (mut whole, mut nothing) = (0, 0);
    for step in 0..24 {
        let (before, told) = (pair.count("orders").await, interruptions());
        let limit = used_memory(&redis).await + step * 25_000;
        command(&redis, &format!("CONFIG SET maxmemory {limit}")).await;
        pair.write("orders", &format!("step-{step}"), PAGE as i64)
            .await;
        // A relay that was notified looks for one message first, which may then be a page of its own.
        eventually(DEADLINE, "the page, or its refusal", || async {
            interruptions() > told || pair.count("orders").await == before + PAGE
        })
        .await
        .unwrap();
        match pair.count("orders").await - before {
            0 | 1 => nothing += 1,
            PAGE => whole += 1,
            part => panic!("{part} entries of a page of {PAGE} at step {step}"),
        }
        command(&redis, "CONFIG SET maxmemory 0").await;
        pair.all_published(RETURN).await;
    }
    assert!(whole > 0 && nothing > 0, "{whole} whole, {nothing} refused");
    pair.assert_exactly_once_after(&relay).await;
}

pub(crate) async fn used_memory(redis: &MultiplexedConnection) -> u64 {
    let mut info = redis::cmd("INFO");
    info.arg("memory");
    let info: String = info.query_async(&mut redis.clone()).await.unwrap();
    let used = info
        .lines()
        .find_map(|line| line.strip_prefix("used_memory:"));
    used.unwrap().trim().parse().unwrap()
}

#[tokio::test]
async fn missing_replicas_cost_nothing_but_time() {
    writes_are_refused(
        Redis::start().await.unwrap(),
        "CONFIG SET min-replicas-to-write 1",
        "CONFIG SET min-replicas-to-write 0",
        "NOREPLICAS",
    )
    .await;
}

#[tokio::test]
async fn a_server_that_is_a_replica_for_a_while_costs_nothing_but_time() {
    // A master that is not there: the data stays.
    writes_are_refused(
        Redis::start().await.unwrap(),
        "REPLICAOF 127.0.0.1 1",
        "REPLICAOF NO ONE",
        "ReadOnly",
    )
    .await;
}

#[tokio::test]
async fn snapshots_that_fail_cost_nothing_but_time() {
    let redis = Redis::builder().arg("--save", "3600 1");
    let pair = Pair::with_redis(redis.start().await.unwrap()).await;
    let redis = pair.redis.connect().await.unwrap();
    let relay = working(&pair).await;
    let in_the_way = pair.redis.data_dir().join("dump.rdb");
    std::fs::create_dir(&in_the_way).unwrap();
    let saved = |wanted: &'static str| {
        let redis = &redis;
        move || async move {
            let mut info = redis::cmd("INFO");
            info.arg("persistence");
            let info: String = info.query_async(&mut redis.clone()).await.unwrap();
            info.contains(&format!("rdb_last_bgsave_status:{wanted}"))
                && info.contains("rdb_bgsave_in_progress:0")
        }
    };
    command(&redis, "BGSAVE").await;
    eventually(DEADLINE, "the snapshot to fail", saved("err"))
        .await
        .unwrap();
    pair.write("orders", "during", 20).await;
    relay.wait_for_line("MISCONF", DEADLINE).await.unwrap();
    assert_eq!(pair.count("orders").await, 50);
    std::fs::remove_dir(&in_the_way).unwrap();
    command(&redis, "BGSAVE").await;
    eventually(DEADLINE, "the snapshot to succeed", saved("ok"))
        .await
        .unwrap();
    pair.all_published(RETURN).await;
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn a_redis_that_loads_its_data_is_waited_for_and_its_scripts_loaded_again() {
    let redis = Redis::builder()
        .persistence(Persistence::Aof(Fsync::Always))
        .arg("--key-load-delay", "4000");
    let pair = Pair::with_redis(redis.start().await.unwrap()).await;
    let redis = pair.redis.connect().await.unwrap();
    let relay = working(&pair).await;
    let fill = "for n = 1, 500 do redis.call('SET', 'other:' .. n, n) end";
    redis::cmd("EVAL")
        .arg(fill)
        .arg(0)
        .exec_async(&mut redis.clone())
        .await
        .unwrap();
    pair.redis.kill9().await.unwrap();
    pair.redis.start_again_loading().await.unwrap();
    pair.write("orders", "during", 50).await;
    let loaded = || async { pair.redis.log().matches("Ready to accept").count() == 2 };
    eventually(DEADLINE, "the data to be loaded", loaded)
        .await
        .unwrap();
    pair.all_published(RETURN).await;

    let redis = pair.redis.connect().await.unwrap();
    command(&redis, "SCRIPT FLUSH").await;
    pair.write("orders", "after", 10).await;
    pair.all_published(RETURN).await;
    pair.assert_exactly_once_after(&relay).await;
    let letters = "SELECT count(*) FROM outbox.dead_letters";
    let letters: i64 = pair.sql.query_one(letters, &[]).await.unwrap().get(0);
    assert_eq!(letters, 0);
}

#[tokio::test]
async fn a_script_that_blocks_redis_costs_nothing_but_time() {
    let redis = Redis::builder().arg("--busy-reply-threshold", "50");
    let pair = Pair::with_redis(redis.start().await.unwrap()).await;
    let redis = pair.redis.connect().await.unwrap();
    let relay = working(&pair).await;
    let mut busy = pair.redis.connect().await.unwrap();
    let busy = tokio::spawn(async move {
        let forever = redis::cmd("EVAL")
            .arg("while true do end")
            .arg(0)
            .to_owned();
        forever.exec_async(&mut busy).await
    });
    eventually(DEADLINE, "Redis to be busy", || {
        let mut redis = redis.clone();
        async move {
            let pong: redis::RedisResult<String> = redis::cmd("PING").query_async(&mut redis).await;
            pong.is_err_and(|e| e.code() == Some("BUSY"))
        }
    })
    .await
    .unwrap();
    pair.write("orders", "during", 50).await;
    relay.wait_for_line("BUSY", DEADLINE).await.unwrap();
    command(&redis, "SCRIPT KILL").await;
    pair.all_published(RETURN).await;
    assert!(busy.await.unwrap().is_err());
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn connections_that_are_killed_or_closed_for_idleness_are_made_anew() {
    let pair = Pair::start().await;
    let redis = pair.redis.connect().await.unwrap();
    let relay = working(&pair).await;
    for n in 0..10 {
        command(&redis, "CLIENT KILL TYPE normal SKIPME yes").await;
        pair.write("orders", &format!("killed-{n}"), 20).await;
        pair.all_published(RETURN).await;
    }
    // Redis closes what is idle for a second; the relay's own look at the marker is rarer. One that looks at the memory
    // every second stays, and so does the test's.
    command(&redis, "CONFIG SET timeout 1").await;
    let closed = || async {
        let info: String = redis::cmd("INFO")
            .arg("clients")
            .query_async(&mut pair.redis.connect().await.unwrap())
            .await
            .unwrap();
        ["connected_clients:1\r", "connected_clients:2\r"]
            .iter()
            .any(|few| info.contains(few))
    };
    eventually(DEADLINE, "the idle connections to be closed", closed)
        .await
        .unwrap();
    pair.write("orders", "idle", 1).await;
    pair.all_published(RETURN).await;
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn a_reply_that_is_lost_doubles_nothing() {
    let pair = Pair::start().await;
    let proxy = Proxy::start(pair.redis.port()).await.unwrap();
    let relay = pair.relay_via(pair.postgres.port(), proxy.port());
    let relay = relay.args(["--page-rows", "50"]).spawn().unwrap();
    pair.leads(&relay).await;
    for n in 0..5 {
        let hold = proxy.hold(RelayStep::PageSent.matcher().nth(2), Direction::Reply);
        pair.write("orders", &format!("lost-{n}"), 300).await;
        hold.reached().await.unwrap();
        hold.drop_it();
        pair.all_published(RETURN).await;
    }
    // Whatever the next three requests are.
    proxy.cut_reply(3).await.unwrap();
    pair.write("orders", "cut", 50).await;
    pair.all_published(DEADLINE).await;
    // The page may have run before all of them were: what is left must not meet the stop.
    proxy.pass().await.unwrap();
    pair.write("orders", "after", 1).await;
    pair.all_published(DEADLINE).await;
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn a_socket_that_dies_without_a_word_is_noticed() {
    let pair = Pair::start().await;
    let postgres = Proxy::start(pair.postgres.port()).await.unwrap();
    let redis = Proxy::start(pair.redis.port()).await.unwrap();
    let relay = pair.relay_via(postgres.port(), redis.port());
    let relay = relay.spawn().unwrap();
    pair.leads(&relay).await;
    for (n, proxy) in [&postgres, &redis].into_iter().enumerate() {
        proxy.blackhole().await.unwrap();
        pair.write("orders", &format!("hole-{n}"), 20).await;
        pair.all_published(Duration::from_secs(20)).await;
    }
    tokio::try_join!(postgres.blackhole(), redis.blackhole()).unwrap();
    pair.write("orders", "both", 20).await;
    pair.all_published(DEADLINE).await;
    pair.assert_exactly_once_after(&relay).await;
}

/// Connections that arrive on a port where the server was, each closed at once, during a time.
async fn attempts(port: u16, during: Duration) -> usize {
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let mut attempts = 0;
    let count = async {
        loop {
            drop(listener.accept().await.unwrap());
            attempts += 1;
        }
    };
    let _: Result<(), _> = tokio::time::timeout(during, count).await;
    attempts
}

/// Tries while a server is gone for long enough that the waits have reached their bound.
fn assert_steady(attempts: usize, during: Duration) {
    let per_second = attempts as f64 / during.as_secs_f64();
    assert!(
        (1.0..20.0).contains(&per_second),
        "{per_second} tries a second"
    );
}

#[tokio::test]
async fn a_redis_that_is_gone_for_long_is_tried_steadily_and_found_at_once() {
    let redis = Redis::builder().persistence(Persistence::Aof(Fsync::Always));
    let pair = Pair::with_redis(redis.start().await.unwrap()).await;
    let relay = working(&pair).await;
    pair.redis.kill9().await.unwrap();
    pair.write("orders", "during", 100).await;
    let during = Duration::from_secs(8);
    assert_steady(attempts(pair.redis.port(), during).await, during);
    pair.redis.start_again().await.unwrap();
    pair.all_published(RETURN).await;
    pair.assert_exactly_once_after(&relay).await;
}

#[tokio::test]
async fn a_postgres_that_is_gone_for_long_is_tried_steadily_and_found_at_once() {
    let mut pair = Pair::with_own_postgres().await;
    let relay = working(&pair).await;
    pair.write("orders", "during", 100).await;
    pair.postgres.stop(Shutdown::Immediate).await.unwrap();
    let during = Duration::from_secs(8);
    assert_steady(attempts(pair.postgres.port(), during).await, during);
    pair.postgres.start_again().await.unwrap();
    pair.reconnect().await;
    pair.write("orders", "after", 1).await;
    pair.all_published(RETURN).await;
    pair.assert_exactly_once_after(&relay).await;
}
