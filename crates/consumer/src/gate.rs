//! What of a batch must not run: entries older than what the inbox still knows, and messages whose ordering key a dead
//! letter holds. Both go into the table of dead letters, in the transaction of the batch.

use std::{collections::HashSet, time::Duration};

use deadpool_postgres::Transaction;
use time::OffsetDateTime;

use crate::{
    Message,
    builder::OnDeadLetter,
    dead_letters::{Letter, LetterState},
    inbox::Inbox,
    queries,
    trouble::Trouble,
};

/// How far the clocks of the producer's and the consumer's database may be apart.
pub(crate) const CLOCK_SKEW_MAX: Duration = Duration::from_secs(60 * 60);

const REASON_EXPIRED: &str =
    "published before the oldest key that the inbox still has: it may have been applied already";
const REASON_WAITING: &str = "waits for an earlier dead letter of its ordering key";

/// When a batch needs a look at the table before it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gate {
    /// How long the inbox keeps keys at least.
    pub(crate) inbox_retention: Duration,
    pub(crate) on_dead_letter: OnDeadLetter,
}

impl Gate {
    /// Whether the purge may have deleted a key of a message as old as this one.
    fn is_old(&self, message: &Message, now: OffsetDateTime) -> bool {
        now - message.created_at() > self.inbox_retention.saturating_sub(CLOCK_SKEW_MAX)
    }

    /// Whether a dead letter of this message would hold later ones.
    pub(crate) fn holds(&self, message: &Message) -> bool {
        self.on_dead_letter == OnDeadLetter::HoldKey && message.ordering_key().is_some()
    }
}

/// How a batch was sorted out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sorted {
    /// Messages that may run; they come first.
    pub(crate) run: usize,
    /// Messages that are dead letters now.
    pub(crate) dead: usize,
    /// Messages that wait for a dead letter of their key now.
    pub(crate) waiting: usize,
}

impl Inbox {
    /// Moves the messages that may run to the front, in their order. The others stand in the table of dead letters when
    /// the transaction commits, unless they were applied before.
    ///
    /// Without old messages and without `HoldKey` it asks Postgres nothing.
    pub(crate) async fn sort_out(
        &self,
        tx: &Transaction<'_>,
        messages: &mut Vec<Message>,
    ) -> Result<Sorted, Trouble> {
        let mut sorted = Sorted::default();
        let now = OffsetDateTime::now_utc();
        let mut aside = Vec::new();
        let any_old = messages
            .iter()
            .any(|message| self.gate.is_old(message, now));
        let may_wait = self.gate.on_dead_letter == OnDeadLetter::HoldKey;
        if any_old || may_wait {
            self.bounded(tx.batch_execute(&self.openings.long)).await?;
        }
        if any_old {
            // The purge deletes keys only after it has changed this row, which now waits for our commit.
            let purged_through = self
                .bounded(tx.prepare_cached(queries::PURGED_THROUGH))
                .await?;
            let row = self
                .bounded(tx.query_opt(&purged_through, &[&self.group]))
                .await?;
            let through: Option<OffsetDateTime> = row.and_then(|row| row.get(0));
            if let Some(through) = through {
                aside = split_off(messages, |message| {
                    message.created_at() < through + CLOCK_SKEW_MAX
                });
            }
            for message in &aside {
                sorted.dead += self
                    .put_aside(tx, message, LetterState::Dead, REASON_EXPIRED)
                    .await?;
            }
        }
        if may_wait {
            let held = self.held_keys(tx, messages).await?;
            let waiting = split_off(messages, |message| {
                message.ordering_key().is_some_and(|key| held.contains(key))
            });
            for message in &waiting {
                sorted.waiting += self
                    .put_aside(tx, message, LetterState::Waiting, REASON_WAITING)
                    .await?;
            }
            aside.extend(waiting);
        }
        sorted.run = messages.len();
        messages.append(&mut aside);
        Ok(sorted)
    }

    /// Those of the messages' ordering keys that an unresolved dead letter holds.
    async fn held_keys(
        &self,
        tx: &Transaction<'_>,
        messages: &[Message],
    ) -> Result<HashSet<String>, Trouble> {
        let keys: Vec<&str> = messages.iter().filter_map(Message::ordering_key).collect();
        let (Some(first), false) = (messages.first(), keys.is_empty()) else {
            return Ok(HashSet::new());
        };
        let rows = self
            .bounded(tx.query(queries::HELD_KEYS, &[&self.group, &first.topic(), &keys]))
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Returns 1, or 0 where the message was applied before.
    async fn put_aside(
        &self,
        tx: &Transaction<'_>,
        message: &Message,
        state: LetterState,
        reason: &str,
    ) -> Result<usize, Trouble> {
        let (topic, key) = (message.topic(), message.message_key());
        let applied = self
            .bounded(tx.query_one(queries::IS_APPLIED, &[&self.group, &topic, &key]))
            .await?;
        if applied.get(0) {
            return Ok(0);
        }
        let letter = Letter::of_message(message, state, self.gate.holds(message), 0, reason);
        self.bounded(self.insert_letter(tx, message.source(), &letter))
            .await?;
        Ok(1)
    }
}

/// Takes out what matches; both parts stay in their order.
fn split_off(messages: &mut Vec<Message>, matches: impl Fn(&Message) -> bool) -> Vec<Message> {
    let (taken, left) = messages.drain(..).partition(|message| matches(message));
    *messages = left;
    taken
}
