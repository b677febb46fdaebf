//! A batch until each of its messages is settled: applied, known already, or set aside; and its acknowledgement.

use std::sync::Arc;

use tokio::{runtime::Handle, time::Instant};
use tracing::{error, info, warn};

use crate::{
    Message,
    backoff::{Backoff, Pace},
    builder::Settings,
    counters::{Count, Counters},
    dead_letters::SetAside,
    decision::{Decision, Fault},
    entry::{Entry, Place},
    failures::Attempts,
    handler::Apply,
    inbox::Inbox,
    link::Link,
    message::{Malformed, Source},
    own_connections::OwnConnections,
    patience::{Halt, Patience},
    queue::{Delivery, Item, Parcel, Queue},
    trouble::Trouble,
};

/// The reason of a dead letter whose handler never returned.
pub(crate) const REASON_PROCESS_ENDED: &str = "the process ended while the handler ran";

/// What is recorded of the attempts of a message that is about to run.
#[derive(Debug, Clone, Copy)]
enum Counted {
    /// This attempt, with its number.
    Now(u32),
    /// Earlier ones.
    Before,
}

/// How far a batch is settled.
pub(crate) enum Settled {
    /// What became of all of it is committed: applied now or before, or set aside. It is to be acknowledged.
    Committed,
    /// It is acknowledged, but for what must run again, in its order: what failed and may be tried again, and what
    /// came after it with the same ordering key.
    Acknowledged { unsettled: Vec<Item> },
}

/// Settles batches with the application's handler. It is shared by the lanes of a member.
pub(crate) struct Worker<A> {
    pub(crate) inbox: Arc<Inbox>,
    /// For batches.
    connections: OwnConnections,
    /// Acknowledges.
    control: Link,
    queue: Queue,
    pub(crate) handler: A,
    pub(crate) max_attempts: u32,
    pub(crate) retry: Pace,
    pub(crate) patience: Patience,
    pub(crate) counters: Counters,
}

impl<A: Apply> Worker<A> {
    pub(crate) fn new(
        settings: &Settings,
        inbox: Arc<Inbox>,
        control: Link,
        queue: Queue,
        handler: A,
        patience: Patience,
        here: Handle,
    ) -> Self {
        Self {
            inbox,
            connections: OwnConnections::new(
                settings.pool.clone(),
                here,
                settings.response_timeout,
            ),
            control,
            queue,
            handler,
            max_attempts: settings.max_attempts,
            retry: settings.retry,
            counters: patience.counters.clone(),
            patience,
        }
    }

    /// Settles the items of a batch. After the stop signal it finishes what runs and halts before the next message; the
    /// rest stays pending.
    pub(crate) async fn settle(
        &self,
        source: &Arc<Source>,
        items: Vec<Item>,
    ) -> Result<Settled, Halt> {
        let mut together = Vec::with_capacity(items.len());
        for item in items {
            match (item.parcel, item.delivery) {
                (Parcel::Malformed(entry, malformed), _) => {
                    return self.settle_malformed(source, entry, &malformed).await;
                }
                (Parcel::Message(message), Delivery::First) => together.push(*message),
                (Parcel::Message(message), Delivery::Again) => {
                    return self.settle_redelivered(*message).await;
                }
                (Parcel::Message(message), Delivery::Failed { recorded }) => {
                    let attempts = recorded.then_some(Counted::Before);
                    return self.settle_alone(*message, attempts).await;
                }
            }
        }
        self.settle_together(together, source).await
    }

    async fn settle_malformed(
        &self,
        source: &Source,
        entry: Entry,
        malformed: &Malformed,
    ) -> Result<Settled, Halt> {
        self.patience
            .insist("set aside a malformed entry", async || {
                self.inbox
                    .set_aside_malformed(source, &entry, malformed)
                    .await
            })
            .await?;
        error!(
            stream = source.stream,
            entry = entry.id,
            reason = malformed.0,
            "malformed entry set aside"
        );
        self.counters.add(&source.stream, Count::Dead, 1);
        Ok(Settled::Committed)
    }

    /// First deliveries: one transaction for all. If a handler fails, it may be for what its batch mates
    /// did, so the failure counts for nobody, and each message runs by itself.
    async fn settle_together(
        &self,
        mut messages: Vec<Message>,
        source: &Arc<Source>,
    ) -> Result<Settled, Halt> {
        if messages.len() == 1 {
            return self.settle_alone(messages.remove(0), None).await;
        }
        match self.apply(&mut messages, false).await? {
            Ok(()) => return Ok(Settled::Committed),
            Err(trouble) => {
                info!(stream = source.stream, messages = messages.len(), error = %trouble, "batch failed; one by one");
            }
        }
        let mut unsettled: Vec<Item> = Vec::new();
        for message in messages {
            self.patience.go_on()?;
            let key = message.ordering_key();
            if key.is_some() && unsettled.iter().any(|item| item.ordering_key() == key) {
                let delivery = Delivery::Failed { recorded: false };
                unsettled.push(Item::message(message, delivery));
                continue;
            }
            let place = message.place();
            match self.settle_alone(message, None).await? {
                Settled::Committed => self.acknowledge(source, &[place]).await?,
                Settled::Acknowledged { unsettled: again } => unsettled.extend(again),
            }
        }
        Ok(Settled::Acknowledged { unsettled })
    }

    /// An entry that was given out before: the process may have died of it. Its attempt is committed
    /// before it runs, so that a handler that kills the process cannot do so for ever.
    async fn settle_redelivered(&self, mut message: Message) -> Result<Settled, Halt> {
        let settled = self.patience.insist("look up an entry", async || {
            self.inbox.is_settled(&message).await
        });
        if settled.await? {
            self.counters.add(message.stream(), Count::Repeated, 1);
            return Ok(Settled::Committed);
        }
        let attempts = self.count_attempt(&message, None).await?;
        if attempts.count > self.max_attempts {
            let reason = attempts
                .last_error
                .as_deref()
                .unwrap_or(REASON_PROCESS_ENDED);
            return self.set_aside(&message, attempts.count - 1, reason).await;
        }
        message.set_attempts_before(attempts.count - 1);
        let counted = Counted::Now(attempts.count);
        self.settle_alone(message, Some(counted)).await
    }

    /// One attempt of one message, in a transaction of its own. It is unsettled if it failed and may be tried again.
    /// `counted` says what is recorded of it.
    async fn settle_alone(
        &self,
        message: Message,
        counted: Option<Counted>,
    ) -> Result<Settled, Halt> {
        let mut alone = vec![message];
        let Err(trouble) = self.apply(&mut alone, counted.is_some()).await? else {
            return Ok(Settled::Committed);
        };
        let mut message = alone.remove(0);
        let attempts = match counted {
            Some(Counted::Now(attempts)) => {
                self.patience
                    .insist("record an error", async || {
                        self.inbox.note_error(&message, &trouble.text).await
                    })
                    .await?;
                attempts
            }
            Some(Counted::Before) | None => {
                self.count_attempt(&message, Some(&trouble.text))
                    .await?
                    .count
            }
        };
        self.counters.add(message.stream(), Count::Failed, 1);
        let rejected = trouble.decision() == Decision::SetAside;
        if rejected || attempts >= self.max_attempts {
            return self.set_aside(&message, attempts, &trouble.text).await;
        }
        let wait = match trouble.fault {
            Fault::HandlerPostpones(wait) => wait,
            _ => self.retry.after_attempts(attempts),
        };
        warn!(
            stream = message.stream(), entry = message.entry_id(), message_key = message.message_key(),
            attempts, wait_ms = crate::reader::milliseconds(wait), error = %trouble, "attempt failed"
        );
        message.set_attempts_before(attempts);
        let item = Item::message(message, Delivery::Failed { recorded: true });
        let unsettled = vec![item.not_before(Instant::now() + wait)];
        Ok(Settled::Acknowledged { unsettled })
    }

    /// Applies messages in one transaction, waiting out outages. The inner error is a handler's failure.
    async fn apply(
        &self,
        messages: &mut Vec<Message>,
        forget_attempts: bool,
    ) -> Result<Result<(), Trouble>, Halt> {
        let mut backoff: Backoff = self.patience.backoff();
        loop {
            match self
                .inbox
                .apply(&self.connections, &self.handler, messages, forget_attempts)
                .await
            {
                Ok(applied) => {
                    self.patience.over("apply messages", &mut backoff);
                    if let Some(first) = messages.first() {
                        let stream = first.stream();
                        self.counters.add(stream, Count::Applied, applied.fresh);
                        self.counters.add(stream, Count::Held, applied.waiting);
                        self.counters.add(stream, Count::Dead, applied.dead);
                        let set_aside = applied.waiting + applied.dead;
                        let repeated = messages.len() - applied.fresh - set_aside;
                        self.counters.add(stream, Count::Repeated, repeated);
                        if applied.dead > 0 {
                            error!(
                                stream,
                                messages = applied.dead,
                                "messages older than the inbox remembers set aside as dead letters"
                            );
                        }
                    }
                    return Ok(Ok(()));
                }
                Err(trouble) if trouble.decision().blames_the_message() => {
                    return Ok(Err(trouble));
                }
                Err(trouble) => {
                    self.patience
                        .wait("apply messages", &mut backoff, &trouble)
                        .await?
                }
            }
        }
    }

    async fn count_attempt(
        &self,
        message: &Message,
        error: Option<&str>,
    ) -> Result<Attempts, Halt> {
        self.patience
            .insist("count an attempt", async || {
                self.inbox.count_attempt(message, error).await
            })
            .await
    }

    async fn set_aside(
        &self,
        message: &Message,
        attempts: u32,
        reason: &str,
    ) -> Result<Settled, Halt> {
        let outcome = self
            .patience
            .insist("set a message aside", async || {
                self.inbox.set_aside(message, attempts, reason).await
            })
            .await?;
        match outcome {
            SetAside::Dead => {
                error!(
                    stream = message.stream(),
                    entry = message.entry_id(),
                    message_key = message.message_key(),
                    attempts,
                    reason,
                    "message set aside as a dead letter"
                );
                self.counters.add(message.stream(), Count::Dead, 1);
            }
            SetAside::Applied => self.counters.add(message.stream(), Count::Repeated, 1),
        }
        Ok(Settled::Committed)
    }

    /// Tells Redis that entries are settled. A crash before this delivers them again, to be found in the
    /// inbox. It goes on trying after the stop signal: what has run is acknowledged if the grace period allows.
    pub(crate) async fn acknowledge(&self, source: &Source, entries: &[Place]) -> Result<(), Halt> {
        let mut command = redis::cmd("XACK");
        command.arg(&source.stream).arg(&self.inbox.group);
        command.arg(entries);
        let mut backoff = self.patience.backoff();
        loop {
            match self.control.query(&command).await {
                Ok(_) => {
                    self.patience.over("acknowledge entries", &mut backoff);
                    return Ok(());
                }
                Err(trouble) => {
                    let wait = self
                        .patience
                        .note("acknowledge entries", &mut backoff, &trouble)?;
                    if trouble.decision() == Decision::Misconfigured {
                        // Other streams must not wait for this one. The reader finds the entries again.
                        self.queue.note_refused(source);
                        return Ok(());
                    }
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }
}
