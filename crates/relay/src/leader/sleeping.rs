//! How the leader sleeps: it lies down, so that producers notify it, and looks for what it may have missed on the way.

use std::time::{Duration, Instant};

use super::{BUSY, Leader};
use crate::error::Result;
use crate::reader::Page;

/// A rest shorter than this does not count: the relay was called up again at once.
const LULL: Duration = Duration::from_millis(1);

/// Looks without a wait while a writer is open that may not have seen the relay lie down: most end within one.
const LOOKS_AT_ONCE: u32 = 3;

/// Longest wait between two looks after that.
const DOZE_MAX: Duration = Duration::from_millis(50);

impl Leader<'_> {
    /// Waits until there is something to read, and reads it; or until another duty is due.
    ///
    /// A producer notifies only while the relay holds the `asleep` lock. A writer that probed the lock before
    /// the relay lay down notifies nobody; so after lying down the relay looks who is open, reads once
    /// more, and keeps looking while one of these is left. A notification that is lost costs a poll interval.
    pub(super) async fn sleep(&mut self) -> Result<Page> {
        if self.lying.is_none() && self.unrested >= BUSY {
            let page = self.linger().await?;
            if !page.is_empty() {
                return Ok(page);
            }
        }
        let mut looks = 0;
        let mut page = match &self.lying {
            // Whoever has committed since the last look has notified.
            Some(unsure_of) if unsure_of.is_empty() && self.reader.gap_ranges() == 0 => {
                Page::default()
            }
            _ => self.look_lying(false).await?,
        };
        while page.is_empty() && !self.stop.is_cancelled() {
            let Some(duty_in) = self.next_duty().checked_duration_since(Instant::now()) else {
                break;
            };
            let longest = match &self.lying {
                Some(unsure_of) if unsure_of.is_empty() => self.config.poll_interval,
                _ => doze(looks),
            };
            looks += 1;
            let wait = longest.min(duty_in);
            let lain_down = Instant::now();
            let notified = !wait.is_zero() && self.session.speaking(self.rest(wait)).await?;
            if lain_down.elapsed() >= LULL {
                self.unrested = 0;
            }
            page = self.look_lying(notified).await?;
        }
        Ok(page)
    }

    /// Looks once more after a lull before a busy relay lies down, since commits that notify wait for each other. The busy
    /// time is over where not even two messages came meanwhile.
    async fn linger(&mut self) -> Result<Page> {
        self.session.speaking(self.rest(LULL)).await?;
        let page = self.reader.trip(&self.session).await?;
        if page.rows.len() < 2 {
            self.unrested = 0;
        }
        Ok(page)
    }

    /// Reads, lying: lies down first where it is not. After a notification there is something, whoever is still open,
    /// and mostly one message.
    async fn look_lying(&mut self, notified: bool) -> Result<Page> {
        let Some(unsure_of) = self.lying.take() else {
            let (locked, unsure_of, page) = self.reader.lie_down(&self.session).await?;
            self.lying = locked.then_some(unsure_of);
            return Ok(page);
        };
        if notified {
            self.lying = Some(unsure_of);
            let page = self.reader.trip_for_one(&self.session).await;
            self.courtesy.give_way();
            return page;
        }
        self.lying = Some(self.reader.still_open(&self.session, unsure_of).await?);
        self.reader.trip(&self.session).await
    }

    /// Gives the `asleep` lock back where it is held: nobody need notify a relay that does not publish.
    pub(super) async fn stand_up(&mut self) -> Result<()> {
        match self.lying.take() {
            Some(_) => self.reader.rise(&self.session).await,
            None => Ok(()),
        }
    }

    /// Waits for a notification, the order to stop, or the time to pass; true for a notification.
    pub(super) async fn rest(&self, wait: Duration) -> bool {
        tokio::select! {
            () = self.session.notified() => true,
            () = self.stop.cancelled() => false,
            () = tokio::time::sleep(wait) => false,
        }
    }
}

/// How long to wait after so many looks in vain.
fn doze(looks: u32) -> Duration {
    match looks.checked_sub(LOOKS_AT_ONCE) {
        None => Duration::ZERO,
        Some(doublings) => Duration::from_millis(1 << doublings.min(6)).min(DOZE_MAX),
    }
}
