//! How far the purge may go while groups hold rows back (`--hold-until-acked`).
//!
//! Rows do not stand in the streams in the order of their ids, since a row that commits late is published late. So
//! what a group has acknowledged is told by time: a point says that all rows up to an id stood in the streams when no
//! entry was younger than some millisecond. Once the group has acknowledged everything up to that millisecond, it has
//! acknowledged those rows. Both times are those of entries, so no clocks are compared.

use std::collections::VecDeque;

/// Points that are remembered; past it every other one goes, which holds rows a little longer.
const POINTS_MAX: usize = 1_024;

/// All rows up to `settled` stand in the streams, in entries of the millisecond `last_ms` or before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    settled: i64,
    last_ms: u64,
}

/// The points of one leadership. A later one begins anew, since rows may have been published again in between.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    points: VecDeque<Point>,
}

impl Ledger {
    /// Records that the rows up to `settled` were in the streams before their last entries were looked at.
    pub(super) fn note(&mut self, settled: i64, last_ms: u64) {
        if self
            .points
            .back()
            .is_some_and(|last| last.settled >= settled)
        {
            return;
        }
        self.points.push_back(Point { settled, last_ms });
        if self.points.len() > POINTS_MAX {
            let mut keep = false;
            self.points.retain(|_| {
                keep = !keep;
                keep
            });
        }
    }

    /// The id up to which all rows are acknowledged, when the oldest entry that is not is of this millisecond.
    pub(super) fn acknowledged_up_to(&mut self, oldest_ms: u64) -> i64 {
        let passed = self
            .points
            .iter()
            .take_while(|point| point.last_ms < oldest_ms)
            .count();
        // A group that is set back needs earlier points again, and without them all is held until it has caught up.
        self.points.drain(..passed.saturating_sub(1));
        match self.points.front() {
            Some(point) if passed > 0 => point.settled,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_go_once_everything_published_with_them_is_acknowledged() {
        let mut ledger = Ledger::default();
        assert_eq!(ledger.acknowledged_up_to(u64::MAX), 0);
        ledger.note(10, 100);
        ledger.note(20, 200);
        ledger.note(20, 250);
        ledger.note(30, 300);
        assert_eq!(ledger.acknowledged_up_to(100), 0);
        assert_eq!(ledger.acknowledged_up_to(101), 10);
        // An entry of the same millisecond may be one of the rows.
        assert_eq!(ledger.acknowledged_up_to(200), 10);
        assert_eq!(ledger.acknowledged_up_to(201), 20);
        assert_eq!(ledger.acknowledged_up_to(150), 0);
        assert_eq!(ledger.acknowledged_up_to(301), 30);
    }

    #[test]
    fn memory_is_bounded_and_the_latest_points_stay() {
        let mut ledger = Ledger::default();
        for n in 1..=100_000 {
            ledger.note(n, n.unsigned_abs());
        }
        assert!(ledger.points.len() <= POINTS_MAX);
        let last = ledger.points.back().unwrap();
        assert!(last.settled > 99_000, "{last:?}");
        assert!(ledger.acknowledged_up_to(50_001) <= 50_000);
    }
}
