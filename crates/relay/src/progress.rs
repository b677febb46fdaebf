//! What has been published, and the step that publishes more: page by page into Redis, and after it
//! into the checkpoint.

mod holding;
mod suspects;

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::error::Result;
use crate::metric_names as names;
use crate::postgres::{MessageRow, Session, sql};
use crate::protocol::cursor::{Cursor, Step};
use crate::protocol::layout::{hold_name, partition, stream_name, streams_of};
use crate::protocol::place::{Blocked, Place, Suspect};
use crate::publisher::{Entries, PageWrite, Publisher, tail_from_ms};
use crate::reader::Page;

/// Entries of one stream's tail that are compared with suspect rows, at the most.
pub(crate) const TAIL_ENTRIES_MAX: usize = 1_000_000;

/// With more ranges of gaps than these, no page is sent before the reply to the one before it: a copy of the cursor
/// takes too long.
const GAP_RANGES_COPIED_MAX: usize = 1_000;

/// Changes of the gaps since the last checkpoint: first id to last id, or none when the range is gone.
type GapChanges = BTreeMap<i64, Option<i64>>;

/// The published state of the outbox under this leadership.
#[derive(Debug)]
pub(crate) struct Progress {
    /// What the marker says.
    pub(crate) place: Place,
    prefix: String,
    suspect: Option<Suspect>,
    /// What stands in the streams already, for suspect rows; read when first needed.
    tails: HashMap<String, HashMap<i64, String>>,
    /// Messages that became dead letters and that the cursor has yet to pass.
    set_aside: HashSet<i64>,
    gap_changes: GapChanges,
    /// The list of blocked streams changed since the last checkpoint.
    blocked_changed: bool,
    /// Page of the last checkpoint.
    checkpointed: Option<i64>,
}

impl Progress {
    /// The state right after a take-over, whose checkpoint is still to be written.
    pub(crate) fn new(place: Place, suspect: Option<Suspect>, prefix: String) -> Self {
        Progress {
            place,
            prefix,
            suspect,
            tails: HashMap::new(),
            set_aside: HashSet::new(),
            gap_changes: GapChanges::new(),
            blocked_changed: false,
            checkpointed: None,
        }
    }

    /// What publishes a page. Rows of blocked streams are passed over: their own cursors stay. `newly_blocked` are
    /// those that refused it just now.
    pub(crate) async fn write_of(
        &mut self,
        publisher: &mut Publisher,
        page: &mut Page,
        newly_blocked: &[(String, Option<Blocked>)],
    ) -> Result<PageWrite> {
        // One that was sent for another place does nothing when it arrives.
        let sent = page.sent.take();
        if let Some(sent) = sent.filter(|sent| self.is_ordinary() && sent.page == self.place.page) {
            return Ok(sent);
        }
        let skipped = self.standing(publisher, &page.rows).await?;
        let entries = self.entries(&page.rows, &skipped, None);
        let mut write = PageWrite::new(self.place.page, &self.place.cursor, entries, page);
        write.blocked = newly_blocked.to_vec();
        write.drop_suspect = self.suspect_ends_with(&write.step);
        Ok(write)
    }

    /// What publishes the page after one that is under way, if there is nothing out of the ordinary that may have
    /// passed by then. `cursor` is the one behind that page.
    pub(crate) fn write_behind(&self, cursor: &Cursor, page: &Page) -> PageWrite {
        let entries = self.entries(&page.rows, &HashSet::new(), None);
        PageWrite::new(self.place.page + 1, cursor, entries, page)
    }

    /// The cursor behind a page that is under way, if the next one may be sent before its reply.
    pub(crate) fn cursor_behind(&self, under_way: &PageWrite) -> Option<Cursor> {
        let few_gaps = self.place.cursor.gaps.len() <= GAP_RANGES_COPIED_MAX;
        (few_gaps && self.is_ordinary()).then(|| {
            let mut cursor = self.place.cursor.clone();
            cursor.apply(&under_way.step);
            cursor
        })
    }

    /// Every row goes to its stream: none is held back, set aside, or may stand there already.
    fn is_ordinary(&self) -> bool {
        self.place.blocked.is_empty() && self.set_aside.is_empty() && self.suspect.is_none()
    }

    /// The entries of a page. `lifted` is not held back for once.
    fn entries<'p>(
        &self,
        rows: impl IntoIterator<Item = &'p MessageRow>,
        skipped: &HashSet<i64>,
        lifted: Option<&str>,
    ) -> Entries {
        let held = |name: &str| self.place.blocked.contains_key(name) && lifted != Some(name);
        let mut topics: HashMap<&str, PageTopic> = HashMap::new();
        let mut entries = Entries::default();
        for row in rows {
            let topic = topics.entry(row.topic()).or_insert_with(|| PageTopic {
                held: held(&hold_name(row.topic())),
                partitions: self.partitions(row.topic()),
                streams: HashMap::new(),
            });
            if topic.held || skipped.contains(&row.id()) || self.set_aside.contains(&row.id()) {
                continue;
            }
            let partitions = topic.partitions;
            let partition = partition(row.ordering_key(), row.message_key(), partitions);
            let stream = *topic.streams.entry(partition).or_insert_with(|| {
                let stream = stream_name(&self.prefix, row.topic(), partition, partitions);
                (!held(&stream)).then(|| entries.stream(stream))
            });
            if let Some(stream) = stream {
                entries.add(stream, row);
            }
        }
        entries
    }

    /// How many streams a topic has.
    pub(crate) fn partitions(&self, topic: &str) -> u32 {
        self.place
            .layouts
            .get(topic)
            .map_or(1, |layout| layout.partitions)
    }

    /// The stream that a row goes to, and those of earlier layouts, where it may stand already.
    fn streams_of(&self, row: &MessageRow) -> Vec<String> {
        let layout = self
            .place
            .layouts
            .get(row.topic())
            .cloned()
            .unwrap_or_default();
        streams_of(
            &self.prefix,
            row.topic(),
            &layout,
            row.ordering_key(),
            row.message_key(),
        )
    }

    /// Moves on behind what was published.
    pub(crate) fn passed(&mut self, step: &Step, redis_ms: i64) {
        for lo in &step.unset {
            self.gap_changes.insert(*lo, None);
        }
        for (lo, hi) in &step.set {
            self.gap_changes.insert(*lo, Some(*hi));
        }
        if self.suspect_ends_with(step) {
            self.suspect = None;
            self.tails.clear();
        }
        self.place.pass(step, redis_ms);
        if !self.set_aside.is_empty() {
            let place = &self.place;
            let to_come = |id| {
                let mut held_back = place.blocked.values();
                !place.cursor.covers(id) || held_back.any(|blocked| !blocked.cursor.covers(id))
            };
            self.set_aside.retain(|id| to_come(*id));
        }
    }

    /// Sets a message aside for good: from now on the cursor may pass it.
    ///
    /// The dead letter is committed first. A crash right after it leaves a dead letter for a message
    /// that will be tried again, and either becomes the same dead letter or goes out after all.
    pub(crate) async fn set_aside(
        &mut self,
        session: &Session,
        row: &MessageRow,
        reason: &str,
    ) -> Result<()> {
        session
            .execute(
                "write a dead letter",
                sql::DEAD_LETTER,
                &[&row.id(), &reason],
            )
            .await?;
        tracing::error!(
            id = row.id(),
            message_key = row.message_key(),
            topic = row.topic(),
            bytes = row.bytes(),
            reason,
            "a message is set aside: Redis refuses it"
        );
        self.set_aside.insert(row.id());
        Ok(())
    }

    /// The messages that were set aside and not passed yet, for the next leadership of this process.
    pub(crate) fn into_set_aside(self) -> HashSet<i64> {
        self.set_aside
    }

    /// Goes on with messages set aside before.
    pub(crate) fn keep_set_aside(&mut self, set_aside: HashSet<i64>) {
        self.set_aside = set_aside;
    }

    /// Entries from this time of Redis' clock on, in milliseconds, may be looked for by a take-over: those that were
    /// published after the last checkpoint, and those that suspect rows are compared with.
    pub(crate) fn proofs_from_ms(&self) -> i64 {
        let suspects = self.suspect.map(|s| tail_from_ms(s.since_ms));
        suspects.map_or(self.place.redis_ms, |ms| ms.min(self.place.redis_ms))
    }

    /// Whether something was published since the last checkpoint.
    pub(crate) fn needs_checkpoint(&self) -> bool {
        self.checkpointed != Some(self.place.page)
    }

    /// Writes the checkpoint, after the marker it follows.
    ///
    /// A crash before it leaves a marker that is ahead, which the next leader believes. It is never
    /// ahead of the marker, unless Redis loses its tail.
    pub(crate) async fn checkpoint(&mut self, session: &Session) -> Result<()> {
        if self.checkpointed.is_none() || self.blocked_changed {
            crate::checkpoint::write_whole(session, &self.place).await?;
        } else {
            crate::checkpoint::write_step(session, &self.place, &self.gap_changes).await?;
        }
        ::metrics::counter!(names::CHECKPOINTS).increment(1);
        self.gap_changes.clear();
        self.blocked_changed = false;
        self.checkpointed = Some(self.place.page);
        Ok(())
    }
}

/// A topic of one page: whether it is held, over how many streams it goes, and the index of each of them, or none
/// for one that is held back.
struct PageTopic {
    held: bool,
    partitions: u32,
    streams: HashMap<u32, Option<usize>>,
}
