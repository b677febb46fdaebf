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

mod question;

use std::collections::BTreeMap;

pub use self::question::{Holder, Question};
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

/// A writer as `L` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Listed {
    /// Who it is.
    pub writer: Writer,
    /// The low 32 bits of its transaction id, once it has one.
    pub xid: Option<u32>,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Seen {
    since: u64,
    holds_up_to: i64,
    xid: Option<u32>,
}

impl Seen {
    /// Whether it may fill a gap from `lo` whose first `L` was that of trip `asked`.
    fn holds(&self, lo: i64, asked: u64) -> bool {
        self.since <= asked && lo <= self.holds_up_to
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Gap {
    hi: i64,
    /// The trip whose `L` was the first after the gap was opened; none before that.
    asked: Option<u64>,
}

/// What a reader spares itself and the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// Ranges of gaps from which on it stops reading ahead.
    pub gap_ranges_max: usize,
    /// Trips that a writer must have stood in `L` before gaps are left to it: those that end sooner would only
    /// make statements be repeated.
    pub long_trips: u64,
    /// Gaps from which on it is worth leaving some out.
    pub left_out_min: usize,
}

impl Limits {
    /// The limits of the daemon, with this many ranges of gaps.
    pub const fn of_gap_ranges(gap_ranges_max: usize) -> Self {
        Limits {
            gap_ranges_max,
            long_trips: 64,
            left_out_min: 256,
        }
    }
}

/// The reader's side of the cursor: how far it has read, and who may still fill which gap.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Log {
    high: i64,
    gaps: BTreeMap<i64, Gap>,
    writers: BTreeMap<Writer, Seen>,
    trip: u64,
    /// The last `R` was cut: it has yet to show all rows of writers that ended before it.
    cut: bool,
    limits: Limits,
}

impl Log {
    /// A reader that goes on from a cursor.
    pub fn new(from: &Cursor, limits: Limits) -> Self {
        let gaps = from
            .gaps
            .iter()
            .map(|(lo, hi)| (lo, Gap { hi, asked: None }))
            .collect();
        Log {
            high: from.high,
            gaps,
            writers: BTreeMap::new(),
            trip: 0,
            cut: false,
            limits,
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
    pub fn meets_prepared(&self, writers: &[Listed]) -> bool {
        writers
            .iter()
            .any(|listed| listed.writer.prepared && !self.writers.contains_key(&listed.writer))
    }

    /// Starts a trip with its `L`. `last_value` bounds the prepared writers that are new in it.
    ///
    /// May be left out when [`Log::needs_writers`] is false; then nothing was learnt, and the writers
    /// known so far are forgotten, since one of them may have ended and come back.
    pub fn learn(&mut self, writers: Vec<Listed>, last_value: Option<i64>) {
        self.trip += 1;
        let mut seen = BTreeMap::new();
        for Listed { writer, xid } in writers {
            let holds_up_to = if writer.prepared {
                last_value.unwrap_or(i64::MAX)
            } else {
                i64::MAX
            };
            // Prepared, a transaction goes by another name: this one may stand in the lists before as a
            // backend's, and fill any gap that is open.
            let since = if writer.prepared { 0 } else { self.trip };
            let first = Seen {
                since,
                holds_up_to,
                xid,
            };
            let known = self.writers.get(&writer).copied();
            seen.insert(
                writer,
                Seen {
                    xid,
                    ..known.unwrap_or(first)
                },
            );
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

    /// The same log with its trips numbered anew, in the same order and no further apart than matters: what it
    /// asks and takes from here on is the same. Logs that will do the same are then equal.
    pub fn renumbered(&self) -> Log {
        let since = self.writers.values().map(|seen| seen.since);
        let asked = self.gaps.values().filter_map(|gap| gap.asked);
        // Prepared writers are counted from 0, so that stays where it is.
        let mut trips: Vec<u64> = since.chain(asked).chain([0, self.trip]).collect();
        trips.sort_unstable();
        trips.dedup();
        let (mut anew, mut last, mut at) = (BTreeMap::new(), 0, 0);
        for (nth, trip) in trips.into_iter().enumerate() {
            if nth > 0 {
                at += (trip - last).min(self.limits.long_trips.max(1));
            }
            last = trip;
            anew.insert(trip, at);
        }
        let mut log = self.clone();
        log.trip = anew[&self.trip];
        for seen in log.writers.values_mut() {
            seen.since = anew[&seen.since];
        }
        for gap in log.gaps.values_mut() {
            gap.asked = gap.asked.map(|asked| anew[&asked]);
        }
        log
    }

    /// Takes the answer to the last question into the account.
    pub fn accept(&mut self, answer: Answer<'_>) -> Taken {
        for id in answer.late {
            self.fill(*id);
        }
        self.cut = answer.late_cut;
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
            if prepared.iter().any(|p| p.holds(lo, asked)) {
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
mod tests;
