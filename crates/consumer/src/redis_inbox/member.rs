//! The loop of a member whose inbox is in Redis: read (`member/reading.rs`), handle one by one, acknowledge.

mod reading;

use std::{convert::Infallible, marker::PhantomData, sync::Arc, time::Duration};

use redis::Script;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::{
    Settings,
    store::{Begun, Store},
};
use crate::{
    Error, HandlerError, Message,
    counters::Count,
    dead_letters::entry_json,
    decision::{Decision, Fault},
    entry::Entry,
    handler::Watch,
    link::Link,
    message::{Malformed, Source},
    patience::{Halt, Patience},
    queries,
    reader::milliseconds,
    replies::Delivered,
    trouble::Trouble,
};

/// Longest wait of one read, so that a stop and the search for dead members' entries are never far.
const BLOCK_MAX: Duration = Duration::from_millis(500);
/// How long leaving the group may take.
const LEAVE_MAX: Duration = Duration::from_secs(1);
const REASON_PROCESS_ENDED: &str = "the process ended while the handler ran";

/// One member at work.
pub(super) struct Member<F, E> {
    settings: Settings,
    link: Link,
    store: Store,
    patience: Patience,
    watch: Watch,
    handler: F,
    sources: Vec<Arc<Source>>,
    layout_at: Instant,
    claim_at: Instant,
    error: PhantomData<fn() -> E>,
}

impl<F, E> Member<F, E>
where
    F: AsyncFn(&Message) -> Result<(), E>,
    E: Into<HandlerError>,
{
    pub(super) fn new(settings: Settings, handler: F, stop: CancellationToken) -> Self {
        let block = BLOCK_MAX.min(settings.claim_after / 2);
        let link = Link::new(
            settings.redis.clone(),
            &settings.stream_prefix,
            settings.response_timeout,
            settings.response_timeout + block,
        );
        let now = Instant::now();
        Self {
            store: Store::new(&settings, link.clone()),
            patience: Patience {
                pace: settings.outage,
                stop,
                counters: settings.counters.clone(),
            },
            watch: Watch(settings.counters.clone()),
            link,
            settings,
            handler,
            sources: Vec::new(),
            layout_at: now,
            claim_at: now,
            error: PhantomData,
        }
    }

    /// Works until the stop signal and the end of what runs then, which is `Ok`.
    pub(super) async fn run(&mut self) -> Result<(), Error> {
        let (stop, grace) = (self.patience.stop.clone(), self.settings.grace);
        let ended = tokio::select! {
            ended = self.work() => ended,
            () = async { stop.cancelled().await; tokio::time::sleep(grace).await } => Ok(()),
        };
        let _ = timeout(LEAVE_MAX, self.leave()).await;
        match ended {
            Ok(()) | Err(Halt::Stopped | Halt::LeaseLost) => Ok(()),
            Err(Halt::Fatal(error)) => Err(error),
        }
    }

    async fn work(&mut self) -> Result<(), Halt> {
        self.start().await?;
        let mut backoff = self.patience.backoff();
        loop {
            self.patience.go_on()?;
            let delivered = match self.read().await {
                Ok(delivered) => {
                    self.patience.over("read", &mut backoff);
                    delivered
                }
                Err(trouble) => {
                    if trouble.decision() == Decision::RemakeGroup {
                        self.patience
                            .insist("make the group", async || self.make_groups().await)
                            .await?;
                    } else {
                        self.patience.wait("read", &mut backoff, &trouble).await?;
                    }
                    continue;
                }
            };
            for (source, delivered) in delivered {
                self.settle(&source, delivered).await?;
            }
        }
    }

    async fn start(&mut self) -> Result<(), Halt> {
        let mut backoff = self.patience.backoff();
        while let Err(trouble) = self.link.query(&redis::cmd("PING")).await {
            if trouble.decision() == Decision::Misconfigured {
                let reason = trouble.text;
                return Err(Halt::Fatal(Error::Refused {
                    server: "Redis",
                    reason,
                }));
            }
            self.patience.wait("start", &mut backoff, &trouble).await?;
        }
        Ok(())
    }

    async fn settle(&self, source: &Arc<Source>, delivered: Delivered) -> Result<(), Halt> {
        if !delivered.lost.is_empty() {
            error!(stream = source.stream, entries = ?delivered.lost, "entries were deleted before they were handled");
            self.settings
                .counters
                .add(&source.stream, Count::Lost, delivered.lost.len());
            let mut ack = redis::cmd("XACK");
            ack.arg(&source.stream)
                .arg(&self.settings.group)
                .arg(&delivered.lost);
            self.patience
                .insist("acknowledge entries", async || self.link.query(&ack).await)
                .await?;
        }
        for entry in delivered.entries {
            self.patience.go_on()?;
            match Message::from_entry(source, entry) {
                Ok(message) => self.handle(message).await?,
                Err((entry, malformed)) => {
                    self.set_aside_malformed(source, &entry, &malformed).await?;
                }
            }
        }
        Ok(())
    }

    /// One message until it is handled, set aside, or found to be another member's.
    async fn handle(&self, mut message: Message) -> Result<(), Halt> {
        loop {
            let begun = self
                .patience
                .insist("take a message", async || self.store.begin(&message).await);
            let attempt = match begun.await? {
                Begun::Attempt(attempt) => attempt,
                Begun::Handled => {
                    self.settings
                        .counters
                        .add(message.stream(), Count::Repeated, 1);
                    return self.finish(&message).await;
                }
                // If that member dies, the entry is claimed after the claim time.
                Begun::Elsewhere => return Ok(()),
            };
            if attempt > self.settings.max_attempts {
                return self
                    .set_aside(&message, attempt - 1, REASON_PROCESS_ENDED)
                    .await;
            }
            message.set_attempts_before(attempt - 1);
            let Err(trouble) = self.call(&message).await else {
                self.settings
                    .counters
                    .add(message.stream(), Count::Applied, 1);
                return self.finish(&message).await;
            };
            self.settings
                .counters
                .add(message.stream(), Count::Failed, 1);
            if trouble.decision() == Decision::SetAside || attempt >= self.settings.max_attempts {
                return self.set_aside(&message, attempt, &trouble.text).await;
            }
            let wait = match trouble.fault {
                Fault::HandlerPostpones(wait) => wait,
                _ => self.settings.retry.after_attempts(attempt),
            };
            warn!(
                stream = message.stream(), entry = message.entry_id(), message_key = message.message_key(),
                attempt, wait_ms = milliseconds(wait), error = %trouble, "attempt failed"
            );
            let waiting = self.patience.pause(wait);
            self.keeping(&message, waiting).await?;
        }
    }

    async fn call(&self, message: &Message) -> Result<(), Trouble> {
        let call = self
            .watch
            .call(std::slice::from_ref(message), (self.handler)(message));
        self.keeping(message, call).await
    }

    /// Does something while key and entry are kept ours.
    async fn keeping<T>(&self, message: &Message, work: impl Future<Output = T>) -> T {
        tokio::select! {
            done = work => done,
            never = self.renew_for_ever(message) => match never {},
        }
    }

    async fn renew_for_ever(&self, message: &Message) -> Infallible {
        loop {
            tokio::time::sleep(self.settings.claim_after / 3).await;
            // One that fails is made up for by the next; past the claim time another member may begin as well.
            if let Err(trouble) = self.store.renew(&self.settings.name, message).await {
                warn!(message_key = message.message_key(), error = %trouble, "could not renew a message");
            }
        }
    }

    /// Goes on trying after the stop signal, as long as the grace period allows: the effect is there.
    async fn finish(&self, message: &Message) -> Result<(), Halt> {
        let mut backoff = self.patience.backoff();
        while let Err(trouble) = self.store.done(message).await {
            let wait = self
                .patience
                .note("acknowledge a message", &mut backoff, &trouble)?;
            tokio::time::sleep(wait).await;
        }
        Ok(())
    }

    async fn set_aside(&self, message: &Message, attempts: u32, reason: &str) -> Result<(), Halt> {
        let aside = self.patience.insist("set a message aside", async || {
            self.store.set_aside(message, attempts, reason).await
        });
        aside.await?;
        error!(
            stream = message.stream(),
            entry = message.entry_id(),
            message_key = message.message_key(),
            attempts,
            reason,
            "message set aside as a dead letter"
        );
        self.settings.counters.add(message.stream(), Count::Dead, 1);
        Ok(())
    }

    async fn set_aside_malformed(
        &self,
        source: &Source,
        entry: &Entry,
        Malformed(reason): &Malformed,
    ) -> Result<(), Halt> {
        let fields = entry_json(entry);
        let aside = self
            .patience
            .insist("set aside a malformed entry", async || {
                self.store
                    .set_aside_malformed(&source.stream, &entry.id, &fields, reason)
                    .await
            });
        aside.await?;
        error!(
            stream = source.stream,
            entry = entry.id,
            reason,
            "malformed entry set aside"
        );
        self.settings.counters.add(&source.stream, Count::Dead, 1);
        Ok(())
    }

    /// Our name goes from each stream where it holds nothing; what it holds becomes claimable at once.
    async fn leave(&self) {
        let script = Script::new(queries::LEAVE_GROUP);
        let idle = milliseconds(self.settings.claim_after).to_string();
        for source in &self.sources {
            let arguments = [&self.settings.group, &self.settings.name, &idle].map(String::as_str);
            // Where Redis is away, the claim time does the same.
            let _ = self
                .link
                .run_script(&script, &source.stream, &arguments)
                .await;
        }
        info!(
            group = self.settings.group,
            member = self.settings.name,
            "consumer stopped"
        );
    }
}
