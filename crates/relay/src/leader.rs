//! The leader: the one visible loop. Read a page, publish it, write the checkpoint, sleep.

use std::cell::Cell;
use std::time::{Duration, Instant};

use futures_util::future::{OptionFuture, join};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::backoff::Waits;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::janitor::{milestone_interval, purge_on_order};
use crate::postgres::{MessageRow, Session, sql};
use crate::progress::Progress;
use crate::protocol::failure::Meaning;
use crate::publisher::{Publisher, may_be_the_page};
use crate::reader::{GAP_RANGES_MAX, JanitorPid, Page, Reader};
use crate::takeover::{TakenOver, take_over};

/// A leader that has not reached Redis for this long makes room for a standby that does.
const WITHOUT_REDIS_MAX: Duration = Duration::from_secs(10);

/// How often the history and the marker are looked at, busy or idle, and the purge is ordered.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// How often a blocked stream is tried again.
const BLOCKED_RETRY: Duration = Duration::from_secs(3);

/// Ids that one step of a blocked stream looks through.
const BLOCKED_IDS_MAX: i64 = 200_000;

/// First and longest wait between two looks while a writer is open that may not have seen the relay lie down.
const DOZE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// Times that a message must close the connection, alone in its page, before it is set aside.
const REFUSALS_MAX: u32 = 3;

/// Redis refuses no message below this: `proto-max-bulk-len` and the query buffer's limit are 1 MiB at least.
const REFUSABLE_BYTES_MIN: i64 = 900_000;

/// Everything that one leadership holds.
struct Leader<'c> {
    config: &'c Config,
    stop: &'c CancellationToken,
    session: Session,
    publisher: Publisher,
    reader: Reader,
    progress: Progress,
    replay_until: i64,
    purge: watch::Sender<i64>,
    checkpoint_at: Instant,
    check_at: Instant,
    milestone_at: Instant,
    blocked_at: Instant,
    gaps_warned_at: Option<Instant>,
    /// A message that was alone in a page that failed, and how often.
    refusals: (i64, u32),
}

/// Leads until it is told to stop, or until the leadership is lost. `working` is set once it leads.
///
/// Reads ahead by one page while a page is published. What was read ahead is dropped when publishing
/// fails, and read again.
///
/// # Errors
///
/// Why the leadership is lost. The session, and the lock with it, is gone when this returns.
pub(crate) async fn lead(
    config: &Config,
    session: Session,
    mut publisher: Publisher,
    stop: &CancellationToken,
    working: &Cell<bool>,
) -> Result<()> {
    let TakenOver {
        progress,
        replay_until,
    } = take_over(&session, &mut publisher, config).await?;
    working.set(true);
    session.batch("listen", sql::LISTEN).await?;
    let janitor = JanitorPid::default();
    let (page_rows, page_bytes) = (config.page_rows, config.page_bytes);
    let reader = Reader::new(
        &session,
        &progress.place.cursor,
        page_rows,
        page_bytes,
        janitor.clone(),
    )
    .await?;
    let (purge, orders) = watch::channel(0);
    tokio::spawn(purge_on_order(config.clone(), janitor, orders));
    let now = Instant::now();
    let mut leader = Leader {
        config,
        stop,
        session,
        publisher,
        reader,
        progress,
        replay_until,
        purge,
        checkpoint_at: now + config.checkpoint_interval,
        check_at: now + CHECK_INTERVAL,
        milestone_at: now,
        blocked_at: now,
        gaps_warned_at: None,
        refusals: (0, 0),
    };
    let mut page = Page {
        more: true,
        ..Page::default()
    };
    loop {
        let turn = leader.turn(&mut page).await;
        let turn = match turn {
            Err(error) => leader.recover(error, &mut page).await,
            done => done,
        };
        turn?;
        if stop.is_cancelled() {
            return leader.end(&page).await;
        }
    }
}

impl Leader<'_> {
    /// One turn of the loop. `page` is what is to be published, and then what was read meanwhile.
    async fn turn(&mut self, page: &mut Page) -> Result<()> {
        if page.is_empty() && !page.more {
            // Sleep, or read again after a page that was not full.
            *page = self.sleep().await?;
        } else if page.is_empty() {
            // Read.
            *page = self.reader.trip(&self.session, true).await?;
        } else {
            // Publish, and read the next page meanwhile.
            let rows = page.rows.len();
            let ahead: OptionFuture<_> = page
                .more
                .then(|| self.reader.trip(&self.session, true))
                .into();
            let published = self
                .session
                .speaking(self.progress.publish(&mut self.publisher, page));
            let (published, ahead) = join(published, ahead).await;
            if let Err(error) = published? {
                return Err(self.refused(error, page).await?);
            }
            *page = ahead.transpose()?.unwrap_or_else(|| Page {
                more: true,
                ..Page::default()
            });
            self.refusals = (0, 0);
            self.reader.relax_rows();
            self.throttle_replay(rows).await?;
        }
        self.catch_up_blocked().await?;
        self.keep_books().await
    }

    /// Finishes the page at hand, writes the checkpoint and leaves.
    async fn end(mut self, page: &Page) -> Result<()> {
        if !page.is_empty()
            && self
                .session
                .speaking(self.progress.publish(&mut self.publisher, page))
                .await?
                .is_err()
        {
            tracing::warn!("stopping with a page unpublished; the next leader publishes it");
        }
        if self.progress.needs_checkpoint() {
            self.progress.checkpoint(&self.session).await?;
        }
        tracing::info!(
            high = self.progress.place.cursor.high,
            "stopped; checkpoint written"
        );
        Ok(())
    }

    /// Waits until there is something to read, and reads it; or until another duty is due.
    ///
    /// A producer notifies only while the relay holds the `asleep` lock. A writer that probed the lock before
    /// the relay lay down notifies nobody; so after lying down the relay looks who is open, reads once
    /// more, and keeps looking while one of these is left. A notification that is lost costs a poll interval.
    async fn sleep(&mut self) -> Result<Page> {
        if self.progress.needs_checkpoint() {
            self.checkpoint().await?;
        }
        let (mut doze, doze_max) = DOZE;
        let mut asleep = false;
        let mut unsure_of = Vec::new();
        let mut page;
        loop {
            if asleep {
                let still = self
                    .reader
                    .open_writers_among(&self.session, unsure_of)
                    .await?;
                unsure_of = still;
            } else {
                // Fails while a producer probes it at this very moment.
                asleep = self
                    .session
                    .one("lie down", sql::TRY_LIE_DOWN, &[])
                    .await?
                    .get(0);
                unsure_of = self.reader.open_writers(&self.session).await?;
            }
            page = self.reader.trip(&self.session, false).await?;
            let now = Instant::now();
            if !page.is_empty() || self.stop.is_cancelled() || now >= self.next_duty() {
                break;
            }
            let longest = if asleep && unsure_of.is_empty() {
                self.config.poll_interval
            } else {
                doze
            };
            doze = (doze * 2).min(doze_max);
            let wait = longest.min(self.next_duty() - now);
            let woken = self.session.speaking(self.rest(wait)).await?;
            if woken {
                page = self.reader.trip(&self.session, true).await?;
                if !page.is_empty() {
                    break;
                }
            }
        }
        if asleep {
            self.session.one("get up", sql::GET_UP, &[]).await?;
        }
        Ok(page)
    }

    /// Waits for a notification, the order to stop, or the time to pass; true for a notification.
    async fn rest(&self, wait: Duration) -> bool {
        tokio::select! {
            () = self.session.notified() => true,
            () = self.stop.cancelled() => false,
            () = tokio::time::sleep(wait) => false,
        }
    }

    /// When something other than reading is due.
    fn next_duty(&self) -> Instant {
        match self.progress.blocked().is_empty() {
            true => self.check_at,
            false => self.check_at.min(self.blocked_at),
        }
    }

    /// Writes the checkpoint and, now and then, the record that the purge goes by.
    async fn checkpoint(&mut self) -> Result<()> {
        self.progress.checkpoint(&self.session).await?;
        let now = Instant::now();
        self.checkpoint_at = now + self.config.checkpoint_interval;
        let every = milestone_interval(self.config.retention);
        if now >= self.milestone_at {
            let high = self.progress.place.cursor.high;
            self.session
                .execute(
                    "record the time",
                    sql::MILESTONE,
                    &[&high, &every.as_secs_f64()],
                )
                .await?;
            self.milestone_at = now + every;
        }
        Ok(())
    }

    /// The checkpoint, the check of both histories, and the orders for the purge, each when it is due.
    async fn keep_books(&mut self) -> Result<()> {
        if self.progress.needs_checkpoint() && Instant::now() >= self.checkpoint_at {
            self.checkpoint().await?;
        }
        if Instant::now() < self.check_at {
            return Ok(());
        }
        self.check_history().await?;
        if self.progress.needs_checkpoint() || Instant::now() >= self.milestone_at {
            self.checkpoint().await?;
        }
        self.purge.send_replace(self.progress.purge_limit());
        self.check_at = Instant::now() + CHECK_INTERVAL;
        self.warn_of_gaps().await
    }

    /// Looks whether both servers are still where this leader left them. A Redis can lose its tail, and a
    /// Postgres its past, without that this client sees a disconnect.
    async fn check_history(&mut self) -> Result<()> {
        let place = &self.progress.place;
        let row = self
            .session
            .one("check the history", sql::STILL_SAME, &[&place.cursor.high])
            .await?;
        let (timeline, last_value, key): (i64, i64, Option<String>) =
            (row.get(0), row.get(1), row.get(2));
        if timeline != i64::from(place.history.timeline) {
            return Err(Error::HistoryChanged("the timeline is another"));
        }
        if last_value < place.cursor.high {
            return Err(Error::HistoryChanged("the sequence fell back"));
        }
        if place.cursor.high > 0 && key.as_ref() != Some(&place.cursor.high_key) {
            return Err(Error::HistoryChanged("the last published row is not there"));
        }
        let (epoch, page) = self
            .session
            .speaking(self.publisher.marker_position())
            .await??;
        if (&epoch, &page) != (&place.epoch.to_string(), &place.page.to_string()) {
            return Err(Error::Moved { epoch, page });
        }
        Ok(())
    }

    async fn warn_of_gaps(&mut self) -> Result<()> {
        if self.reader.gap_ranges() < GAP_RANGES_MAX {
            self.gaps_warned_at = None;
            return Ok(());
        }
        if self
            .gaps_warned_at
            .is_some_and(|at| at.elapsed() < Duration::from_secs(60))
        {
            return Ok(());
        }
        self.gaps_warned_at = Some(Instant::now());
        for row in self
            .session
            .all(
                "list who holds the gaps",
                sql::HOLDERS,
                &[&self.reader.janitor_pid()],
            )
            .await?
        {
            let (pid, age): (Option<i32>, f64) = (row.get(1), row.get(3));
            tracing::error!(
                pid,
                application = row.get::<_, String>(2),
                age_seconds = age,
                query = row.get::<_, String>(4),
                prepared = row.get::<_, Option<String>>(5),
                "too many ids wait for this open transaction; nothing newer is read until it ends"
            );
        }
        Ok(())
    }

    /// Tries blocked streams again and publishes to them, in order, what they lack.
    async fn catch_up_blocked(&mut self) -> Result<()> {
        if self.progress.blocked().is_empty() || Instant::now() < self.blocked_at {
            return Ok(());
        }
        self.blocked_at = Instant::now() + BLOCKED_RETRY;
        let streams: Vec<String> = self.progress.blocked().keys().cloned().collect();
        for stream in streams {
            let (rows, to) = self.read_blocked(&stream).await?;
            let caught_up = self
                .progress
                .catch_up(&mut self.publisher, &stream, &rows, to);
            if !self.session.speaking(caught_up).await?? {
                continue;
            }
            if self.progress.blocked().contains_key(&stream) {
                self.blocked_at = Instant::now(); // there is more, and it flows
            } else {
                tracing::info!(%stream, "the stream takes entries again and has caught up");
            }
        }
        Ok(())
    }

    /// The next messages that a blocked stream lacks, and up to which id they are all of them.
    async fn read_blocked(&self, stream: &str) -> Result<(Vec<MessageRow>, i64)> {
        let Some(blocked) = self.progress.blocked().get(stream) else {
            return Ok((Vec::new(), 0));
        };
        let (mut lo, mut hi, mut ids) = (Vec::new(), Vec::new(), 0);
        let mut to = self.progress.place.cursor.high;
        for (first, last) in self.progress.lacks(blocked).iter() {
            if ids >= BLOCKED_IDS_MAX {
                to = first - 1;
                break;
            }
            let end = last.min(first + BLOCKED_IDS_MAX - ids - 1);
            ids += end - first + 1;
            lo.push(first);
            hi.push(end);
            if end < last {
                to = end;
                break;
            }
        }
        let (rows_max, bytes_max) = (
            i64::from(self.config.page_rows),
            i64::from(self.config.page_bytes),
        );
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
            [&lo, &hi, &rows_max, &bytes_max, &blocked.topic];
        let rows = self
            .session
            .all("read for a blocked stream", sql::BLOCKED_PAGE, &params)
            .await?;
        let rows: Vec<MessageRow> = rows.into_iter().map(MessageRow::from).collect();
        let cut = rows.len() >= self.config.page_rows as usize
            || rows
                .last()
                .is_some_and(|row| row.running_bytes() >= bytes_max);
        match rows.last() {
            Some(last) if cut => to = last.id(),
            _ => {}
        }
        Ok((rows, to))
    }

    /// Keeps a replay to its rate.
    async fn throttle_replay(&self, rows: usize) -> Result<()> {
        let Some(rate) = self.config.replay_rate else {
            return Ok(());
        };
        if self.progress.place.cursor.high > self.replay_until {
            return Ok(());
        }
        let pause = Duration::from_secs_f64(rows as f64 / f64::from(rate));
        let wait = async {
            let _ = tokio::time::timeout(pause, self.stop.cancelled()).await;
        };
        self.session.speaking(wait).await
    }

    /// Looks whether the page itself is what closed the connection. Redis closes it on a message past its
    /// limits without naming the message; so pages are halved until that one is alone.
    async fn refused(&mut self, error: Error, page: &Page) -> Result<Error> {
        if !may_be_the_page(&error) {
            return Ok(error);
        }
        if let [row] = page.rows.as_slice() {
            if row.bytes() < REFUSABLE_BYTES_MIN {
                return Ok(error);
            }
            // Between two tries Redis took the marker of a new epoch: scripts and writes work.
            let times = if self.refusals.0 == row.id() {
                self.refusals.1 + 1
            } else {
                1
            };
            self.refusals = (row.id(), times);
            if times >= REFUSALS_MAX {
                self.progress
                    .set_aside(&self.session, row, &error.one_line())
                    .await?;
            }
        }
        let rows = u32::try_from(page.rows.len() / 2).unwrap_or(u32::MAX);
        self.reader.limit_rows(rows);
        Ok(error)
    }

    /// Gets over a failure of Redis, or a history that changed: connects anew and takes over anew, with a
    /// new epoch. A page that was under way is then in the marker, or it can no longer arrive.
    ///
    /// # Errors
    ///
    /// Any failure of Postgres, and that a standby reaches Redis and this relay does not.
    async fn recover(&mut self, error: Error, page: &mut Page) -> Result<()> {
        if !error.is_redis() && !matches!(error, Error::HistoryChanged(_)) {
            return Err(error);
        }
        tracing::warn!(
            error = error.one_line(),
            "publishing is interrupted; trying again"
        );
        *page = Page {
            more: true,
            ..Page::default()
        };
        let since = Instant::now();
        let mut waits = Waits::new(self.config);
        let mut error = error;
        while !self.stop.is_cancelled() {
            match self.take_over_again(&error).await {
                Ok(()) => {
                    tracing::info!(after = ?since.elapsed(), "publishing again");
                    return Ok(());
                }
                Err(next) if next.is_redis() => error = next,
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
        let taken = take_over(&self.session, &mut self.publisher, self.config);
        let TakenOver {
            progress,
            replay_until,
        } = self.session.speaking(taken).await??;
        let set_aside = std::mem::replace(&mut self.progress, progress).into_set_aside();
        self.progress.keep_set_aside(set_aside);
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
