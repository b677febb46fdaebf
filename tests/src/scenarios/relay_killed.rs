//! The relay is killed with SIGKILL, at each step of a page and at random moments.

use std::collections::HashSet;

use outbox_testkit::{Direction, Matcher};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    Arm, Result, Scenario, Stage,
    evidence::Column,
    link::{Moment, Net},
    scenario::{Naive, Shows},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new(
        3,
        "the relay is killed after it has read a page",
        Naive::MarkingLoop,
        Shows::Nothing,
        |stage| Box::pin(killed_at(stage, Step::PageRead)),
    )
    .repeatable(),
    Scenario::new(
        3,
        "the relay is killed before its script runs",
        Naive::MarkingLoop,
        Shows::Nothing,
        |stage| Box::pin(killed_at(stage, Step::ScriptSent)),
    )
    .repeatable(),
    Scenario::new(
        3,
        "the relay is killed after its script and before the reply",
        Naive::MarkingLoop,
        Shows::Harm(Column::DoubledInStream),
        |stage| Box::pin(killed_at(stage, Step::ScriptRun)),
    )
    .repeatable(),
    Scenario::new(
        3,
        "the relay is killed before its checkpoint",
        Naive::MarkingLoop,
        Shows::Harm(Column::DoubledInStream),
        |stage| Box::pin(killed_at(stage, Step::CheckpointSent)),
    )
    .repeatable(),
    Scenario::new(
        3,
        "the relay is killed after its checkpoint",
        Naive::MarkingLoop,
        Shows::Nothing,
        |stage| Box::pin(killed_at(stage, Step::CheckpointWritten)),
    )
    .repeatable(),
    Scenario::new(
        3,
        "the relay is killed at random moments",
        Naive::MarkingLoop,
        Shows::Harm(Column::DoubledInStream),
        |stage| Box::pin(killed_at_random(stage)),
    )
    .repeatable(),
];

/// Orders between two kills at random moments; a relay starts in the time of the smaller ones.
const ORDERS_BETWEEN: std::ops::Range<usize> = 1..400;

/// What the relay is at when it dies. The naive loop does the same with other words: its script is its XADDs, its
/// checkpoint the commit of what it has marked.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Postgres has sent the page, the relay has not got it.
    PageRead,
    /// The script is on its way.
    ScriptSent,
    /// The script has run, its reply is on its way.
    ScriptRun,
    /// The checkpoint is on its way.
    CheckpointSent,
    /// The checkpoint is committed.
    CheckpointWritten,
}

impl Step {
    fn moment(self, arm: Arm) -> Moment {
        let (read, script, checkpoint) = match arm {
            Arm::Control => ("SKIP LOCKED", "XADD", "COMMIT"),
            Arm::Outbox => ("UNION ALL", "EVALSHA", "UPDATE outbox.checkpoint"),
        };
        let (net, matcher) = match self {
            Step::PageRead => (Net::Postgres, Matcher::sql(read)),
            Step::ScriptSent | Step::ScriptRun => (Net::Redis, Matcher::redis(script)),
            Step::CheckpointSent | Step::CheckpointWritten => {
                (Net::Postgres, Matcher::sql(checkpoint))
            }
        };
        let direction = match self {
            Step::ScriptSent | Step::CheckpointSent => Direction::Request,
            Step::PageRead | Step::ScriptRun | Step::CheckpointWritten => Direction::Reply,
        };
        Moment::new(net, matcher, direction)
    }
}

/// Kills whoever carries messages when it is at a step, several times.
async fn killed_at(stage: &mut Stage, step: Step) -> Result {
    let moment = step.moment(stage.arm);
    for _ in 0..stage.suite.scale.pick(3, 10) {
        // A relay that is about to take over has steps of another kind.
        stage.messages_flow().await?;
        let (index, held) = moment.first_of(&stage.carriers).await?;
        stage.replace_carrier(index).await?;
        held.drop_it();
    }
    Ok(())
}

/// Kills relays whatever they are at: also while they start and take over. The window of the control is a part of each of
/// its pages: there it goes on until a kill has hit it.
async fn killed_at_random(stage: &mut Stage) -> Result {
    let mut random = StdRng::seed_from_u64(stage.suite.seed);
    let kills = stage.suite.scale.pick(10, 100);
    let kills_max = match stage.arm {
        Arm::Control => 10 * kills,
        Arm::Outbox => kills,
    };
    for kill in 1..=kills_max {
        stage
            .orders_acknowledged(random.random_range(ORDERS_BETWEEN))
            .await?;
        let index = random.random_range(0..stage.carriers.len());
        stage.replace_carrier(index).await?;
        if kill >= kills && has_doubled(stage).await? {
            break;
        }
    }
    Ok(())
}

async fn has_doubled(stage: &Stage) -> Result<bool> {
    let keys = stage.follow_from_start().await?.rest().await?;
    let once: HashSet<&String> = keys.iter().collect();
    Ok(once.len() < keys.len())
}
