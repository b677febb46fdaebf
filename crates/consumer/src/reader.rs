//! What a member handles next: what was given out before, and new entries, read into the queue.

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use redis::Cmd;
use tokio::time::{Instant, timeout};
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
    recovery::{Search, Step},
    replies::{self, Delivered},
    trouble::Trouble,
};

/// How long a stop waits for Redis to end a blocking read.
const UNBLOCK_MAX: Duration = Duration::from_millis(500);
/// How long nothing is looked at while there is nothing to read or no room.
const IDLE_MAX: Duration = Duration::from_millis(500);
/// How long a stream that refuses is left alone.
const REFUSED_PAUSE: Duration = Duration::from_secs(3);

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

/// Where the reader is in one term of a stream.
struct Progress {
    source: Arc<Source>,
    search: Search,
    /// Read for the first time, but left in Redis because older entries had to be claimed first.
    first: HashSet<String>,
    refused_until: Option<Instant>,
    refusals: u64,
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

    /// The streams to look at now. What is known of others is forgotten.
    fn sources(&mut self) -> Vec<Arc<Source>> {
        let now = Instant::now();
        let all = self.queue.readable();
        self.progress.retain(|_, progress| {
            all.iter()
                .any(|source| Arc::ptr_eq(source, &progress.source))
        });
        let interval = self.claim_after / 2;
        all.into_iter()
            .filter(|source| {
                let progress = self
                    .progress
                    .entry(source.stream.clone())
                    .or_insert_with(|| Progress {
                        source: Arc::clone(source),
                        search: Search::new(source.epoch.is_some(), interval),
                        first: HashSet::new(),
                        refused_until: None,
                        refusals: 0,
                    });
                if progress.refused_until.is_some_and(|until| until <= now) {
                    progress.refused_until = None;
                }
                progress.refused_until.is_none()
            })
            .collect()
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

    /// Leaves a stream alone that refuses, so that the others go on.
    fn unless_refused<T>(
        &mut self,
        source: &Source,
        result: Result<T, Trouble>,
    ) -> Result<Option<T>, Trouble> {
        let Some(progress) = self.progress.get_mut(&source.stream) else {
            return result.map(Some);
        };
        match result {
            Ok(value) => {
                progress.refusals = 0;
                Ok(Some(value))
            }
            Err(trouble) if trouble.fault == Fault::RedisForbids => {
                progress.refused_until = Some(Instant::now() + REFUSED_PAUSE);
                progress.refusals += 1;
                progress.search.restart();
                if progress.refusals.is_power_of_two() {
                    error!(stream = source.stream, tries = progress.refusals, error = %trouble, "stream refused; the others go on");
                }
                Ok(None)
            }
            Err(trouble) => Err(trouble),
        }
    }

    /// One step of the search in a stream. Returns whether there is more to do at once.
    async fn search(&mut self, source: &Arc<Source>, room: usize) -> Result<bool, Trouble> {
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
                let last = last_id(&delivered).map(str::to_owned);
                self.deliver(source, delivered, Delivery::Again).await?;
                self.search_of(source).read_own(last.as_deref());
            }
            Step::Claim { cursor } => {
                let min_idle = match source.epoch {
                    Some(_) => 0,
                    None => milliseconds(self.claim_after),
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
                if claimed > 0 && source.epoch.is_none() {
                    self.note_claimed(source, claimed);
                }
                self.search_of(source).claimed(cursor, Instant::now());
            }
            Step::Rest { .. } => {}
        }
        Ok(())
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
                let ids = ours.entries.into_iter().map(|entry| entry.id);
                progress.first.extend(ids);
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

    /// How many entries of each stream other members hold. Only the owner may ask: it claims them.
    async fn held_by_others(&self, sources: &[Arc<Source>]) -> Result<Vec<usize>, Trouble> {
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

    /// Puts entries into the queue, but for those that it has already. Returns how many are new to it.
    async fn deliver(
        &mut self,
        source: &Arc<Source>,
        delivered: Delivered,
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
        let items: Vec<Item> = delivered
            .entries
            .into_iter()
            .filter(|entry| !self.queue.holds(source, &entry.id))
            .map(|entry| {
                let delivery = match first.remove(&entry.id) {
                    true => Delivery::First,
                    false => delivery,
                };
                match Message::from_entry(source, &entry) {
                    Ok(message) => Item::message(message, delivery),
                    Err(malformed) => Item::malformed(entry, malformed, delivery),
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

    fn search_of(&mut self, source: &Source) -> &mut Search {
        let progress = self.progress.get_mut(&source.stream);
        &mut progress
            .expect("a stream that is read has its progress")
            .search
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
