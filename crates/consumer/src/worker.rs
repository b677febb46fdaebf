//! A batch until each of its messages is settled: applied, known already, or set aside; then acknowledged.

use std::sync::Arc;

use tracing::{error, info, warn};

use crate::{
    Message,
    backoff::{Backoff, Pace},
    builder::Settings,
    counters::{Count, Counters},
    dead_letters::SetAside,
    decision::{Decision, Fault},
    failures::Attempts,
    handler::Apply,
    inbox::Inbox,
    link::Link,
    message::Source,
    patience::{Halt, Patience},
    reader::Batch,
    trouble::Trouble,
};

/// The reason of a dead letter whose handler never returned.
pub(crate) const REASON_PROCESS_ENDED: &str = "the process ended while the handler ran";

/// Settles batches with the application's handler.
pub(crate) struct Worker<A> {
    pub(crate) inbox: Inbox,
    pub(crate) handler: A,
    pub(crate) max_attempts: u32,
    pub(crate) retry: Pace,
    pub(crate) patience: Patience,
    pub(crate) counters: Counters,
}

impl<A: Apply> Worker<A> {
    pub(crate) fn new(settings: &Settings, handler: A, patience: Patience) -> Self {
        Self {
            inbox: Inbox::new(
                settings.pool.clone(),
                settings.group.clone(),
                settings.response_timeout,
                settings.gate,
            ),
            handler,
            max_attempts: settings.max_attempts,
            retry: settings.retry,
            counters: patience.counters.clone(),
            patience,
        }
    }

    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Settles all messages of a batch. After the stop signal it finishes what runs and halts before the
    /// next message; the rest stays pending.
    pub(crate) async fn settle(&self, batch: Batch, control: &mut Link) -> Result<(), Halt> {
        let Batch {
            source,
            delivered,
            redelivered,
        } = batch;
        if !delivered.lost.is_empty() {
            error!(stream = source.stream, entries = ?delivered.lost, "entries were deleted before they were handled");
            self.counters
                .add(&source.stream, Count::Lost, delivered.lost.len());
            self.acknowledge(control, &source, &delivered.lost).await?;
        }
        let mut messages = Vec::with_capacity(delivered.entries.len());
        for entry in delivered.entries {
            match Message::from_entry(&source, &entry) {
                Ok(message) => messages.push(message),
                Err(malformed) => {
                    self.patience
                        .insist("set aside a malformed entry", async || {
                            self.inbox
                                .set_aside_malformed(&source, &entry, &malformed)
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
                    self.acknowledge(control, &source, &[entry.id]).await?;
                }
            }
        }
        if redelivered {
            for message in messages {
                self.patience.go_on()?;
                self.settle_redelivered(message, control).await?;
            }
            return Ok(());
        }
        self.settle_together(messages, &source, control).await
    }

    /// First deliveries: one transaction for all. If a handler fails, it may be for what its batch mates
    /// did, so the failure counts for nobody, and each message runs by itself.
    async fn settle_together(
        &self,
        mut messages: Vec<Message>,
        source: &Arc<Source>,
        control: &mut Link,
    ) -> Result<(), Halt> {
        if messages.len() > 1 {
            let applied = self.apply(&mut messages, false).await?;
            match applied {
                Ok(()) => {
                    let ids: Vec<String> = messages
                        .iter()
                        .map(|message| message.entry_id().to_owned())
                        .collect();
                    return self.acknowledge(control, source, &ids).await;
                }
                Err(trouble) => {
                    info!(stream = source.stream, messages = messages.len(), error = %trouble, "batch failed; one by one");
                }
            }
        }
        for message in messages {
            self.patience.go_on()?;
            self.settle_alone(message, None, control).await?;
        }
        Ok(())
    }

    /// An entry that was given out before: the process may have died of it. Its attempt is committed
    /// before it runs, so that a handler that kills the process cannot do so for ever.
    async fn settle_redelivered(
        &self,
        mut message: Message,
        control: &mut Link,
    ) -> Result<(), Halt> {
        let settled = self.patience.insist("look up an entry", async || {
            self.inbox.is_settled(&message).await
        });
        if settled.await? {
            self.counters.add(message.stream(), Count::Repeated, 1);
            return self.acknowledge_message(control, &message).await;
        }
        let attempts = self.count_attempt(&message, None).await?;
        if attempts.count > self.max_attempts {
            let reason = attempts
                .last_error
                .as_deref()
                .unwrap_or(REASON_PROCESS_ENDED);
            return self
                .set_aside(&message, attempts.count - 1, reason, control)
                .await;
        }
        message.set_attempts_before(attempts.count - 1);
        self.settle_alone(message, Some(attempts.count), control)
            .await
    }

    /// One message in transactions of its own, until it is applied or has failed too often. `counted` is
    /// the number of the first attempt, where that was recorded beforehand.
    async fn settle_alone(
        &self,
        message: Message,
        mut counted: Option<u32>,
        control: &mut Link,
    ) -> Result<(), Halt> {
        let mut recorded = counted.is_some();
        let mut alone = vec![message];
        loop {
            let Err(trouble) = self.apply(&mut alone, recorded).await? else {
                return self.acknowledge_message(control, &alone[0]).await;
            };
            let message = &alone[0];
            let attempts = match counted.take() {
                Some(attempts) => {
                    self.patience
                        .insist("record an error", async || {
                            self.inbox.note_error(message, &trouble.text).await
                        })
                        .await?;
                    attempts
                }
                None => {
                    self.count_attempt(message, Some(&trouble.text))
                        .await?
                        .count
                }
            };
            recorded = true;
            self.counters.add(message.stream(), Count::Failed, 1);
            let rejected = trouble.decision() == Decision::SetAside;
            if rejected || attempts >= self.max_attempts {
                return self
                    .set_aside(message, attempts, &trouble.text, control)
                    .await;
            }
            let wait = match trouble.fault {
                Fault::HandlerPostpones(wait) => wait,
                _ => self.retry.after_attempts(attempts),
            };
            warn!(
                stream = message.stream(), entry = message.entry_id(), message_key = message.message_key(),
                attempts, wait_ms = crate::reader::milliseconds(wait), error = %trouble, "attempt failed"
            );
            self.patience.pause(wait).await?;
            alone[0].set_attempts_before(attempts);
        }
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
                .apply(&self.handler, messages, forget_attempts)
                .await
            {
                Ok(applied) => {
                    self.patience.over("apply messages", &mut backoff);
                    if let Some(first) = messages.first() {
                        let stream = first.stream();
                        self.counters.add(stream, Count::Applied, applied.fresh);
                        self.counters.add(stream, Count::Held, applied.aside);
                        let repeated = messages.len() - applied.fresh - applied.aside;
                        self.counters.add(stream, Count::Repeated, repeated);
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
        control: &mut Link,
    ) -> Result<(), Halt> {
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
        self.acknowledge_message(control, message).await
    }

    async fn acknowledge_message(&self, control: &mut Link, message: &Message) -> Result<(), Halt> {
        self.acknowledge(control, message.source(), &[message.entry_id().to_owned()])
            .await
    }

    /// Tells Redis that entries are settled. A crash before this delivers them again, to be found in the
    /// inbox. It goes on trying after the stop signal: what has run is acknowledged if the grace period allows.
    async fn acknowledge(
        &self,
        control: &mut Link,
        source: &Source,
        ids: &[String],
    ) -> Result<(), Halt> {
        let mut command = redis::cmd("XACK");
        command.arg(&source.stream).arg(&self.inbox.group).arg(ids);
        let mut backoff = self.patience.backoff();
        loop {
            match control.query(&command).await {
                Ok(_) => {
                    self.patience.over("acknowledge entries", &mut backoff);
                    return Ok(());
                }
                Err(trouble) => {
                    let wait = self
                        .patience
                        .note("acknowledge entries", &mut backoff, &trouble)?;
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }
}
