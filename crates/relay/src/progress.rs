//! What has been published, and the step that publishes more: page by page into Redis, and after it
//! into the checkpoint.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::error::Result;
use crate::postgres::{MessageRow, Session, sql};
use crate::protocol::cursor::{Cursor, Step};
use crate::protocol::ranges::RangeSet;
use crate::protocol::start::{Blocked, Place, Suspect};
use crate::publisher::{PageWrite, Published, Publisher, stream_name};
use crate::reader::Page;

/// Entries of one stream's tail that are compared with suspect rows, at the most.
pub(crate) const TAIL_ENTRIES_MAX: usize = 1_000_000;

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

    /// Publishes a page and moves on. Rows of blocked streams are passed over: their own cursors stay.
    ///
    /// A crash before the script leaves the page unpublished, and the next leader reads it again. A
    /// crash after it leaves the page and the marker, and the next leader goes on behind it.
    pub(crate) async fn publish(&mut self, publisher: &mut Publisher, page: &Page) -> Result<()> {
        let rows = page.rows.iter().map(|row| (row.id(), row.message_key()));
        let step = self.place.cursor.step(rows, &page.dead);
        let skipped = self.standing(publisher, &page.rows).await?;
        let mut newly_blocked: Vec<(String, Option<Blocked>)> = Vec::new();
        loop {
            let (streams, entries) = self.entries(&page.rows, &skipped);
            let write = PageWrite {
                epoch: self.place.epoch,
                page: self.place.page,
                streams: &streams,
                entries: &entries,
                step: &step,
                blocked: &newly_blocked,
                drop_suspect: self.suspect_ends_with(&step),
            };
            match publisher.publish(&write).await? {
                Published::Done { redis_ms } => {
                    self.passed(&step, redis_ms);
                    return Ok(());
                }
                Published::StreamRefuses { stream, reason } => {
                    tracing::error!(%stream, %reason, "a stream refuses entries and is held back; the others go on");
                    let blocked = self.block(&stream, &page.rows, reason);
                    newly_blocked.push((stream, Some(blocked)));
                }
            }
        }
    }

    /// The entries of a page: index of the stream, and the row.
    fn entries<'p>(
        &self,
        rows: &'p [MessageRow],
        skipped: &HashSet<i64>,
    ) -> (Vec<String>, Vec<(usize, &'p MessageRow)>) {
        let mut streams: Vec<String> = Vec::new();
        // None for a topic whose stream is blocked.
        let mut by_topic: HashMap<&str, Option<usize>> = HashMap::new();
        let mut entries = Vec::with_capacity(rows.len());
        for row in rows {
            let index = *by_topic.entry(row.topic()).or_insert_with(|| {
                let stream = stream_name(&self.prefix, row.topic());
                if self.place.blocked.contains_key(&stream) {
                    return None;
                }
                streams.push(stream);
                Some(streams.len() - 1)
            });
            if let Some(index) = index
                && !skipped.contains(&row.id())
                && !self.set_aside.contains(&row.id())
            {
                entries.push((index, row));
            }
        }
        (streams, entries)
    }

    /// Holds a stream back at the cursor before the page.
    fn block(&mut self, stream: &str, rows: &[MessageRow], reason: String) -> Blocked {
        let topic = rows
            .iter()
            .map(MessageRow::topic)
            .find(|topic| stream_name(&self.prefix, topic) == stream);
        let cursor = Cursor {
            high_key: String::new(),
            ..self.place.cursor.clone()
        };
        let blocked = Blocked {
            topic: topic.unwrap_or_default().to_owned(),
            cursor,
            reason,
        };
        self.place
            .blocked
            .insert(stream.to_owned(), blocked.clone());
        self.blocked_changed = true;
        blocked
    }

    fn passed(&mut self, step: &Step, redis_ms: i64) {
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
        self.place.cursor.apply(step);
        self.place.page += 1;
        self.place.redis_ms = redis_ms;
        if !self.set_aside.is_empty() {
            let place = &self.place;
            let to_come = |id| {
                let mut held_back = place.blocked.values();
                !place.cursor.covers(id) || held_back.any(|blocked| !blocked.cursor.covers(id))
            };
            self.set_aside.retain(|id| to_come(*id));
        }
    }

    /// Whether the cursor has passed all suspect rows once it made this step.
    fn suspect_ends_with(&self, step: &Step) -> bool {
        let Some(suspect) = self.suspect else {
            return false;
        };
        if !self.place.blocked.is_empty() {
            return false; // a stream that is held back has suspect rows of its own
        }
        let mut after = self.place.cursor.clone();
        after.apply(step);
        after.high >= suspect.until && after.gaps.first().is_none_or(|first| first > suspect.until)
    }

    /// Suspect rows that stand in their stream already, with the same id and key.
    async fn standing(
        &mut self,
        publisher: &mut Publisher,
        rows: &[MessageRow],
    ) -> Result<HashSet<i64>> {
        let Some(suspect) = self.suspect else {
            return Ok(HashSet::new());
        };
        let mut standing = HashSet::new();
        for row in rows.iter().filter(|row| row.id() <= suspect.until) {
            let stream = stream_name(&self.prefix, row.topic());
            if !self.tails.contains_key(&stream) {
                let cursor = &self.place.cursor;
                let wanted = |id| id <= suspect.until && !cursor.covers(id);
                let (tail, whole) = publisher
                    .tail(&stream, suspect.since_ms, TAIL_ENTRIES_MAX, wanted)
                    .await?;
                if !whole {
                    tracing::warn!(%stream, entries = TAIL_ENTRIES_MAX, "the stream's tail is longer than is compared; \
                        messages behind that may stand in it twice");
                }
                self.tails.insert(stream.clone(), tail);
            }
            if self.tails[&stream]
                .get(&row.id())
                .is_some_and(|key| key == row.message_key())
            {
                standing.insert(row.id());
            }
        }
        if !standing.is_empty() {
            tracing::info!(
                messages = standing.len(),
                "messages that stand in the stream already are not added again"
            );
        }
        Ok(standing)
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

    /// Blocked streams, by name.
    pub(crate) fn blocked(&self) -> &BTreeMap<String, Blocked> {
        &self.place.blocked
    }

    /// What a blocked stream lacks of all that is published.
    pub(crate) fn lacks(&self, blocked: &Blocked) -> RangeSet {
        blocked.cursor.behind(&self.place.cursor)
    }

    /// Publishes to one blocked stream what it lacks, up to and with the id `to`; with nothing left it is
    /// blocked no longer. Returns false when the stream still refuses.
    pub(crate) async fn catch_up(
        &mut self,
        publisher: &mut Publisher,
        stream: &str,
        rows: &[MessageRow],
        to: i64,
    ) -> Result<bool> {
        let Some(blocked) = self.place.blocked.get(stream) else {
            return Ok(true);
        };
        let done = to >= self.place.cursor.high;
        let after = (!done).then(|| Blocked {
            cursor: caught_up(&blocked.cursor, &self.place.cursor, to),
            ..blocked.clone()
        });
        let skipped = self.standing(publisher, rows).await?;
        let entries: Vec<(usize, &MessageRow)> = rows
            .iter()
            .filter(|row| !skipped.contains(&row.id()) && !self.set_aside.contains(&row.id()))
            .map(|row| (0, row))
            .collect();
        let write = PageWrite {
            epoch: self.place.epoch,
            page: self.place.page,
            streams: &[stream.to_owned()],
            entries: &entries,
            step: &Step::default(),
            blocked: &[(stream.to_owned(), after.clone())],
            drop_suspect: false,
        };
        match publisher.publish(&write).await? {
            Published::StreamRefuses { .. } => Ok(false),
            Published::Done { redis_ms } => {
                match after {
                    Some(after) => self.place.blocked.insert(stream.to_owned(), after),
                    None => self.place.blocked.remove(stream),
                };
                self.blocked_changed = true;
                self.passed(&Step::default(), redis_ms);
                Ok(true)
            }
        }
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
        self.gap_changes.clear();
        self.blocked_changed = false;
        self.checkpointed = Some(self.place.page);
        Ok(())
    }

    /// The highest id that the purge may take: below the checkpoint, the lowest gap and every blocked cursor.
    pub(crate) fn purge_limit(&self) -> i64 {
        let cursors = std::iter::once(&self.place.cursor)
            .chain(self.place.blocked.values().map(|b| &b.cursor));
        cursors
            .map(|c| (c.high - 1).min(c.gaps.first().map_or(i64::MAX, |first| first - 1)))
            .min()
            .unwrap_or(0)
    }
}

/// A blocked stream's cursor once it has published all that `global` has up to and with `to`.
fn caught_up(blocked: &Cursor, global: &Cursor, to: i64) -> Cursor {
    let high = blocked.high.max(to);
    let mut gaps = blocked.gaps.clone();
    if to > blocked.high {
        gaps.insert(blocked.high + 1, to);
    }
    let published = Cursor {
        high: 0,
        ..Cursor::default()
    }
    .behind(&Cursor {
        high: to.min(global.high),
        ..global.clone()
    });
    Cursor {
        high,
        high_key: String::new(),
        gaps: gaps.difference(&published.up_to(to)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(high: i64, gaps: &[(i64, i64)]) -> Cursor {
        Cursor {
            high,
            high_key: String::new(),
            gaps: gaps.iter().copied().collect(),
        }
    }

    #[test]
    fn a_stream_that_catches_up_lacks_less_and_less() {
        let blocked = cursor(50, &[(10, 12), (40, 41)]);
        let global = cursor(100, &[(11, 11), (70, 75)]);
        assert_eq!(
            blocked.behind(&global).iter().collect::<Vec<_>>(),
            [(10, 10), (12, 12), (40, 41), (51, 69), (76, 100)]
        );
        let step = caught_up(&blocked, &global, 12);
        assert_eq!(step, cursor(50, &[(11, 11), (40, 41)]));
        let step = caught_up(&step, &global, 72);
        assert_eq!(step, cursor(72, &[(11, 11), (70, 72)]));
        assert_eq!(step.behind(&global).iter().collect::<Vec<_>>(), [(76, 100)]);
        let end = caught_up(&step, &global, 100);
        assert_eq!(end, global);
    }
}
