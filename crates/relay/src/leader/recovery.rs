//! How the leader gets over a failure of Redis without giving up the lock, and finds the message that Redis
//! refuses.

use std::time::{Duration, Instant};

use super::Leader;
use crate::backoff::Waits;
use crate::caretaker::{Caretaker, Order};
use crate::error::{Error, Result};
use crate::health::Phase;
use crate::metric_names as names;
use crate::postgres::{MessageRow, sql};
use crate::protocol::failure::Meaning;
use crate::publisher::{Publisher, may_be_the_page};
use crate::reader::Page;
use crate::takeover::{TakenOver, take_over};

/// A leader that has not reached Redis for this long makes room for a standby that does.
const WITHOUT_REDIS_MAX: Duration = Duration::from_secs(10);

/// Times that a message must close the connection, alone in its page, before it is set aside.
const REFUSALS_MAX: u32 = 3;

/// Redis refuses no message below this: `proto-max-bulk-len` and the query buffer's limit are 1 MiB at least.
const REFUSABLE_BYTES_MIN: i64 = 900_000;

impl Leader<'_> {
    /// Looks whether the rows of a page are what closed the connection, and returns how many the next page may
    /// have then. Redis closes it on a message past its limits without naming the message; so pages are halved
    /// until that one is alone.
    pub(super) async fn refused(
        &mut self,
        error: &Error,
        rows: &[MessageRow],
    ) -> Result<Option<u32>> {
        if !may_be_the_page(error) {
            return Ok(None);
        }
        if let [row] = rows {
            if row.bytes() < REFUSABLE_BYTES_MIN {
                return Ok(None);
            }
            // Between two tries Redis took the marker of a new epoch: scripts and writes work.
            let times = if self.refusals.0 == row.id() {
                self.refusals.1 + 1
            } else {
                1
            };
            self.refusals = (row.id(), times);
            if times >= REFUSALS_MAX {
                let reason = format!(
                    "its {} bytes are more than Redis takes (proto-max-bulk-len, client-query-buffer-limit): {error} \
                     {times} times with this message alone: {}",
                    row.bytes(),
                    cause(error)
                );
                self.progress.set_aside(&self.session, row, &reason).await?;
            }
        }
        let half = u32::try_from(rows.len() / 2).unwrap_or(u32::MAX);
        Ok(Some(half.max(1)))
    }

    /// Gets over a failure of Redis, or a history that changed: connects anew and takes over anew, with a
    /// new epoch. A page that was under way is then in the marker, or it can no longer arrive.
    ///
    /// # Errors
    ///
    /// Any failure of Postgres, and that a standby reaches Redis and this relay does not.
    pub(super) async fn recover(&mut self, error: Error, page: &mut Page) -> Result<()> {
        if !error.is_redis() && !matches!(error, Error::HistoryChanged(_)) {
            return Err(error);
        }
        tracing::warn!(
            error = error.one_line(),
            "publishing is interrupted; trying again"
        );
        self.stand_up().await?;
        ::metrics::counter!(names::INTERRUPTIONS).increment(1);
        self.config
            .health
            .enter(Phase::Interrupted(error.one_line()));
        *page = Page {
            more: true,
            ..Page::default()
        };
        self.next = None;
        // What was waited for in vain counts: a socket that died without a word is noticed late.
        let waited = match &error {
            Error::Timeout { limit, .. } => *limit,
            Error::Redis { source, .. } if source.is_timeout() => self.config.redis_timeout,
            _ => Duration::ZERO,
        };
        let since = Instant::now()
            .checked_sub(waited)
            .unwrap_or_else(Instant::now);
        let mut waits = Waits::new(self.config);
        let mut error = error;
        while !self.stop.is_cancelled() {
            match self.take_over_again(&error).await {
                Ok(()) => {
                    self.config.health.enter(Phase::Leading);
                    tracing::info!(after = ?since.elapsed(), "publishing again");
                    return Ok(());
                }
                Err(next) if next.is_redis() => {
                    self.config
                        .health
                        .enter(Phase::Interrupted(next.one_line()));
                    error = next;
                }
                Err(next) => return Err(next),
            }
            if since.elapsed() >= WITHOUT_REDIS_MAX && self.ready_standby().await? {
                return Err(Error::Yielded(since.elapsed()));
            }
            let wait = if error.meaning() == Meaning::Setup {
                waits.slow()
            } else {
                waits.next()
            };
            self.session.speaking(self.rest(wait)).await?;
        }
        *page = Page::default();
        Ok(())
    }

    async fn take_over_again(&mut self, error: &Error) -> Result<()> {
        // An error reply leaves the connection as it is.
        if !error.is_reply() {
            let (redis, prefix, limit) = (
                &self.config.redis,
                &self.config.stream_prefix,
                self.config.redis_timeout,
            );
            self.publisher = self
                .session
                .speaking(Publisher::connect(redis, prefix, limit))
                .await??;
        }
        // What is needed again must not go meanwhile.
        self.purge.send_replace(0);
        self.caretaker.order(Order::default());
        let taken = take_over(&self.session, &mut self.publisher, self.config);
        let TakenOver {
            progress,
            replay_until,
        } = self.session.speaking(taken).await??;
        let set_aside = std::mem::replace(&mut self.progress, progress).into_set_aside();
        self.progress.keep_set_aside(set_aside);
        // What the groups had acknowledged may have been lost with what they were given.
        self.caretaker = Caretaker::start(self.config);
        self.replay_until = replay_until;
        self.reader.restart(&self.progress.place.cursor);
        Ok(())
    }

    async fn ready_standby(&self) -> Result<bool> {
        Ok(self
            .session
            .one("look for a standby", sql::READY_STANDBY, &[])
            .await?
            .get(0))
    }
}

/// What the server or the system said.
fn cause(error: &Error) -> String {
    std::error::Error::source(error).map_or_else(String::new, ToString::to_string)
}
