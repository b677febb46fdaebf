//! Rows that may stand in the streams already, after the history changed.

use std::collections::{HashMap, HashSet};

use super::{Progress, TAIL_ENTRIES_MAX};
use crate::error::Result;
use crate::postgres::MessageRow;
use crate::protocol::cursor::Step;
use crate::protocol::place::Suspect;
use crate::publisher::Publisher;

impl Progress {
    /// Whether the cursor has passed all suspect rows once it made this step.
    pub(super) fn suspect_ends_with(&self, step: &Step) -> bool {
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
    pub(super) async fn standing(
        &mut self,
        publisher: &mut Publisher,
        rows: &[MessageRow],
    ) -> Result<HashSet<i64>> {
        let Some(suspect) = self.suspect else {
            return Ok(HashSet::new());
        };
        let mut standing = HashSet::new();
        for row in rows.iter().filter(|row| row.id() <= suspect.until) {
            for stream in self.streams_of(row) {
                if !self.tails.contains_key(&stream) {
                    let tail = self.read_tail(publisher, &stream, suspect).await?;
                    self.tails.insert(stream.clone(), tail);
                }
                if self.tails[&stream]
                    .get(&row.id())
                    .is_some_and(|key| key == row.message_key())
                {
                    standing.insert(row.id());
                }
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

    pub(super) async fn read_tail(
        &self,
        publisher: &mut Publisher,
        stream: &str,
        suspect: Suspect,
    ) -> Result<HashMap<i64, String>> {
        // What a held stream lacks is covered by the common cursor.
        let covered = |id| self.place.blocked.is_empty() && self.place.cursor.covers(id);
        let wanted = |id| id <= suspect.until && !covered(id);
        let (tail, whole) = publisher
            .tail(stream, suspect.since_ms, TAIL_ENTRIES_MAX, wanted)
            .await?;
        if !whole {
            tracing::warn!(%stream, entries = TAIL_ENTRIES_MAX, "the stream's tail is longer than is compared; \
                messages behind that may stand in it twice");
        }
        Ok(tail)
    }
}
