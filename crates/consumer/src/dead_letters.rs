//! Setting entries aside with their reason, so that the stream goes on without them.

use std::fmt::Write as _;

use deadpool_postgres::Transaction;

use crate::{
    Message,
    entry::Entry,
    inbox::Inbox,
    message::{Malformed, Source},
    queries,
    trouble::Trouble,
};

/// The content type of a malformed entry's payload: all its fields, as JSON.
const CONTENT_TYPE_ENTRY: &str = "application/vnd.outbox.entry+json";

/// What became of a message that was to be set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SetAside {
    /// It is a dead letter.
    Dead,
    /// Another member has applied it in the meantime, so that it is none.
    Applied,
}

impl Inbox {
    /// Makes a message a dead letter. Once this is committed, and only then, its entry is acknowledged; a
    /// crash in between brings the entry back, and it is found set aside.
    pub(crate) async fn set_aside(
        &self,
        message: &Message,
        attempts: u32,
        reason: &str,
    ) -> Result<SetAside, Trouble> {
        self.durably_as_owner(message.source(), async |tx| {
            let (topic, key) = (message.topic(), message.message_key());
            tx.execute(
                queries::FORGET_ATTEMPTS,
                &[&self.group, &topic, &[key].as_slice()],
            )
            .await?;
            // Waits for a member that holds the same entry and is about to commit its effect.
            let taken = tx
                .query_one(
                    queries::TAKE_KEYS,
                    &[&self.group, &topic, &[key].as_slice()],
                )
                .await?;
            if taken.get::<_, i64>(0) == 0 {
                return Ok(SetAside::Applied);
            }
            let holds = self.gate.holds(message);
            let letter = Letter::of_message(message, LetterState::Dead, holds, attempts, reason);
            self.insert_letter(tx, message.source(), &letter).await?;
            tx.execute(queries::RELEASE_KEY, &[&self.group, &topic, &key])
                .await?;
            Ok(SetAside::Dead)
        })
        .await
    }

    /// Makes an entry that is no message a dead letter, with all its fields.
    pub(crate) async fn set_aside_malformed(
        &self,
        source: &Source,
        entry: &Entry,
        Malformed(reason): &Malformed,
    ) -> Result<(), Trouble> {
        let payload = entry_json(entry);
        let reason = format!("malformed entry: {reason}");
        let letter = Letter {
            entry_id: &entry.id,
            message: None,
            content_type: Some(CONTENT_TYPE_ENTRY),
            payload: payload.as_bytes(),
            attempts: 0,
            reason: &reason,
            state: LetterState::Dead,
            holds: false,
        };
        self.durably_as_owner(source, async |tx| {
            self.insert_letter(tx, source, &letter).await
        })
        .await
    }

    pub(crate) async fn insert_letter(
        &self,
        tx: &Transaction<'_>,
        source: &Source,
        letter: &Letter<'_>,
    ) -> Result<(), tokio_postgres::Error> {
        let message = letter.message;
        tx.execute(
            queries::SET_ASIDE,
            &[
                &self.group,
                &source.stream,
                &letter.entry_id,
                &source.topic,
                &message.map(Message::id),
                &message.map(Message::message_key),
                &message.and_then(Message::ordering_key),
                &message.and_then(Message::event_type),
                &message.map(Message::created_at),
                &letter.content_type,
                &message.and_then(Message::headers_text),
                &letter.payload,
                &letter.attempts,
                &letter.reason,
                &letter.state.name(),
                &letter.holds,
            ],
        )
        .await
        .map(drop)
    }
}

/// The row of a dead letter, as far as it differs between messages and malformed entries.
pub(crate) struct Letter<'a> {
    entry_id: &'a str,
    message: Option<&'a Message>,
    content_type: Option<&'a str>,
    payload: &'a [u8],
    attempts: i32,
    reason: &'a str,
    state: LetterState,
    /// Whether later messages of its ordering key wait for it.
    holds: bool,
}

/// Why a row stands in the table of dead letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LetterState {
    /// It waits for a person.
    Dead,
    /// It never failed; its ordering key is held by an earlier row.
    Waiting,
}

impl LetterState {
    /// As the column `state` has it.
    fn name(self) -> &'static str {
        match self {
            LetterState::Dead => "dead",
            LetterState::Waiting => "waiting",
        }
    }
}

impl<'a> Letter<'a> {
    pub(crate) fn of_message(
        message: &'a Message,
        state: LetterState,
        holds: bool,
        attempts: u32,
        reason: &'a str,
    ) -> Self {
        Self {
            entry_id: message.entry_id(),
            message: Some(message),
            content_type: message.explicit_content_type(),
            payload: message.payload(),
            attempts: i32::try_from(attempts).unwrap_or(i32::MAX),
            reason,
            state,
            holds,
        }
    }
}

/// The fields as a JSON list of pairs. Bytes that are no UTF-8 are given as `{"hex": …}`.
pub(crate) fn entry_json(entry: &Entry) -> String {
    let pairs: Vec<serde_json::Value> = entry
        .fields()
        .map(|(name, value)| serde_json::json!([bytes_json(name), bytes_json(value)]))
        .collect();
    serde_json::Value::Array(pairs).to_string()
}

fn bytes_json(bytes: &[u8]) -> serde_json::Value {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return text.into();
    }
    let mut hex = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
    }
    serde_json::json!({ "hex": hex })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_entry_keeps_all_its_bytes() {
        let entry = Entry::of("1-0", &[("", b""), ("payload", b"\xff\xfe")]);
        assert_eq!(
            entry_json(&entry),
            r#"[["",""],["payload",{"hex":"fffe"}]]"#
        );
    }
}
