//! What a member handles next: its own pending entries, those of dead members, and new ones.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use redis::Cmd;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::{
    builder::Settings,
    counters::{Count, Counters},
    link::Link,
    message::Source,
    recovery::{OwnPending, Walk},
    replies::{self, Delivered},
    trouble::Trouble,
};

/// How long a stop waits for Redis to end a blocking read.
const UNBLOCK_MAX: Duration = Duration::from_millis(500);

/// Entries of one stream, to be handled together.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) source: Arc<Source>,
    pub(crate) delivered: Delivered,
    /// Whether the entries were given out before, so that a handler may have died of one of them.
    pub(crate) redelivered: bool,
}

/// Reads as one member of the group, on a connection of its own.
pub(crate) struct Reader {
    link: Link,
    group: String,
    name: String,
    sources: Vec<Arc<Source>>,
    count: usize,
    block: Duration,
    claim_after: Duration,
    counters: Counters,
    /// Read, but not handed out yet: one read can bring a batch of each stream.
    ready: VecDeque<Batch>,
    own_pending: OwnPending,
    walk: Walk,
    /// New entries are due after each batch of claimed ones, so that a long walk does not hold them up.
    new_entries_due: bool,
}

impl Reader {
    pub(crate) fn new(settings: &Settings, counters: Counters) -> Self {
        // Longer than BLOCK, else every quiet wait would look like a dead connection.
        let response_timeout = settings.block + settings.response_timeout;
        Self {
            link: Link::new(
                settings.redis.clone(),
                settings.response_timeout,
                response_timeout,
            ),
            group: settings.group.clone(),
            name: settings.name.clone(),
            sources: settings.sources.clone(),
            count: settings.batch,
            block: settings.block,
            claim_after: settings.claim_after,
            counters,
            ready: VecDeque::new(),
            own_pending: OwnPending::new(settings.sources.len()),
            walk: Walk::new(settings.sources.len(), settings.claim_after / 2),
            new_entries_due: false,
        }
    }

    /// The next batch, or none when nothing came for a while or the stop signal did.
    ///
    /// On trouble, the next call begins again with our own pending entries: the reply may have been lost,
    /// and the entries in it are pending for us. It must not be called while a batch is being handled,
    /// which it would then read again.
    ///
    /// # Cancel safety
    ///
    /// Dropped while it waits, it may leave entries pending for us that nobody has seen. They are found
    /// when it is called again from the start of our own pending entries, or claimed by another member.
    pub(crate) async fn next(
        &mut self,
        control: &mut Link,
        stop: &CancellationToken,
    ) -> Result<Option<Batch>, Trouble> {
        let next = self.look(control, stop).await;
        if next.is_err() {
            self.ready.clear();
            self.own_pending.restart();
        }
        next
    }

    async fn look(
        &mut self,
        control: &mut Link,
        stop: &CancellationToken,
    ) -> Result<Option<Batch>, Trouble> {
        while !stop.is_cancelled() {
            if let Some(batch) = self.ready.pop_front() {
                return Ok(Some(batch));
            }
            if self.own_pending.position().is_some() {
                if let Some(batch) = self.read_own_pending().await? {
                    return Ok(Some(batch));
                }
            } else if self.walk.position(Instant::now()).is_some() && !self.new_entries_due {
                if let Some(batch) = self.claim(control).await? {
                    self.new_entries_due = true;
                    return Ok(Some(batch));
                }
            } else {
                self.new_entries_due = false;
                self.read_new(control, stop).await?;
                if self.ready.is_empty() && !self.walk.is_under_way() {
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    async fn read_own_pending(&mut self) -> Result<Option<Batch>, Trouble> {
        let Some((index, after)) = self.own_pending.position() else {
            return Ok(None);
        };
        let source = Arc::clone(&self.sources[index]);
        let mut command = self.read_group(None);
        command.arg("STREAMS").arg(&source.stream).arg(after);
        let reply = self.link.query(&command).await?;
        let delivered = replies::read_group(reply)?
            .pop()
            .map(|(_, delivered)| delivered)
            .unwrap_or_default();
        self.own_pending.advance(last_id(&delivered));
        Ok(batch(source, delivered, true))
    }

    /// One step of the walk. Entries of our own name are not in flight while we read, so that claiming
    /// one of them again is as good as reading it.
    async fn claim(&mut self, control: &mut Link) -> Result<Option<Batch>, Trouble> {
        let Some((index, cursor)) = self.walk.position(Instant::now()) else {
            return Ok(None);
        };
        let source = Arc::clone(&self.sources[index]);
        let mut command = redis::cmd("XAUTOCLAIM");
        command
            .arg(&source.stream)
            .arg(&self.group)
            .arg(&self.name)
            .arg(milliseconds(self.claim_after));
        command.arg(cursor).arg("COUNT").arg(self.count);
        let (cursor, delivered) = replies::auto_claim(control.query(&command).await?)?;
        self.walk.advance(cursor, Instant::now());
        if !delivered.entries.is_empty() {
            info!(
                stream = source.stream,
                entries = delivered.entries.len(),
                "claimed entries left pending"
            );
            self.counters
                .add(&source.stream, Count::Claimed, delivered.entries.len());
        }
        Ok(batch(source, delivered, true))
    }

    async fn read_new(
        &mut self,
        control: &mut Link,
        stop: &CancellationToken,
    ) -> Result<(), Trouble> {
        let block = (!self.walk.is_under_way()).then_some(self.block);
        let mut command = self.read_group(block);
        command.arg("STREAMS");
        for source in &self.sources {
            command.arg(&source.stream);
        }
        for _ in &self.sources {
            command.arg(">");
        }
        self.link.identify().await?;
        let reader_id = self.link.client_id();
        let reply = {
            let read = self.link.query(&command);
            tokio::pin!(read);
            tokio::select! {
                reply = &mut read => Some(reply?),
                () = stop.cancelled() => {
                    unblock(control, reader_id).await;
                    // What this brings is not begun any more; it stays pending, and leaving the group makes
                    // it claimable at once. The point is that nothing is given to us after we have left.
                    let _ = timeout(UNBLOCK_MAX, read).await;
                    None
                }
            }
        };
        let Some(reply) = reply else {
            self.link.close();
            return Ok(());
        };
        for (stream, delivered) in replies::read_group(reply)? {
            let source = self.sources.iter().find(|source| source.stream == stream);
            self.ready
                .extend(source.and_then(|source| batch(Arc::clone(source), delivered, false)));
        }
        Ok(())
    }

    fn read_group(&self, block: Option<Duration>) -> Cmd {
        let mut command = redis::cmd("XREADGROUP");
        command
            .arg("GROUP")
            .arg(&self.group)
            .arg(&self.name)
            .arg("COUNT")
            .arg(self.count);
        if let Some(block) = block {
            command.arg("BLOCK").arg(milliseconds(block));
        }
        command
    }
}

fn batch(source: Arc<Source>, delivered: Delivered, redelivered: bool) -> Option<Batch> {
    (!delivered.is_empty()).then_some(Batch {
        source,
        delivered,
        redelivered,
    })
}

/// The highest id of a read. Living and lost entries come in one order but are kept apart.
fn last_id(delivered: &Delivered) -> Option<&str> {
    let living = delivered.entries.last().map(|entry| entry.id.as_str());
    let lost = delivered.lost.last().map(String::as_str);
    living.into_iter().chain(lost).max_by_key(|id| id_parts(id))
}

fn id_parts(id: &str) -> (u64, u64) {
    let (time, sequence) = id.split_once('-').unwrap_or((id, "0"));
    (time.parse().unwrap_or(0), sequence.parse().unwrap_or(0))
}

async fn unblock(control: &mut Link, reader_id: Option<i64>) {
    if let Some(id) = reader_id {
        let mut command = redis::cmd("CLIENT");
        command.arg("UNBLOCK").arg(id);
        // If Redis does not answer either, closing the connection ends the read as well.
        let _ = timeout(UNBLOCK_MAX, control.query(&command)).await;
    }
}

/// Whole milliseconds, at least 1: 0 would mean for ever to BLOCK.
pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis())
        .unwrap_or(u64::MAX)
        .max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replies::Entry;

    #[test]
    fn the_last_id_is_compared_as_numbers() {
        let entry = |id: &str| Entry {
            id: id.to_owned(),
            fields: Vec::new(),
        };
        let delivered = Delivered {
            entries: vec![entry("9-1"), entry("9-2")],
            lost: vec!["10-0".to_owned()],
        };
        assert_eq!(last_id(&delivered), Some("10-0"));
        assert_eq!(last_id(&Delivered::default()), None);
    }
}
