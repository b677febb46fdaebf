//! What a reader may take next without losing rows that commit late.
//!
//! Ids are given out before commit, so a row can become visible below ids already read. A reader makes
//! *trips*. Each is `L`, the open writers of the table, and then one statement that answers, on one
//! snapshot, `R`: the rows now visible inside the gaps, and `Q`: the rows above `high`.
//!
//! An insert takes its table lock before it draws an id and keeps it until its commit is visible. So
//! whoever may still fill a gap stands in every `L` from the one after the gap was opened until it
//! ends. A gap is dead once none of the writers of that first `L` is left and an `R` sent later does
//! not show the row. Nothing else closes a gap: no timeout, no guess.
//!
//! A writer that stands in `L` now and has stood there without a break since trip `t` can hold exactly
//! the gaps whose first `L` was that of trip `t` or later. Gaps are opened in ascending order, so
//! those that no writer holds are the lowest ones: a trip looks at these alone. Only a prepared writer
//! is not known by when it is first seen, but by the last id given out by then.

use std::collections::{BTreeMap, HashMap};

use super::cursor::Cursor;
use super::ranges::RangeSet;

/// A transaction that holds the table's row-exclusive lock, as `pg_locks` names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Writer {
    /// The `virtualtransaction`, which is not given out again while the server runs.
    pub id: String,
    /// Prepared for two-phase commit: it draws no further ids.
    pub prepared: bool,
}

/// What a trip asks of the database.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// `R`: look for rows in these ranges, ascending.
    pub gaps_lo: Vec<i64>,
    /// The last id of each of these ranges.
    pub gaps_hi: Vec<i64>,
    /// `Q`: look for rows above this id.
    pub high: i64,
    /// Whether there is room for the gaps that `Q` may open.
    pub read_ahead: bool,
}

/// What the statement of a trip showed, by id and ascending.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// The rows of `R`.
    pub late: &'a [i64],
    /// A limit cut `R`, so that it proves nothing above its last row.
    pub late_cut: bool,
    /// The rows of `Q`.
    pub new: &'a [i64],
}

/// What the reader takes from an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// The rows of `Q` go into the page as well. Not when `R` was cut: an older row of the same
    /// ordering key may stand behind the cut.
    pub new: bool,
    /// Gaps that are dead: their writers rolled back.
    pub dead: RangeSet,
}

/// A prepared writer holds no gap above the last id given out before it was first seen.
#[derive(Clone, Copy, Debug)]
struct Seen {
    since: u64,
    holds_up_to: i64,
}

#[derive(Clone, Copy, Debug)]
struct Gap {
    hi: i64,
    /// The trip whose `L` was the first after the gap was opened; none before that.
    asked: Option<u64>,
}

/// The reader's side of the cursor: how far it has read, and who may still fill which gap.
#[derive(Clone, Debug)]
pub struct Log {
    high: i64,
    gaps: BTreeMap<i64, Gap>,
    writers: HashMap<Writer, Seen>,
    trip: u64,
    gap_ranges_max: usize,
}

impl Log {
    /// A reader that goes on from a cursor. It stops reading ahead at `gap_ranges_max` ranges of gaps.
    pub fn new(from: &Cursor, gap_ranges_max: usize) -> Self {
        let gaps = from
            .gaps
            .iter()
            .map(|(lo, hi)| (lo, Gap { hi, asked: None }))
            .collect();
        Log {
            high: from.high,
            gaps,
            writers: HashMap::new(),
            trip: 0,
            gap_ranges_max,
        }
    }

    /// The largest id read.
    pub fn high(&self) -> i64 {
        self.high
    }

    /// Whether the next trip needs `L`. Without a gap there is nothing a writer could hold.
    pub fn needs_writers(&self) -> bool {
        !self.gaps.is_empty()
    }

    /// How many ranges of ids are open.
    pub fn gap_ranges(&self) -> usize {
        self.gaps.len()
    }

    /// The lowest open gap.
    pub fn lowest_gap(&self) -> Option<i64> {
        self.gaps.keys().next().copied()
    }

    /// Whether `L` shows a prepared writer for the first time: the caller then reads the sequence's
    /// `last_value` *after* this `L`, for [`Log::learn`].
    pub fn meets_prepared(&self, writers: &[Writer]) -> bool {
        writers
            .iter()
            .any(|writer| writer.prepared && !self.writers.contains_key(writer))
    }

    /// Starts a trip with its `L`. `last_value` bounds the prepared writers that are new in it.
    ///
    /// May be left out when [`Log::needs_writers`] is false; then nothing was learnt, and the writers
    /// known so far are forgotten, since one of them may have ended and come back.
    pub fn learn(&mut self, writers: Vec<Writer>, last_value: Option<i64>) {
        self.trip += 1;
        let mut seen = HashMap::with_capacity(writers.len());
        for writer in writers {
            let holds_up_to = if writer.prepared {
                last_value.unwrap_or(i64::MAX)
            } else {
                i64::MAX
            };
            // Prepared, a transaction goes by another name: this one may stand in the lists before as a
            // backend's, and fill any gap that is open.
            let since = if writer.prepared { 0 } else { self.trip };
            let first = Seen { since, holds_up_to };
            let known = self.writers.get(&writer).copied();
            seen.insert(writer, known.unwrap_or(first));
        }
        self.writers = seen;
        for gap in self.gaps.values_mut().rev() {
            if gap.asked.is_some() {
                break;
            }
            gap.asked = Some(self.trip);
        }
    }

    /// Forgets the writers of the last `L`, for a trip without one.
    pub fn learn_nothing(&mut self) {
        self.trip += 1;
        self.writers.clear();
    }

    /// What the statement that follows `L` has to ask.
    pub fn question(&self) -> Question {
        Question {
            gaps_lo: self.gaps.keys().copied().collect(),
            gaps_hi: self.gaps.values().map(|gap| gap.hi).collect(),
            high: self.high,
            read_ahead: self.gaps.len() < self.gap_ranges_max,
        }
    }

    /// Takes the answer to the last question into the account.
    pub fn accept(&mut self, answer: Answer<'_>) -> Taken {
        for id in answer.late {
            self.fill(*id);
        }
        if answer.late_cut {
            return Taken::default();
        }
        let dead = self.bury();
        for id in answer.new {
            if *id > self.high + 1 {
                self.gaps.insert(
                    self.high + 1,
                    Gap {
                        hi: *id - 1,
                        asked: None,
                    },
                );
            }
            self.high = *id;
        }
        Taken { new: true, dead }
    }

    fn fill(&mut self, id: i64) {
        let Some((&lo, &gap)) = self.gaps.range(..=id).next_back() else {
            return;
        };
        if id > gap.hi {
            return;
        }
        self.gaps.remove(&lo);
        if lo < id {
            self.gaps.insert(lo, Gap { hi: id - 1, ..gap });
        }
        if id < gap.hi {
            self.gaps.insert(id + 1, gap);
        }
    }

    /// Removes the gaps that nobody of the last `L` can fill.
    fn bury(&mut self) -> RangeSet {
        let oldest = self
            .writers
            .iter()
            .filter(|(w, _)| !w.prepared)
            .map(|(_, seen)| seen.since)
            .min();
        let prepared: Vec<Seen> = self
            .writers
            .iter()
            .filter(|(w, _)| w.prepared)
            .map(|(_, seen)| *seen)
            .collect();
        let mut dead = RangeSet::new();
        for (&lo, gap) in &self.gaps {
            // `asked` ascends with the ids: from here on, the oldest writer holds every gap.
            let Some(asked) = gap.asked else { break };
            if oldest.is_some_and(|since| since <= asked) {
                break;
            }
            if prepared
                .iter()
                .any(|p| p.since <= asked && lo <= p.holds_up_to)
            {
                continue;
            }
            dead.insert(lo, gap.hi);
        }
        for (lo, hi) in dead.iter() {
            let buried: Vec<i64> = self.gaps.range(lo..=hi).map(|(lo, _)| *lo).collect();
            for lo in buried {
                self.gaps.remove(&lo);
            }
        }
        dead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> Log {
        Log::new(&Cursor::default(), 1_000)
    }

    fn writers(ids: &[&str]) -> Vec<Writer> {
        ids.iter()
            .map(|id| Writer {
                id: (*id).to_owned(),
                prepared: id.starts_with('-'),
            })
            .collect()
    }

    fn trip(log: &mut Log, open: &[&str], late: &[i64], new: &[i64]) -> Vec<(i64, i64)> {
        log.learn(writers(open), None);
        log.accept(Answer {
            late,
            late_cut: false,
            new,
        })
        .dead
        .iter()
        .collect()
    }

    #[test]
    fn a_gap_stays_while_a_writer_of_its_first_list_is_open() {
        let mut log = log();
        assert_eq!(trip(&mut log, &["3/1"], &[], &[2]), []);
        assert_eq!(trip(&mut log, &["3/1", "4/1"], &[], &[]), []);
        assert_eq!(
            trip(&mut log, &["4/1", "5/1"], &[], &[]),
            [],
            "4/1 was open after the gap was seen"
        );
        assert_eq!(
            trip(&mut log, &["5/1"], &[], &[]),
            [(1, 1)],
            "5/1 came later: it cannot hold id 1"
        );
        assert_eq!(log.gap_ranges(), 0);
    }

    #[test]
    fn a_writer_that_ended_and_began_anew_holds_only_later_gaps() {
        let mut log = log();
        trip(&mut log, &["3/1"], &[], &[2]);
        trip(&mut log, &["3/1", "4/1"], &[], &[]);
        // 3/1 released the lock by rolling back to a savepoint; its id is gone for good.
        assert_eq!(trip(&mut log, &[], &[], &[]), [(1, 1)]);
        trip(&mut log, &["3/1"], &[], &[4]);
        assert_eq!(trip(&mut log, &["3/1"], &[], &[]), []);
    }

    #[test]
    fn a_late_row_splits_its_gap_and_both_parts_remember() {
        let mut log = log();
        trip(&mut log, &["3/1"], &[], &[10]);
        trip(&mut log, &["3/1"], &[5], &[]);
        assert_eq!(log.question().gaps_lo, [1, 6]);
        assert_eq!(log.question().gaps_hi, [4, 9]);
        assert_eq!(trip(&mut log, &["9/9"], &[], &[]), [(1, 4), (6, 9)]);
    }

    #[test]
    fn a_cut_answer_closes_no_gap_and_takes_no_new_row() {
        let mut log = log();
        trip(&mut log, &["3/1"], &[], &[10]);
        log.learn(writers(&[]), None);
        let taken = log.accept(Answer {
            late: &[1, 2],
            late_cut: true,
            new: &[11],
        });
        assert_eq!(taken, Taken::default());
        assert_eq!((log.high(), log.lowest_gap()), (10, Some(3)));
        assert_eq!(trip(&mut log, &[], &[3], &[11]), [(4, 9)]);
        assert_eq!(log.high(), 11);
    }

    #[test]
    fn a_prepared_writer_holds_nothing_drawn_after_it_was_prepared() {
        let mut log = log();
        trip(&mut log, &[], &[], &[2]);
        log.learn(writers(&["-1/77"]), Some(2));
        log.accept(Answer {
            late: &[],
            late_cut: false,
            new: &[4],
        });
        assert_eq!(
            trip(&mut log, &["-1/77"], &[], &[]),
            [(3, 3)],
            "3 was drawn after the prepared writer's last id"
        );
        assert_eq!(log.lowest_gap(), Some(1));
        assert_eq!(trip(&mut log, &[], &[1], &[]), []);
    }

    #[test]
    fn a_writer_that_is_prepared_after_its_gap_was_seen_still_holds_it() {
        let mut log = log();
        trip(&mut log, &["3/1"], &[], &[2]);
        assert_eq!(trip(&mut log, &["3/1"], &[], &[]), []);
        log.learn(writers(&["-1/77"]), Some(2));
        let taken = log.accept(Answer {
            late: &[],
            late_cut: false,
            new: &[],
        });
        assert!(taken.dead.is_empty());
        assert_eq!(trip(&mut log, &["-1/77"], &[], &[]), []);
        assert_eq!(trip(&mut log, &[], &[], &[]), [(1, 1)]);
    }

    #[test]
    fn too_many_gaps_stop_reading_ahead() {
        let mut log = Log::new(&Cursor::default(), 2);
        trip(&mut log, &["3/1"], &[], &[2, 4]);
        assert!(!log.question().read_ahead);
        trip(&mut log, &["3/1"], &[1], &[]);
        assert!(log.question().read_ahead);
    }
}
