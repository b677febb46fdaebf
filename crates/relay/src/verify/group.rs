//! What a consumer group has made of the entries: its inbox, which may be in another database.

use tokio_postgres::{Client, Statement};

use super::compare::Message;
use super::spill::{Given, Record};
use super::tally::{Suspect, Tallies};
use crate::dead_letters;
use crate::error::{Error, Result};
use crate::postgres::{PostgresTarget, verify_sql};

/// Clocks of Redis and of the consumer's Postgres may differ by this much, in milliseconds.
const CLOCK_SKEW_MS: f64 = 60_000.0;

/// An entry whose effect is asked for.
pub(super) struct Ask<'m> {
    pub(super) message: &'m Message,
    pub(super) record: Record,
    pub(super) stream: &'m str,
}

/// What the inbox says of an entry's message that was not applied.
#[derive(Clone, Copy)]
pub(super) struct NotApplied {
    set_aside: bool,
    /// Up to when applied keys may have been purged, in milliseconds since 1970.
    purged_ms: f64,
}

/// A group with its inbox.
pub(super) struct Group {
    pub(super) name: String,
    client: Client,
    not_applied: Statement,
}

impl Group {
    /// Opens a session of the consumer's database.
    ///
    /// # Errors
    ///
    /// The database is out of reach, or has no schema `inbox`.
    pub(super) async fn open(target: &PostgresTarget, name: &str) -> Result<Self> {
        let client = dead_letters::inbox(target, "outbox-relay verify").await?;
        client
            .batch_execute(verify_sql::INBOX_SESSION)
            .await
            .map_err(|source| Error::Postgres {
                doing: "set up the session",
                source,
            })?;
        let not_applied = client
            .prepare(verify_sql::NOT_APPLIED)
            .await
            .map_err(|source| Error::Postgres {
                doing: "prepare to read the inbox",
                source,
            })?;
        Ok(Group {
            name: name.to_owned(),
            client,
            not_applied,
        })
    }

    /// Counts what became of these entries, which are in the order of their rows. The inbox is read after the entries: what
    /// was acknowledged by then has its effect by now.
    pub(super) async fn judge(&self, asks: &[Ask<'_>], found: &mut Tallies) -> Result<()> {
        let answers = self.ask(asks).await?;
        let mut at = 0;
        for copies in asks.chunk_by(|a, b| a.message.id == b.message.id) {
            let open = &answers[at..at + copies.len()];
            at += copies.len();
            let given = |state: Given| copies.iter().find(|ask| ask.record.given == state);
            if open.iter().any(Option::is_none) {
                found.applied += 1;
            } else if open.iter().flatten().any(|open| open.set_aside) {
                found.dead_letters += 1;
            } else if let Some(ask) = given(Given::Pending) {
                found.pending += 1;
                found.not_yet_applied.add(|| suspect(ask, "pending"));
            } else if let Some(ask) = given(Given::NotYet) {
                found.not_given += 1;
                found.not_yet_applied.add(|| suspect(ask, "not given yet"));
            } else if beyond(copies, open) {
                found.beyond_inbox += 1;
            } else if let Some(ask) = copies.first() {
                let note = "acknowledged, and neither applied nor a dead letter";
                found.lost_effect.add(|| suspect(ask, note));
            }
        }
        Ok(())
    }

    /// For each entry what the inbox says, none where its message was applied.
    async fn ask(&self, asks: &[Ask<'_>]) -> Result<Vec<Option<NotApplied>>> {
        let mut answers = vec![None; asks.len()];
        if asks.is_empty() {
            return Ok(answers);
        }
        let topics: Vec<&str> = asks.iter().map(|a| a.message.topic.as_str()).collect();
        let keys: Vec<&str> = asks
            .iter()
            .map(|a| a.message.message_key.as_str())
            .collect();
        let streams: Vec<&str> = asks.iter().map(|a| a.stream).collect();
        let entries: Vec<String> = asks.iter().map(|a| a.record.entry.to_string()).collect();
        let rows = self
            .client
            .query(
                &self.not_applied,
                &[&self.name, &topics, &keys, &streams, &entries],
            )
            .await
            .map_err(|source| Error::Postgres {
                doing: "read the inbox",
                source,
            })?;
        for row in rows {
            let at = usize::try_from(row.get::<_, i64>(0) - 1).unwrap_or(usize::MAX);
            if let Some(answer) = answers.get_mut(at) {
                *answer = Some(NotApplied {
                    set_aside: row.get(1),
                    purged_ms: row.get(2),
                });
            }
        }
        Ok(answers)
    }
}

/// Whether the inbox may have forgotten that it applied these.
fn beyond(copies: &[Ask<'_>], open: &[Option<NotApplied>]) -> bool {
    let purged_ms = open
        .iter()
        .flatten()
        .map(|open| open.purged_ms)
        .fold(f64::NEG_INFINITY, f64::max);
    copies
        .iter()
        .any(|ask| ask.record.entry.0 as f64 <= purged_ms + CLOCK_SKEW_MS)
}

fn suspect(ask: &Ask<'_>, note: &str) -> Suspect {
    Suspect {
        id: Some(ask.message.id),
        message_key: Some(ask.message.message_key.clone()),
        stream: Some(ask.record.stream),
        entry: Some(ask.record.entry),
        note: note.to_owned(),
        ..Suspect::default()
    }
}
