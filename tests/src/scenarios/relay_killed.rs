//! The relay is killed with SIGKILL, at each step of a page and at random moments.

use std::collections::HashSet;

use outbox_testkit::{Matcher, RelayStep as Step};
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
        |stage| Box::pin(killed_at(stage, Step::PageSent)),
    )
    .repeatable(),
    Scenario::new(
        3,
        "the relay is killed after its script and before the reply",
        Naive::MarkingLoop,
        Shows::Harm(Column::DoubledInStream),
        |stage| Box::pin(killed_at(stage, Step::PageRun)),
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

/// The moment at which whoever carries messages is at a step. The naive loop does the same with other words: its script
/// is its XADDs, its checkpoint the commit of what it has marked.
fn moment(step: Step, arm: Arm) -> Moment {
    let net = if step.is_of_redis() {
        Net::Redis
    } else {
        Net::Postgres
    };
    let matcher = match (arm, step) {
        (Arm::Outbox, step) => step.matcher(),
        (Arm::Control, Step::PageRead) => Matcher::sql("SKIP LOCKED"),
        (Arm::Control, Step::PageSent | Step::PageRun) => Matcher::redis("XADD"),
        (Arm::Control, Step::CheckpointSent | Step::CheckpointWritten) => Matcher::sql("COMMIT"),
    };
    Moment::new(net, matcher, step.direction())
}

/// Kills whoever carries messages when it is at a step, several times.
async fn killed_at(stage: &mut Stage, step: Step) -> Result {
    let moment = moment(step, stage.arm);
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
