//! The consumer is killed with SIGKILL, or by a message, or frozen, and its group is lost.

use std::time::{Duration, Instant};

use outbox_testkit::{Direction, Matcher};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    Result, Scenario, Stage,
    evidence::Column,
    link::{Moment, Net},
    order::{End, Queue, STREAM, place},
    programs::GROUP,
    scenario::{Naive, Shows},
    stage::{DEADLINE, Setting, until},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new(
        7,
        "the consumer is killed before its commit",
        Naive::AckFirst,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(killed_at(stage, Step::CommitSent)),
    )
    .repeatable(),
    Scenario::new(
        7,
        "the consumer is killed between commit and acknowledgement",
        Naive::NoInbox,
        Shows::Harm(Column::DoubledEffects),
        |stage| Box::pin(killed_at(stage, Step::AcknowledgementSent)),
    )
    .repeatable(),
    Scenario::new(
        7,
        "the consumer is killed in the middle of a batch",
        Naive::AckFirst,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(killed_at(stage, Step::EffectWritten)),
    )
    .repeatable(),
    Scenario::new(
        7,
        "the consumer is killed at random moments",
        Naive::AckFirst,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(killed_at_random(stage)),
    )
    .repeatable(),
    Scenario::new(
        7,
        "some messages kill the process that handles them",
        Naive::AckFirst,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(messages_kill(stage)),
    )
    .setting(Setting {
        consumer: &["--poison", POISON],
        ..Setting::USUAL
    }),
    Scenario::new(
        7,
        "the consumer freezes in a batch, another takes it over, the first goes on",
        Naive::NoInbox,
        Shows::Harm(Column::DoubledEffects),
        |stage| Box::pin(frozen_and_taken_over(stage)),
    )
    .repeatable(),
    Scenario::new(
        7,
        "the group is destroyed",
        Naive::NoInbox,
        Shows::Harm(Column::DoubledEffects),
        |stage| Box::pin(group_is_destroyed(stage)),
    )
    .repeatable(),
];

/// The customer whose orders kill the consumer.
const POISON: &str = "poison";

/// How long it may take until the next death: what a dead consumer had read ahead runs one by one, with each attempt
/// committed before it, while more comes in.
const AFTER_DEATH: Duration = Duration::from_secs(180);

/// Orders between two kills at random moments; a consumer starts in the time of the smaller ones.
const ORDERS_BETWEEN: std::ops::Range<usize> = 1..400;

/// An effect in the middle of a batch.
const MIDDLE: usize = 7;

/// What a consumer is at when it dies.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// An effect that is not the first of its batch is written and not committed.
    EffectWritten,
    /// The commit is on its way. Now and then it is that of the consumer's housekeeping.
    CommitSent,
    /// The effects are committed, the acknowledgement is on its way.
    AcknowledgementSent,
}

impl Step {
    fn moment(self) -> Moment {
        match self {
            Step::EffectWritten => Moment::new(
                Net::Postgres,
                Matcher::sql("INSERT INTO effects").nth(MIDDLE),
                Direction::Reply,
            ),
            Step::CommitSent => {
                Moment::new(Net::Postgres, Matcher::sql("COMMIT"), Direction::Request)
            }
            Step::AcknowledgementSent => {
                Moment::new(Net::Redis, Matcher::redis("XACK"), Direction::Request)
            }
        }
    }
}

/// Kills the consumer when it is at a step, several times.
async fn killed_at(stage: &mut Stage, step: Step) -> Result {
    for _ in 0..stage.suite.scale.pick(1, 10) {
        let (index, held) = step.moment().first_of(&stage.consumers).await?;
        let given = stage.given().await?;
        stage.replace_consumer(index).await?;
        held.drop_it();
        // Where a process dies again and again with the same message in hand, that is the reason in the end.
        stage.group_passes(given).await?;
    }
    Ok(())
}

/// Kills consumers whatever they are at: also while they start, and while they repeat what the last one was at.
async fn killed_at_random(stage: &mut Stage) -> Result {
    let mut random = StdRng::seed_from_u64(stage.suite.seed);
    for _ in 0..stage.suite.scale.pick(3, 100) {
        stage
            .orders_acknowledged(random.random_range(ORDERS_BETWEEN))
            .await?;
        let index = random.random_range(0..stage.consumers.len());
        stage.replace_consumer(index).await?;
    }
    Ok(())
}

/// Some messages kill each consumer that handles them. Whoever supervises it starts it again each time.
async fn messages_kill(stage: &mut Stage) -> Result {
    let mut deaths = 0;
    for _ in 0..stage.suite.scale.pick(1, 4) {
        let mut client = stage.shop_client().await?;
        let way = stage.way();
        let key = place(&mut client, &mut Queue::new(""), way, POISON, End::Commit).await?;
        let mut follower = stage.follow_from_start().await?;
        stage.poison.insert(key.clone());
        if !follower.arrives(&key, DEADLINE).await? {
            return Err("the message that kills was not published".into());
        }
        let last = stage.last_entry().await?;
        loop {
            until(AFTER_DEATH, "a death or what comes after", || async {
                Ok(first_dead(stage).is_some() || stage.has_passed(last).await.is_ok())
            })
            .await?;
            let Some(index) = first_dead(stage) else {
                break;
            };
            deaths += 1;
            stage.replace_consumer(index).await?;
        }
    }
    stage.note(format!(
        "{} messages killed {deaths} processes",
        stage.poison.len()
    ));
    Ok(())
}

fn first_dead(stage: &Stage) -> Option<usize> {
    let dead = |consumer: &crate::Actor| consumer.process.exit_status().is_some();
    stage.consumers.iter().position(dead)
}

/// A consumer freezes in the middle of a batch. Another is given what it holds, and then it goes on where it was.
async fn frozen_and_taken_over(stage: &mut Stage) -> Result {
    for _ in 0..stage.suite.scale.pick(1, 4) {
        let (frozen, held) = Step::EffectWritten
            .moment()
            .first_of(&stage.consumers)
            .await?;
        let consumer = &stage.consumers[frozen];
        consumer.process.pause();
        let since = Instant::now();
        held.release();
        let given = stage.given().await?;
        stage.start_consumer().await?;
        stage.group_passes(given).await?;
        stage.note(format!("taken over after {:?}", since.elapsed()));

        // Its next commit ends the batch, if it can; at the second one it has got over that, too. Of our consumer
        // these are the commits with which it says that it is alive.
        let consumer = &stage.consumers[frozen];
        let commits = Matcher::sql("COMMIT").nth(2);
        let gone_on = consumer.link.postgres.hold(commits, Direction::Reply);
        consumer.process.resume();
        gone_on.reached().await?;
        gone_on.release();
        // As many as before. Whoever is left begins anew, also in the control, where both have the same name.
        if let Some(other) = stage.consumers.pop() {
            other.process.kill9();
        }
        stage.replace_consumer(frozen).await?;
    }
    Ok(())
}

/// Somebody deletes the group, several times.
async fn group_is_destroyed(stage: &mut Stage) -> Result {
    for _ in 0..stage.suite.scale.pick(2, 10) {
        let given = stage.given().await?;
        let mut redis = stage.servers.redis.connect().await?;
        redis::cmd("XGROUP")
            .arg(&["DESTROY", STREAM, GROUP])
            .exec_async(&mut redis)
            .await?;
        stage.group_passes(given).await?;
    }
    Ok(())
}
