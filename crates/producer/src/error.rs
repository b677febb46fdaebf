//! What can go wrong on the way into the outbox.

use std::fmt;

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a message was not written.
///
/// [`Error::Invalid`] is found before the round trip: the transaction can be used further. Every other
/// error comes from the database, and Postgres refuses each later statement of that transaction (a
/// savepoint around the write limits this).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of the message breaks a rule of the outbox.
    #[error("{}{field} {problem}: {remedy}", Position(*index))]
    #[non_exhaustive]
    Invalid {
        /// Position of the message in the slice given to [`write_all`](crate::write_all), from 0.
        index: Option<usize>,
        /// The field, by its column name (`payload` also stands for `payload_binary`).
        field: &'static str,
        /// What is wrong with it.
        problem: String,
        /// What to do about it.
        remedy: &'static str,
        /// The error of the serializer, the JSON parser or the database, if one of them found it.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },

    /// The message key is in the outbox already (or twice in the slice).
    #[error("{} is already in the outbox: use another key, or `write_once` to skip such messages", Key(message_key.as_deref()))]
    #[non_exhaustive]
    DuplicateKey {
        /// The key. `None` when Postgres does not tell which of several keys it was, because the role
        /// has no SELECT on the column `message_key`.
        message_key: Option<String>,
        /// The error of the database; none when the key stands twice in the slice.
        source: Option<tokio_postgres::Error>,
    },

    /// The database has no outbox.
    #[error("this database has no outbox: run `outbox-relay migrate`")]
    SchemaMissing(#[source] tokio_postgres::Error),

    /// The database refused the statement for another reason, or the connection is gone.
    #[error("the database did not take the message")]
    Database(#[source] tokio_postgres::Error),
}

impl Error {
    pub(crate) fn invalid(
        field: &'static str,
        problem: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Self::Invalid {
            index: None,
            field,
            problem: problem.into(),
            remedy,
            source: None,
        }
    }

    pub(crate) fn caused_by(
        mut self,
        cause: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        if let Self::Invalid { source, .. } = &mut self {
            *source = Some(Box::new(cause));
        }
        self
    }

    pub(crate) fn at(mut self, position: usize) -> Self {
        if let Self::Invalid { index, .. } = &mut self {
            *index = Some(position);
        }
        self
    }
}

/// `message 3: `, or nothing where there is only one message.
struct Position(Option<usize>);

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(index) => write!(f, "message {index}: "),
            None => Ok(()),
        }
    }
}

struct Key<'a>(Option<&'a str>);

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(key) => write!(f, "message_key {key:?}"),
            None => f.write_str("a message_key of these messages"),
        }
    }
}
