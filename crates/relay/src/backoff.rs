//! Waiting longer after each failure: the only file that knows the `backoff` crate.

use std::time::Duration;

use backoff::SystemClock;
use backoff::backoff::Backoff as _;
use backoff::exponential::{ExponentialBackoff, ExponentialBackoffBuilder};

use crate::config::Config;

/// The wait where only a person can help.
const SLOW: Duration = Duration::from_secs(5);

/// Waits with jitter that double up to a bound, without an end.
#[derive(Debug)]
pub(crate) struct Waits {
    backoff: ExponentialBackoff<SystemClock>,
    longest: Duration,
}

impl Waits {
    /// Waits within the configured bounds.
    pub(crate) fn new(config: &Config) -> Self {
        Self::between(config.backoff_first, config.backoff_max)
    }

    fn between(first: Duration, longest: Duration) -> Self {
        let backoff = ExponentialBackoffBuilder::new()
            .with_initial_interval(first)
            .with_max_interval(longest)
            .with_multiplier(2.0)
            .with_randomization_factor(0.3)
            .with_max_elapsed_time(None)
            .build();
        Waits { backoff, longest }
    }

    /// How long to wait before the next try.
    pub(crate) fn next(&mut self) -> Duration {
        self.backoff.next_backoff().unwrap_or(self.longest)
    }

    /// How long to wait before the next try where only a person can help.
    pub(crate) fn slow(&self) -> Duration {
        SLOW
    }

    /// Begins anew after a success.
    pub(crate) fn reset(&mut self) {
        self.backoff.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_stay_within_their_bounds_for_ever() {
        const FIRST: Duration = Duration::from_millis(10);
        const LONGEST: Duration = Duration::from_millis(100);
        let mut waits = Waits::between(FIRST, LONGEST);
        assert!(waits.next() <= FIRST.mul_f64(1.3));
        for _ in 0..10_000 {
            assert!(waits.next() <= LONGEST.mul_f64(1.3));
        }
        assert!(waits.next() >= LONGEST.mul_f64(0.7));
        waits.reset();
        assert!(waits.next() <= FIRST.mul_f64(1.3));
    }
}
