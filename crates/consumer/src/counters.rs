//! Counts of what one consumer has done since it was built.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Live counts of one consumer; cloning shares them. They start at 0 and only grow.
#[derive(Debug, Clone, Default)]
pub struct Counters(Arc<Cells>);

#[derive(Debug, Default)]
struct Cells {
    applied: AtomicU64,
    repeated: AtomicU64,
    failed: AtomicU64,
    dead: AtomicU64,
    claimed: AtomicU64,
    lost: AtomicU64,
    outages: AtomicU64,
}

/// What [`Counters::snapshot`] saw.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CountersSnapshot {
    /// Messages whose effect this consumer has committed.
    pub applied: u64,
    /// Entries that were acknowledged without the handler, because the inbox had their key already.
    pub repeated: u64,
    /// Attempts that failed and were counted.
    pub failed: u64,
    /// Entries set aside as dead letters.
    pub dead: u64,
    /// Entries taken over from other members of the group.
    pub claimed: u64,
    /// Entries that were deleted from their stream before they were handled.
    pub lost: u64,
    /// Operations that failed because of an outage and were tried again.
    pub outages: u64,
}

/// One of the counts.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Count {
    Applied,
    Repeated,
    Failed,
    Dead,
    Claimed,
    Lost,
    Outages,
}

impl Counters {
    /// The counts as they are now.
    #[must_use]
    pub fn snapshot(&self) -> CountersSnapshot {
        CountersSnapshot {
            applied: self.cell(Count::Applied).load(Ordering::Relaxed),
            repeated: self.cell(Count::Repeated).load(Ordering::Relaxed),
            failed: self.cell(Count::Failed).load(Ordering::Relaxed),
            dead: self.cell(Count::Dead).load(Ordering::Relaxed),
            claimed: self.cell(Count::Claimed).load(Ordering::Relaxed),
            lost: self.cell(Count::Lost).load(Ordering::Relaxed),
            outages: self.cell(Count::Outages).load(Ordering::Relaxed),
        }
    }

    pub(crate) fn add(&self, count: Count, n: usize) {
        self.cell(count).fetch_add(n as u64, Ordering::Relaxed);
    }

    fn cell(&self, count: Count) -> &AtomicU64 {
        match count {
            Count::Applied => &self.0.applied,
            Count::Repeated => &self.0.repeated,
            Count::Failed => &self.0.failed,
            Count::Dead => &self.0.dead,
            Count::Claimed => &self.0.claimed,
            Count::Lost => &self.0.lost,
            Count::Outages => &self.0.outages,
        }
    }
}
