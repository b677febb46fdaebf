//! The cursor: what has been published. A marker in Redis and a checkpoint in Postgres each hold one.

use super::ranges::RangeSet;

/// What has been published: every id up to `high` that is not in `gaps`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cursor {
    /// The largest id read. 0 before the first message.
    pub high: i64,
    /// The `message_key` of the row at `high`, to recognise the row by; empty when `high` is 0.
    pub high_key: String,
    /// Ids below `high` that were not visible when the cursor passed them.
    pub gaps: RangeSet,
}

/// One page's change to a cursor, as small as the page, however many gaps there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Step {
    /// The new `high` and its key, when the page moves it.
    pub high: Option<(i64, String)>,
    /// Gap ranges that are new or end elsewhere now, by first id. Applied after `unset`.
    pub set: Vec<(i64, i64)>,
    /// First ids of gap ranges that are gone.
    pub unset: Vec<i64>,
}

impl Step {
    /// Whether the page leaves the cursor as it is.
    pub fn is_empty(&self) -> bool {
        self.high.is_none() && self.set.is_empty() && self.unset.is_empty()
    }
}

impl Cursor {
    /// Whether `id` counts as published.
    pub fn covers(&self, id: i64) -> bool {
        id <= self.high && !self.gaps.contains(id)
    }

    /// Whether the row at `high` has yet to be looked up; see [`Cursor::anchor`].
    pub fn lacks_key(&self) -> bool {
        self.high > 0 && self.high_key.is_empty()
    }

    /// Makes `high` a published row whose key is known, since the history is recognised by it. `nearest` is the
    /// row at or below `high` with the largest id. Where that is in a gap, the cursor still lacks a key, and
    /// the caller looks again; without any row, nothing is published.
    pub fn anchor(&mut self, nearest: Option<(i64, String)>) {
        let Some((id, key)) = nearest else {
            *self = Cursor::default();
            return;
        };
        match self.gaps.range_around(id) {
            Some((lo, _)) => self.high = lo - 1,
            None => (self.high, self.high_key) = (id, key),
        }
        self.gaps = std::mem::take(&mut self.gaps).up_to(self.high);
    }

    /// The ids that this cursor has not published and `ahead` has.
    pub fn behind(&self, ahead: &Cursor) -> RangeSet {
        let mut ids = self.gaps.clone();
        ids.insert(self.high + 1, i64::MAX);
        ids.up_to(ahead.high).difference(&ahead.gaps)
    }

    /// The change that publishing `rows` (id and key, ascending) and giving up the `dead` ranges makes.
    ///
    /// A row at or below `high` fills a gap. A row above it moves `high`, and the ids between become a gap.
    pub fn step<'a>(
        &self,
        rows: impl IntoIterator<Item = (i64, &'a str)>,
        dead: &RangeSet,
    ) -> Step {
        let mut touched = RangeSet::new();
        let mut left = RangeSet::new();
        let mut opened = Vec::new();
        let mut high: Option<(i64, &str)> = None;

        let close = |lo: i64, hi: i64, touched: &mut RangeSet, left: &mut RangeSet| {
            if let Some((gap_lo, gap_hi)) = self.gaps.range_around(lo)
                && touched.range_around(gap_lo).is_none()
            {
                touched.insert(gap_lo, gap_hi);
                left.insert(gap_lo, gap_hi);
            }
            left.remove(lo, hi);
        };
        for (lo, hi) in dead.iter() {
            // A dead range may cover several gaps of this cursor.
            let mut at = lo;
            while at <= hi {
                let end = self
                    .gaps
                    .range_around(at)
                    .map_or(at, |(_, gap_hi)| gap_hi.min(hi));
                close(at, end, &mut touched, &mut left);
                at = end + 1;
            }
        }
        for (id, key) in rows {
            let top = high.map_or(self.high, |(top, _)| top);
            if id <= top {
                close(id, id, &mut touched, &mut left);
                continue;
            }
            if id > top + 1 {
                opened.push((top + 1, id - 1));
            }
            high = Some((id, key));
        }

        let unset = touched
            .iter()
            .map(|(lo, _)| lo)
            .filter(|lo| {
                left.range_around(*lo)
                    .is_none_or(|(left_lo, _)| left_lo != *lo)
            })
            .collect();
        let set = left
            .iter()
            .filter(|(lo, hi)| self.gaps.range_around(*lo) != Some((*lo, *hi)))
            .chain(opened)
            .collect();
        Step {
            high: high.map(|(id, key)| (id, key.to_owned())),
            set,
            unset,
        }
    }

    /// How many ranges of gaps there are once this step is taken.
    pub fn gap_ranges_after(&self, step: &Step) -> usize {
        let begins = |lo: i64| {
            self.gaps
                .range_around(lo)
                .is_some_and(|(first, _)| first == lo)
        };
        let new = step.set.iter().filter(|(lo, _)| !begins(*lo)).count();
        self.gaps.len() + new - step.unset.len()
    }

    /// Takes over a step that was computed from this very cursor.
    pub fn apply(&mut self, step: &Step) {
        for lo in &step.unset {
            if let Some((lo, hi)) = self.gaps.range_around(*lo) {
                self.gaps.remove(lo, hi);
            }
        }
        for (lo, hi) in &step.set {
            if let Some((old_lo, old_hi)) = self.gaps.range_around(*lo) {
                self.gaps.remove(old_lo, old_hi);
            }
            self.gaps.insert(*lo, *hi);
        }
        if let Some((high, key)) = &step.high {
            self.high = *high;
            self.high_key.clone_from(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(high: i64, gaps: &[(i64, i64)]) -> Cursor {
        Cursor {
            high,
            high_key: key(high),
            gaps: gaps.iter().copied().collect(),
        }
    }

    fn key(id: i64) -> String {
        format!("k{id}")
    }

    fn publish(cursor: &mut Cursor, ids: &[i64], dead: &[(i64, i64)]) -> Step {
        let keys: Vec<String> = ids.iter().map(|id| key(*id)).collect();
        let rows = ids.iter().copied().zip(keys.iter().map(String::as_str));
        let step = cursor.step(rows, &dead.iter().copied().collect());
        let ranges = cursor.gap_ranges_after(&step);
        cursor.apply(&step);
        assert_eq!(cursor.gaps.len(), ranges, "{step:?}");
        step
    }

    #[test]
    fn missing_ids_become_gaps_and_late_rows_fill_them() {
        let mut c = cursor(0, &[]);
        publish(&mut c, &[1, 2, 5, 9], &[]);
        assert_eq!(c, cursor(9, &[(3, 4), (6, 8)]));
        let step = publish(&mut c, &[4, 7, 10], &[]);
        assert_eq!(c, cursor(10, &[(3, 3), (6, 6), (8, 8)]));
        assert_eq!(step.set, [(3, 3), (6, 6), (8, 8)]);
        assert!(
            step.unset.is_empty(),
            "every old first id still starts a range"
        );
        publish(&mut c, &[3], &[(6, 6), (8, 8)]);
        assert_eq!(c, cursor(10, &[]));
    }

    #[test]
    fn a_step_touches_only_the_gaps_it_changes() {
        let mut c = cursor(1_000, &[(10, 20), (30, 40), (50, 60)]);
        let step = publish(&mut c, &[30], &[(12, 14)]);
        assert_eq!(step.set, [(10, 11), (15, 20), (31, 40)]);
        assert_eq!(step.unset, [30]);
        assert_eq!(step.high, None);
        assert_eq!(c, cursor(1_000, &[(10, 11), (15, 20), (31, 40), (50, 60)]));
    }

    #[test]
    fn steps_agree_with_a_plain_set_of_ids() {
        use rand::{Rng, SeedableRng, rngs::StdRng};
        use std::collections::BTreeSet;
        for seed in 0..200 {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut c = Cursor::default();
            let mut published = BTreeSet::new();
            let mut given_up = BTreeSet::new();
            for _ in 0..30 {
                let mut ids: Vec<i64> = c
                    .gaps
                    .iter()
                    .flat_map(|(lo, hi)| lo..=hi)
                    .filter(|_| rng.random_bool(0.2))
                    .collect();
                let dead: Vec<(i64, i64)> = c
                    .gaps
                    .iter()
                    .flat_map(|(lo, hi)| lo..=hi)
                    .filter(|id| !ids.contains(id) && rng.random_bool(0.1))
                    .map(|id| (id, id))
                    .collect();
                ids.extend((c.high + 1..c.high + 12).filter(|_| rng.random_bool(0.4)));
                publish(&mut c, &ids, &dead);
                published.extend(ids);
                given_up.extend(dead.iter().map(|(id, _)| *id));
                for id in 1..=c.high {
                    assert_eq!(
                        c.covers(id),
                        published.contains(&id) || given_up.contains(&id),
                        "seed {seed}, id {id}"
                    );
                }
                assert_eq!(published.last().copied().unwrap_or(0), c.high);
            }
        }
    }

    #[test]
    fn a_cursor_is_anchored_at_a_row_that_is_published() {
        let mut c = cursor(10, &[(2, 3), (6, 8)]);
        c.high_key.clear();
        c.anchor(Some((7, key(7))));
        assert!(c.lacks_key(), "7 is in a gap: {c:?}");
        c.anchor(Some((4, key(4))));
        assert_eq!(c, cursor(4, &[(2, 3)]));
        c.anchor(None);
        assert_eq!(c, Cursor::default());
    }

    #[test]
    fn behind_is_what_the_other_has_published_since() {
        let old = cursor(10, &[(3, 4)]);
        let new = cursor(15, &[(4, 4), (12, 12)]);
        assert_eq!(
            old.behind(&new),
            [(3, 3), (11, 11), (13, 15)].into_iter().collect()
        );
        assert!(new.behind(&old).is_empty());
    }
}
