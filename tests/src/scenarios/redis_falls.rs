//! Redis forgets: everything, its tail, or one key. After that exactly what it lost goes out again.
//!
//! The outbox's column says so by itself: what was lost is in the stream in the end, and nothing stands there twice.

use std::time::Instant;

use outbox_testkit::{Direction, Fsync, Matcher, Persistence, Proxy, Redis, RelayStep};

use crate::{
    Arm, Result, Scenario, Stage,
    evidence::Column,
    programs::CURSOR,
    scenario::{Naive, Shows},
    stage::{DEADLINE, Setting, until},
};

const KEEPS_AOF: Setting = Setting {
    redis: |builder| builder.persistence(Persistence::Aof(Fsync::EverySecond)),
    ..Setting::USUAL
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new(
        4,
        "Redis is killed and keeps nothing",
        Naive::MarkingLoop,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(killed_and_empty(stage)),
    )
    .repeatable(),
    Scenario::new(
        4,
        "Redis with AOF everysec is killed with a reply on its way",
        Naive::MarkingLoop,
        Shows::Harm(Column::DoubledInStream),
        |stage| Box::pin(killed_before_a_reply(stage)),
    )
    .setting(KEEPS_AOF),
    Scenario::new(
        4,
        "Redis with AOF everysec loses power, and what was not flushed",
        Naive::MarkingLoop,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(unflushed_tail(stage)),
    )
    .setting(KEEPS_AOF),
    Scenario::new(
        4,
        "Redis starts from an old RDB snapshot",
        Naive::MarkingLoop,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(old_dump(stage)),
    )
    .repeatable(),
    Scenario::new(
        4,
        "FLUSHALL",
        Naive::MarkingLoop,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(flushed(stage)),
    ),
    Scenario::new(
        4,
        "SCRIPT FLUSH, again and again",
        Naive::MarkingLoop,
        Shows::Nothing,
        |stage| Box::pin(scripts_flushed(stage)),
    )
    .repeatable(),
    // A loop that marks its rows has no marker to lose; the one that can be compared is a cursor in Redis.
    Scenario::new(
        4,
        "the marker alone is deleted",
        Naive::CursorLoop,
        Shows::Harm(Column::DoubledInStream),
        |stage| Box::pin(marker_deleted(stage)),
    )
    .repeatable(),
    Scenario::new(
        4,
        "failover to a replica that lags",
        Naive::MarkingLoop,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(failover(stage)),
    )
    .repeatable(),
    Scenario::new(
        4,
        "the same node becomes a replica and a primary again, without a disconnect",
        Naive::MarkingLoop,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(demoted_and_promoted(stage)),
    )
    .repeatable(),
    Scenario::new(
        4,
        "the same while the relay is idle",
        Naive::MarkingLoop,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(demoted_and_promoted_while_idle(stage)),
    ),
];

/// Entries that Redis has and then has not.
const LOST: i64 = 300;

/// Orders that are placed while Redis is away.
const ORDERS_WITHOUT_REDIS: usize = 200;

async fn killed_and_empty(stage: &mut Stage) -> Result {
    note_loss(stage, 0).await?;
    stage.servers.redis.kill9().await?;
    stage.orders_acknowledged(ORDERS_WITHOUT_REDIS).await?;
    stage.servers.redis.start_again().await?;
    Ok(())
}

/// The kernel keeps what a killed process has written: the page is there, and nobody was told.
async fn killed_before_a_reply(stage: &mut Stage) -> Result {
    let matcher = match stage.arm {
        Arm::Control => Matcher::redis("XADD"),
        Arm::Outbox => RelayStep::PageSent.matcher(),
    };
    let redis = &stage.carriers[0].link.redis;
    let reply = redis.hold(matcher, Direction::Reply);
    reply.reached().await?;
    stage.servers.redis.kill9().await?;
    reply.drop_it();
    stage.orders_acknowledged(ORDERS_WITHOUT_REDIS).await?;
    stage.servers.redis.start_again().await?;
    Ok(())
}

/// A crash of the machine leaves the append-only file as it was at the last fsync, up to a second ago. So it is copied
/// while Redis runs, and the copy put back.
async fn unflushed_tail(stage: &mut Stage) -> Result {
    let flushed = stage.servers.redis.snapshot().await?;
    let kept = stage.stream_len().await?;
    gains(stage, LOST).await?;
    note_loss(stage, kept).await?;
    stage.servers.redis.restore(&flushed).await?;
    Ok(())
}

async fn old_dump(stage: &mut Stage) -> Result {
    stage.servers.redis.save().await?;
    let kept = stage.stream_len().await?;
    let dump = stage.servers.redis.snapshot().await?;
    gains(stage, LOST).await?;
    note_loss(stage, kept).await?;
    stage.servers.redis.restore(&dump).await?;
    Ok(())
}

async fn flushed(stage: &mut Stage) -> Result {
    note_loss(stage, 0).await?;
    tell(&stage.servers.redis, "FLUSHALL").await
}

async fn scripts_flushed(stage: &mut Stage) -> Result {
    for _ in 0..10 {
        tell(&stage.servers.redis, "SCRIPT FLUSH").await?;
        gains(stage, 20).await?;
    }
    Ok(())
}

/// Several times: a naive loop that is between its look at the cursor and its next page does not notice.
async fn marker_deleted(stage: &mut Stage) -> Result {
    let delete = format!("DEL outbox:relay:marker {CURSOR}");
    for _ in 0..5 {
        tell(&stage.servers.redis, &delete).await?;
        gains(stage, 50).await?;
    }
    Ok(())
}

async fn failover(stage: &mut Stage) -> Result {
    let lagging = Lagging::behind(stage).await?;
    gains(stage, LOST).await?;
    note_loss(stage, lagging.entries).await?;
    stage.servers.redis.kill9().await?;
    lagging.replica.promote().await?;
    stage.put_redis(lagging.replica).await?;
    Ok(())
}

/// The primary is made a replica of a node that had fallen behind, which replaces its data, and is then promoted. Its
/// clients stay connected all the time.
async fn demoted_and_promoted(stage: &mut Stage) -> Result {
    let lagging = Lagging::behind(stage).await?;
    gains(stage, LOST).await?;
    note_loss(stage, lagging.entries).await?;
    fall_back(stage, lagging).await
}

/// The same when there is nothing to publish and so nothing that could fail: the relay has to look by itself.
async fn demoted_and_promoted_while_idle(stage: &mut Stage) -> Result {
    let lagging = Lagging::behind(stage).await?;
    gains(stage, LOST).await?;
    stage.stop_shops().await?;
    until(DEADLINE, "an idle relay", || async {
        stage.settled().await.map(|()| true)
    })
    .await?;
    let before = stage.stream_len().await?;
    note_loss(stage, lagging.entries).await?;
    fall_back(stage, lagging).await?;
    if stage.arm == Arm::Outbox {
        let since = Instant::now();
        until(DEADLINE, "what was lost, without a new order", || async {
            Ok(stage.stream_len().await? >= before)
        })
        .await?;
        let took = since.elapsed();
        stage.recovery = Some(took);
        stage.note(format!(
            "the idle relay had published again what was lost after {:.1} s",
            took.as_secs_f64()
        ));
    }
    Ok(())
}

async fn fall_back(stage: &Stage, lagging: Lagging) -> Result {
    let redis = &stage.servers.redis;
    lagging.replica.promote().await?;
    redis.replica_of(lagging.replica.port()).await?;
    redis.in_sync().await?;
    redis.promote().await?;
    Ok(())
}

/// A replica that receives nothing more.
struct Lagging {
    replica: Redis,
    /// How many entries its stream has at most.
    entries: i64,
    /// The network between primary and replica, which forwards nothing.
    _cut: Proxy,
}

impl Lagging {
    async fn behind(stage: &Stage) -> Result<Self> {
        let primary = &stage.servers.redis;
        let replica = primary.replica().await?;
        let cut = Proxy::start(primary.port()).await?;
        replica.replica_of(cut.port()).await?;
        replica.in_sync().await?;
        cut.blackhole_all().await?;
        Ok(Self {
            replica,
            entries: stage.stream_len().await?,
            _cut: cut,
        })
    }
}

/// Waits until the stream has this many entries more.
async fn gains(stage: &Stage, more: i64) -> Result {
    let wanted = stage.stream_len().await? + more;
    until(DEADLINE, "more entries in the stream", || async {
        Ok(stage.stream_len().await? >= wanted)
    })
    .await
}

/// Notes that all entries but so many are about to be lost.
async fn note_loss(stage: &mut Stage, kept: i64) -> Result {
    let lost = stage.stream_len().await? - kept;
    stage.note(format!("Redis lost {lost} entries or more"));
    Ok(())
}

/// Runs a command without looking at what it returns.
async fn tell(redis: &Redis, command: &str) -> Result {
    let mut words = command.split(' ');
    let mut command = redis::cmd(words.next().unwrap_or_default());
    words.for_each(|word| {
        command.arg(word);
    });
    command.exec_async(&mut redis.connect().await?).await?;
    Ok(())
}
