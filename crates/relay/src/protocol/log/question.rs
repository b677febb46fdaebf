//! What a trip asks, and which gaps it may leave out because long transactions hold them.

use super::{Gap, Log, Seen};

/// What a trip asks of the database.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Question {
    /// `R`: look for rows in these ranges, ascending.
    pub gaps_lo: Vec<i64>,
    /// The last id of each of these ranges.
    pub gaps_hi: Vec<i64>,
    /// `Q`: look for rows above this id.
    pub high: i64,
    /// Whether there is room for the gaps that `Q` may open.
    pub read_ahead: bool,
    /// Transactions that hold the gaps left out of `R`. The answer counts only if its snapshot shows all of
    /// them as open; see [`Log::may_trust`].
    pub left_to: Vec<Holder>,
}

/// A transaction that gaps are left to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holder {
    /// The low 32 bits of its id.
    pub xid: u32,
    /// The trip since which it has stood in `L` without a break.
    pub since: u64,
}

/// Whether a snapshot (`xmin:xmax:xip,…`, as `pg_current_snapshot()` writes it) does not see a transaction's
/// end. Ids are compared in their low 32 bits: those of transactions that are open are less than 2^31 apart.
pub(super) fn is_open(xid: u32, snapshot: &str) -> bool {
    let low = |id: &str| u32::try_from(id.parse::<u64>().ok()? & u64::from(u32::MAX)).ok();
    let mut parts = snapshot.split(':').skip(1);
    let (Some(xmax), Some(open)) = (parts.next().and_then(low), parts.next()) else {
        return false;
    };
    open.split(',').any(|id| low(id) == Some(xid)) || xid.wrapping_sub(xmax) < 1 << 31
}

impl Log {
    /// What the statement that follows `L` has to ask, of all gaps.
    pub fn question(&self) -> Question {
        self.ask(self.gaps.iter(), Vec::new())
    }

    /// The same without the gaps that are left to long transactions; all gaps where that saves little.
    pub fn short_question(&self) -> Question {
        if self.cut {
            return self.question();
        }
        let mut by_age: Vec<&Seen> = self.writers.values().collect();
        by_age.sort_unstable_by_key(|seen| seen.since);
        let is_long =
            |seen: &Seen| seen.xid.is_some() && seen.since + self.limits.long_trips <= self.trip;
        let long = by_age.iter().take_while(|seen| is_long(seen)).count();
        let (long, others) = by_age.split_at(long);
        let first_other = others.first().map_or(u64::MAX, |seen| seen.since);
        // Everybody who may fill such a gap is among the long ones, and one of them does hold it.
        let left_out = |(lo, gap): &(&i64, &Gap)| {
            gap.asked.is_some_and(|asked| {
                asked < first_other && long.iter().any(|seen| seen.holds(**lo, asked))
            })
        };
        if self.gaps.iter().filter(left_out).count() < self.limits.left_out_min {
            return self.question();
        }
        let holder = |seen: &&Seen| {
            Some(Holder {
                xid: seen.xid?,
                since: seen.since,
            })
        };
        let left_to = long.iter().filter_map(holder).collect();
        self.ask(self.gaps.iter().filter(|gap| !left_out(gap)), left_to)
    }

    fn ask<'a>(
        &self,
        gaps: impl Iterator<Item = (&'a i64, &'a Gap)>,
        left_to: Vec<Holder>,
    ) -> Question {
        let (gaps_lo, gaps_hi) = gaps.map(|(lo, gap)| (*lo, gap.hi)).unzip();
        let read_ahead = self.gaps.len() < self.limits.gap_ranges_max;
        Question {
            gaps_lo,
            gaps_hi,
            high: self.high,
            read_ahead,
            left_to,
        }
    }

    /// Whether an answer to a short question counts: after the `L` of its trip was learnt, all that gaps
    /// were left to still stand in it without a break, and are open in the snapshot of the statement. An answer without a
    /// row has no snapshot, and nothing that could be out of order.
    pub fn may_trust(&self, question: &Question, snapshot: Option<&str>) -> bool {
        question.left_to.iter().all(|holder| {
            let same = |seen: &Seen| (seen.xid, seen.since) == (Some(holder.xid), holder.since);
            self.writers.values().any(same)
                && snapshot.is_none_or(|snapshot| is_open(holder.xid, snapshot))
        })
    }
}
