//! A set of ids kept as ranges, for the gaps of a cursor.

use std::collections::BTreeMap;

/// A set of ids as disjoint inclusive ranges in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RangeSet {
    /// First id of a range to its last.
    ranges: BTreeMap<i64, i64>,
}

impl RangeSet {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `lo..=hi`, joining what it overlaps or touches. An empty range (`lo > hi`) adds nothing.
    pub fn insert(&mut self, lo: i64, hi: i64) {
        if lo > hi {
            return;
        }
        let (mut lo, mut hi) = (lo, hi);
        let reach = hi.saturating_add(1);
        while let Some((&other_lo, &other_hi)) = self.ranges.range(..=reach).next_back() {
            if other_hi < lo.saturating_sub(1) {
                break;
            }
            lo = lo.min(other_lo);
            hi = hi.max(other_hi);
            self.ranges.remove(&other_lo);
        }
        self.ranges.insert(lo, hi);
    }

    /// Takes `lo..=hi` out, splitting ranges where it must.
    pub fn remove(&mut self, lo: i64, hi: i64) {
        if lo > hi {
            return;
        }
        while let Some((&other_lo, &other_hi)) = self.ranges.range(..=hi).next_back() {
            if other_hi < lo {
                break;
            }
            self.ranges.remove(&other_lo);
            if other_hi > hi {
                self.ranges.insert(hi + 1, other_hi);
            }
            if other_lo < lo {
                self.ranges.insert(other_lo, lo - 1);
            }
        }
    }

    /// Whether the set holds `id`.
    pub fn contains(&self, id: i64) -> bool {
        self.range_around(id).is_some()
    }

    /// The range that holds `id`.
    pub fn range_around(&self, id: i64) -> Option<(i64, i64)> {
        let (&lo, &hi) = self.ranges.range(..=id).next_back()?;
        (id <= hi).then_some((lo, hi))
    }

    /// The ranges in ascending order, as (first, last).
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (i64, i64)> + '_ {
        self.ranges.iter().map(|(&lo, &hi)| (lo, hi))
    }

    /// The lowest id.
    pub fn first(&self) -> Option<i64> {
        self.ranges.keys().next().copied()
    }

    /// How many ranges there are: what the set costs in memory.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether the set holds nothing.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Everything in either set.
    pub fn union(mut self, other: &RangeSet) -> RangeSet {
        for (lo, hi) in other.iter() {
            self.insert(lo, hi);
        }
        self
    }

    /// What is in this set and not in `other`.
    pub fn difference(mut self, other: &RangeSet) -> RangeSet {
        for (lo, hi) in other.iter() {
            self.remove(lo, hi);
        }
        self
    }

    /// The part of the set up to and with `id`.
    pub fn up_to(mut self, id: i64) -> RangeSet {
        if let Some(above) = id.checked_add(1) {
            self.remove(above, i64::MAX);
        }
        self
    }
}

impl FromIterator<(i64, i64)> for RangeSet {
    fn from_iter<I: IntoIterator<Item = (i64, i64)>>(ranges: I) -> Self {
        let mut set = RangeSet::new();
        for (lo, hi) in ranges {
            set.insert(lo, hi);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranges: &[(i64, i64)]) -> RangeSet {
        ranges.iter().copied().collect()
    }

    #[test]
    fn insert_joins_what_touches() {
        assert_eq!(set(&[(1, 3), (7, 9), (4, 6)]), set(&[(1, 9)]));
        assert_eq!(set(&[(1, 3), (5, 6)]).len(), 2);
        assert_eq!(set(&[(5, 6), (1, 10)]), set(&[(1, 10)]));
        assert_eq!(set(&[(3, 2)]), RangeSet::new());
        assert_eq!(set(&[(i64::MAX, i64::MAX), (1, i64::MAX)]).len(), 1);
    }

    #[test]
    fn remove_splits_and_spans() {
        let mut gaps = set(&[(1, 10), (20, 30)]);
        gaps.remove(5, 22);
        assert_eq!(gaps, set(&[(1, 4), (23, 30)]));
        gaps.remove(25, 25);
        assert_eq!(
            gaps.iter().collect::<Vec<_>>(),
            [(1, 4), (23, 24), (26, 30)]
        );
        assert!(gaps.contains(24) && !gaps.contains(25) && !gaps.contains(22));
    }

    #[test]
    fn set_algebra_agrees_with_plain_sets() {
        use std::collections::BTreeSet;
        let plain = |s: &RangeSet| {
            (0..40)
                .filter(|id| s.contains(*id))
                .collect::<BTreeSet<i64>>()
        };
        let a = set(&[(1, 5), (9, 9), (15, 20)]);
        for (lo, hi) in [(0, 0), (3, 3), (4, 16), (9, 9), (0, 39), (21, 22)] {
            let b = set(&[(lo, hi), (30, 31)]);
            assert_eq!(
                plain(&a.clone().union(&b)),
                plain(&a).union(&plain(&b)).copied().collect()
            );
            assert_eq!(
                plain(&a.clone().difference(&b)),
                plain(&a).difference(&plain(&b)).copied().collect()
            );
            assert_eq!(
                plain(&a.clone().up_to(hi)),
                plain(&a).range(..=hi).copied().collect()
            );
        }
    }
}
