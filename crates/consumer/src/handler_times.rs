//! How long the calls of a handler took, as a histogram.

use std::time::Duration;

/// Upper bounds of the buckets in microseconds; the last bucket has none.
const BOUNDS_US: [u64; 13] = [
    1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    10_000_000, 60_000_000,
];

/// A histogram of the time that calls of the handler took.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HandlerTimes {
    buckets: [u64; BOUNDS_US.len() + 1],
    total: Duration,
}

impl HandlerTimes {
    pub(crate) fn add(&mut self, time: Duration) {
        let bucket = BOUNDS_US.partition_point(|bound| u128::from(*bound) < time.as_micros());
        self.buckets[bucket] += 1;
        self.total = self.total.saturating_add(time);
    }

    /// How many calls there were.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// How long they took together.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.total
    }

    /// The calls by how long they took: an upper bound, none for the last, and how many took up to that and longer
    /// than the bound before it.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        let bounds = BOUNDS_US
            .iter()
            .map(|bound| Some(Duration::from_micros(*bound)));
        bounds.chain([None]).zip(self.buckets.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_is_in_the_bucket_of_its_time() {
        let mut times = HandlerTimes::default();
        for ms in [0, 1, 2, 120_000] {
            times.add(Duration::from_millis(ms));
        }
        assert_eq!(times.calls(), 4);
        assert_eq!(times.total(), Duration::from_millis(120_003));
        let filled: Vec<_> = times.buckets().filter(|(_, calls)| *calls > 0).collect();
        let us = |us| Some(Duration::from_micros(us));
        assert_eq!(filled, [(us(1_000), 2), (us(2_500), 1), (None, 1)]);
    }
}
