//! Streams, and whole topics, that are held back with a cursor of their own, and how they catch up.

use std::collections::BTreeMap;

use super::Progress;
use crate::error::{Error, Result};
use crate::postgres::MessageRow;
use crate::protocol::cursor::{Cursor, Step};
use crate::protocol::layout::{Layout, hold_name, stream_name};
use crate::protocol::place::Blocked;
use crate::protocol::ranges::RangeSet;
use crate::publisher::{Entries, PageWrite, Published, Publisher};
use crate::reader::Page;

impl Progress {
    /// Holds a stream back at the cursor before the page.
    pub(crate) fn block(&mut self, stream: &str, rows: &[MessageRow], reason: String) -> Blocked {
        let row = rows.iter().find(|row| {
            self.streams_of(row)
                .first()
                .is_some_and(|name| name == stream)
        });
        let topic = row.map(MessageRow::topic).unwrap_or_default().to_owned();
        self.hold(stream.to_owned(), topic, reason)
    }

    pub(super) fn hold(&mut self, name: String, topic: String, reason: String) -> Blocked {
        let cursor = Cursor {
            high_key: String::new(),
            ..self.place.cursor.clone()
        };
        let blocked = Blocked {
            topic,
            cursor,
            reason,
        };
        self.place.blocked.insert(name, blocked.clone());
        self.blocked_changed = true;
        blocked
    }

    /// Blocked streams, by name.
    pub(crate) fn blocked(&self) -> &BTreeMap<String, Blocked> {
        &self.place.blocked
    }

    /// What a blocked stream lacks of all that is published.
    pub(crate) fn lacks(&self, blocked: &Blocked) -> RangeSet {
        blocked.cursor.behind(&self.place.cursor)
    }

    /// Publishes to a stream (or topic) that is held back what it lacks, up to and with the id `to`; with
    /// nothing left it is held no longer. Returns false when a stream still refuses.
    pub(crate) async fn catch_up(
        &mut self,
        publisher: &mut Publisher,
        name: &str,
        rows: &[MessageRow],
        to: i64,
    ) -> Result<bool> {
        let Some(blocked) = self.place.blocked.get(name) else {
            return Ok(true);
        };
        let done = to >= self.place.cursor.high;
        let blocked = blocked.clone();
        let cursor = caught_up(&blocked.cursor, &self.place.cursor, to);
        let after = (!done).then(|| Blocked {
            cursor,
            ..blocked.clone()
        });
        let skipped = self.standing(publisher, rows).await?;
        // The rows are those of the topic; a stream takes those of its partition.
        let whole_topic = name == hold_name(&blocked.topic);
        let ours = |row: &&MessageRow| {
            whole_topic
                || self
                    .streams_of(row)
                    .first()
                    .is_some_and(|stream| stream == name)
        };
        let mut write = self.without_step();
        write.entries = self.entries(rows.iter().filter(ours), &skipped, Some(name));
        write.blocked = vec![(name.to_owned(), after.clone())];
        match publisher.publish(&mut write).await? {
            Published::StreamRefuses { .. } => Ok(false),
            Published::Done { redis_ms } => {
                match after {
                    Some(after) => self.place.blocked.insert(name.to_owned(), after),
                    None => self.place.blocked.remove(name),
                };
                self.blocked_changed = true;
                self.passed(&Step::default(), redis_ms);
                Ok(true)
            }
        }
    }

    /// Holds a whole topic back, while its groups catch up with the old streams.
    pub(crate) async fn hold_topic(
        &mut self,
        publisher: &mut Publisher,
        topic: &str,
        reason: &str,
    ) -> Result<()> {
        let name = hold_name(topic);
        let blocked = self.hold(name.clone(), topic.to_owned(), reason.to_owned());
        self.write_marker(publisher, vec![(name, Some(blocked))], Vec::new())
            .await
    }

    /// Spreads a topic over another number of streams, from the next page on.
    pub(crate) async fn change_layout(
        &mut self,
        publisher: &mut Publisher,
        topic: &str,
        partitions: u32,
    ) -> Result<()> {
        let layout = self
            .place
            .layouts
            .get(topic)
            .cloned()
            .unwrap_or_default()
            .changed_to(partitions);
        self.place.layouts.insert(topic.to_owned(), layout.clone());
        self.blocked_changed = true;
        self.write_marker(publisher, Vec::new(), vec![(topic.to_owned(), layout)])
            .await
    }

    /// A page that leaves the global cursor where it is.
    fn without_step(&self) -> PageWrite {
        let (entries, page) = (Entries::default(), Page::default());
        PageWrite::new(self.place.page, &self.place.cursor, entries, &page)
    }

    /// A page without rows.
    pub(super) async fn write_marker(
        &mut self,
        publisher: &mut Publisher,
        blocked: Vec<(String, Option<Blocked>)>,
        layouts: Vec<(String, Layout)>,
    ) -> Result<()> {
        let mut write = self.without_step();
        (write.blocked, write.layouts) = (blocked, layouts);
        match publisher.publish(&mut write).await? {
            Published::Done { redis_ms } => self.passed(&Step::default(), redis_ms),
            Published::StreamRefuses { stream, .. } => {
                return Err(Error::Invariant(format!(
                    "a page without entries was refused by {stream}"
                )));
            }
        }
        Ok(())
    }

    /// Whether a topic is held back as a whole.
    pub(crate) fn holds_topic(&self, topic: &str) -> bool {
        self.place.blocked.contains_key(&hold_name(topic))
    }

    /// Whether one of a topic's streams refuses entries: what it lacks belongs into the present layout.
    pub(crate) fn refuses(&self, topic: &str) -> bool {
        let hold = hold_name(topic);
        self.place
            .blocked
            .iter()
            .any(|(name, blocked)| blocked.topic == topic && *name != hold)
    }

    /// The streams of a topic in its present layout.
    pub(crate) fn streams_of_topic(&self, topic: &str) -> Vec<String> {
        let partitions = self.partitions(topic);
        (0..partitions)
            .map(|partition| stream_name(&self.prefix, topic, partition, partitions))
            .collect()
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
