//! The leader: the one visible loop. Read a page, publish it, write the checkpoint, sleep.

mod courtesy;
mod duties;
mod pausing;
mod recovery;
mod sleeping;
mod telling;

use std::cell::Cell;
use std::collections::HashSet;
use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::future::{OptionFuture, join, join3};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::courtesy::Courtesy;
use self::duties::CHECK_INTERVAL;
use crate::caretaker::Caretaker;
use crate::config::Config;
use crate::error::Result;
use crate::health::Phase;
use crate::janitor::purge_on_order;
use crate::postgres::{Session, sql};
use crate::progress::Progress;
use crate::protocol::log::Writer;
use crate::protocol::place::Blocked;
use crate::publisher::{PageWrite, Published, Publisher};
use crate::reader::{Page, Reader};
use crate::takeover::{TakenOver, take_over};

/// Messages without a rest in between from which on the relay is busy. A trickle brings a few in a row by chance, one
/// by one; two that come together count as [`TOGETHER`].
const BUSY: u32 = 16;
const TOGETHER: u32 = 4;

/// Everything that one leadership holds.
struct Leader<'c> {
    config: &'c Config,
    stop: &'c CancellationToken,
    session: Session,
    publisher: Publisher,
    reader: Reader,
    /// While the `asleep` lock is held: writers that may have looked at it before.
    lying: Option<Vec<Writer>>,
    /// Whether to let a backend lie down that has just answered.
    courtesy: Courtesy,
    /// Messages since the relay last rested, as [`BUSY`] counts them.
    unrested: u32,
    progress: Progress,
    /// What was read beyond the page at hand.
    next: Option<Page>,
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
/// Reads ahead by two pages while a page is published, and sends the first of them. What was read ahead is dropped when
/// publishing fails, and read again.
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
        lying: None,
        courtesy: Courtesy::new(),
        unrested: 0,
        progress,
        next: None,
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
            return leader.end(&mut page).await;
        }
    }
}

impl Leader<'_> {
    /// One turn of the loop. `page` is what is to be published, and then what was read meanwhile.
    async fn turn(&mut self, page: &mut Page) -> Result<()> {
        if page.is_empty()
            && let Some(next) = self.next.take()
        {
            *page = next;
        }
        if page.sent.is_none() {
            if self.is_paused(page).await? {
                return self.stand_up().await;
            }
            if self.caretaker.redis_is_full() {
                self.stand_up().await?;
                return self.wait_for_room().await;
            }
        }
        if page.is_empty() && !page.more {
            // Sleep, or read again after a page that was not full.
            *page = self.sleep().await?;
        } else if page.is_empty() {
            // Read.
            *page = self.reader.trip(&self.session).await?;
        } else {
            let rows = page.rows.len();
            let next = match self.publish(page).await {
                Ok(next) => next,
                Err(error) => {
                    if let Some(rows_max) = self.refused(&error, &page.rows).await? {
                        self.reader.limit_rows(rows_max);
                    }
                    return Err(error);
                }
            };
            if page.rows.iter().any(|row| row.id() == self.refusals.0) {
                self.refusals = (0, 0);
            }
            // There may be more by now; a relay that is still down is notified of it, or looks before it rests.
            *page = next.unwrap_or_else(|| Page {
                more: self.lying.is_none(),
                ..Page::default()
            });
            self.reader.relax_rows();
            self.throttle_replay(rows).await?;
        }
        if page.sent.is_some() {
            // The marker is about to move on.
            return Ok(());
        }
        self.catch_up_blocked().await?;
        self.keep_books().await
    }

    /// Publishes a page. Meanwhile the next one is sent behind it, and the one after that is read, if there is more. Returns
    /// the next one.
    ///
    /// A crash before Redis runs the page leaves it unpublished, and the next leader reads it again. A
    /// crash after it leaves the page and the marker, and the next leader goes on behind it.
    async fn publish(&mut self, page: &mut Page) -> Result<Option<Page>> {
        let mut newly_blocked = Vec::new();
        let mut write = self.write_of(page, &newly_blocked).await?;
        let read_on = page.more && !self.stop.is_cancelled();
        let behind = match read_on && self.may_send_ahead(page) {
            true => self.progress.cursor_behind(&write),
            false => None,
        };
        let send = async |next: &mut Page| {
            if let Some(cursor) = behind.filter(|_| !next.rows.is_empty()) {
                let mut write = self.progress.write_behind(&cursor, next);
                self.publisher.send_ahead(&mut write).await;
                next.sent = Some(write);
            }
        };
        // With one page after another, producers need not notify. Few pages are not worth the statements: the relay
        // stays down.
        let together = page.more || page.rows.len() > 1;
        let weight = if together { TOGETHER } else { 1 };
        self.unrested = self.unrested.saturating_add(weight);
        let busy = page.more && page.rows.len() > 1 || self.unrested >= BUSY;
        // In boxes, which a message that comes alone does without: as values these futures would be copied with it.
        let rise: OptionFuture<_> = (busy && self.lying.take().is_some())
            .then(|| Box::pin(self.reader.rise(&self.session)))
            .into();
        let read = self.next.take();
        let ahead: OptionFuture<_> = read_on
            .then(|| Box::pin(ahead(&mut self.reader, &self.session, read, send)))
            .into();
        let (published, rise, ahead) = {
            let published = pin!(self.publisher.publish(&mut write));
            let published = pin!(self.session.speaking(published));
            join3(published, rise, ahead).await
        };
        let mut published = published??;
        rise.transpose()?;
        let redis_ms = loop {
            match published {
                Published::Done { redis_ms } => break redis_ms,
                Published::StreamRefuses { stream, reason } => {
                    tracing::error!(%stream, %reason, "a stream refuses entries and is held back; the others go on");
                    let blocked = self.progress.block(&stream, &page.rows, reason);
                    newly_blocked.push((stream, Some(blocked)));
                    write = self.write_of(page, &newly_blocked).await?;
                    let again = self.publisher.publish(&mut write);
                    published = self.session.speaking(again).await??;
                }
            }
        };
        self.progress.passed(&write.step, redis_ms);
        self.config.health.published();
        let Some((next, read)) = ahead.transpose()? else {
            return Ok(None);
        };
        self.next = read;
        Ok(Some(next))
    }

    /// Whether the page after this one may be sent before the reply to this one. Not where the reply may tell that the
    /// next page has to be another, nor where a duty is due, which finds the marker where the last reply left it.
    fn may_send_ahead(&self, page: &Page) -> bool {
        let replays = self.config.replay_rate.is_some()
            && self.progress.place.cursor.high <= self.replay_until;
        let free_until = self.next_duty().min(self.look_at);
        page.rows.len() > 1 && !self.reader.is_limited() && !replays && Instant::now() < free_until
    }

    async fn write_of(
        &mut self,
        page: &mut Page,
        newly_blocked: &[(String, Option<Blocked>)],
    ) -> Result<PageWrite> {
        let write = self
            .progress
            .write_of(&mut self.publisher, page, newly_blocked);
        self.session.speaking(write).await?
    }

    /// Finishes the page at hand, writes the checkpoint and leaves.
    async fn end(mut self, page: &mut Page) -> Result<()> {
        if !page.is_empty() && self.publish(page).await.is_err() {
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

/// The next page, and the one after it, if there is one. `read` is the next page where it was read before. Three are at work
/// then: Redis publishes one, this process sends the second, Postgres reads the third.
async fn ahead(
    reader: &mut Reader,
    session: &Session,
    read: Option<Page>,
    send: impl AsyncFnOnce(&mut Page),
) -> Result<(Page, Option<Page>)> {
    let mut next = match read {
        Some(next) => next,
        None => reader.trip(session).await?,
    };
    if !next.more {
        send(&mut next).await;
        return Ok((next, None));
    }
    let send = async {
        tokio::task::yield_now().await; // Postgres is asked first
        send(&mut next).await;
    };
    let (after, ()) = join(reader.trip(session), send).await;
    Ok((next, Some(after?)))
}
