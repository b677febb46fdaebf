//! Looks again at what does not agree, since both sides went on while they were read.

use std::collections::{HashMap, HashSet};

use super::compare::Message;
use super::sent::{Passed, Sent};
use super::streams::{Reader, Stream};
use super::tally::{Suspect, Tallies, Tally};
use crate::error::Result;
use crate::postgres::{Session, sql, verify_sql};

/// Entries of a stream's tail that are read in one call.
const CHUNK: usize = 500;

/// Both sides, as they are now.
pub(super) struct Recheck<'a> {
    pub(super) session: &'a Session,
    pub(super) reader: &'a mut Reader,
    pub(super) streams: &'a [Stream],
    /// The cursor as it is now: it may have fallen back since.
    pub(super) sent: &'a Sent,
}

impl Recheck<'_> {
    /// Takes out of every tally what is right by now. A lost effect needs no second look: the inbox was read
    /// after the acknowledgement.
    pub(super) async fn run(&mut self, found: &mut Tallies) -> Result<()> {
        self.missing(&mut found.missing).await?;
        self.phantoms(&mut found.phantom).await?;
        for tally in [&mut found.doubled, &mut found.out_of_order] {
            let mut confirmed = Vec::new();
            for suspect in std::mem::take(&mut tally.kept) {
                let other = match suspect.other {
                    Some((stream, entry)) => self.entry(stream, entry).await?.is_some(),
                    None => true,
                };
                confirmed.push(self.still_there(suspect).await?.filter(|_| other));
            }
            tally.settle(confirmed);
        }
        Ok(())
    }

    /// What the relay published after its stream was read, or will publish again, is not missing.
    async fn missing(&mut self, tally: &mut Tally) -> Result<()> {
        let mut wanted: HashSet<(i64, Vec<u8>)> = tally
            .kept
            .iter()
            .filter_map(|s| Some((s.id?, s.message_key.clone()?.into_bytes())))
            .collect();
        if wanted.is_empty() {
            return Ok(());
        }
        for stream in self.streams {
            let Some(end) = self.reader.last_entry(&stream.name).await? else {
                continue;
            };
            let mut from = format!("({}", stream.read_to);
            loop {
                let (_, page) = self
                    .reader
                    .page(&stream.name, &from, &end.to_string(), CHUNK, "")
                    .await?;
                let Some(last) = page.last() else { break };
                from = format!("({}", last.entry);
                for seen in page.into_iter().filter(|seen| !seen.replayed) {
                    if let Some(id) = seen.id {
                        wanted.remove(&(id, seen.message_key));
                    }
                }
            }
        }
        let confirmed = std::mem::take(&mut tally.kept)
            .into_iter()
            .map(|suspect| {
                let still = match (suspect.id, &suspect.message_key) {
                    (Some(id), Some(key)) => {
                        wanted.contains(&(id, key.clone().into_bytes()))
                            && self.sent.passed(id) == Passed::Yes
                    }
                    _ => true,
                };
                still.then_some(suspect)
            })
            .collect();
        tally.settle(confirmed);
        Ok(())
    }

    /// An entry is no phantom once its row is there, or the purge has passed it.
    async fn phantoms(&mut self, tally: &mut Tally) -> Result<()> {
        if tally.kept.is_empty() {
            return Ok(());
        }
        let ids: Vec<i64> = tally.kept.iter().filter_map(|s| s.id).collect();
        let rows = self
            .session
            .all("look up rows again", verify_sql::ROWS_AGAIN, &[&ids])
            .await?;
        let rows: HashMap<i64, Message> = rows
            .iter()
            .map(|row| (row.get(0), Message::of(row)))
            .collect();
        let row = self
            .session
            .one("read the purge's reach", sql::PURGED_TO, &[])
            .await?;
        let purged_to: i64 = row.get(0);
        let mut confirmed = Vec::new();
        for suspect in std::mem::take(&mut tally.kept) {
            let Some(suspect) = self.still_there(suspect).await? else {
                confirmed.push(None);
                continue;
            };
            let topic = suspect
                .stream
                .map_or("", |stream| &self.streams[stream as usize].topic);
            let right = suspect.id.is_some_and(|id| match rows.get(&id) {
                Some(row) => {
                    suspect.message_key.as_ref() == Some(&row.message_key) && topic == row.topic
                }
                None => id <= purged_to,
            });
            confirmed.push((!right).then_some(suspect));
        }
        tally.settle(confirmed);
        Ok(())
    }

    /// The suspect with the message key of its entry, unless the entry is gone.
    async fn still_there(&mut self, mut suspect: Suspect) -> Result<Option<Suspect>> {
        let (Some(stream), Some(entry)) = (suspect.stream, suspect.entry) else {
            return Ok(Some(suspect));
        };
        let Some(key) = self.entry(stream, entry).await? else {
            return Ok(None);
        };
        if !key.is_empty() {
            suspect.message_key = Some(String::from_utf8_lossy(&key).into_owned());
        }
        Ok(Some(suspect))
    }

    async fn entry(&mut self, stream: u32, entry: super::EntryId) -> Result<Option<Vec<u8>>> {
        let name = &self.streams[stream as usize].name;
        let seen = self.reader.entry(name, entry).await?;
        Ok(seen.map(|seen| seen.message_key))
    }
}
