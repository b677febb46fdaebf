//! What a leader does while publishing is paused: it leads on, and publishes nothing.

use std::time::{Duration, Instant};

use super::Leader;
use crate::error::Result;
use crate::health::Note;
use crate::pause;
use crate::reader::Page;

/// Shortest and longest time between two looks for a pause. In between it is the poll interval.
const LOOK: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

impl Leader<'_> {
    /// Whether publishing is paused. Looks, at most once in a poll interval, before anything is published; an idle leader
    /// need not know.
    ///
    /// While it is paused, this is the turn: waits for a word from `resume` or the poll interval, and keeps the books, so
    /// that the leadership, the check of the history and the purge of what was published go on. What had been read is
    /// dropped and read again later. A relay that takes over looks before its first page.
    pub(super) async fn is_paused(&mut self, page: &mut Page) -> Result<bool> {
        if self.paused {
            self.session
                .speaking(self.rest(self.look_interval()))
                .await?;
        } else {
            let publishes = !page.is_empty() || !self.progress.blocked().is_empty();
            if !publishes || Instant::now() < self.look_at {
                return Ok(false);
            }
        }
        self.look_for_pause().await?;
        if self.paused {
            self.next = None;
            if !page.is_empty() {
                self.reader.restart(&self.progress.place.cursor);
            }
            *page = Page {
                more: true,
                ..Page::default()
            };
            self.keep_books().await?;
        }
        Ok(self.paused)
    }

    /// Looks for a pause, and says so where that changed.
    pub(super) async fn look_for_pause(&mut self) -> Result<()> {
        let found = pause::read(&self.session).await?;
        self.look_at = Instant::now() + self.look_interval();
        match &found {
            Some(pause) if !self.paused => {
                tracing::warn!(
                    since = pause.since,
                    by = pause.by,
                    reason = pause.reason,
                    "publishing is paused; outbox-relay resume ends that"
                );
            }
            None if self.paused => tracing::info!("publishing is no longer paused"),
            Some(_) | None => {}
        }
        self.paused = found.is_some();
        // Also when nothing changed: a take-over forgets the notes.
        let note = found.map(|pause| format!("publishing is paused {pause}"));
        self.config.health.note(Note::Paused, note);
        Ok(())
    }

    fn look_interval(&self) -> Duration {
        self.config.poll_interval.clamp(LOOK.0, LOOK.1)
    }
}
