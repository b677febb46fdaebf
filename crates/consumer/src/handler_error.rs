//! How a handler says that a message has not taken effect, and what is to become of it.

use std::{error::Error as StdError, fmt, time::Duration};

use crate::{decision::Fault, trouble::Trouble};

/// Why a handler did not apply a message, and what is to be done about it. In each case all that the handler
/// wrote is rolled back.
///
/// A handler returns `Ok(())` for *done*. Everything else that it may return becomes this type by `?` or `into()`:
///
/// - Any error, such as `tokio_postgres::Error`, an error enum of the application, `anyhow::Error`, or a string: the
///   attempt is counted, and the message runs again after the back-off, up to `max_attempts`. An error of Postgres
///   anywhere in its chain that tells of an outage or a conflict (a lost connection, 40001, 40P01) counts for nothing.
/// - [`HandlerError::retry_after`]: the same after a time that the handler chooses.
/// - [`HandlerError::reject`]: the message becomes a dead letter at once.
///
/// It is no [`std::error::Error`] itself, which is what lets every error turn into it.
///
/// ```
/// use std::time::Duration;
/// use outbox_consumer::{HandlerError, Message, Transaction};
///
/// #[derive(serde::Deserialize)]
/// struct OrderPlaced { order: i64 }
///
/// async fn ship(tx: &Transaction<'_>, message: &Message) -> Result<(), HandlerError> {
///     // A document that cannot be decoded now cannot be decoded later.
///     let OrderPlaced { order } = message.json().map_err(HandlerError::reject)?;
///     let address = tx.query_opt("SELECT FROM addresses WHERE order_id = $1", &[&order]).await?;
///     if address.is_none() {
///         return Err(HandlerError::retry_after(Duration::from_secs(60), "no address yet"));
///     }
///     tx.execute("INSERT INTO shipments (order_id) VALUES ($1)", &[&order]).await?;
///     Ok(())
/// }
/// ```
#[must_use = "it has no effect unless the handler returns it"]
pub struct HandlerError {
    verdict: Verdict,
    reason: Box<dyn StdError + Send + Sync>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Failed,
    RetryAfter(Duration),
    Rejected,
}

impl HandlerError {
    /// The attempt is counted, and the message runs again after `wait` instead of the back-off. After
    /// `max_attempts` it becomes a dead letter like any other. Messages that must not overtake it wait as well.
    pub fn retry_after(wait: Duration, reason: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self {
            verdict: Verdict::RetryAfter(wait),
            reason: reason.into(),
        }
    }

    /// No further attempt can succeed: the message becomes a dead letter now, with this reason.
    pub fn reject(reason: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self {
            verdict: Verdict::Rejected,
            reason: reason.into(),
        }
    }
}

impl<E> From<E> for HandlerError
where
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    fn from(error: E) -> Self {
        Self {
            verdict: Verdict::Failed,
            reason: error.into(),
        }
    }
}

impl From<HandlerError> for Trouble {
    fn from(HandlerError { verdict, reason }: HandlerError) -> Self {
        match verdict {
            Verdict::Failed => Trouble::from_handler(&*reason),
            Verdict::RetryAfter(wait) => {
                Trouble::from_verdict(Fault::HandlerPostpones(wait), &*reason)
            }
            Verdict::Rejected => Trouble::from_verdict(Fault::HandlerRejects, &*reason),
        }
    }
}

impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.reason, f)
    }
}

impl fmt::Debug for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlerError")
            .field("verdict", &self.verdict)
            .field("reason", &self.reason)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(error: impl Into<HandlerError>) -> Fault {
        Trouble::from(error.into()).fault
    }

    #[test]
    fn each_way_to_fail_has_its_fault() {
        let wait = Duration::from_secs(7);
        assert_eq!(fault("text"), Fault::HandlerError);
        assert_eq!(fault(std::io::Error::other("io")), Fault::HandlerError);
        let postponed = HandlerError::retry_after(wait, "later");
        assert_eq!(fault(postponed), Fault::HandlerPostpones(wait));
        assert_eq!(fault(HandlerError::reject("never")), Fault::HandlerRejects);
    }

    #[test]
    fn a_question_mark_keeps_the_verdict() {
        fn inner() -> Result<(), HandlerError> {
            Err(HandlerError::reject("never"))
        }
        fn outer() -> Result<(), HandlerError> {
            inner()?;
            Ok(())
        }
        assert_eq!(fault(outer().unwrap_err()), Fault::HandlerRejects);
    }
}
