//! All faults, a file for each family.

mod soak;
mod window_one;

use crate::Scenario;

/// Every scenario, in the report's order.
#[must_use]
pub fn all() -> Vec<Scenario> {
    [window_one::SCENARIOS, soak::SCENARIOS].concat()
}
