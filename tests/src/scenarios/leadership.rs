//! Several relays: the one that leads dies, freezes or is cut off, and never do two of them publish.

use std::time::{Duration, Instant};

use outbox_testkit::{Direction, Matcher, RelayStep, eventually};

use crate::{
    Arm, Result, Scenario, Stage,
    evidence::Column,
    scenario::{Naive, Shows},
    stage::DEADLINE,
};

/// Who leads, and how many relays stand by and reach Redis: the advisory locks 1 and 5.
const RELAYS: &str = "
    SELECT max(a.application_name) FILTER (WHERE l.objid = 1), count(*) FILTER (WHERE l.objid = 5)
    FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
    WHERE l.locktype = 'advisory' AND l.classid = 1869968482 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())";

const fn scenario(name: &'static str, relays: usize, strike: crate::Strike) -> Scenario {
    let harm = Shows::Harm(Column::DoubledInStream);
    Scenario::new(6, name, Naive::LoopWithoutLock, harm, strike).carriers(relays)
}

pub(super) const SCENARIOS: &[Scenario] = &[
    scenario("the leader of two is killed", 2, |stage| {
        Box::pin(killed(stage))
    })
    .repeatable(),
    scenario("the leader of three is killed", 3, |stage| {
        Box::pin(killed(stage))
    }),
    scenario(
        "the leader of two freezes, and its page arrives late",
        2,
        |stage| Box::pin(frozen(stage, Direction::Request)),
    )
    .repeatable(),
    scenario(
        "the leader of three freezes, and its page arrives late",
        3,
        |stage| Box::pin(frozen(stage, Direction::Request)),
    ),
    scenario(
        "the leader of two freezes before the reply to its page",
        2,
        |stage| Box::pin(frozen(stage, Direction::Reply)),
    )
    .repeatable(),
    scenario("the leader is cut off from Postgres", 2, |stage| {
        Box::pin(cut_off(stage, true, false, WITHOUT_POSTGRES))
    })
    .repeatable(),
    scenario("the leader is cut off from Redis", 2, |stage| {
        Box::pin(cut_off(stage, false, true, WITHOUT_REDIS))
    }),
    scenario(
        "the leader of three is cut off from both servers",
        3,
        |stage| Box::pin(cut_off(stage, true, true, WITHOUT_POSTGRES)),
    ),
];

/// In what time another relay takes over. See [`taken_over`] for how much more a busy machine may take.
const AFTER_CRASH: Duration = Duration::from_secs(2);
const FROZEN: Duration = Duration::from_secs(8);
const WITHOUT_POSTGRES: Duration = FROZEN;

/// For ten seconds it keeps the lead: Redis may come back.
const WITHOUT_REDIS: Duration = Duration::from_secs(10 + 2);

async fn killed(stage: &mut Stage) -> Result {
    for _ in 0..stage.suite.scale.pick(1, 5) {
        let leader = leader_among_standbys(stage).await?;
        stage.carriers.remove(leader).process.kill9();
        taken_over(stage, Instant::now(), AFTER_CRASH).await?;
        stage.start_carrier().await?;
    }
    Ok(())
}

/// The leader freezes while a page is on its way to Redis, or the reply on its way back. It thaws long after another
/// relay has taken over, and only then what was on its way arrives.
async fn frozen(stage: &mut Stage, direction: Direction) -> Result {
    let leader = leader_among_standbys(stage).await?;
    let matcher = match stage.arm {
        Arm::Control => Matcher::redis("XADD"),
        Arm::Outbox => RelayStep::PageSent.matcher(),
    };
    let redis = &stage.carriers[leader].link.redis;
    let page = redis.hold(matcher, direction);
    page.reached().await?;
    stage.carriers[leader].process.pause();
    taken_over(stage, Instant::now(), FROZEN).await?;
    stage.carriers[leader].process.resume();
    page.release();
    // It is of use again.
    leader_among_standbys(stage).await?;
    Ok(())
}

async fn cut_off(
    stage: &mut Stage,
    from_postgres: bool,
    from_redis: bool,
    target: Duration,
) -> Result {
    let leader = leader_among_standbys(stage).await?;
    let link = &stage.carriers[leader].link;
    if from_postgres {
        link.postgres.blackhole_all().await?;
    }
    if from_redis {
        link.redis.blackhole_all().await?;
    }
    taken_over(stage, Instant::now(), target).await?;
    let link = &stage.carriers[leader].link;
    link.postgres.pass().await?;
    link.redis.pass().await?;
    // It is of use again.
    leader_among_standbys(stage).await?;
    Ok(())
}

/// The carrier that leads, once all others stand by. Of naive loops, any.
async fn leader_among_standbys(stage: &Stage) -> Result<usize> {
    if stage.arm == Arm::Control {
        return Ok(0);
    }
    let client = stage.shop_client().await?;
    let standing_by = i64::try_from(stage.carriers.len() - 1)?;
    let what = "one leader, and the others standing by";
    let leader = eventually(DEADLINE, what, || async {
        let row = client
            .query_one(RELAYS, &[])
            .await
            .map_err(|e| e.to_string())?;
        let (leader, standbys): (Option<String>, i64) = (row.get(0), row.get(1));
        match &leader {
            Some(leader) if standbys == standing_by => Ok(leader.clone()),
            _ => Err(format!("{leader:?} leads {standbys} standbys")),
        }
    })
    .await?;
    let mut carriers = stage.carriers.iter();
    let leader = carriers.position(|carrier| carrier.name == leader);
    Ok(leader.ok_or("a stranger leads")?)
}

/// Waits until a message that is written now arrives, by whomever, and holds the time against twice the target.
async fn taken_over(stage: &mut Stage, since: Instant, target: Duration) -> Result {
    let took = stage.recovered(since).await?;
    if stage.arm == Arm::Control {
        return Ok(());
    }
    let took = took.ok_or("no other relay takes over")?;
    stage.recovery = stage.recovery.max(Some(took));
    let measured = format!(
        "another relay had taken over after {:.1} s, the target is {} s",
        took.as_secs_f64(),
        target.as_secs()
    );
    stage.note(measured.clone());
    // The short form runs beside many other tests.
    let margin = stage.suite.scale.pick(target.max(FROZEN), target);
    if took > target + margin {
        return Err(measured.into());
    }
    Ok(())
}
