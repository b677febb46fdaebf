//! Holds rows against entries, a page of rows at a time, both in the order of ids.

use tokio_postgres::{Row, Statement};

use super::group::{Ask, Group};
use super::range::IdRange;
use super::sent::{Passed, Sent};
use super::spill::{Given, Hashes, Kind, PARTS, Record, Spill};
use super::streams::Stream;
use super::tally::{Suspect, Tallies};
use super::{LOADED_MAX, Progress};
use crate::error::Result;
use crate::postgres::{Session, sql};

/// Rows of one statement.
const PAGE_ROWS: i64 = 5_000;

/// Rows without an entry that are looked up in one statement: an ordering key has up to 16 KiB.
const DETAIL_ROWS: usize = 500;

/// A row, without its payload.
pub(super) struct Message {
    pub(super) id: i64,
    pub(super) topic: String,
    pub(super) message_key: String,
}

impl Message {
    pub(super) fn of(row: &Row) -> Self {
        Message {
            id: row.get(0),
            topic: row.get(1),
            message_key: row.get(2),
        }
    }
}

/// The two sides, and what was found so far.
pub(super) struct Comparison<'a> {
    pub(super) session: &'a Session,
    pub(super) rows: Statement,
    pub(super) details: Statement,
    pub(super) group: Option<&'a Group>,
    pub(super) streams: &'a [Stream],
    pub(super) sent: &'a Sent,
    pub(super) prefix: &'a str,
    /// Topics that are compared; all where there are none.
    pub(super) topics: &'a [String],
    pub(super) hashes: &'a Hashes,
    /// Below this id the outbox has been purged, and an entry needs no row.
    pub(super) floor: i64,
    pub(super) found: Tallies,
}

impl<'a> Comparison<'a> {
    /// Goes through the whole range.
    pub(super) async fn run(
        &mut self,
        range: IdRange,
        spill: &mut Spill,
        progress: &mut Progress,
    ) -> Result<()> {
        for part in 0..PARTS {
            let slices = spill.records(part).div_ceil(LOADED_MAX).max(1);
            for ids in range.of_part(part).slices(slices) {
                let mut records = Vec::new();
                if spill.records(part) > 0 {
                    spill.each(part, |record| {
                        if ids.contains(record.id) {
                            records.push(record);
                        }
                        Ok(())
                    })?;
                }
                records.sort_unstable();
                self.slice(ids, &records).await?;
            }
            spill.forget(part);
            progress.show("parts compared", part as u64 + 1, PARTS as u64);
        }
        Ok(())
    }

    async fn slice(&mut self, ids: IdRange, records: &[Record]) -> Result<()> {
        let mut rest = records;
        let mut from = ids.from;
        while from <= ids.to {
            let rows = self
                .session
                .rows("read rows", &self.rows, &[&from, &ids.to, &PAGE_ROWS])
                .await?;
            let messages: Vec<Message> = rows.iter().map(Message::of).collect();
            let last = match messages.last() {
                Some(last) if rows.len() as i64 == PAGE_ROWS => last.id,
                _ => ids.to,
            };
            let (here, later) = rest.split_at(rest.partition_point(|r| r.id <= last));
            self.page(&messages, here).await?;
            rest = later;
            if last == i64::MAX {
                break;
            }
            from = last + 1;
        }
        Ok(())
    }

    /// Rows and records of the same ids.
    async fn page(&mut self, messages: &[Message], records: &[Record]) -> Result<()> {
        let mut groups = records.chunk_by(|a, b| a.id == b.id).peekable();
        let mut orphans: Vec<&[Record]> = Vec::new();
        let mut absent: Vec<&Message> = Vec::new();
        let mut asks: Vec<Ask<'_>> = Vec::new();
        for message in messages {
            while let Some(group) = groups.next_if(|group| group[0].id < message.id) {
                orphans.push(group);
            }
            let group = groups.next_if(|group| group[0].id == message.id);
            let group = group.unwrap_or_default();
            self.late(group);
            self.message(message, group, &mut absent, &mut asks);
        }
        orphans.extend(groups);
        self.orphans(&orphans).await?;
        for chunk in absent.chunks(DETAIL_ROWS) {
            self.absent(chunk).await?;
        }
        if let Some(group) = self.group {
            group.judge(&asks, &mut self.found).await?;
        }
        Ok(())
    }

    /// A row and the records of its id.
    fn message<'m>(
        &mut self,
        message: &'m Message,
        records: &[Record],
        absent: &mut Vec<&'m Message>,
        asks: &mut Vec<Ask<'m>>,
    ) where
        'a: 'm,
    {
        let streams = self.streams;
        let wanted = self.topics.is_empty() || self.topics.contains(&message.topic);
        let hash = self.hashes.of(message.message_key.as_bytes());
        let mut own: Vec<&Record> = Vec::new();
        for record in records.iter().filter(|r| r.kind == Kind::Entry) {
            let topic = &self.streams[record.stream as usize].topic;
            if record.hash == hash && *topic == message.topic {
                own.push(record);
            } else {
                let note = if record.hash == hash {
                    format!("the row is of topic {}", message.topic)
                } else {
                    "the row of that id has another message key".to_owned()
                };
                self.found.phantom.add(|| suspect(record, note));
            }
        }
        if !wanted {
            return;
        }
        self.found.rows += 1;
        let Some(first) = own.first() else {
            absent.push(message);
            return;
        };
        self.found.published += 1;
        if let Some(second) = own.get(1) {
            self.found.doubled.add(|| doubled(first, second, own.len()));
        }
        for record in own.iter().filter(|r| r.given != Given::NotAsked) {
            asks.push(Ask {
                message,
                record: **record,
                stream: &streams[record.stream as usize].name,
            });
        }
    }

    /// Entries that came late count if they are the first of their message in the stream: a copy disorders nothing.
    fn late(&mut self, records: &[Record]) {
        let entries = || records.iter().filter(|r| r.kind == Kind::Entry);
        for late in records.iter().filter(|r| r.kind == Kind::Late) {
            let at = |r: &&Record| (r.stream, r.entry) == (late.stream, late.entry);
            let Some(entry) = entries().find(at) else {
                continue;
            };
            let earlier = |r: &Record| {
                r.hash == entry.hash && r.stream == entry.stream && r.entry < entry.entry
            };
            if !entries().any(earlier) {
                let note = format!("after id {} of its ordering key", late.hash[0]);
                self.found.out_of_order.add(|| suspect(entry, note));
            }
        }
    }

    /// Entries of ids that have no row.
    async fn orphans(&mut self, groups: &[&[Record]]) -> Result<()> {
        if groups.iter().any(|group| group[0].id >= self.floor) {
            // The purge may have run since the start. The rows were read before this.
            let row = self
                .session
                .one("read the purge's reach", sql::PURGED_TO, &[])
                .await?;
            self.floor = self.floor.max(row.get::<_, i64>(0).saturating_add(1));
        }
        for group in groups {
            self.late(group);
            let mut entries: Vec<&Record> =
                group.iter().filter(|r| r.kind == Kind::Entry).collect();
            if group[0].id >= self.floor {
                for record in entries {
                    let note = "no row has that id".to_owned();
                    self.found.phantom.add(|| suspect(record, note));
                }
                continue;
            }
            let topic = |r: &Record| &self.streams[r.stream as usize].topic;
            entries.sort_by_key(|r| (topic(r), **r));
            for copies in entries.chunk_by(|a, b| a.hash == b.hash && topic(a) == topic(b)) {
                if let [first, second, ..] = copies {
                    let copies = copies.len();
                    self.found.doubled.add(|| doubled(first, second, copies));
                }
            }
        }
        Ok(())
    }

    /// Rows that have no entry.
    async fn absent(&mut self, messages: &[&Message]) -> Result<()> {
        let mut passed = Vec::new();
        for message in messages {
            match self.sent.passed(message.id) {
                Passed::Yes => passed.push(*message),
                Passed::NotYet => {
                    self.found.above_cursor += 1;
                    self.not_yet(message, None, "above the cursor");
                }
                Passed::Gap => {
                    self.found.in_gaps += 1;
                    self.not_yet(message, None, "in a gap of the cursor");
                }
            }
        }
        let ids: Vec<i64> = passed.iter().map(|message| message.id).collect();
        let mut details = Vec::new();
        if !ids.is_empty() {
            details = self
                .session
                .rows("look up rows", &self.details, &[&ids])
                .await?;
            details.sort_unstable_by_key(|row| row.get::<_, i64>(0));
        }
        for message in passed {
            let at = details.binary_search_by_key(&message.id, |row| row.get(0));
            // A row that the purge has taken since was sent longer ago than the retention.
            let Ok(at) = at else {
                self.found.rows -= 1;
                continue;
            };
            let set_aside: bool = details[at].get(2);
            if set_aside {
                self.found.set_aside += 1;
            } else {
                self.passed_without_entry(message, details[at].get(1), details[at].get(3));
            }
        }
        Ok(())
    }

    fn passed_without_entry(
        &mut self,
        message: &Message,
        ordering_key: Option<&str>,
        created_ms: i64,
    ) {
        let names = self.sent.streams(
            self.prefix,
            &message.topic,
            ordering_key,
            &message.message_key,
        );
        let own = names.first().map_or("", String::as_str);
        if let Some(reason) = self.sent.held_back(message.id, &message.topic, own) {
            let note = format!("held back: {reason}");
            self.found.held_back += 1;
            self.not_yet(message, Some(own), &note);
            return;
        }
        let stream = (0..)
            .zip(self.streams)
            .find(|(_, stream)| stream.name == own);
        let (tally, note) = match stream.map(|(_, stream)| (stream.begins_with, stream)) {
            Some((i64::MAX, _)) => (&mut self.found.trimmed, format!("{own} is empty")),
            Some((first, _)) if message.id < first => (
                &mut self.found.trimmed,
                format!("{own} begins with id {first}"),
            ),
            // The first entry may be of a message that came late, with a lower id than those before it.
            Some((_, stream)) if stream.may_have_trimmed(created_ms) => (
                &mut self.found.trimmed,
                format!("{own} was trimmed past its time"),
            ),
            _ => (&mut self.found.missing, format!("not in {own}")),
        };
        tally.add(|| Suspect {
            stream: stream.map(|(index, _)| index),
            note,
            ..of_row(message)
        });
    }

    fn not_yet(&mut self, message: &Message, stream: Option<&str>, note: &str) {
        let stream = stream
            .and_then(|name| (0..).zip(self.streams).find(|(_, s)| s.name == name))
            .map(|(index, _)| index);
        self.found.not_yet_published.add(|| Suspect {
            stream,
            note: note.to_owned(),
            ..of_row(message)
        });
    }
}

fn of_row(message: &Message) -> Suspect {
    Suspect {
        id: Some(message.id),
        message_key: Some(message.message_key.clone()),
        ..Suspect::default()
    }
}

fn suspect(record: &Record, note: String) -> Suspect {
    Suspect {
        id: Some(record.id),
        stream: Some(record.stream),
        entry: Some(record.entry),
        note,
        ..Suspect::default()
    }
}

fn doubled(first: &Record, second: &Record, copies: usize) -> Suspect {
    Suspect {
        other: Some((first.stream, first.entry)),
        ..suspect(second, format!("{copies} entries, the first"))
    }
}
