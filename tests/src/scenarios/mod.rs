//! All faults, a file for each family.

mod consumer_killed;
mod leadership;
mod long_transactions;
mod postgres_crashes;
mod postgres_falls;
mod redis_falls;
mod redis_refuses;
mod relay_killed;
mod soak;
mod window_one;
mod window_two;

use crate::Scenario;

/// Every scenario, in the report's order.
#[must_use]
pub fn all() -> Vec<Scenario> {
    [
        window_one::SCENARIOS,
        window_two::SCENARIOS,
        relay_killed::SCENARIOS,
        redis_falls::SCENARIOS,
        redis_refuses::SCENARIOS,
        postgres_crashes::SCENARIOS,
        postgres_falls::SCENARIOS,
        leadership::SCENARIOS,
        consumer_killed::SCENARIOS,
        long_transactions::SCENARIOS,
        soak::SCENARIOS,
    ]
    .concat()
}
