//! How long to wait before something is tried again. The only file that knows the crate `backoff`.

use std::time::Duration;

use backoff::{ExponentialBackoff, backoff::Backoff as _};

/// Doublings after which any interval has reached its cap; more are not computed.
const DOUBLINGS_MAX: u32 = 64;

/// An interval that starts at `initial`, doubles up to `cap`, and is spread by half in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    pub(crate) initial: Duration,
    pub(crate) cap: Duration,
}

impl Pace {
    fn intervals(self) -> ExponentialBackoff {
        ExponentialBackoff {
            current_interval: self.initial,
            initial_interval: self.initial,
            multiplier: 2.0,
            max_interval: self.cap,
            // No limit: who gives up decides so by a count or a signal, never by this clock.
            max_elapsed_time: None,
            ..ExponentialBackoff::default()
        }
    }

    /// The wait after the given number of failed attempts, the first being 1.
    pub(crate) fn after_attempts(self, attempts: u32) -> Duration {
        let mut intervals = self.intervals();
        for _ in 1..attempts.min(DOUBLINGS_MAX) {
            intervals.next_backoff();
        }
        intervals.next_backoff().unwrap_or(self.cap)
    }
}

/// The waits of one outage, until [`Backoff::reset`].
#[derive(Debug)]
pub(crate) struct Backoff {
    pace: Pace,
    intervals: ExponentialBackoff,
    tries: u64,
}

impl Backoff {
    pub(crate) fn new(pace: Pace) -> Self {
        Self {
            pace,
            intervals: pace.intervals(),
            tries: 0,
        }
    }

    /// The next wait. It never ends and never overflows, however long the outage.
    pub(crate) fn next_wait(&mut self) -> Duration {
        self.tries = self.tries.saturating_add(1);
        self.intervals.next_backoff().unwrap_or(self.pace.cap)
    }

    /// The tries since the outage began.
    pub(crate) fn tries(&self) -> u64 {
        self.tries
    }

    pub(crate) fn reset(&mut self) {
        self.tries = 0;
        self.intervals.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: Pace = Pace {
        initial: Duration::from_millis(10),
        cap: Duration::from_millis(100),
    };

    #[test]
    fn the_wait_neither_overflows_nor_vanishes() {
        let mut backoff = Backoff::new(PACE);
        for n in 0..10_000 {
            let wait = backoff.next_wait();
            assert!(wait >= Duration::from_millis(5), "try {n}: {wait:?}");
            assert!(wait <= Duration::from_millis(150), "try {n}: {wait:?}");
            assert!(
                n < 10 || wait >= Duration::from_millis(50),
                "try {n}: {wait:?}"
            );
        }
    }

    #[test]
    fn any_stored_number_of_attempts_has_a_wait() {
        for attempts in [0, 1, 2, 63, 64, 1_000, u32::MAX] {
            let wait = PACE.after_attempts(attempts);
            assert!(wait >= Duration::from_millis(5), "{attempts}: {wait:?}");
            assert!(wait <= Duration::from_millis(150), "{attempts}: {wait:?}");
        }
        assert!(PACE.after_attempts(64) >= Duration::from_millis(50));
    }
}
