//! The relay beside the loop that most relays are.

use crate::{
    Error,
    figures::{Outcome, Target},
    marking::{self, Sent},
    stage::Stage,
    stats::quotients,
};

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let backlog = stage.backlog().await?;
    let database = stage.fresh_outbox().await?;
    let (mut ours, mut marking) = (Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        marking.push(marking::drain(stage, &database, backlog.rows, Sent::Marked).await?);
        stage.round("the relay drains", round);
        ours.push(backlog.drain(stage, &[]).await?.rows_per_s);
    }
    stage.drop_database(&database).await?;
    Ok(Outcome::default()
        .must(
            "relay / loop",
            "",
            &quotients(&ours, &marking),
            Target::AtLeast(3.0),
        )
        .beside("relay", "rows/s", &ours)
        .beside("loop with UPDATE", "rows/s", &marking))
}
