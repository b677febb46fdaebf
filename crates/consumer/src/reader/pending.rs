//! What was given out before: our own entries, and those that other members hold.

use std::sync::Arc;

use futures_util::future::join_all;
use tokio::time::Instant;
use tracing::info;

use super::{Reader, milliseconds};
use crate::{
    counters::Count,
    decision::Fault,
    entry::Place,
    message::Source,
    queue::Delivery,
    recovery::{Search, Step},
    replies::{self, Delivered},
    trouble::Trouble,
};

impl Reader {
    /// One step of the search in a stream. Returns whether there is more to do at once.
    pub(super) async fn search(
        &mut self,
        source: &Arc<Source>,
        room: usize,
    ) -> Result<bool, Trouble> {
        let now = Instant::now();
        let Some(step) = self.progress[&source.stream].search.step(now) else {
            return Ok(false);
        };
        self.queue.begin_read(std::slice::from_ref(source));
        let taken = self.take_step(source, step, room).await;
        self.queue.end_read(std::slice::from_ref(source));
        match taken {
            // A stream or a group that is new: there is nothing to search.
            Err(trouble) if trouble.fault == Fault::GroupGone => {
                self.make_group(source).await?;
                Ok(true)
            }
            Err(trouble) => Err(trouble),
            Ok(()) => {
                let search = &self.progress[&source.stream].search;
                Ok(search.step(Instant::now()).is_some())
            }
        }
    }

    async fn take_step(
        &mut self,
        source: &Arc<Source>,
        step: Step,
        room: usize,
    ) -> Result<(), Trouble> {
        match step {
            Step::Look => {
                let held = self.held_by_others(std::slice::from_ref(source)).await?;
                self.search_of(source).others_hold(held[0] > 0);
            }
            Step::Own { after } => {
                let mut command = self.read_group(room, None);
                command.arg("STREAMS").arg(&source.stream).arg(after);
                let delivered = replies::read_group(self.control.query(&command).await?)?
                    .pop()
                    .map(|(_, delivered)| delivered)
                    .unwrap_or_default();
                let last = last(&delivered).map(|place| place.to_string());
                self.deliver(source, delivered, Delivery::Again).await?;
                self.search_of(source)
                    .read_own(last.as_deref(), Instant::now());
            }
            Step::Claim { cursor, at_once } => {
                // What is in hand is kept fresh, so that our own entries are not claimed from ourselves.
                let min_idle = if at_once {
                    0
                } else {
                    milliseconds(self.claim_after)
                };
                let mut command = redis::cmd("XAUTOCLAIM");
                command
                    .arg(&source.stream)
                    .arg(&self.group)
                    .arg(&self.name)
                    .arg(min_idle);
                command
                    .arg(cursor)
                    .arg("COUNT")
                    .arg(room.clamp(1, self.batch));
                let (cursor, delivered) = replies::auto_claim(self.control.query(&command).await?)?;
                let claimed = self.deliver(source, delivered, Delivery::Again).await?;
                // What is claimed at once was noted when it was seen.
                if claimed > 0 && !at_once {
                    self.note_claimed(source, claimed);
                }
                self.search_of(source)
                    .claimed(cursor, at_once, Instant::now());
            }
            Step::Rest { .. } => {}
        }
        Ok(())
    }

    /// How many entries of each stream other members hold. Only the owner may ask: it claims them.
    pub(super) async fn held_by_others(
        &self,
        sources: &[Arc<Source>],
    ) -> Result<Vec<usize>, Trouble> {
        if sources.is_empty() {
            return Ok(Vec::new());
        }
        let mut counts = Vec::with_capacity(sources.len());
        // All are sent before the first reply is waited for.
        let replies = join_all(sources.iter().map(async |source| {
            let mut command = redis::cmd("XPENDING");
            command.arg(&source.stream).arg(&self.group);
            self.control.query(&command).await
        }))
        .await;
        for (source, reply) in sources.iter().zip(replies) {
            let holders = replies::pending_by_member(reply?)?;
            let others = holders.iter().filter(|(name, _)| *name != self.name);
            let held = others.map(|(_, held)| held).sum();
            if held > 0 {
                self.note_claimed(source, held);
            }
            counts.push(held);
        }
        Ok(counts)
    }

    fn note_claimed(&self, source: &Source, entries: usize) {
        info!(
            stream = source.stream,
            entries, "claimed entries left pending"
        );
        self.patience
            .counters
            .add(&source.stream, Count::Claimed, entries);
    }

    fn search_of(&mut self, source: &Source) -> &mut Search {
        let progress = self.progress.get_mut(&source.stream);
        &mut progress
            .expect("a stream that is read has its progress")
            .search
    }
}

/// The highest place of a read. Living and lost entries come in one order but are kept apart.
fn last(delivered: &Delivered) -> Option<Place> {
    let living = delivered.entries.last().map(|entry| entry.place);
    let lost = delivered.lost.last().and_then(|id| Place::parse(id));
    living.max(lost)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::Entry;

    #[test]
    fn the_last_place_may_be_that_of_a_lost_entry() {
        let delivered = Delivered {
            entries: vec![Entry::of("9-1", &[]), Entry::of("9-2", &[])],
            lost: vec!["10-0".to_owned()],
        };
        assert_eq!(last(&delivered), Place::parse("10-0"));
        assert_eq!(last(&Delivered::default()), None);
    }
}
