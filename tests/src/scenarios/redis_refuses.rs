//! Redis is there and does not do what it is asked: it is full, busy, or the connection to it is dead without a word.

use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;

use crate::{
    Result, Scenario, Stage,
    evidence::Column,
    scenario::{Naive, Shows},
    stage::{DEADLINE, Setting, until},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new(
        4,
        "maxmemory is reached and lifted",
        Naive::MarkingLoop,
        Shows::Harm(Column::DoubledInStream),
        |stage| Box::pin(full(stage)),
    )
    .setting(Setting {
        relay: &["--redis-memory-ceiling", "0"], // it would pause before Redis refuses
        ..Setting::USUAL
    })
    .repeatable(),
    Scenario::new(
        4,
        "a script keeps Redis busy",
        Naive::MarkingLoop,
        Shows::Harm(Column::DoubledInStream),
        |stage| Box::pin(busy(stage)),
    )
    .repeatable(),
    Scenario::new(
        4,
        "sockets die without a word",
        Naive::MarkingLoop,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(sockets_die(stage)),
    )
    .repeatable(),
];

/// Orders that are placed while Redis refuses.
const ORDERS_MEANWHILE: usize = 100;

/// How often Redis is full in a run.
const TIMES_FULL: u32 = 5;

/// What Redis still takes before it is full: some pages, so that it is full in the middle of one.
const ROOM_BYTES: u64 = 64 * 1024;

/// How long nobody gets an answer: longer than the half second that a client waits by default, and shorter than the
/// five of `busy-reply-threshold`, so that what was sent meanwhile is done afterwards.
const STALL: Duration = Duration::from_millis(800);

/// Turns of a script's loop that a fast machine does in less than [`STALL`].
const TURNS: u64 = 10_000_000;

const FOREVER: &str = "while true do end";

/// Several times: naive code doubles what a page had before Redis was full, and that may be nothing.
async fn full(stage: &mut Stage) -> Result {
    for _ in 0..TIMES_FULL {
        full_once(stage).await?;
    }
    Ok(())
}

async fn full_once(stage: &mut Stage) -> Result {
    let mut redis = stage.servers.redis.connect().await?;
    let refused = errors(&mut redis, "OOM").await?;
    let used: u64 = info(&mut redis, "memory", "used_memory:")
        .await?
        .unwrap_or(0);
    set(&mut redis, "maxmemory", used + ROOM_BYTES).await?;
    until(DEADLINE, "a Redis that is full", || {
        let mut redis = redis.clone();
        async move { Ok(errors(&mut redis, "OOM").await? > refused) }
    })
    .await?;
    stage.orders_acknowledged(ORDERS_MEANWHILE).await?;
    set(&mut redis, "maxmemory", 0).await
}

/// First for less than `busy-reply-threshold`, and then until the script is killed.
async fn busy(stage: &mut Stage) -> Result {
    let mut redis = stage.servers.redis.connect().await?;
    stall(&mut redis).await?;

    let before = errors(&mut redis, "BUSY").await?;
    set(&mut redis, "busy-reply-threshold", 50).await?;
    let mut blocked = stage.servers.redis.connect().await?;
    let script = tokio::spawn(async move { run(&mut blocked, FOREVER).await });
    let mut own = 0;
    loop {
        let pong: redis::RedisResult<()> = redis::cmd("PING").query_async(&mut redis).await;
        if pong.is_err_and(|e| e.code() == Some("BUSY")) {
            own += 1;
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    stage.orders_acknowledged(ORDERS_MEANWHILE).await?;
    redis::cmd("SCRIPT")
        .arg("KILL")
        .exec_async(&mut redis)
        .await?;
    // It ends with the error that it was killed.
    let _ = script.await?;
    set(&mut redis, "busy-reply-threshold", 5_000).await?;
    let refused = errors(&mut redis, "BUSY").await? - before;
    if refused <= own {
        return Err("nobody met the busy Redis".into());
    }
    Ok(())
}

/// All sockets that exist are dead and stay so, without FIN or RST; new ones pass.
async fn sockets_die(stage: &mut Stage) -> Result {
    stage.mark_struck();
    for actor in stage.carriers.iter().chain(&stage.consumers) {
        actor.link.postgres.blackhole().await?;
        actor.link.redis.blackhole().await?;
    }
    Ok(())
}

/// Runs scripts, each twice as long as the one before, until one has taken long enough. A script knows no clock.
async fn stall(redis: &mut MultiplexedConnection) -> Result {
    let mut turns = TURNS;
    let mut begun = Instant::now();
    while begun.elapsed() < STALL {
        begun = Instant::now();
        run(redis, &format!("for _ = 1, {turns} do end")).await?;
        turns *= 2;
    }
    Ok(())
}

async fn run(redis: &mut MultiplexedConnection, script: &str) -> Result {
    let mut eval = redis::cmd("EVAL");
    eval.arg(script).arg(0);
    eval.exec_async(redis).await?;
    Ok(())
}

async fn set(redis: &mut MultiplexedConnection, name: &str, value: u64) -> Result {
    let mut set = redis::cmd("CONFIG");
    set.arg("SET").arg(name).arg(value);
    set.exec_async(redis).await?;
    Ok(())
}

/// How often Redis has answered with an error of this code.
async fn errors(redis: &mut MultiplexedConnection, code: &str) -> Result<u64> {
    let field = format!("errorstat_{code}:count=");
    Ok(info(redis, "errorstats", &field).await?.unwrap_or(0))
}

async fn info(
    redis: &mut MultiplexedConnection,
    section: &str,
    field: &str,
) -> Result<Option<u64>> {
    let info: String = redis::cmd("INFO").arg(section).query_async(redis).await?;
    let value = info.lines().find_map(|line| line.strip_prefix(field));
    Ok(value.map(str::parse).transpose()?)
}
