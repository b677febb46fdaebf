//! What was counted, with some examples of each.

use super::EntryId;

/// Suspicions of one kind that are kept, to be looked at again and shown; the rest is only counted.
pub(super) const KEPT_MAX: usize = 1_000;

/// Something that does not agree.
#[derive(Clone, Debug, Default)]
pub(super) struct Suspect {
    pub(super) id: Option<i64>,
    pub(super) message_key: Option<String>,
    /// Index of the stream.
    pub(super) stream: Option<u32>,
    pub(super) entry: Option<EntryId>,
    /// The entry that it is held against, with the index of its stream.
    pub(super) other: Option<(u32, EntryId)>,
    pub(super) note: String,
}

/// How many there are of a kind.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) count: u64,
    pub(super) kept: Vec<Suspect>,
}

impl Tally {
    /// Counts one more, and keeps it if there is room.
    pub(super) fn add(&mut self, suspect: impl FnOnce() -> Suspect) {
        self.count += 1;
        if self.kept.len() < KEPT_MAX {
            self.kept.push(suspect());
        }
    }

    /// Puts back what was taken out and looked at again; none for what is right by now.
    pub(super) fn settle(&mut self, looked_at: Vec<Option<Suspect>>) {
        self.count -= looked_at.iter().filter(|suspect| suspect.is_none()).count() as u64;
        self.kept = looked_at.into_iter().flatten().collect();
    }
}

/// Everything that the comparison counts.
#[derive(Default)]
pub(super) struct Tallies {
    pub(super) rows: u64,
    pub(super) published: u64,
    pub(super) above_cursor: u64,
    pub(super) in_gaps: u64,
    pub(super) held_back: u64,
    pub(super) not_yet_published: Tally,
    pub(super) set_aside: u64,
    pub(super) trimmed: Tally,
    pub(super) missing: Tally,
    pub(super) doubled: Tally,
    pub(super) out_of_order: Tally,
    pub(super) phantom: Tally,
    pub(super) applied: u64,
    pub(super) dead_letters: u64,
    pub(super) pending: u64,
    pub(super) not_given: u64,
    pub(super) not_yet_applied: Tally,
    pub(super) beyond_inbox: u64,
    pub(super) lost_effect: Tally,
}
