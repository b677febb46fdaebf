//! Postgres falls back to an earlier state, and gives ids out again to other messages: a failover, a snapshot or a dump.
//!
//! All variants lose the same way: some state is kept (a standby that stops receiving, a snapshot, a dump), more orders
//! are placed and published, and then the kept state is all that is left. What the lost server had is read from it
//! after a crash recovery, when nobody reaches it any more.

mod dumps;

use std::{collections::BTreeMap, time::Instant};

use outbox_testkit::{Persistence, Postgres, Snapshot};

use crate::{
    Result, Scenario, Stage,
    evidence::Column,
    order::{End, Queue, STREAM, Way, place},
    scenario::{Forgets, Naive, Shows},
    stage::{Actor, Arm, DEADLINE, Setting, until},
};

const HARM: Shows = Shows::Harm(Column::Lost);

const REDIS_WITH_DUMPS: Setting = Setting {
    redis: |builder| builder.persistence(Persistence::Rdb),
    ..Setting::USUAL
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new(
        5,
        "failover to a standby that lacks the last transactions",
        Naive::CursorLoop,
        HARM,
        |stage| Box::pin(failover(stage)),
    )
    .forgets(Forgets::Published),
    Scenario::new(
        5,
        "an old primary comes back beside the new one",
        Naive::CursorLoop,
        Shows::Harm(Column::Phantom),
        |stage| Box::pin(old_primary(stage)),
    )
    .forgets(Forgets::Published),
    Scenario::new(
        5,
        "a snapshot put back, then more new messages than were lost",
        Naive::CursorLoop,
        HARM,
        |stage| Box::pin(snapshot_put_back(stage)),
    )
    .forgets(Forgets::Published),
    Scenario::new(
        5,
        "a dump restored into the same cluster",
        Naive::CursorLoop,
        HARM,
        |stage| Box::pin(dumps::into_the_same_cluster(stage)),
    )
    .forgets(Forgets::Published),
    Scenario::new(
        5,
        "a dump restored into a new cluster, which is adopted",
        Naive::CursorLoop,
        HARM,
        |stage| Box::pin(dumps::into_a_new_cluster(stage)),
    )
    .forgets(Forgets::Published),
    Scenario::new(
        5,
        "both servers fall back, Postgres further",
        Naive::CursorLoop,
        HARM,
        |stage| Box::pin(postgres_falls_further(stage)),
    )
    .forgets(Forgets::Published)
    .setting(REDIS_WITH_DUMPS),
    Scenario::new(
        5,
        "both servers fall back, Redis further",
        Naive::CursorLoop,
        // Its cursor is older than what Postgres still has.
        Shows::Nothing,
        |stage| Box::pin(redis_falls_further(stage)),
    )
    .forgets(Forgets::Published)
    .setting(REDIS_WITH_DUMPS),
];

/// Orders that are acknowledged after the kept state, short and full.
const LOST: (usize, usize) = (400, 2_000);

/// Orders that somebody places on an old primary.
const STRAYS: usize = 20;

/// The messages of a server, by id.
type Log = BTreeMap<i64, String>;

const LOG: &str = "SELECT id, message_key FROM outbox.messages";
const PLAIN_LOG: &str = "SELECT id, key FROM plain_outbox";
const LAST: &str = "SELECT coalesce(max(id), 0) FROM outbox.messages";
const PLAIN_LAST: &str = "SELECT coalesce(max(id), 0) FROM plain_outbox";

async fn failover(stage: &mut Stage) -> Result {
    let standby = lagging_standby(stage).await?;
    let struck = Instant::now();
    let (_old, lost) = fail_over(stage, standby).await?;
    if stage.arm == Arm::Outbox {
        stage.measure_recovery(struck).await?;
    }
    ids_given_again(stage, &lost).await
}

/// Somebody starts a relay at the old primary, and somebody writes there.
async fn old_primary(stage: &mut Stage) -> Result {
    let standby = lagging_standby(stage).await?;
    for shop in &stage.shops {
        shop.link.postgres.refuse().await?;
    }
    let (old, lost) = fail_over(stage, standby).await?;
    if stage.arm == Arm::Outbox && stage.recovered(Instant::now()).await?.is_none() {
        return Err("no message came through after the failover".into());
    }
    let mut follower = stage.follow().await?;
    let mut client = old.connect(&stage.servers.shop).await?;
    let mut stray = String::new();
    for _ in 0..STRAYS {
        let queue = &mut Queue::new("");
        stray = place(&mut client, queue, stage.way(), "stray", End::Commit).await?;
    }
    let carrier = stage.carrier_on(&old).await?.ok_or("nobody carries")?;
    match stage.arm {
        Arm::Outbox => refuses(&carrier).await?,
        Arm::Control if follower.arrives(&stray, DEADLINE).await? => {}
        Arm::Control => return Err("the naive code at the old primary sent nothing".into()),
    }
    drop(carrier);
    stage.mark_struck();
    for shop in &stage.shops {
        shop.link.postgres.pass().await?;
    }
    ids_given_again(stage, &lost).await
}

async fn refuses(relay: &Actor) -> Result {
    let status = relay.process.wait(DEADLINE).await?;
    let why = "an old primary that came back";
    relay.process.wait_for_line(why, DEADLINE).await?;
    if status.success() {
        return Err("the relay at the old primary ended as if all were well".into());
    }
    Ok(())
}

/// The new messages are written before any relay looks, so that the sequence is past the marker again.
async fn snapshot_put_back(stage: &mut Stage) -> Result {
    let snapshot = stage.servers.postgres.snapshot().await?;
    publish_orders(stage).await?;
    let lost = last_state(stage).await?;
    stage.servers.postgres.restore(&snapshot).await?;
    let_in(&stage.shops).await?;
    ids_given_again(stage, &lost).await?;
    stage.mark_struck();
    let_in(&stage.carriers).await
}

async fn postgres_falls_further(stage: &mut Stage) -> Result {
    let rows = stage.servers.postgres.snapshot().await?;
    publish_orders(stage).await?;
    let entries = redis_snapshot(stage).await?;
    publish_orders(stage).await?;
    both_fall_back(stage, &rows, &entries).await
}

async fn redis_falls_further(stage: &mut Stage) -> Result {
    let entries = redis_snapshot(stage).await?;
    publish_orders(stage).await?;
    let rows = stage.servers.postgres.snapshot().await?;
    publish_orders(stage).await?;
    both_fall_back(stage, &rows, &entries).await
}

async fn redis_snapshot(stage: &Stage) -> Result<Snapshot> {
    stage.servers.redis.save().await?;
    Ok(stage.servers.redis.snapshot().await?)
}

async fn both_fall_back(stage: &mut Stage, rows: &Snapshot, entries: &Snapshot) -> Result {
    let lost = last_state(stage).await?;
    let servers = &stage.servers;
    let (postgres, redis) = tokio::join!(
        servers.postgres.restore(rows),
        servers.redis.restore(entries)
    );
    postgres?;
    redis?;
    let struck = Instant::now();
    let_in(&stage.shops).await?;
    let_in(&stage.carriers).await?;
    if stage.arm == Arm::Outbox {
        stage.measure_recovery(struck).await?;
    }
    ids_given_again(stage, &lost).await
}

/// A standby without the last orders, which are published.
async fn lagging_standby(stage: &Stage) -> Result<Postgres> {
    let primary = &stage.servers.postgres;
    let standby = primary.standby().await?;
    standby.caught_up_with(primary).await?;
    standby.stop_receiving().await?;
    publish_orders(stage).await?;
    Ok(standby)
}

/// The primary dies and the standby takes its place. Returns the old one, which runs again and which nobody is led to,
/// with what it had.
async fn fail_over(stage: &mut Stage, standby: Postgres) -> Result<(Postgres, Log)> {
    stage.servers.postgres.kill9().await?;
    standby.promote().await?;
    let old = stage.put_postgres(standby).await?;
    old.start_again().await?;
    stage.witness_on(&old).await?;
    let lost = log_of(stage, &old).await?;
    Ok((old, lost))
}

/// Waits for orders, and until as good as all of them are in the stream: naive code may have lost some by now.
async fn publish_orders(stage: &Stage) -> Result {
    let orders = stage.suite.scale.pick(LOST.0, LOST.1);
    let mut redis = stage.servers.redis.connect().await?;
    let before: usize = entries(&mut redis).await?;
    stage.orders_acknowledged(orders).await?;
    let wanted = before + orders / 2;
    until(DEADLINE, "published orders", || {
        let mut redis = redis.clone();
        async move { Ok(entries(&mut redis).await? >= wanted) }
    })
    .await
}

async fn entries(redis: &mut redis::aio::MultiplexedConnection) -> Result<usize> {
    let length = redis::cmd("XLEN").arg(STREAM).query_async(redis).await?;
    Ok(length)
}

/// Cuts everybody off Postgres, crashes it, and returns what it then has: all that was ever committed there.
async fn last_state(stage: &mut Stage) -> Result<Log> {
    for actor in stage.shops.iter().chain(&stage.carriers) {
        actor.link.postgres.refuse().await?;
    }
    stage.servers.postgres.kill9().await?;
    stage.servers.postgres.start_again().await?;
    stage.witness().await?;
    log_of(stage, &stage.servers.postgres).await
}

/// Ends [`last_state`] for some processes.
async fn let_in(actors: &[Actor]) -> Result {
    for actor in actors {
        actor.link.postgres.pass().await?;
    }
    Ok(())
}

async fn log_of(stage: &Stage, server: &Postgres) -> Result<Log> {
    let client = server.connect(&stage.servers.shop).await?;
    let sql = match stage.way() {
        Way::Outbox => LOG,
        _ => PLAIN_LOG,
    };
    let rows = client.query(sql, &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Waits until ids are given out that the lost server never had, and makes sure that some before were given out again.
async fn ids_given_again(stage: &mut Stage, lost: &Log) -> Result {
    let last = lost.keys().next_back().copied().unwrap_or(0);
    let client = stage.shop_client().await?;
    let sql = match stage.way() {
        Way::Outbox => LAST,
        _ => PLAIN_LAST,
    };
    until(DEADLINE, "more new messages than were lost", || async {
        Ok(client.query_one(sql, &[]).await?.get::<_, i64>(0) > last)
    })
    .await?;
    let present = log_of(stage, &stage.servers.postgres).await?;
    let again = |(id, key): &(&i64, &String)| lost.get(id).is_some_and(|other| other != *key);
    let count = present.iter().filter(again).count();
    if count == 0 {
        return Err("no id was given out again, so nothing was struck".into());
    }
    stage.note(format!("{count} ids given out again"));
    Ok(())
}
