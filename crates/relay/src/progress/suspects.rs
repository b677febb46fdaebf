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
        self.suspect
            .is_some_and(|suspect| suspect.ends_with(step, &self.place))
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
        let wanted = |id| suspect.may_stand(id, &self.place);
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
