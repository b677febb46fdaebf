//! The way of a message into the caller's transaction.

use std::collections::HashSet;

use futures_util::future;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Error as PgError, Row as PgRow, Transaction};

use crate::error::{Error, Result};
use crate::limits::{STATEMENT_BYTES_MAX, STATEMENT_ROWS_MAX};
use crate::message::Message;
use crate::queries::{INSERT_MANY, INSERT_ONCE, INSERT_ONE, LOCK_ORDERING_KEYS};
use crate::row::{JsonText, Row};

/// First number of the advisory locks of [`Message::ordered`]; the second is `hashtext(ordering_key)`.
pub const ORDERED_LOCK_CLASS: i32 = 1_869_968_483;

/// A message that is part of the transaction. It is a fact once the transaction has committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Position in the log. Ids of a transaction rise in the order of its writes; a rolled-back id is
    /// not used again.
    pub id: i64,
    /// The message key, given or generated.
    pub message_key: String,
}

/// What [`write_once`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The message is part of the transaction.
    Written(Written),
    /// The outbox had a message of this key; nothing was written.
    AlreadyWritten,
}

/// Writes one message into the transaction, in one round trip (with [`Message::ordered`] too).
///
/// # Errors
///
/// [`Error::Invalid`] before the round trip, [`Error::DuplicateKey`], [`Error::SchemaMissing`],
/// [`Error::Database`].
///
/// # Cancel safety
///
/// Not cancel safe: after a drop the transaction may hold the message or not. Roll it back; dropping
/// the transaction does so.
pub async fn write(transaction: &Transaction<'_>, message: &Message) -> Result<Written> {
    let row = Row::checked(message)?;
    let rows = insert_one(transaction, INSERT_ONE, &row)
        .await
        .map_err(|error| refused(error, &[row.message_key]))?;
    let row = rows
        .first()
        .expect("an INSERT of one row with RETURNING returns one row");
    Ok(Written {
        id: row.get(0),
        message_key: message.message_key.clone(),
    })
}

/// Writes one message unless the outbox has its key, and says which.
///
/// A message whose key another open transaction has just written waits for the end of that transaction.
/// A key can be used again once the relay has purged its message (days after it was published). At
/// REPEATABLE READ and above a key that was committed after the transaction's snapshot is a serialization
/// failure (40001), to be retried as any other.
///
/// # Errors
///
/// Those of [`write()`], without [`Error::DuplicateKey`].
///
/// # Cancel safety
///
/// As [`write()`]: roll the transaction back.
pub async fn write_once(transaction: &Transaction<'_>, message: &Message) -> Result<Outcome> {
    let row = Row::checked(message)?;
    let rows = insert_one(transaction, INSERT_ONCE, &row)
        .await
        .map_err(|error| refused(error, &[row.message_key]))?;
    Ok(match rows.first() {
        Some(row) => Outcome::Written(Written {
            id: row.get(0),
            message_key: message.message_key.clone(),
        }),
        None => Outcome::AlreadyWritten,
    })
}

/// Writes all messages, with ids that rise in the order of the slice, in one round trip for every
/// [`STATEMENT_ROWS_MAX`] messages or [`STATEMENT_BYTES_MAX`] bytes.
///
/// The locks of all [ordered](Message::ordered) messages are taken first, in the server's order of their
/// hashes. An empty slice does nothing.
///
/// # Errors
///
/// Those of [`write()`]; [`Error::Invalid`] has the position of the message, and a key that stands twice in
/// the slice is found before the round trip. After any other error roll the transaction back: some of the
/// statements may have run.
///
/// # Cancel safety
///
/// As [`write()`]: roll the transaction back.
pub async fn write_all(
    transaction: &Transaction<'_>,
    messages: &[Message],
) -> Result<Vec<Written>> {
    let rows = checked_rows(messages)?;
    let mut locks: Vec<&str> = rows.iter().filter_map(|row| row.lock).collect();
    let mut ids: Vec<i64> = Vec::with_capacity(rows.len());
    for statement in statements(&rows) {
        let inserted = locked(transaction, &locks, insert_many(transaction, statement))
            .await
            .map_err(|error| {
                let keys: Vec<&str> = statement.iter().map(|row| row.message_key).collect();
                refused(error, &keys)
            })?;
        locks.clear();
        ids.extend(inserted.iter().map(|row| row.get::<_, i64>(0)));
    }
    Ok(ids
        .into_iter()
        .zip(messages)
        .map(|(id, message)| Written {
            id,
            message_key: message.message_key.clone(),
        })
        .collect())
}

fn checked_rows(messages: &[Message]) -> Result<Vec<Row<'_>>> {
    let mut keys = HashSet::with_capacity(messages.len());
    let mut rows = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        rows.push(Row::checked(message).map_err(|error| error.at(index))?);
        if !keys.insert(message.key()) {
            return Err(Error::DuplicateKey {
                message_key: Some(message.message_key.clone()),
                source: None,
            });
        }
    }
    Ok(rows)
}

/// The rows in pieces that one statement can hold; a row larger than a statement's bytes is alone.
fn statements<'r, 'm>(rows: &'r [Row<'m>]) -> impl Iterator<Item = &'r [Row<'m>]> {
    let mut rest = rows;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fitting = rest
            .iter()
            .take(STATEMENT_ROWS_MAX)
            .take_while(|row| {
                bytes += row.bytes();
                bytes <= STATEMENT_BYTES_MAX
            })
            .count();
        let (statement, later) = rest.split_at(fitting.max(1).min(rest.len()));
        rest = later;
        (!statement.is_empty()).then_some(statement)
    })
}

async fn insert_one(
    transaction: &Transaction<'_>,
    query: &str,
    row: &Row<'_>,
) -> Result<Vec<PgRow>, PgError> {
    let parameters: [(&(dyn ToSql + Sync), Type); 8] = [
        (&row.topic, Type::TEXT),
        (&row.ordering_key, Type::TEXT),
        (&row.message_key, Type::TEXT),
        (&row.event_type, Type::TEXT),
        (&row.payload, Type::JSON),
        (&row.payload_binary, Type::BYTEA),
        (&row.content_type, Type::TEXT),
        (&row.headers, Type::JSON),
    ];
    // Unnamed statements: no second round trip to prepare, and nothing that a pooler could mix up.
    locked(
        transaction,
        row.lock.as_slice(),
        transaction.query_typed(query, &parameters),
    )
    .await
}

async fn insert_many(
    transaction: &Transaction<'_>,
    rows: &[Row<'_>],
) -> Result<Vec<PgRow>, PgError> {
    let topics: Vec<&str> = rows.iter().map(|row| row.topic).collect();
    let ordering_keys: Vec<Option<&str>> = rows.iter().map(|row| row.ordering_key).collect();
    let message_keys: Vec<&str> = rows.iter().map(|row| row.message_key).collect();
    let event_types: Vec<Option<&str>> = rows.iter().map(|row| row.event_type).collect();
    let payloads: Vec<Option<&JsonText<'_>>> =
        rows.iter().map(|row| row.payload.as_ref()).collect();
    let payloads_binary: Vec<Option<&[u8]>> = rows.iter().map(|row| row.payload_binary).collect();
    let content_types: Vec<Option<&str>> = rows.iter().map(|row| row.content_type).collect();
    let headers: Vec<Option<&JsonText<'_>>> = rows.iter().map(|row| row.headers.as_ref()).collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 8] = [
        (&topics, Type::TEXT_ARRAY),
        (&ordering_keys, Type::TEXT_ARRAY),
        (&message_keys, Type::TEXT_ARRAY),
        (&event_types, Type::TEXT_ARRAY),
        (&payloads, Type::JSON_ARRAY),
        (&payloads_binary, Type::BYTEA_ARRAY),
        (&content_types, Type::TEXT_ARRAY),
        (&headers, Type::JSON_ARRAY),
    ];
    transaction.query_typed(INSERT_MANY, &parameters).await
}

/// Runs `insert` after the locks of `ordering_keys`.
///
/// The lock is a statement of its own: the server runs it to its end before it begins the INSERT, so no id
/// is drawn while a writer of the same key is open. Both are sent in one go, since `join` polls its first
/// future first and the connection sends in the order of polling. When the lock fails, the transaction is
/// aborted and the INSERT with it; the error of the lock is the one to report.
async fn locked(
    transaction: &Transaction<'_>,
    ordering_keys: &[&str],
    insert: impl Future<Output = Result<Vec<PgRow>, PgError>>,
) -> Result<Vec<PgRow>, PgError> {
    if ordering_keys.is_empty() {
        return insert.await;
    }
    let parameters: [(&(dyn ToSql + Sync), Type); 2] = [
        (&ORDERED_LOCK_CLASS, Type::INT4),
        (&ordering_keys, Type::TEXT_ARRAY),
    ];
    let lock = transaction.query_typed(LOCK_ORDERING_KEYS, &parameters);
    let (locked, inserted) = future::join(lock, insert).await;
    locked?;
    inserted
}

/// What an error of the database means for messages with these keys. By SQLSTATE: texts are translated.
fn refused(error: PgError, message_keys: &[&str]) -> Error {
    let Some(cause) = error.as_db_error() else {
        return Error::Database(error);
    };
    let code = cause.code();
    if *code == SqlState::UNIQUE_VIOLATION
        && cause.constraint() == Some("messages_message_key_unique")
    {
        let message_key = duplicate(cause.detail(), message_keys).map(str::to_owned);
        Error::DuplicateKey {
            message_key,
            source: Some(error),
        }
    } else if *code == SqlState::UNDEFINED_TABLE || *code == SqlState::INVALID_SCHEMA_NAME {
        Error::SchemaMissing(error)
    } else if *code == SqlState::INVALID_TEXT_REPRESENTATION {
        Error::invalid(
            "payload",
            "is not JSON by the rules of Postgres",
            "give it one JSON document",
        )
        .caused_by(error)
    } else if *code == SqlState::STATEMENT_TOO_COMPLEX {
        let remedy = "nest the document less, or raise max_stack_depth on the server";
        Error::invalid("payload", "is nested too deeply for this server", remedy).caused_by(error)
    } else {
        Error::Database(error)
    }
}

/// Which of `message_keys` an error's detail names. It reads `…(message_key)=(KEY)…` in every language; of
/// several keys that fit, the longest is meant (`a` also fits where `a)` was printed).
fn duplicate<'k>(detail: Option<&str>, message_keys: &[&'k str]) -> Option<&'k str> {
    if let [only] = message_keys {
        return Some(only);
    }
    let detail = detail?;
    let (_, named) = detail.split_once("(message_key)=(")?;
    message_keys
        .iter()
        .copied()
        .filter(|key| {
            named
                .strip_prefix(key)
                .is_some_and(|rest| rest.starts_with(')'))
        })
        .max_by_key(|key| key.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_duplicate_is_found_in_every_language() {
        let keys = ["order-1", "order-12", "a)", "a"];
        let german = "Schlüssel »(message_key)=(order-12)« existiert bereits.";
        assert_eq!(duplicate(Some(german), &keys), Some("order-12"));
        assert_eq!(
            duplicate(Some("Key (message_key)=(a)) already exists."), &keys),
            Some("a)")
        );
        assert_eq!(duplicate(Some("Key already exists."), &keys), None);
        assert_eq!(duplicate(None, &keys), None);
        assert_eq!(duplicate(None, &["only"]), Some("only"));
    }

    #[test]
    fn a_statement_is_bounded_in_rows_and_bytes_and_never_empty() {
        let small: Vec<Message> = (0..STATEMENT_ROWS_MAX + 1)
            .map(|_| Message::raw_json("t", "1"))
            .collect();
        let rows = checked_rows(&small).unwrap();
        let lengths: Vec<usize> = statements(&rows).map(<[Row<'_>]>::len).collect();
        assert_eq!(lengths, [STATEMENT_ROWS_MAX, 1]);

        let large: Vec<Message> = (0..5)
            .map(|_| Message::binary("t", vec![0; 6 << 20], "a/b"))
            .collect();
        let rows = checked_rows(&large).unwrap();
        let lengths: Vec<usize> = statements(&rows).map(<[Row<'_>]>::len).collect();
        assert_eq!(lengths, [2, 2, 1]);

        assert_eq!(statements(&[]).count(), 0);
    }
}
