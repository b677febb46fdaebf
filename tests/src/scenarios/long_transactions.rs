//! Transactions that stay open for the whole run beside the load: those that wrote a message arrive when they commit,
//! and none holds anything else up.

use std::{
    fmt,
    time::{Duration, Instant},
};

use crate::{
    Result, Scenario, Stage,
    evidence::Column,
    order::{Queue, STREAM, write_order},
    scenario::{Naive, Shows},
    stage::{Arm, DEADLINE, Setting, until},
    stream::Follower,
};

const HARM: Shows = Shows::Harm(Column::Lost);

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new(
        8,
        "a transaction that wrote a message stays open for the whole run",
        Naive::CursorLoop,
        HARM,
        |stage| Box::pin(writer_stays_open(stage)),
    ),
    Scenario::new(
        8,
        "a transaction that wrote no message stays open for the whole run",
        Naive::CursorLoop,
        // It wrote nothing that could be lost.
        Shows::Nothing,
        |stage| Box::pin(other_stays_open(stage)),
    ),
    Scenario::new(
        8,
        "a prepared transaction, over a crash of Postgres",
        Naive::CursorLoop,
        HARM,
        |stage| Box::pin(prepared(stage)),
    )
    .setting(Setting {
        postgres: |builder| builder.setting("max_prepared_transactions", "10"),
        ..Setting::USUAL
    }),
    Scenario::new(
        8,
        "2,000 messages/s with 50 % rollbacks beside one open writer",
        Naive::CursorLoop,
        HARM,
        |stage| Box::pin(rate_beside_open_writer(stage)),
    )
    .setting(Setting {
        // So many customers that their rows do not slow the shop: an open transaction keeps each version of them.
        shop: &[
            "--per-second",
            "2000",
            "--rollback-percent",
            "50",
            "--customers",
            "100000",
        ],
        ..Setting::USUAL
    }),
];

/// Orders beside an open transaction, short and full.
const ORDERS_BESIDE: (usize, usize) = (1_000, 20_000);

/// Messages whose way is timed beside an open transaction.
const TIMED: usize = 5;

/// A message that takes longer is held up. Without a cause it takes milliseconds, and one that waits for the open
/// transaction takes for ever.
const HELD_UP: Duration = Duration::from_secs(5);

/// How long naive code gets for a row that it has most likely passed.
const LATE_ROW_OF_CONTROL: Duration = Duration::from_secs(2);

/// The gaps of all rollbacks are closed, but for those of the latest.
const GAPS_MAX: usize = 30;

/// The first and the last of the run are compared; short and full.
const WINDOW: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));

/// Windows of a run.
const WINDOWS: (u32, u32) = (3, 6);

/// The rate of the last window is at least this part of the first one's; short and full. In windows of two seconds it
/// scatters by itself on a busy machine.
const RATE_KEPT: (f64, f64) = (0.5, 0.9);

async fn writer_stays_open(stage: &mut Stage) -> Result {
    let mut client = stage.shop_client().await?;
    let transaction = client.transaction().await?;
    let key = write_order(&transaction, &mut Queue::new(""), stage.way(), "late").await?;
    let follower = stage.follow().await?;
    nothing_is_held_up(stage).await?;
    transaction.commit().await?;
    arrives_late(stage, follower, &key).await
}

/// It has a transaction id, older than those of all that follow, and has written to another table.
async fn other_stays_open(stage: &mut Stage) -> Result {
    let mut client = stage.shop_client().await?;
    let transaction = client.transaction().await?;
    transaction
        .execute("INSERT INTO customers VALUES ('idle', 0)", &[])
        .await?;
    nothing_is_held_up(stage).await?;
    if stage.arm == Arm::Outbox {
        let redis = stage.servers.redis.connect().await?;
        until(DEADLINE, "the gaps of rollbacks to close", || {
            let mut redis = redis.clone();
            async move {
                let gaps: usize = redis::cmd("HLEN")
                    .arg("outbox:relay:gaps")
                    .query_async(&mut redis)
                    .await?;
                Ok(gaps <= GAPS_MAX)
            }
        })
        .await?;
    }
    transaction.commit().await?;
    Ok(())
}

async fn prepared(stage: &mut Stage) -> Result {
    let mut client = stage.shop_client().await?;
    let transaction = client.transaction().await?;
    // A transaction that has notified cannot be prepared.
    transaction
        .batch_execute("SET LOCAL outbox.notify = 'off'")
        .await?;
    let key = write_order(&transaction, &mut Queue::new(""), stage.way(), "late").await?;
    transaction
        .batch_execute("PREPARE TRANSACTION 'late'")
        .await?;
    let follower = stage.follow().await?;
    stage.orders_acknowledged(TIMED).await?;
    drop(transaction);
    stage.servers.postgres.kill9().await?;
    stage.servers.postgres.start_again().await?;
    nothing_is_held_up(stage).await?;
    let client = stage.shop_client().await?;
    client.batch_execute("COMMIT PREPARED 'late'").await?;
    arrives_late(stage, follower, &key).await
}

/// Every rollback leaves a gap that the open writer keeps open.
async fn rate_beside_open_writer(stage: &mut Stage) -> Result {
    let mut client = stage.shop_client().await?;
    let transaction = client.transaction().await?;
    let key = write_order(&transaction, &mut Queue::new(""), stage.way(), "late").await?;
    let follower = stage.follow().await?;
    let window = stage.suite.scale.pick(WINDOW.0, WINDOW.1);
    let between = stage.suite.scale.pick(WINDOWS.0, WINDOWS.1) - 2;
    let first = Rate::over(stage, window).await?;
    for _ in 0..between {
        Rate::over(stage, window).await?;
    }
    let last = Rate::over(stage, window).await?;
    transaction.commit().await?;
    stage.note(format!("first {window:?}: {first}; last: {last}"));
    let wanted = stage.suite.scale.pick(RATE_KEPT.0, RATE_KEPT.1);
    let is_kept = last.compared_with(&first) >= wanted;
    if stage.arm == Arm::Outbox && !is_kept {
        return Err(format!("the rate falls: first {first}; last {last}").into());
    }
    arrives_late(stage, follower, &key).await
}

/// Waits for orders beside an open transaction and times how long messages take.
async fn nothing_is_held_up(stage: &mut Stage) -> Result {
    let orders = stage.suite.scale.pick(ORDERS_BESIDE.0, ORDERS_BESIDE.1);
    let mut slowest = Duration::ZERO;
    for _ in 0..TIMED {
        stage.orders_acknowledged(orders / TIMED).await?;
        let taken = stage.recovered(Instant::now()).await?;
        match (stage.arm, taken) {
            (_, Some(taken)) => slowest = slowest.max(taken),
            (Arm::Control, None) => {}
            (Arm::Outbox, None) => return Err("a message is held up for good".into()),
        }
    }
    stage.note(format!(
        "slowest of {TIMED} messages beside it: {slowest:.2?}"
    ));
    if stage.arm == Arm::Outbox && slowest > HELD_UP {
        return Err(format!("a message was held up for {slowest:.2?}").into());
    }
    Ok(())
}

/// Waits for the row of a transaction that has just committed.
async fn arrives_late(stage: &mut Stage, mut follower: Follower, key: &str) -> Result {
    let committed = Instant::now();
    let deadline = match stage.arm {
        Arm::Control => LATE_ROW_OF_CONTROL,
        Arm::Outbox => DEADLINE,
    };
    let arrived = follower.arrives(key, deadline).await?;
    let taken = committed.elapsed();
    match (stage.arm, arrived) {
        (_, true) => stage.note(format!("its row arrived {taken:.2?} after the commit")),
        (Arm::Control, false) => stage.note("its row never arrived"),
        (Arm::Outbox, false) => return Err("the row that was committed late is missing".into()),
    }
    Ok(())
}

/// What was done in a second, on average over a window.
struct Rate {
    published: f64,
    /// Orders that the shops have acknowledged: what could be published.
    acknowledged: f64,
}

impl Rate {
    async fn over(stage: &Stage, window: Duration) -> Result<Self> {
        let mut redis = stage.servers.redis.connect().await?;
        let mut count = async || -> Result<(u32, u32)> {
            let published = redis::cmd("XLEN")
                .arg(STREAM)
                .query_async(&mut redis)
                .await?;
            Ok((published, stage.acknowledged_count().try_into()?))
        };
        let started = Instant::now();
        let before = count().await?;
        // A rate is measured over time; nothing is waited for here.
        tokio::time::sleep(window).await;
        let after = count().await?;
        let seconds = started.elapsed().as_secs_f64();
        Ok(Self {
            published: f64::from(after.0.saturating_sub(before.0)) / seconds,
            acknowledged: f64::from(after.1.saturating_sub(before.1)) / seconds,
        })
    }

    /// The published rate as a part of an earlier one. A shop that places fewer orders leaves less to publish, so what
    /// it places less of is left out.
    fn compared_with(&self, first: &Rate) -> f64 {
        let load = (self.acknowledged / first.acknowledged).min(1.0);
        self.published / (load * first.published)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            published,
            acknowledged,
        } = self;
        write!(
            f,
            "{published:.0}/s published of {acknowledged:.0}/s committed"
        )
    }
}
