//! Dead letters that are to be delivered again, and messages that waited behind one: to this group only, from the table.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio_postgres::Row;
use tracing::{error, info, warn};

use crate::{
    Message,
    counters::Count,
    decision::{Decision, Fault},
    handler::Apply,
    inbox::Inbox,
    message::{Source, Stored},
    opening::Keys,
    patience::Halt,
    queries,
    trouble::Trouble,
    worker::{REASON_PROCESS_ENDED, Worker},
};

/// How often the table is looked at while nothing is due.
const INTERVAL: Duration = Duration::from_secs(1);
const LOOKING: &str = "look for dead letters to retry";

/// A row whose turn has come. Its attempt is committed already, so that a handler that kills the process cannot do so
/// for ever.
struct Due {
    id: i64,
    /// The number of the attempt within this series.
    tries: i32,
    reason: String,
    message: Message,
}

impl<A: Apply> Worker<A> {
    /// Delivers what is due, one after the other, until the stop signal or until it cannot go on.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point: an open transaction is rolled back, and the row is taken again after the claim time.
    pub(crate) async fn redeliver(&self, topics: &[String], claim_after: Duration) -> Halt {
        let mut backoff = self.patience.backoff();
        loop {
            let next = match self.inbox.next_due(topics, claim_after).await {
                Ok(Some(due)) => self.deliver(due).await,
                Ok(None) => {
                    self.patience.over(LOOKING, &mut backoff);
                    self.patience.pause(INTERVAL).await
                }
                // No oftener than otherwise: the batches try to reach the same server already.
                Err(trouble) => match self.patience.note(LOOKING, &mut backoff, &trouble) {
                    Ok(_) => self.patience.pause(INTERVAL).await,
                    Err(halt) => Err(halt),
                },
            };
            if let Err(halt) = next.and_then(|()| self.patience.go_on()) {
                return halt;
            }
        }
    }

    /// One attempt. The effect, the key and the removal of the row are committed together.
    async fn deliver(&self, due: Due) -> Result<(), Halt> {
        let max_attempts = i32::try_from(self.max_attempts).unwrap_or(i32::MAX);
        if due.tries > max_attempts {
            // The attempts before were begun and none came back.
            return self.give_up(&due, REASON_PROCESS_ENDED, 1).await;
        }
        let Due {
            id, tries, message, ..
        } = &due;
        let (stream, message_key) = (message.stream(), message.message_key());
        match self.inbox.apply_letter(&self.handler, &due).await {
            Ok(Delivered::Applied) => {
                self.counters.add(stream, Count::Applied, 1);
                info!(
                    dead_letter = id,
                    stream, message_key, tries, "delivered from the table of dead letters"
                );
                Ok(())
            }
            Ok(Delivered::Known) => {
                self.counters.add(stream, Count::Repeated, 1);
                Ok(())
            }
            Ok(Delivered::Gone) => Ok(()),
            Err(trouble) if trouble.decision().blames_the_message() => {
                self.counters.add(stream, Count::Failed, 1);
                if trouble.decision() == Decision::SetAside || *tries >= max_attempts {
                    return self.give_up(&due, &trouble.text, 0).await;
                }
                let wait = match trouble.fault {
                    Fault::HandlerPostpones(wait) => wait,
                    _ => self.retry.after_attempts(tries.unsigned_abs()),
                };
                warn!(dead_letter = id, stream, message_key, tries, error = %trouble, "attempt failed");
                self.put_back(&due, wait, &trouble.text, 0).await
            }
            Err(trouble) => {
                let wait = self.patience.note(
                    "retry a dead letter",
                    &mut self.patience.backoff(),
                    &trouble,
                )?;
                // The outage counts for nothing.
                self.put_back(&due, wait, &due.reason, 1).await?;
                self.patience.pause(wait).await
            }
        }
    }

    async fn put_back(
        &self,
        due: &Due,
        wait: Duration,
        reason: &str,
        uncounted: i32,
    ) -> Result<(), Halt> {
        let later = self.patience.insist("put a dead letter back", async || {
            self.inbox.put_back(due, wait, reason, uncounted).await
        });
        later.await
    }

    async fn give_up(&self, due: &Due, reason: &str, uncounted: i32) -> Result<(), Halt> {
        let dead = self.patience.insist("set a message aside again", async || {
            self.inbox.declare_dead(due, reason, uncounted).await
        });
        dead.await?;
        let Due { id, message, .. } = due;
        let (stream, message_key) = (message.stream(), message.message_key());
        error!(
            dead_letter = id,
            stream, message_key, reason, "message set aside as a dead letter"
        );
        self.counters.add(stream, Count::Dead, 1);
        Ok(())
    }
}

/// What became of one delivery from the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivered {
    Applied,
    /// The inbox has its key: it was applied in the meantime.
    Known,
    /// The row was discarded, or another member has it.
    Gone,
}

impl Inbox {
    /// The next row whose turn it is, with its attempt counted; nobody else takes it within the claim time. Writes
    /// nothing where there is none.
    async fn next_due(
        &self,
        topics: &[String],
        claim_after: Duration,
    ) -> Result<Option<Due>, Trouble> {
        if !self.may_be_due(topics).await? {
            return Ok(None);
        }
        let seconds = claim_after.as_secs_f64();
        let row = self
            .durably(async |tx| {
                tx.query_opt(queries::TAKE_DUE, &[&self.group, &topics, &seconds])
                    .await
            })
            .await?;
        row.map(|row| due(&row).map_err(Trouble::from)).transpose()
    }

    async fn may_be_due(&self, topics: &[String]) -> Result<bool, Trouble> {
        let connection = self.connect().await?;
        let row = self
            .bounded(async {
                let may_be_due = connection.prepare_cached(queries::MAY_BE_DUE).await?;
                connection
                    .query_one(&may_be_due, &[&self.group, &topics])
                    .await
            })
            .await;
        match row {
            Ok(row) => Ok(row.get(0)),
            Err(trouble) => {
                Inbox::give_up(self, connection, &trouble);
                Err(trouble)
            }
        }
    }

    async fn apply_letter<A: Apply>(&self, handler: &A, due: &Due) -> Result<Delivered, Trouble> {
        let mut connection = self.connect().await?;
        let result: Result<Delivered, Trouble> = async {
            let statements = self.prepare(&connection, Keys::MayBeKnown).await?;
            let transaction = self.bounded(connection.transaction()).await?;
            self.bounded(transaction.batch_execute(&self.openings.long))
                .await?;
            let locked = self
                .bounded(transaction.query_opt(queries::LOCK_DUE, &[&due.id, &due.tries]))
                .await?;
            if locked.is_none() {
                return Ok(Delivered::Gone);
            }
            let mut messages = vec![due.message.clone()];
            let (transaction, fresh) = self
                .take_effect(transaction, handler, &mut messages, 1, &statements)
                .await?;
            self.bounded(transaction.execute(queries::REMOVE_LETTER, &[&due.id]))
                .await?;
            self.commit(transaction).await?;
            Ok(if fresh == 1 {
                Delivered::Applied
            } else {
                Delivered::Known
            })
        }
        .await;
        if let Err(trouble) = &result
            && !trouble.decision().blames_the_message()
        {
            self.give_up(connection, trouble);
        }
        result
    }

    async fn put_back(
        &self,
        due: &Due,
        wait: Duration,
        reason: &str,
        uncounted: i32,
    ) -> Result<(), Trouble> {
        let seconds = wait.as_secs_f64();
        self.durably(async |tx| {
            let sql = queries::PUT_BACK;
            tx.execute(sql, &[&due.id, &due.tries, &seconds, &reason, &uncounted])
                .await
                .map(drop)
        })
        .await
    }

    async fn declare_dead(&self, due: &Due, reason: &str, uncounted: i32) -> Result<(), Trouble> {
        self.durably(async |tx| {
            let sql = queries::DECLARE_DEAD;
            tx.execute(sql, &[&due.id, &due.tries, &reason, &uncounted])
                .await
                .map(drop)
        })
        .await
    }
}

fn due(row: &Row) -> Result<Due, tokio_postgres::Error> {
    let attempts: i32 = row.try_get("attempts")?;
    let source = Source {
        topic: row.try_get("topic")?,
        stream: row.try_get("stream")?,
        // Any member may deliver it: the row is its lease.
        epoch: None,
    };
    let message = Message::from_stored(Stored {
        source: Arc::new(source),
        entry_id: row.try_get("entry_id")?,
        id: row.try_get("message_id")?,
        message_key: row.try_get("message_key")?,
        ordering_key: row.try_get("ordering_key")?,
        event_type: row.try_get("event_type")?,
        created_at: row.try_get("created_at")?,
        content_type: row.try_get("content_type")?,
        headers_text: row.try_get("headers")?,
        payload: Bytes::from(row.try_get::<_, Vec<u8>>("payload")?),
        attempts_before: attempts.unsigned_abs().saturating_sub(1),
    });
    Ok(Due {
        id: row.try_get("id")?,
        tries: row.try_get("tries")?,
        reason: row.try_get("reason")?,
        message,
    })
}
