//! Waiting for a condition with a deadline, instead of sleeping and hoping.

use std::{
    fmt,
    time::{Duration, Instant},
};

use crate::Error;

/// How long a poll waits before it looks again.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// One look at the condition that [`eventually`] waits for.
///
/// Implemented for `bool` (true = done), `Option` (`Some` = done, with the value) and `Result` (`Ok` = done,
/// with the value; the error is shown when the deadline passes).
pub trait Probe {
    /// What the wait returns once the condition holds.
    type Value;

    /// The value when the condition holds, otherwise what was seen instead.
    fn verdict(self) -> Result<Self::Value, String>;
}

impl Probe for bool {
    type Value = ();

    fn verdict(self) -> Result<(), String> {
        if self {
            Ok(())
        } else {
            Err("false".to_owned())
        }
    }
}

impl<T> Probe for Option<T> {
    type Value = T;

    fn verdict(self) -> Result<T, String> {
        self.ok_or_else(|| "nothing".to_owned())
    }
}

impl<T, E: fmt::Debug> Probe for Result<T, E> {
    type Value = T;

    fn verdict(self) -> Result<T, String> {
        self.map_err(|error| format!("{error:?}"))
    }
}

/// Polls `probe` every few milliseconds until it says that the condition holds, and returns its value.
///
/// To have the last value named in the error, return `Err(value)` while the condition does not hold:
///
/// ```no_run
/// # async fn rows() -> usize { 3 }
/// # async fn example() -> Result<(), outbox_testkit::Error> {
/// use std::time::Duration;
/// use outbox_testkit::eventually;
///
/// eventually(Duration::from_secs(5), "three rows", || async {
///     let rows = rows().await;
///     if rows == 3 { Ok(()) } else { Err(rows) }
/// })
/// .await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// When `deadline` has passed: names `what` and what was seen last. A probe that hangs is cut off at the
/// deadline too.
///
/// # Cancel safety
///
/// As cancel safe as the futures that `probe` makes; nothing else is kept between polls.
pub async fn eventually<P, F>(
    deadline: Duration,
    what: &str,
    mut probe: impl FnMut() -> F,
) -> Result<P::Value, Error>
where
    P: Probe,
    F: Future<Output = P>,
{
    let started = Instant::now();
    let mut seen = "nothing yet".to_owned();
    loop {
        let left = deadline.saturating_sub(started.elapsed());
        match tokio::time::timeout(left, probe()).await {
            Ok(outcome) => match outcome.verdict() {
                Ok(value) => return Ok(value),
                Err(other) => seen = other,
            },
            Err(_) => seen = format!("{seen} (the last look did not come back)"),
        }
        if started.elapsed() >= deadline {
            return Err(Error::timed_out(what, deadline, seen));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
