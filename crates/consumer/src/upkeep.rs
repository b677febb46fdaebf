//! What a member does beside its batches: lag, the mark of the database's history, and the purge.

use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use crate::{
    Error,
    builder::Settings,
    counters::Counters,
    gate::Gate,
    history::History,
    inbox::Inbox,
    link::Link,
    patience::{Halt, Patience},
    queries,
    survey::Survey,
    topics::Topics,
    trouble::Trouble,
    window::{Published, Window},
};

/// How often the streams are looked at and the mark is moved.
const INTERVAL: Duration = Duration::from_secs(2);
/// How often old rows are looked for.
const PURGE_INTERVAL: Duration = Duration::from_secs(60);
/// Rows that one transaction of the purge deletes.
const PURGE_ROWS_MAX: i32 = 1_000;

/// The duties of a member that are no delivery. Every member has them; where one is enough, a lock says who.
pub(crate) struct Upkeep {
    inbox: Inbox,
    link: Link,
    group: String,
    stream_prefix: String,
    topics: Topics,
    history: History,
    window: Window,
    patience: Patience,
    counters: Counters,
}

impl Upkeep {
    pub(crate) fn new(settings: &Settings, patience: Patience) -> Self {
        let timeout = settings.response_timeout;
        let link = Link::new(
            settings.redis.clone(),
            &settings.stream_prefix,
            timeout,
            timeout,
        );
        let Gate {
            inbox_retention, ..
        } = settings.gate;
        Self {
            inbox: Inbox::new(settings),
            topics: Topics::new(settings, link.clone()),
            link,
            group: settings.group.clone(),
            stream_prefix: settings.stream_prefix.clone(),
            history: History::new(&settings.stream_prefix, &settings.group),
            window: Window {
                inbox_retention,
                dead_letter_retention: settings.dead_letter_retention,
            },
            counters: patience.counters.clone(),
            patience,
        }
    }

    /// What must be known before the first message runs: that the inbox remembers long enough, and that the database
    /// still knows what the group has acknowledged.
    pub(crate) async fn begin(&mut self) -> Result<(), Halt> {
        let mut backoff = self.patience.backoff();
        loop {
            match self.try_to_begin().await {
                Ok(Ok(true)) => return Ok(()),
                // Another member is comparing at this moment.
                Ok(Ok(false)) => self.patience.pause(Duration::from_millis(50)).await?,
                Ok(Err(error)) => return Err(Halt::Fatal(error)),
                Err(trouble) => {
                    self.patience
                        .wait("compare histories", &mut backoff, &trouble)
                        .await?
                }
            }
        }
    }

    async fn try_to_begin(&mut self) -> Result<Result<bool, Error>, Trouble> {
        let published = Published::read(&self.link, &self.stream_prefix).await?;
        if let Err(error) = self.window.check(published) {
            return Ok(Err(error));
        }
        self.look_around().await.map(Ok)
    }

    /// Goes on until the stop signal, or until it cannot go on.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any point; what was half done is done again by the next member.
    pub(crate) async fn go_on(&mut self) -> Halt {
        let mut backoff = self.patience.backoff();
        let mut purge_at = Instant::now();
        loop {
            let done = if Instant::now() >= purge_at {
                purge_at = Instant::now() + PURGE_INTERVAL;
                self.purge().await
            } else {
                self.look_around().await.map(drop)
            };
            let next = match done {
                Ok(()) => {
                    self.patience.over("upkeep", &mut backoff);
                    self.patience.pause(INTERVAL).await
                }
                // No oftener than otherwise: the batches try to reach the same servers already.
                Err(trouble) => match self.patience.note("upkeep", &mut backoff, &trouble) {
                    Ok(_) => self.patience.pause(INTERVAL).await,
                    Err(halt) => Err(halt),
                },
            };
            if let Err(halt) = next {
                return halt;
            }
        }
    }

    /// Notes how far the group is behind, and compares histories. False while another member does the latter.
    async fn look_around(&mut self) -> Result<bool, Trouble> {
        let streams = self.topics.all().await?;
        let survey = Survey::take(&self.link, &self.group, &streams).await?;
        for (stream, standing) in &survey.streams {
            self.counters.set_lag(stream, standing.lag);
        }
        self.history.keep(&self.inbox, &self.link, &streams).await
    }

    /// Deletes what nobody needs any more, in small transactions.
    async fn purge(&mut self) -> Result<(), Trouble> {
        // Without the relay's word it is not known what can still come.
        let published = Published::read(&self.link, &self.stream_prefix).await?;
        let keep = self.window.keep(published);
        if self.window.check(published).is_err() {
            warn!(
                group = self.group,
                kept_h = keep.as_secs() / 3_600,
                "inbox_retention is too short for the relay's settings"
            );
        }
        let mut keys = 0;
        loop {
            let deleted = self.inbox.purge(keep, PURGE_ROWS_MAX).await?;
            keys += deleted;
            if deleted < i64::from(PURGE_ROWS_MAX) || self.patience.go_on().is_err() {
                break;
            }
        }
        let letters = self
            .inbox
            .purge_letters(self.window.dead_letter_retention, PURGE_ROWS_MAX)
            .await?;
        if letters > 0 {
            warn!(
                group = self.group,
                letters, "dead letters past their retention deleted"
            );
        }
        if keys > 0 {
            info!(group = self.group, keys, "keys past their retention purged");
        }
        Ok(())
    }
}

impl Inbox {
    async fn purge(&self, retention: Duration, rows_max: i32) -> Result<i64, Trouble> {
        let seconds = retention.as_secs_f64();
        self.durably(async |tx| {
            let row = tx
                .query_one(queries::PURGE, &[&self.group, &seconds, &rows_max])
                .await?;
            Ok(row.get(0))
        })
        .await
    }

    async fn purge_letters(&self, retention: Duration, rows_max: i32) -> Result<i64, Trouble> {
        let seconds = retention.as_secs_f64();
        let rows_max = i64::from(rows_max);
        self.durably(async |tx| {
            let row = tx
                .query_one(queries::PURGE_LETTERS, &[&self.group, &seconds, &rows_max])
                .await?;
            Ok(row.get(0))
        })
        .await
    }
}
