//! What a member handles next: what was given out before, and new entries, read into the queue.

use std::{collections::HashMap, convert::Infallible, sync::Arc, time::Duration};

use redis::Cmd;
use tokio::time::timeout;
use tracing::{error, info};

use crate::{
    Message,
    builder::Settings,
    counters::Count,
    decision::{Decision, Fault},
    link::Link,
    message::Source,
    patience::{Halt, Patience},
    queue::{Delivery, Item, Queue},
    replies::{self, Delivered},
    trouble::Trouble,
};

mod pending;
mod progress;

use progress::Progress;

/// How long a stop waits for Redis to end a blocking read.
const UNBLOCK_MAX: Duration = Duration::from_millis(500);
/// How long nothing is looked at while there is nothing to read or no room.
const IDLE_MAX: Duration = Duration::from_millis(500);

/// Reads as one member of the group, on a connection of its own.
pub(crate) struct Reader {
    link: Link,
    /// For everything that must not wait behind a blocking read.
    control: Link,
    queue: Queue,
    patience: Patience,
    group: String,
    name: String,
    batch: usize,
    block: Duration,
    claim_after: Duration,
    progress: HashMap<String, Progress>,
}

impl Reader {
    pub(crate) fn new(
        settings: &Settings,
        control: Link,
        queue: Queue,
        patience: Patience,
    ) -> Self {
        // Longer than BLOCK, else every quiet wait would look like a dead connection.
        let response_timeout = settings.block + settings.response_timeout;
        Self {
            link: Link::new(
                settings.redis.clone(),
                &settings.stream_prefix,
                settings.response_timeout,
                response_timeout,
            ),
            control,
            queue,
            patience,
            group: settings.group.clone(),
            name: settings.name.clone(),
            batch: settings.batch,
            block: settings.block,
            claim_after: settings.claim_after,
            progress: HashMap::new(),
        }
    }

    /// Reads until the stop signal, which is [`Halt::Stopped`].
    ///
    /// On trouble it begins again with what is pending: the reply may have been lost, and the entries in it are
    /// pending for us.
    ///
    /// # Cancel safety
    ///
    /// Dropped while it waits, it may leave entries pending for us that nobody has seen. The next owner finds them, or
    /// who claims them after the claim time.
    pub(crate) async fn read(&mut self) -> Halt {
        match self.read_until_halt().await {
            Ok(never) => match never {},
            Err(halt) => halt,
        }
    }

    async fn read_until_halt(&mut self) -> Result<Infallible, Halt> {
        let mut backoff = self.patience.backoff();
        let mut group_made = false;
        loop {
            self.patience.go_on()?;
            let Err(trouble) = self.look().await else {
                self.patience.over("read", &mut backoff);
                group_made = false;
                continue;
            };
            for progress in self.progress.values_mut() {
                progress.search.restart();
            }
            // A new group, or a stream that went away: no wait, unless that has just been tried.
            if trouble.decision() == Decision::RemakeGroup && !group_made {
                group_made = true;
                let sources: Vec<_> = self.progress.values().map(|p| p.source.clone()).collect();
                let mut made = Ok(());
                for source in sources {
                    made = self.make_group(&source).await;
                    if made.is_err() {
                        break;
                    }
                }
                let Err(trouble) = made else {
                    continue;
                };
                self.patience
                    .wait("make the group", &mut backoff, &trouble)
                    .await?;
            } else {
                group_made = false;
                self.patience.wait("read", &mut backoff, &trouble).await?;
            }
        }
    }

    /// One round: a step of each search, and one read of what is new.
    async fn look(&mut self) -> Result<(), Trouble> {
        let sources = self.sources();
        let room = self.queue.room();
        if sources.is_empty() || room == 0 {
            self.idle().await;
            return Ok(());
        }
        let mut searching = false;
        for source in &sources {
            let searched = self.search(source, room).await;
            searching |= self.unless_refused(source, searched)?.unwrap_or(false);
        }
        let ready: Vec<Arc<Source>> = sources
            .into_iter()
            .filter(|source| {
                let progress = &self.progress[&source.stream];
                progress.refused_until.is_none() && !progress.search.comes_first()
            })
            .collect();
        if ready.is_empty() {
            return Ok(());
        }
        let room = self.queue.room();
        if room == 0 {
            return Ok(());
        }
        let block = (!searching).then_some(self.block);
        self.queue.begin_read(&ready);
        let read = self.read_new(&ready, room, block).await;
        self.queue.end_read(&ready);
        match read {
            // One of them refuses; which one, only a read of each can tell.
            Err(trouble) if trouble.fault == Fault::RedisForbids => self.read_each(&ready).await,
            read => read,
        }
    }

    async fn idle(&self) {
        let wait = timeout(IDLE_MAX, async {
            tokio::select! {
                () = self.queue.streams_changed() => {}
                () = self.queue.room_changed() => {}
                () = self.patience.stop.cancelled() => {}
            }
        });
        // The end of the time is as good a reason to look again.
        let _ = wait.await;
    }

    async fn read_new(
        &mut self,
        sources: &[Arc<Source>],
        room: usize,
        block: Option<Duration>,
    ) -> Result<(), Trouble> {
        let mut command = self.read_group(room.div_ceil(sources.len()), block);
        command.arg("STREAMS");
        for source in sources {
            command.arg(&source.stream);
        }
        for _ in sources {
            command.arg(">");
        }
        let Some(reply) = self.wait_for_new(&command).await? else {
            return Ok(());
        };
        let mut read: HashMap<String, Delivered> =
            replies::read_group(reply)?.into_iter().collect();
        // Whoever was frozen may have read since: an entry that comes before ours.
        let owned: Vec<Arc<Source>> = sources
            .iter()
            .filter(|source| source.epoch.is_some())
            .filter(|source| read.is_empty() || read.contains_key(&source.stream))
            .cloned()
            .collect();
        let held = self.held_by_others(&owned).await?;
        for (source, held) in owned.iter().zip(held) {
            if held > 0 {
                let ours = read.remove(&source.stream).unwrap_or_default();
                let progress = self.progress.get_mut(&source.stream);
                let progress = progress.expect("a stream that is read has its progress");
                let ours = ours.entries.iter().map(|entry| entry.place);
                progress.first.extend(ours);
                progress.search.claim_all();
            }
        }
        for source in sources {
            if let Some(delivered) = read.remove(&source.stream) {
                self.deliver(source, delivered, Delivery::First).await?;
            }
        }
        Ok(())
    }

    /// Sends a blocking read. None if the stop signal came meanwhile.
    async fn wait_for_new(&self, command: &Cmd) -> Result<Option<redis::Value>, Trouble> {
        let id = self.link.identify().await?;
        let read = self.link.query(command);
        tokio::pin!(read);
        tokio::select! {
            biased;
            reply = &mut read => return reply.map(Some),
            () = self.patience.stop.cancelled() => {}
            () = self.queue.streams_changed() => {
                unblock(&self.control, id).await;
                return read.await.map(Some);
            }
        }
        unblock(&self.control, id).await;
        // What this brings is not begun any more; it stays pending, and leaving the group makes it claimable at
        // once. The point is that nothing is given to us after we have left.
        let _ = timeout(UNBLOCK_MAX, read).await;
        self.link.close();
        Ok(None)
    }

    /// Reads each stream by itself, without waiting.
    async fn read_each(&mut self, sources: &[Arc<Source>]) -> Result<(), Trouble> {
        for source in sources {
            let one = std::slice::from_ref(source);
            let read = self.read_new(one, self.batch, None).await;
            self.unless_refused(source, read)?;
        }
        Ok(())
    }

    /// Puts entries into the queue, but for those that it has already. Returns how many are new to it.
    async fn deliver(
        &mut self,
        source: &Arc<Source>,
        mut delivered: Delivered,
        delivery: Delivery,
    ) -> Result<usize, Trouble> {
        if !delivered.lost.is_empty() {
            error!(stream = source.stream, entries = ?delivered.lost, "entries were deleted before they were handled");
            self.patience
                .counters
                .add(&source.stream, Count::Lost, delivered.lost.len());
            let mut command = redis::cmd("XACK");
            command
                .arg(&source.stream)
                .arg(&self.group)
                .arg(&delivered.lost);
            self.control.query(&command).await?;
        }
        let first = self.progress.get_mut(&source.stream).map(|p| &mut p.first);
        let first = first.expect("a stream that is read has its progress");
        self.queue.leave_out_held(source, &mut delivered.entries);
        let items: Vec<Item> = delivered
            .entries
            .into_iter()
            .map(|entry| {
                let delivery = match first.remove(&entry.place) {
                    true => Delivery::First,
                    false => delivery,
                };
                match Message::from_entry(source, entry) {
                    Ok(message) => Item::message(message, delivery),
                    Err((entry, malformed)) => Item::malformed(entry, malformed, delivery),
                }
            })
            .collect();
        let new = items.len();
        self.queue.add(source, items);
        Ok(new)
    }

    /// Makes a group that is missing, from the start of its stream: a group made at the end would never see what
    /// was published before, or what the relay publishes again after a loss.
    async fn make_group(&self, source: &Source) -> Result<(), Trouble> {
        let mut command = redis::cmd("XGROUP");
        command
            .arg("CREATE")
            .arg(&source.stream)
            .arg(&self.group)
            .arg("0")
            .arg("MKSTREAM");
        match self.control.query(&command).await {
            Ok(_) => {
                info!(
                    group = self.group,
                    stream = source.stream,
                    "group made from the start of the stream"
                );
                self.queue.note_group_made();
                Ok(())
            }
            Err(trouble) if trouble.fault == Fault::GroupExists => Ok(()),
            Err(trouble) => Err(trouble),
        }
    }

    fn read_group(&self, room: usize, block: Option<Duration>) -> Cmd {
        let mut command = redis::cmd("XREADGROUP");
        command
            .arg("GROUP")
            .arg(&self.group)
            .arg(&self.name)
            .arg("COUNT")
            .arg(room.clamp(1, self.batch));
        if let Some(block) = block {
            command.arg("BLOCK").arg(milliseconds(block));
        }
        command
    }
}

async fn unblock(control: &Link, reader_id: Option<i64>) {
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
