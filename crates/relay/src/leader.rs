//! The leader: the one visible loop. Read a page, publish it, write the checkpoint, sleep.

mod duties;
mod pausing;
mod recovery;
mod telling;

use std::cell::Cell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use futures_util::future::{OptionFuture, join};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::duties::CHECK_INTERVAL;
use crate::caretaker::Caretaker;
use crate::config::Config;
use crate::error::Result;
use crate::health::Phase;
use crate::janitor::purge_on_order;
use crate::postgres::{Session, sql};
use crate::progress::Progress;
use crate::publisher::Publisher;
use crate::reader::{Page, Reader};
use crate::takeover::{TakenOver, take_over};

/// First and longest wait between two looks while a writer is open that may not have seen the relay lie down.
const DOZE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

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
    caretaker: Caretaker,
    checkpoint_at: Instant,
    check_at: Instant,
    milestone_at: Instant,
    blocked_at: Instant,
    /// Most rows in a page of a blocked stream.
    blocked_rows: u32,
    gaps_warned_at: Option<Instant>,
    /// Publishing is paused, as far as it is known; looked for again from `look_at` on.
    paused: bool,
    look_at: Instant,
    /// Topics that are held back until their groups have drained the streams.
    changing: HashSet<String>,
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
    config.health.enter(Phase::Leading);
    session.batch("listen", sql::LISTEN).await?;
    let (page_rows, page_bytes) = (config.page_rows, config.page_bytes);
    let reader = Reader::new(&session, &progress.place.cursor, page_rows, page_bytes).await?;
    let (purge, orders) = watch::channel(0);
    tokio::spawn(purge_on_order(config.clone(), orders));
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
        caretaker: Caretaker::start(config),
        checkpoint_at: now + config.checkpoint_interval,
        check_at: now + CHECK_INTERVAL,
        milestone_at: now,
        blocked_at: now,
        blocked_rows: page_rows,
        gaps_warned_at: None,
        paused: false,
        look_at: now,
        changing: HashSet::new(),
        refusals: (0, 0),
    };
    // The take-over has looked at the history just now, and there may be much that is overdue.
    leader.order_purge();
    leader.look_for_pause().await?;
    leader.change_layouts().await?;
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
        if self.is_paused(page).await? {
            return Ok(());
        }
        if self.caretaker.redis_is_full() {
            return self.wait_for_room().await;
        }
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
                if let Some(rows_max) = self.refused(&error, &page.rows).await? {
                    self.reader.limit_rows(rows_max);
                }
                return Err(error);
            }
            self.config.health.published();
            if page.rows.iter().any(|row| row.id() == self.refusals.0) {
                self.refusals = (0, 0);
            }
            *page = ahead.transpose()?.unwrap_or_else(|| Page {
                more: true,
                ..Page::default()
            });
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
        let (mut doze, doze_max) = DOZE;
        let (mut asleep, mut unsure_of, mut page) = self.reader.lie_down(&self.session).await?;
        while page.is_empty() && !self.stop.is_cancelled() {
            let Some(duty_in) = self.next_duty().checked_duration_since(Instant::now()) else {
                break;
            };
            let longest = if asleep && unsure_of.is_empty() {
                self.config.poll_interval
            } else {
                doze
            };
            doze = (doze * 2).min(doze_max);
            if self
                .session
                .speaking(self.rest(longest.min(duty_in)))
                .await?
            {
                // Producers need not notify while the page is on its way.
                page = self.reader.rise_and_look(&self.session).await?;
                asleep = false;
            } else if asleep {
                unsure_of = self.reader.still_open(&self.session, unsure_of).await?;
                page = self.reader.trip(&self.session, false).await?;
            }
            if !asleep && page.is_empty() {
                (asleep, unsure_of, page) = self.reader.lie_down(&self.session).await?;
            }
        }
        if asleep {
            self.reader.rise(&self.session).await?;
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
}
