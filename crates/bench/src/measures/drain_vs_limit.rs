//! How near the relay comes to what Redis can take.

use crate::{
    Error,
    figures::{Outcome, Target},
    limit::limit,
    rows::ONE_TOPIC,
    stage::Stage,
    stats::quotients,
};

pub(crate) async fn take(stage: &Stage) -> Result<Outcome, Error> {
    let backlog = stage.backlog().await?;
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for round in 0..stage.sizes.repeats {
        stage.round("bare XADDs", round);
        bare.push(limit(backlog.rows, ONE_TOPIC).await?);
        stage.round("the relay drains", round);
        ours.push(backlog.drain(stage, &[]).await?);
    }
    let rates: Vec<f64> = ours.iter().map(|drained| drained.rows_per_s).collect();
    let limits: Vec<f64> = bare.iter().map(|limit| limit.entries_per_s).collect();
    let column = |of: fn(&crate::backlog::Drained) -> f64| ours.iter().map(of).collect::<Vec<_>>();
    let of_bare: Vec<f64> = bare.iter().map(|limit| limit.redis_us_per_entry).collect();
    Ok(Outcome::default()
        .must(
            "relay / limit",
            "",
            &quotients(&rates, &limits),
            Target::AtLeast(0.55),
        )
        .beside("relay", "rows/s", &rates)
        .beside("limit", "entries/s", &limits)
        .beside(
            "Redis CPU, relay",
            "us/row",
            &column(|drained| drained.redis_us_per_row),
        )
        .beside("Redis CPU, limit", "us/entry", &of_bare)
        .beside(
            "relay CPU",
            "us/row",
            &column(|drained| drained.relay_us_per_row),
        ))
}
