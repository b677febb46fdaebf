//! An error of a server or a handler, reduced to its fault and a text for the log.

use std::{error::Error as StdError, fmt, io};

use deadpool_postgres::PoolError;
use outbox_redis_address::Error as AddressError;
use redis::RedisError;
use tokio_postgres::error::DbError;

use crate::decision::{Decision, Fault, Origin, decide, fault_of_redis, fault_of_sqlstate};

/// The longest text kept of an error, in bytes: it is stored with each attempt and dead letter.
const TEXT_BYTES_MAX: usize = 4096;

/// What went wrong, for whom, and how the server or the handler put it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trouble {
    pub(crate) fault: Fault,
    pub(crate) origin: Origin,
    pub(crate) text: String,
}

impl Trouble {
    pub(crate) fn new(origin: Origin, fault: Fault, text: impl Into<String>) -> Self {
        Self {
            fault,
            origin,
            text: clean(text.into()),
        }
    }

    pub(crate) fn decision(&self) -> Decision {
        decide(self.origin, self.fault)
    }

    /// The same trouble, met by what the handler wrote.
    pub(crate) fn of_handler(self) -> Self {
        Self {
            origin: Origin::Handler,
            ..self
        }
    }

    /// The stream is not ours any more.
    pub(crate) fn lease_lost() -> Self {
        let text = "another member has the stream now";
        Self::new(Origin::Library, Fault::LeaseLost, text)
    }

    /// Redis has not answered in time.
    pub(crate) fn redis_silent() -> Self {
        let text = "Redis did not answer in time";
        Self::new(Origin::Library, Fault::RedisSilent, text)
    }

    /// Postgres has not answered in time.
    pub(crate) fn postgres_silent() -> Self {
        Self::new(
            Origin::Library,
            Fault::PostgresSilent,
            "Postgres did not answer in time",
        )
    }

    /// What a handler returned. An error of Postgres anywhere in the chain decides what it means: the
    /// handler that only passes on a lost connection has not failed.
    pub(crate) fn from_handler(error: &(dyn StdError + 'static)) -> Self {
        let fault = fault_in_chain(error).unwrap_or(Fault::HandlerError);
        Self::new(Origin::Handler, fault, chain_text(error))
    }

    /// What a handler returned together with what is to be done about it.
    pub(crate) fn from_verdict(fault: Fault, reason: &(dyn StdError + 'static)) -> Self {
        Self::new(Origin::Handler, fault, chain_text(reason))
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<tokio_postgres::Error> for Trouble {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::new(
            Origin::Library,
            fault_of_postgres(&error),
            chain_text(&error),
        )
    }
}

impl From<PoolError> for Trouble {
    fn from(error: PoolError) -> Self {
        let fault = match &error {
            PoolError::Backend(error) => fault_of_postgres(error),
            PoolError::Timeout(_) => Fault::PostgresSilent,
            PoolError::Closed => Fault::PoolClosed,
            PoolError::NoRuntimeSpecified | PoolError::PostCreateHook(_) => Fault::OtherSql,
        };
        Self::new(Origin::Library, fault, chain_text(&error))
    }
}

impl From<RedisError> for Trouble {
    fn from(error: RedisError) -> Self {
        Self::new(Origin::Library, fault_of_redis(&error), error.to_string())
    }
}

impl From<AddressError> for Trouble {
    fn from(error: AddressError) -> Self {
        let fault = match &error {
            AddressError::Redis { source, .. } => fault_of_redis(source),
            // The sentinel that named it, or the server itself, has yet to hear of the failover.
            AddressError::Replica(_) => Fault::RedisReadOnly,
            AddressError::ManySlots(_) => Fault::ManySlots,
            // No other connection comes of this address and these files.
            _ => Fault::RedisRefused,
        };
        Self::new(Origin::Library, fault, chain_text(&error))
    }
}

fn fault_of_postgres(error: &tokio_postgres::Error) -> Fault {
    if let Some(code) = error.code() {
        return fault_of_sqlstate(code.code());
    }
    let io = error.source().is_some_and(|cause| cause.is::<io::Error>());
    if error.is_closed() || io {
        Fault::PostgresLost
    } else {
        Fault::OtherSql
    }
}

/// Some wrappers hide the error itself and show only its source, hence the look for `DbError` as well.
fn fault_in_chain(error: &(dyn StdError + 'static)) -> Option<Fault> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<tokio_postgres::Error>() {
            return Some(fault_of_postgres(error));
        }
        if let Some(error) = error.downcast_ref::<DbError>() {
            return Some(fault_of_sqlstate(error.code().code()));
        }
        next = error.source();
    }
    None
}

/// An error and its causes in one line; a cause that its wrapper already repeats is left out.
fn chain_text(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

/// Postgres stores no NUL, and nobody reads megabytes.
fn clean(mut text: String) -> String {
    if text.contains('\0') {
        text = text.replace('\0', "\u{fffd}");
    }
    if text.len() > TEXT_BYTES_MAX {
        let mut end = TEXT_BYTES_MAX;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the shop failed")]
    struct Wrapped(#[source] io::Error);

    #[test]
    fn an_error_text_can_be_stored_and_names_its_causes() {
        let cause = io::Error::other(format!("bad\0{}", "é".repeat(5_000)));
        let trouble = Trouble::from_handler(&Wrapped(cause));
        assert_eq!(trouble.fault, Fault::HandlerError);
        assert!(trouble.text.starts_with("the shop failed: bad\u{fffd}é"));
        assert!(trouble.text.len() < TEXT_BYTES_MAX + 8);
        assert!(!trouble.text.contains('\0'));
    }
}
