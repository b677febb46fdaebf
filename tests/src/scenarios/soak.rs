//! Everything at once: for as long as is asked, one fault after the other, drawn from all that can be repeated.

use std::time::Instant;

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};

use super::all;
use crate::{
    Result, Scale, Scenario, Stage,
    scenario::{Naive, Shows},
    stage::Setting,
};

pub(super) const SCENARIOS: &[Scenario] = &[Scenario::new(
    9,
    "soak: random faults, one after the other",
    Naive::MarkingLoop,
    Shows::NoControl,
    |stage| Box::pin(soak(stage)),
)
.carriers(2)
.consumers(2)
.setting(Setting {
    relay: &["--redis-memory-ceiling", "0"], // one of the faults is a Redis that refuses because it is full
    shop: &["--per-second", "1000"],
    ..Setting::USUAL
})];

/// Orders between two faults. Few: the next fault strikes while the last one is being got over.
const ORDERS_BETWEEN: std::ops::Range<usize> = 100..1_500;

async fn soak(stage: &mut Stage) -> Result {
    let faults: Vec<Scenario> = all().into_iter().filter(|fault| fault.repeatable).collect();
    let mut random = StdRng::seed_from_u64(stage.suite.seed);
    let mut struck = Vec::new();
    let end = Instant::now() + stage.suite.soak;
    stage.suite.scale = Scale::Short;
    while Instant::now() < end {
        stage
            .orders_acknowledged(random.random_range(ORDERS_BETWEEN))
            .await?;
        let fault = faults.choose(&mut random).ok_or("no fault to repeat")?;
        struck.push(fault.title());
        tracing::info!(fault = fault.title(), "striking");
        let history = |e| format!("{e}, after {struck:#?}");
        (fault.strike)(stage).await.map_err(history)?;
        if stage.shops.is_empty() {
            stage.start_shop().await?;
        }
        if stage.recovered(Instant::now()).await?.is_none() {
            return Err(history("no message comes through any more".into()).into());
        }
    }
    // What single faults measured under these conditions is not what they are about.
    stage.notes.clear();
    stage.recovery = None;
    stage.note(format!(
        "seed {}, {} faults in {:?}",
        stage.suite.seed,
        struck.len(),
        stage.suite.soak
    ));
    Ok(())
}
