//! How much each measure does.

use std::time::Duration;

/// Sizes of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// How often each arm runs, one after the other.
    pub(crate) repeats: usize,
    /// Rows that are drained.
    pub(crate) drain_rows: u64,
    /// Rows of 4 MB.
    pub(crate) large_rows: u64,
    /// How long an arm of `latency`, `wal`, `barrier` takes.
    pub(crate) paced: Duration,
    /// How long an arm of the producers takes.
    pub(crate) busy: Duration,
    pub(crate) idle: Duration,
    /// How long the transaction of `held_xmin` is open.
    pub(crate) held: Duration,
    /// The first and the last part of it, which are compared.
    pub(crate) held_part: Duration,
    /// Messages that a consumer applies in batches; one by one it is a quarter.
    pub(crate) consumed: u64,
    /// Messages from commit to effect.
    pub(crate) end_to_end: u64,
}

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// What is asked for.
pub(crate) const FULL: Sizes = Sizes {
    repeats: 3,
    drain_rows: 1_000_000,
    large_rows: 200,
    paced: seconds(20),
    busy: seconds(10),
    idle: seconds(30),
    held: seconds(60),
    held_part: seconds(10),
    consumed: 400_000,
    end_to_end: 200_000,
};

/// About three minutes.
pub(crate) const QUICK: Sizes = Sizes {
    repeats: 3,
    drain_rows: 80_000,
    large_rows: 10,
    paced: Duration::from_millis(1_200),
    busy: seconds(1),
    idle: seconds(3),
    held: seconds(2),
    held_part: seconds(1),
    consumed: 30_000,
    end_to_end: 6_000,
};

/// Shows that it runs, and measures nothing.
pub(crate) const TINY: Sizes = Sizes {
    repeats: 1,
    drain_rows: 2_000,
    large_rows: 2,
    paced: Duration::from_millis(300),
    busy: Duration::from_millis(300),
    idle: Duration::from_millis(500),
    held: seconds(2),
    held_part: Duration::from_millis(500),
    consumed: 2_000,
    end_to_end: 2_000,
};
