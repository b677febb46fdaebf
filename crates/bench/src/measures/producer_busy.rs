//! What waking the relay costs producers that keep it busy anyway.

use outbox_testkit::Redis;

use crate::{
    Error,
    figures::{Outcome, Target},
    producers::busy,
    shop::{CLIENTS, CREATE_ORDERS, Clerk},
    stage::Stage,
    stats::quotients,
};

const NO_TRIGGER: &str = "DROP TRIGGER wake_relay ON outbox.messages";

const NOTIFY_IN_EACH_COMMIT: &str = "
    DROP TRIGGER wake_relay ON outbox.messages;
    CREATE TRIGGER wake_relay AFTER INSERT ON outbox.messages
        FOR EACH STATEMENT EXECUTE FUNCTION outbox.wake_relay()";

/// Short, so that the relay drains all the time also where nothing wakes it.
const POLL: [&str; 2] = ["--poll-interval", "10ms"];

/// Parts of a round, so that arms that are compared are close in time: the speed of a machine wanders.
const TURNS: u32 = 2;

/// Names as the chart has them.
pub(crate) const OURS: &str = "wakes a sleeping relay only";
pub(crate) const WITHOUT: &str = "no trigger";
pub(crate) const ALWAYS: &str = "NOTIFY in each commit";

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let (mut ours, mut without, mut always) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        for _ in 0..TURNS {
            stage.round(WITHOUT, round);
            without.push(run(stage, NO_TRIGGER).await?);
            stage.round(OURS, round);
            ours.push(run(stage, "").await?);
            stage.round(ALWAYS, round);
            always.push(run(stage, NOTIFY_IN_EACH_COMMIT).await?);
        }
    }
    Ok(Outcome::default()
        .must(
            "trigger / no trigger",
            "",
            &quotients(&ours, &without),
            Target::AtLeast(0.9),
        )
        .must(
            "trigger / NOTIFY in each commit",
            "",
            &quotients(&ours, &always),
            Target::AtLeast(2.0),
        )
        .beside(WITHOUT, "tps", &without)
        .beside(OURS, "tps", &ours)
        .beside(ALWAYS, "tps", &always))
}

async fn run(stage: &Stage, change: &str) -> Result<f64, Error> {
    let database = stage.fresh_outbox().await?;
    let client = stage.connect(&database).await?;
    client.batch_execute(CREATE_ORDERS).await?;
    client.batch_execute(change).await?;
    let redis = Redis::start().await?;
    let relay = stage.relay(&stage.url_beside(&database), &redis, &POLL)?;
    let clerks = Clerk::open_all(stage, &database, CLIENTS).await?;
    clerks[0].order_and_message(u64::from(u32::MAX)).await?;
    relay.published(&mut redis.connect().await?, 1).await?;
    let time = stage.sizes.busy / TURNS;
    let tps = busy(clerks, time, |clerk, number| async move {
        clerk.order_and_message(number).await
    })
    .await?;
    relay.stop().await?;
    stage.drop_database(&database).await?;
    Ok(tps)
}
