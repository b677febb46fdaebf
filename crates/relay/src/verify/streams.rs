//! Reads the streams: once, without payloads, into the spills.

use redis::Script;
use redis::aio::MultiplexedConnection;

use super::range::IdRange;
use super::spill::{Given, Hashes, Kind, PARTS, Record, Spill};
use super::tally::{Suspect, Tally};
use super::{EntryId, LIMIT, Progress, stripe};
use crate::error::{Error, Result};
use crate::publisher::{RedisTarget, tail_from_ms, trimmed_key};
use crate::rewind;

const SURVEY_LUA: &str = include_str!("survey.lua");

/// Entries of one call; Redis serves nobody else meanwhile, a few milliseconds.
const CHUNK: usize = 1_000;

/// A stream of the topics.
pub(super) struct Stream {
    pub(super) name: String,
    pub(super) topic: String,
    /// Messages below this id may have been trimmed: it is the id of the first entry after all was read.
    pub(super) begins_with: i64,
    /// The relay has trimmed entries below this one.
    pub(super) trimmed_below: Option<EntryId>,
    /// The entry up to which it was read.
    pub(super) read_to: EntryId,
    /// Whether the group that was asked about reads it.
    pub(super) has_group: bool,
}

impl Stream {
    /// Whether the entry of a row from this time (milliseconds since 1970) may be one of those that the relay trimmed.
    pub(super) fn may_have_trimmed(&self, created_ms: i64) -> bool {
        self.trimmed_below
            .is_some_and(|below| tail_from_ms(created_ms).unsigned_abs() <= below.0)
    }
}

/// An entry without its payload.
pub(crate) struct Seen {
    pub(crate) entry: EntryId,
    /// None where the field is missing or no number.
    pub(crate) id: Option<i64>,
    /// Empty where the field is missing, or too long for a message.
    pub(crate) message_key: Vec<u8>,
    /// As the script tags it; empty where there is none.
    ordering_key: Vec<u8>,
    /// Given to a member of the group that was asked about, and not acknowledged.
    pub(crate) pending: bool,
    /// `outbox-relay replay` added it.
    pub(crate) replayed: bool,
}

/// What is read of the streams, and for whom.
pub(super) struct Survey<'a> {
    pub(super) range: IdRange,
    /// Entries before this one are older than the range.
    pub(super) since: Option<EntryId>,
    pub(super) group: Option<&'a str>,
    pub(super) hashes: &'a Hashes,
}

/// What was read.
pub(super) struct Surveyed {
    pub(super) by_id: Spill,
    /// Entries of the range.
    pub(super) entries: u64,
    /// Entries that a replay added, of the range or not.
    pub(super) replayed: u64,
    /// Entries that are no messages.
    pub(super) malformed: Tally,
}

/// A connection to the Redis of the streams. It writes nothing.
pub(crate) struct Reader {
    connection: MultiplexedConnection,
    script: Script,
    trimmed_key: String,
}

impl Reader {
    pub(crate) async fn connect(target: &RedisTarget, prefix: &str) -> Result<Self> {
        Ok(Reader {
            trimmed_key: trimmed_key(prefix),
            connection: target.connect(LIMIT).await?,
            script: Script::new(SURVEY_LUA),
        })
    }

    /// The streams of the topics, of all their partitions, also of earlier counts.
    pub(super) async fn list(
        &mut self,
        prefix: &str,
        topics: &[String],
        group: Option<&str>,
    ) -> Result<Vec<Stream>> {
        let mut streams = Vec::new();
        for name in rewind::streams(&mut self.connection, prefix, topics).await? {
            let Some(topic) = rewind::topic_of(&name, prefix).map(str::to_owned) else {
                continue;
            };
            let (given, _) = self
                .page(&name, "-", "+", 1, group.unwrap_or_default())
                .await?;
            streams.push(Stream {
                topic,
                begins_with: i64::MIN,
                trimmed_below: None,
                read_to: EntryId(0, 0),
                has_group: given.is_some(),
                name,
            });
        }
        Ok(streams)
    }

    /// Reads every stream up to its present end.
    pub(super) async fn survey(
        &mut self,
        streams: &mut [Stream],
        what: &Survey<'_>,
        progress: &mut Progress,
    ) -> Result<Surveyed> {
        let mut expected = 0;
        for stream in streams.iter() {
            expected += self.length(&stream.name).await?;
        }
        let mut done = Surveyed {
            by_id: Spill::new(),
            entries: 0,
            replayed: 0,
            malformed: Tally::default(),
        };
        let mut by_key = Spill::new();
        let mut read = 0;
        let mut disorder = false;
        for (index, stream) in (0..).zip(streams.iter_mut()) {
            let Some(end) = self.last_entry(&stream.name).await? else {
                continue;
            };
            stream.read_to = end;
            let group = what.group.filter(|_| stream.has_group).unwrap_or_default();
            let mut from = what
                .since
                .map_or_else(|| "-".to_owned(), |since| since.to_string());
            let mut highest = i64::MIN;
            loop {
                let (given, page) = self
                    .page(&stream.name, &from, &end.to_string(), CHUNK, group)
                    .await?;
                let Some(last) = page.last() else { break };
                from = format!("({}", last.entry);
                read += page.len() as u64;
                for seen in page {
                    if seen.replayed {
                        done.replayed += 1;
                        continue;
                    }
                    let Some(id) = seen.id.filter(|_| !seen.message_key.is_empty()) else {
                        done.malformed.add(|| Suspect {
                            stream: Some(index),
                            entry: Some(seen.entry),
                            note: "it has no id or no message key".into(),
                            ..Suspect::default()
                        });
                        continue;
                    };
                    if !what.range.contains(id) {
                        continue;
                    }
                    done.entries += 1;
                    disorder |= id < highest;
                    highest = highest.max(id);
                    let record = Record {
                        id,
                        kind: Kind::Entry,
                        hash: what.hashes.of(&seen.message_key),
                        entry: seen.entry,
                        stream: index,
                        given: given_to(given, &seen),
                    };
                    done.by_id.put(what.range.part(id), &record)?;
                    if !seen.ordering_key.is_empty() {
                        let hash = what.hashes.of(&seen.ordering_key);
                        by_key.put(stripe(hash[0], PARTS), &Record { hash, ..record })?;
                    }
                }
                progress.show("entries read", read, expected.max(read));
            }
        }
        // Only now: it may have been trimmed while it was read.
        for stream in streams.iter_mut() {
            stream.begins_with = match self.first_published(&stream.name).await? {
                Some(first) => first.id.unwrap_or(i64::MIN),
                None => i64::MAX,
            };
            let mut record = redis::cmd("HGET");
            record.arg(&self.trimmed_key).arg(&stream.name);
            let below: Option<String> = self.ask(&record).await?;
            stream.trimmed_below = below.map(|below| EntryId::parse(&below));
        }
        // In a stream whose ids only ever rise, no key is out of order.
        if disorder {
            super::order::find_late(&mut by_key, &mut done.by_id, what.range)?;
        }
        Ok(done)
    }

    /// Entries from `from` to `to`, and the last entry that the group was given if it reads the stream.
    pub(crate) async fn page(
        &mut self,
        stream: &str,
        from: &str,
        to: &str,
        count: usize,
        group: &str,
    ) -> Result<(Option<EntryId>, Vec<Seen>)> {
        type Fields = (String, Vec<u8>, Vec<u8>, Vec<u8>, u8, u8);
        let mut call = self.script.prepare_invoke();
        call.key(stream).arg(from).arg(to).arg(count).arg(group);
        let (given, found): (String, Vec<Fields>) = call
            .invoke_async(&mut self.connection)
            .await
            .map_err(|source| Error::Redis {
            doing: "read a stream",
            source,
        })?;
        let seen = |(entry, id, message_key, ordering_key, pending, replayed): Fields| Seen {
            entry: EntryId::parse(&entry),
            id: std::str::from_utf8(&id).ok().and_then(|id| id.parse().ok()),
            message_key,
            ordering_key,
            pending: pending == 1,
            replayed: replayed == 1,
        };
        let given = (!given.is_empty()).then(|| EntryId::parse(&given));
        Ok((given, found.into_iter().map(seen).collect()))
    }

    /// The first entry that no replay added.
    async fn first_published(&mut self, stream: &str) -> Result<Option<Seen>> {
        let (mut from, mut count) = ("-".to_owned(), 1);
        loop {
            let (_, page) = self.page(stream, &from, "+", count, "").await?;
            let Some(last) = page.last() else {
                return Ok(None);
            };
            (from, count) = (format!("({}", last.entry), CHUNK);
            if let Some(first) = page.into_iter().find(|seen| !seen.replayed) {
                return Ok(Some(first));
            }
        }
    }

    /// An entry, if it is still there.
    pub(super) async fn entry(&mut self, stream: &str, entry: EntryId) -> Result<Option<Seen>> {
        let at = entry.to_string();
        let (_, found) = self.page(stream, &at, &at, 1, "").await?;
        Ok(found.into_iter().next())
    }

    /// The last entry of a stream; none where it is empty or gone.
    pub(crate) async fn last_entry(&mut self, stream: &str) -> Result<Option<EntryId>> {
        let last: redis::streams::StreamRangeReply = self
            .ask(
                redis::cmd("XREVRANGE")
                    .arg(stream)
                    .arg("+")
                    .arg("-")
                    .arg("COUNT")
                    .arg(1),
            )
            .await?;
        Ok(last.ids.first().map(|entry| EntryId::parse(&entry.id)))
    }

    async fn length(&mut self, stream: &str) -> Result<u64> {
        self.ask(redis::cmd("XLEN").arg(stream)).await
    }

    async fn ask<T: redis::FromRedisValue>(&mut self, command: &redis::Cmd) -> Result<T> {
        command
            .query_async(&mut self.connection)
            .await
            .map_err(|source| Error::Redis {
                doing: "look at a stream",
                source,
            })
    }
}

fn given_to(given: Option<EntryId>, seen: &Seen) -> Given {
    match given {
        None => Given::NotAsked,
        Some(_) if seen.pending => Given::Pending,
        Some(last) if seen.entry > last => Given::NotYet,
        Some(_) => Given::Acknowledged,
    }
}
