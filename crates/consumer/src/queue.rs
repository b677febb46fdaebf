//! What a member has in hand: entries that were read and are not settled yet, and which of them may run now.
//!
//! The reader puts entries in, the lanes take batches out, the keeper says which streams the member has.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::{
    entry::{Entry, Place},
    message::Source,
    patience::Halt,
    queue::line::Line,
};

mod line;
#[cfg(test)]
mod tests;

pub(crate) use line::{Batch, Delivery, Item, Parcel};

/// Payload bytes in hand beyond which nothing more is read.
const BYTES_MAX: usize = 256 * 1024 * 1024;
/// Entries that wait behind a key that must wait itself do not count as read ahead, up to so many.
const BLOCKED_MAX: usize = 5_000;

/// How much a member reads ahead and takes at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) batch: usize,
    pub(crate) lanes: usize,
    /// What cannot start within this time is not read.
    pub(crate) claim_after: Duration,
}

/// Shared by the reader, the lanes and the keeper of one member.
#[derive(Clone)]
pub(crate) struct Queue(Arc<Shared>);

struct Shared {
    bounds: Bounds,
    lines: Mutex<Lines>,
    /// Something may run now that could not before.
    work: Notify,
    /// The reader is to read other streams. It is the only one who waits for this and the next one.
    streams: Notify,
    /// There may be room for more entries.
    room: Notify,
    /// A group was made anew, so that streams that were drained may not be that any more.
    group_made: AtomicBool,
}

#[derive(Default)]
struct Lines {
    by_stream: HashMap<String, Line>,
    /// The order in which the streams get their turn.
    turns: VecDeque<String>,
    /// How long one message takes on a lane, smoothed; none until the first was settled.
    time_per_message: Option<Duration>,
}

impl Queue {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self(Arc::new(Shared {
            bounds,
            lines: Mutex::default(),
            work: Notify::new(),
            streams: Notify::new(),
            room: Notify::new(),
            group_made: AtomicBool::new(false),
        }))
    }

    /// Begins with a stream. What is in hand of an earlier term of the same stream is forgotten: it is pending, and
    /// is found again by whoever has the stream.
    pub(crate) fn open(&self, source: Arc<Source>) {
        let mut lines = self.lines();
        let stream = source.stream.clone();
        if lines
            .by_stream
            .insert(stream.clone(), Line::new(source))
            .is_none()
        {
            lines.turns.push_back(stream);
        }
        drop(lines);
        self.0.streams.notify_one();
    }

    /// Reads no more of a stream, so that it can be handed over once what is in hand has been settled. Messages
    /// that wait for another attempt are left to the next owner.
    pub(crate) fn close(&self, stream: &str) {
        let now = Instant::now();
        if let Some(line) = self.lines().by_stream.get_mut(stream) {
            line.close(now);
        }
        self.0.streams.notify_one();
    }

    /// Drops what waits of a stream that is being closed; what runs is finished.
    pub(crate) fn hurry(&self, stream: &str) {
        if let Some(line) = self.lines().by_stream.get_mut(stream) {
            line.clear();
        }
    }

    /// Whether nothing of a closed stream is in hand or under way.
    pub(crate) fn is_drained(&self, stream: &str) -> bool {
        let lines = self.lines();
        lines.by_stream.get(stream).is_none_or(Line::is_drained)
    }

    /// Forgets a stream with all that is in hand of it.
    pub(crate) fn lose(&self, stream: &str) {
        let mut lines = self.lines();
        lines.by_stream.remove(stream);
        lines.turns.retain(|turn| turn != stream);
        drop(lines);
        self.0.streams.notify_one();
    }

    /// Until when the lease of a stream is known to hold; nothing is read past it.
    pub(crate) fn lease_holds_until(&self, stream: &str, until: Instant) {
        if let Some(line) = self.lines().by_stream.get_mut(stream) {
            line.lease_until = Some(until);
        }
    }

    /// The streams that may be read now.
    pub(crate) fn readable(&self) -> Vec<Arc<Source>> {
        let now = Instant::now();
        let lines = self.lines();
        let mut sources: Vec<_> = lines
            .by_stream
            .values()
            .filter(|line| line.is_readable(now))
            .map(|line| Arc::clone(&line.source))
            .collect();
        sources.sort_by(|a, b| a.stream.cmp(&b.stream));
        sources
    }

    /// All streams that the member has, readable or not.
    pub(crate) fn sources(&self) -> Vec<Arc<Source>> {
        let lines = self.lines();
        lines
            .by_stream
            .values()
            .map(|line| Arc::clone(&line.source))
            .collect()
    }

    /// Says that streams are being read, until [`Queue::end_read`]: an entry may come in, so that they are not drained.
    pub(crate) fn begin_read(&self, sources: &[Arc<Source>]) {
        self.mark_read(sources, true);
    }

    pub(crate) fn end_read(&self, sources: &[Arc<Source>]) {
        self.mark_read(sources, false);
    }

    fn mark_read(&self, sources: &[Arc<Source>], under_way: bool) {
        let mut lines = self.lines();
        for source in sources {
            if let Some(line) = lines.line_of(source) {
                line.being_read = under_way;
            }
        }
    }

    /// Takes in entries of one stream, in the order in which they are to run. Those in hand already are left out,
    /// and all of them if the stream is not ours any more: they stay pending.
    pub(crate) fn add(&self, source: &Arc<Source>, items: Vec<Item>) {
        if let Some(line) = self.lines().line_of(source) {
            line.add(items);
        }
        self.0.work.notify_waiters();
    }

    /// A stream refuses to have its entries acknowledged. They are pending and are to be read again later.
    pub(crate) fn note_refused(&self, source: &Source) {
        if let Some(line) = self.lines().by_stream.get_mut(&source.stream) {
            line.refused = true;
        }
    }

    /// Whether a stream has refused since this was asked last.
    pub(crate) fn has_refused(&self, source: &Arc<Source>) -> bool {
        let mut lines = self.lines();
        let line = lines.line_of(source);
        line.is_some_and(|line| std::mem::take(&mut line.refused))
    }

    /// Leaves out the entries that are in hand.
    pub(crate) fn leave_out_held(&self, source: &Arc<Source>, entries: &mut Vec<Entry>) {
        if let Some(line) = self.lines().line_of(source) {
            entries.retain(|entry| !line.holds(entry.place));
        }
    }

    /// The ids of all entries in hand, by stream.
    pub(crate) fn in_hand(&self) -> Vec<(String, Vec<String>)> {
        let lines = self.lines();
        lines
            .by_stream
            .iter()
            .map(|(stream, line)| (stream.clone(), line.ids()))
            .filter(|(_, ids)| !ids.is_empty())
            .collect()
    }

    /// How many more entries may be read: no more than can start within half the claim time, as far as the time
    /// that messages take is known.
    pub(crate) fn room(&self) -> usize {
        let lines = self.lines();
        let now = Instant::now();
        let (mut waiting, mut blocked, mut bytes) = (0, 0, 0);
        for line in lines.by_stream.values() {
            let line_blocked = line.blocked(self.0.bounds.lanes, now);
            blocked += line_blocked;
            waiting += line.in_hand() - line_blocked;
            bytes += line.bytes;
        }
        if bytes >= BYTES_MAX || blocked >= BLOCKED_MAX {
            return 0;
        }
        let Bounds { batch, lanes, .. } = self.0.bounds;
        let ahead = match lines.start_in_time(self.0.bounds) {
            Some(count) => count.saturating_mul(lanes).min(batch * (lanes + 1)),
            None => batch * (lanes + 1),
        };
        ahead.saturating_sub(waiting)
    }

    /// Waits until other streams are to be read.
    ///
    /// # Cancel safety
    ///
    /// No change is missed by dropping it.
    pub(crate) async fn streams_changed(&self) {
        self.0.streams.notified().await;
    }

    /// Waits until there may be room.
    ///
    /// # Cancel safety
    ///
    /// As for [`Queue::streams_changed`].
    pub(crate) async fn room_changed(&self) {
        self.0.room.notified().await;
    }

    pub(crate) fn note_group_made(&self) {
        self.0.group_made.store(true, Ordering::Relaxed);
    }

    /// Whether a group was made since this was asked last.
    pub(crate) fn was_group_made(&self) -> bool {
        self.0.group_made.swap(false, Ordering::Relaxed)
    }

    /// The next batch for a lane, once there is one. Its keys are on this lane until [`Queue::release_keys`] or
    /// [`Queue::finish`], its entries in hand until the latter.
    pub(crate) async fn next(&self, stop: &CancellationToken) -> Result<Batch, Halt> {
        loop {
            let work = self.0.work.notified();
            tokio::pin!(work);
            // From here on no notification is missed.
            work.as_mut().enable();
            if stop.is_cancelled() {
                return Err(Halt::Stopped);
            }
            let now = Instant::now();
            let (batch, due) = {
                let mut lines = self.lines();
                (lines.take(self.0.bounds, now), lines.next_due(now))
            };
            if let Some(batch) = batch {
                return Ok(batch);
            }
            tokio::select! {
                () = work => {}
                () = sleep_until(due) => {}
                () = stop.cancelled() => return Err(Halt::Stopped),
            }
        }
    }

    /// What a batch did is committed, so that the next messages of its keys may run before it is finished. Its entries
    /// stay in hand.
    pub(crate) fn release_keys(&self, ticket: &mut Ticket) {
        let keys = std::mem::take(&mut ticket.keys);
        if keys.is_empty() {
            return;
        }
        if let Some(line) = self.lines().line_of(&ticket.source) {
            line.release(&keys);
        }
        self.0.work.notify_waiters();
    }

    /// Takes back a batch: `unsettled` are its items that must run again, in their order; all others are settled.
    pub(crate) fn finish(&self, ticket: Ticket, unsettled: Vec<Item>) {
        let settled = ticket.entries.len() - unsettled.len();
        let mut lines = self.lines();
        if settled > 0 {
            let settled = u32::try_from(settled).unwrap_or(u32::MAX);
            let each = ticket.began.elapsed() / settled;
            let before = lines.time_per_message.unwrap_or(each);
            lines.time_per_message = Some((before * 4 + each) / 5);
        }
        if let Some(line) = lines.line_of(&ticket.source) {
            line.take_back(&ticket, unsettled);
        }
        drop(lines);
        self.0.work.notify_waiters();
        self.0.room.notify_one();
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a lane must give back for a batch.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) source: Arc<Source>,
    pub(crate) entries: Vec<Place>,
    /// Hashes. None once they are released.
    keys: Vec<u64>,
    began: Instant,
}

impl Lines {
    /// The line of exactly this term of a stream.
    fn line_of(&mut self, source: &Arc<Source>) -> Option<&mut Line> {
        let line = self.by_stream.get_mut(&source.stream)?;
        Arc::ptr_eq(&line.source, source).then_some(line)
    }

    /// How many messages can start on one lane within half the claim time.
    fn start_in_time(&self, bounds: Bounds) -> Option<usize> {
        let each = self.time_per_message?.as_nanos().max(1);
        let count = bounds.claim_after.as_nanos() / 2 / each;
        // At least one: a handler that takes longer than the claim time is kept alive by the keeper.
        Some(usize::try_from(count).unwrap_or(usize::MAX).max(1))
    }

    fn take(&mut self, bounds: Bounds, now: Instant) -> Option<Batch> {
        let in_time = self.start_in_time(bounds).unwrap_or(usize::MAX);
        let most = bounds.batch.min(in_time);
        for _ in 0..self.turns.len() {
            self.turns.rotate_left(1);
            let stream = self.turns.back()?;
            let line = self.by_stream.get_mut(stream)?;
            // With several lanes, one does not take what the others could do at the same time.
            let share = line.waiting().div_ceil(bounds.lanes).max(1);
            if let Some(batch) = line.take(most.min(share), now) {
                return Some(batch);
            }
        }
        None
    }

    /// When the next message may be tried again.
    fn next_due(&self, now: Instant) -> Instant {
        let due = self
            .by_stream
            .values()
            .filter_map(|line| line.next_due(now));
        due.min()
            .unwrap_or_else(|| now + Duration::from_secs(24 * 60 * 60))
    }
}
