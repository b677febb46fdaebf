//! Keeps what a member has: its share of the streams, the leases on them, and the entries in hand.
//!
//! It runs as a task of its own on the caller's runtime, so that a handler that blocks its thread costs nothing.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use redis::Script;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};

use crate::{
    backoff::Backoff,
    builder::{Order, Settings},
    decision::Fault,
    inbox::Inbox,
    leases::{Census, Held},
    link::Link,
    message::Source,
    patience::{Halt, Patience},
    queries,
    queue::Queue,
    reader::milliseconds,
    spread::spread,
    topics::{Topics, Wanted},
    trouble::Trouble,
};

/// How long a planned hand-over waits for entries that have not begun to run.
const DRAIN_MAX: Duration = Duration::from_secs(1);
/// How long the keeper waits for Redis at least, before it goes on with the leases.
const REDIS_MAX_MIN: Duration = Duration::from_millis(700);
/// Ids in one call of the heartbeat's script.
const IDS_MAX: usize = 500;
/// How often members share a stream look for other streams.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Keeps leases and entries.
pub(crate) struct Keeper {
    queue: Queue,
    control: Link,
    inbox: Arc<Inbox>,
    topics: Topics,
    patience: Patience,
    order: Order,
    term: Duration,
    claim_after: Duration,
    forget_after: Duration,
    wanted: Vec<Wanted>,
    held: Held,
    /// Streams that are being handed over, since when.
    closing: HashMap<String, Instant>,
    fresh_at: Instant,
    forget_at: Instant,
}

impl Keeper {
    pub(crate) fn new(
        settings: &Settings,
        queue: Queue,
        control: Link,
        inbox: Arc<Inbox>,
        patience: Patience,
    ) -> Self {
        let now = Instant::now();
        Self {
            topics: Topics::new(settings, control.clone()),
            queue,
            control,
            inbox,
            patience,
            order: settings.order,
            term: settings.lease,
            claim_after: settings.claim_after,
            forget_after: settings.forget_members_after,
            wanted: Vec::new(),
            held: Held::new(),
            closing: HashMap::new(),
            fresh_at: now,
            forget_at: now,
        }
    }

    /// Keeps until it is dropped: also after the stop signal, while what runs is finished.
    pub(crate) async fn keep(mut self) -> Halt {
        let (mut redis, mut entries) = (self.patience.backoff(), self.patience.backoff());
        let mut postgres = self.patience.backoff();
        let interval = match self.order {
            Order::PerKey => self.term / 4,
            Order::None => LOOK_INTERVAL.min(self.claim_after / 3),
        };
        // A Redis that does not answer must not cost us the leases.
        let redis_max = interval.max(REDIS_MAX_MIN);
        loop {
            let began = Instant::now();
            let looked = timeout(redis_max, self.look()).await;
            let looked = looked.unwrap_or_else(|_| Err(Trouble::redis_silent()));
            if let Some(halt) = self.noted("look at the streams", &mut redis, looked) {
                return halt;
            }
            let kept = match self.order {
                Order::PerKey => self.keep_leases().await,
                Order::None => {
                    self.share_streams();
                    Ok(())
                }
            };
            if let Some(halt) = self.noted("keep leases", &mut postgres, kept) {
                return halt;
            }
            let fresh = timeout(redis_max, self.keep_entries()).await;
            let fresh = fresh.unwrap_or_else(|_| Err(Trouble::redis_silent()));
            if let Some(halt) = self.noted("keep entries", &mut entries, fresh) {
                return halt;
            }
            sleep(interval.saturating_sub(began.elapsed())).await;
        }
    }

    /// Trouble is met again at the next round; only what ends the consumer is returned.
    fn noted(
        &self,
        doing: &'static str,
        backoff: &mut Backoff,
        result: Result<(), Trouble>,
    ) -> Option<Halt> {
        match result {
            Ok(()) => {
                self.patience.over(doing, backoff);
                None
            }
            Err(trouble) => match self.patience.note(doing, backoff, &trouble) {
                Err(halt @ Halt::Fatal(_)) => Some(halt),
                Ok(_) | Err(Halt::Stopped | Halt::LeaseLost) => None,
            },
        }
    }

    /// Learns which streams the group is to read now.
    async fn look(&mut self) -> Result<(), Trouble> {
        if self.queue.was_group_made() {
            self.topics.begin_anew();
        }
        self.wanted = self.topics.wanted().await?;
        Ok(())
    }

    /// Members share all streams; there is nothing to own.
    fn share_streams(&mut self) {
        let have: Vec<String> = self
            .queue
            .sources()
            .iter()
            .map(|s| s.stream.clone())
            .collect();
        for wanted in &self.wanted {
            if !have.contains(&wanted.stream) {
                self.queue.open(Arc::new(Source {
                    topic: wanted.topic.clone(),
                    stream: wanted.stream.clone(),
                    epoch: None,
                }));
            }
        }
        for stream in have {
            if !self.wanted.iter().any(|wanted| wanted.stream == stream) {
                self.queue.close(&stream);
                if self.queue.is_drained(&stream) {
                    self.queue.lose(&stream);
                }
            }
        }
    }

    /// Renews our leases, hands over what is above our share, and takes what is due to us.
    async fn keep_leases(&mut self) -> Result<(), Trouble> {
        if self.wanted.is_empty() && self.held.is_empty() {
            return Ok(());
        }
        // From before the renewal: by our clock the lease never lasts longer than by the database's.
        let until = Instant::now() + self.term;
        let mut streams: Vec<String> = self.wanted.iter().map(|w| w.stream.clone()).collect();
        if self.patience.stop.is_cancelled() {
            // What runs is finished under the old leases; no new ones come to us.
            streams.clear();
        }
        let census = self.inbox.report(&streams, &self.held, self.term).await?;
        self.drop_lost(&census);
        for stream in self.held.keys() {
            self.queue.lease_holds_until(stream, until);
        }
        if self.patience.stop.is_cancelled() {
            return Ok(());
        }
        let shares = spread(&census.members, &census.owners);
        let is_due = |stream: &str| shares.get(stream) == Some(&self.inbox.member);
        let due: Vec<String> = shares
            .keys()
            .filter(|stream| is_due(stream) && !self.held.contains_key(*stream))
            .filter(|stream| !census.owners.contains_key(*stream))
            .cloned()
            .collect();
        let over: Vec<String> = self
            .held
            .keys()
            // Once begun, a hand-over is carried through, also where the share changed back meanwhile: a line that
            // was closed has let go of messages, and nobody would read the stream again.
            .filter(|stream| !is_due(stream) || self.closing.contains_key(*stream))
            .cloned()
            .collect();
        self.hand_over(&over).await?;
        self.take(&due, &census).await
    }

    /// Lets go of streams that somebody else has taken: we were silent for too long.
    fn drop_lost(&mut self, census: &Census) {
        let lost: Vec<String> = self
            .held
            .keys()
            .filter(|stream| !census.kept.contains(stream))
            .cloned()
            .collect();
        for stream in lost {
            warn!(stream, "the lease was lost");
            self.held.remove(&stream);
            self.closing.remove(&stream);
            self.queue.lose(&stream);
        }
    }

    /// Reads no more of these streams, and releases each once what is in hand of it has been settled.
    async fn hand_over(&mut self, streams: &[String]) -> Result<(), Trouble> {
        for stream in streams {
            let since = *self
                .closing
                .entry(stream.clone())
                .or_insert_with(Instant::now);
            self.queue.close(stream);
            if since.elapsed() >= DRAIN_MAX {
                self.queue.hurry(stream);
            }
            if self.queue.is_drained(stream) {
                self.inbox.release(stream, self.held[stream]).await?;
                info!(stream, "stream handed over");
                self.held.remove(stream);
                self.closing.remove(stream);
                self.queue.lose(stream);
            }
        }
        Ok(())
    }

    async fn take(&mut self, streams: &[String], census: &Census) -> Result<(), Trouble> {
        if streams.is_empty() {
            return Ok(());
        }
        let until = Instant::now() + self.term;
        let streams: Vec<&str> = streams.iter().map(String::as_str).collect();
        let taken = self.inbox.take(&streams, census, self.term).await?;
        let topics: BTreeMap<&str, &str> = self
            .wanted
            .iter()
            .map(|wanted| (wanted.stream.as_str(), wanted.topic.as_str()))
            .collect();
        for (stream, epoch) in taken {
            let Some(topic) = topics.get(stream.as_str()) else {
                continue;
            };
            info!(stream, epoch, "stream taken");
            self.queue.open(Arc::new(Source {
                topic: (*topic).to_owned(),
                stream: stream.clone(),
                epoch: Some(epoch),
            }));
            self.queue.lease_holds_until(&stream, until);
            self.held.insert(stream, epoch);
        }
        Ok(())
    }

    /// Keeps the entries in hand from being claimed, and clears away the names of the dead.
    async fn keep_entries(&mut self) -> Result<(), Trouble> {
        let now = Instant::now();
        if now >= self.fresh_at {
            self.fresh_at = now + self.claim_after / 3;
            let script = Script::new(queries::KEEP_FRESH);
            for (stream, ids) in self.queue.in_hand() {
                for ids in ids.chunks(IDS_MAX) {
                    let mut arguments = vec![self.inbox.group.as_str(), self.inbox.member.as_str()];
                    arguments.extend(ids.iter().map(String::as_str));
                    let kept = self.run(&script, &stream, &arguments).await?;
                    debug!(
                        stream,
                        entries = ids.len(),
                        kept,
                        "entries in hand kept fresh"
                    );
                }
            }
        }
        if now >= self.forget_at {
            self.forget_at = now + (self.forget_after / 2).min(Duration::from_secs(30));
            let script = Script::new(queries::FORGET_SILENT_MEMBERS);
            let idle = milliseconds(self.forget_after).to_string();
            for source in self.queue.sources() {
                let arguments = [&self.inbox.group, &self.inbox.member, &idle].map(String::as_str);
                let gone = self.run(&script, &source.stream, &arguments).await?;
                if gone > 0 {
                    info!(
                        stream = source.stream,
                        members = gone,
                        "names of silent members deleted"
                    );
                }
            }
        }
        Ok(())
    }

    /// Runs a script on a stream. One that is gone, or that refuses, is the reader's affair.
    async fn run(&self, script: &Script, stream: &str, arguments: &[&str]) -> Result<i64, Trouble> {
        match self.control.run_script(script, stream, arguments).await {
            Err(trouble) => match trouble.fault {
                Fault::GroupGone | Fault::RedisForbids | Fault::OtherRedis => Ok(0),
                _ => Err(trouble),
            },
            kept => kept,
        }
    }
}
