//! The ids that are compared.

use super::spill::PARTS;

/// Ids from the first to the last; empty where the first is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IdRange {
    pub(super) from: i64,
    pub(super) to: i64,
}

impl IdRange {
    pub(super) fn contains(self, id: i64) -> bool {
        (self.from..=self.to).contains(&id)
    }

    /// How many ids there are.
    fn width(self) -> i128 {
        (i128::from(self.to) - i128::from(self.from) + 1).max(0)
    }

    /// The part of a spill that an id of the range belongs to.
    pub(super) fn part(self, id: i64) -> usize {
        let step = self.step();
        let part = (i128::from(id) - i128::from(self.from)) / step;
        usize::try_from(part).unwrap_or(0).min(PARTS - 1)
    }

    /// The ids of a part.
    pub(super) fn of_part(self, part: usize) -> IdRange {
        self.slice(part, self.step())
    }

    /// The range in so many slices, which may be empty at its end.
    pub(super) fn slices(self, count: usize) -> impl Iterator<Item = IdRange> {
        let step = (self.width() + count as i128 - 1) / (count as i128).max(1);
        (0..count).map(move |n| self.slice(n, step.max(1)))
    }

    fn step(self) -> i128 {
        ((self.width() + PARTS as i128 - 1) / PARTS as i128).max(1)
    }

    fn slice(self, n: usize, step: i128) -> IdRange {
        let from = i128::from(self.from) + n as i128 * step;
        let to = (from + step - 1).min(i128::from(self.to));
        let id = |n: i128| i64::try_from(n).unwrap_or(i64::MAX);
        if from > to {
            return IdRange { from: 1, to: 0 };
        }
        IdRange {
            from: id(from),
            to: id(to),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_slices_cover_a_range_once() {
        for (from, to) in [
            (1, 1),
            (1, 64),
            (5, 1_000),
            (-3, 70),
            (1, i64::MAX),
            (i64::MIN, i64::MAX),
        ] {
            let range = IdRange { from, to };
            let mut next = i128::from(from);
            for part in 0..PARTS {
                let ids = range.of_part(part);
                for slice in ids.slices(3).filter(|slice| slice.from <= slice.to) {
                    assert_eq!(i128::from(slice.from), next);
                    assert_eq!((range.part(slice.from), range.part(slice.to)), (part, part));
                    next = i128::from(slice.to) + 1;
                }
            }
            assert_eq!(next, i128::from(to) + 1, "{range:?}");
        }
        assert_eq!(IdRange { from: 1, to: 0 }.width(), 0);
    }
}
