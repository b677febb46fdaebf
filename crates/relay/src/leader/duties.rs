//! What the leader does besides publishing: checkpoints, checks of the history, orders for the purge, and
//! the streams that are held back.

use std::time::{Duration, Instant};

use super::Leader;
use crate::caretaker::Order;
use crate::error::{Error, Result};
use crate::janitor::milestone_interval;
use crate::postgres::{MessageRow, page_sql, sql};
use crate::protocol::layout::hold_name;
use crate::reader::GAP_RANGES_MAX;

/// How often it is looked whether the groups have drained a topic whose partitions are to change.
const CHANGE_RETRY: Duration = Duration::from_millis(500);

/// How often a blocked stream is tried again.
const BLOCKED_RETRY: Duration = Duration::from_secs(3);

/// How often it is looked whether Redis has room again.
const ROOM_RETRY: Duration = Duration::from_millis(200);

/// Ids that one step of a blocked stream looks through.
const BLOCKED_IDS_MAX: i64 = 200_000;

/// How often the history and the marker are looked at, busy or idle, and the purge is ordered.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(5);

impl Leader<'_> {
    /// When something other than reading is due.
    pub(super) fn next_duty(&self) -> Instant {
        let checkpoint = self
            .progress
            .needs_checkpoint()
            .then_some(self.checkpoint_at);
        let blocked = (!self.progress.blocked().is_empty()).then_some(self.blocked_at);
        [checkpoint, blocked]
            .into_iter()
            .flatten()
            .fold(self.check_at, Instant::min)
    }

    /// Writes the checkpoint and, now and then, the record that the purge goes by.
    async fn checkpoint(&mut self) -> Result<()> {
        self.progress.checkpoint(&self.session).await?;
        let now = Instant::now();
        self.checkpoint_at = now + self.config.checkpoint_interval;
        let every = milestone_interval(self.config.retention);
        if now >= self.milestone_at {
            let settled = self.progress.place.settled_up_to();
            self.session
                .execute(
                    "record the time",
                    sql::MILESTONE,
                    &[&settled, &every.as_secs_f64()],
                )
                .await?;
            self.milestone_at = now + every;
        }
        Ok(())
    }

    /// Has what was published long enough ago deleted, in the outbox and in the streams. The history must have been
    /// looked at, and the checkpoint written, just before.
    pub(super) fn order_purge(&self) {
        let settled = self.progress.place.settled_up_to();
        self.caretaker.order(Order {
            settled,
            keep_from_ms: self.progress.proofs_from_ms(),
        });
        self.purge
            .send_replace(settled.min(self.caretaker.purge_floor()));
    }

    /// A turn in which nothing is read or published, since Redis is full. The page at hand waits.
    pub(super) async fn wait_for_room(&mut self) -> Result<()> {
        self.session.speaking(self.rest(ROOM_RETRY)).await?;
        self.keep_books().await
    }

    /// The checkpoint, the check of both histories, and the orders for the purge, each when it is due.
    pub(super) async fn keep_books(&mut self) -> Result<()> {
        if self.progress.needs_checkpoint() && Instant::now() >= self.checkpoint_at {
            self.checkpoint().await?;
        }
        if Instant::now() < self.check_at {
            return Ok(());
        }
        self.tell_place();
        self.check_history().await?;
        if self.progress.needs_checkpoint() || Instant::now() >= self.milestone_at {
            self.checkpoint().await?;
        }
        self.order_purge();
        self.look_for_pause().await?;
        self.change_layouts().await?;
        let next = if self.changing.is_empty() {
            CHECK_INTERVAL
        } else {
            CHANGE_RETRY
        };
        self.check_at = Instant::now() + next;
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
        let page = place.page;
        self.session
            .speaking(self.publisher.find_marker_at(page))
            .await?
    }

    /// Changes the number of a topic's partitions where that is wanted.
    ///
    /// Messages of one key go to another stream from then on, so the topic is held back until every group
    /// has acknowledged what stands in the streams of the present count. A crash on either side of the
    /// marker leaves the change wanted, and the next leader carries it on.
    pub(super) async fn change_layouts(&mut self) -> Result<()> {
        self.changing.clear();
        let wanted = self
            .session
            .all("read the wanted partitions", sql::WANTED_LAYOUTS, &[])
            .await?;
        for row in wanted {
            let (topic, wanted, at_once): (String, i32, bool) =
                (row.get(0), row.get(1), row.get(2));
            let partitions = u32::try_from(wanted).unwrap_or(1);
            if self.progress.partitions(&topic) != partitions {
                if self.progress.refuses(&topic) || !at_once && !self.drained(&topic).await? {
                    self.changing.insert(hold_name(&topic));
                    continue;
                }
                let change = self
                    .progress
                    .change_layout(&mut self.publisher, &topic, partitions);
                self.session.speaking(change).await??;
                self.checkpoint().await?;
                self.blocked_at = Instant::now();
                tracing::info!(topic, partitions, "the number of partitions is changed");
            }
            self.session
                .execute("finish the change", sql::WANT_NO_LONGER, &[&topic, &wanted])
                .await?;
        }
        Ok(())
    }

    /// Holds a topic back and looks whether all groups have acknowledged all of it.
    async fn drained(&mut self, topic: &str) -> Result<bool> {
        if !self.progress.holds_topic(topic) {
            let reason = "waiting until all groups have drained the streams, to change the number of partitions";
            let hold = self.progress.hold_topic(&mut self.publisher, topic, reason);
            self.session.speaking(hold).await??;
            tracing::info!(topic, reason, "the topic is held back");
        }
        for stream in self.progress.streams_of_topic(topic) {
            if let Some(group) = self
                .session
                .speaking(self.publisher.undrained_group(&stream))
                .await??
            {
                tracing::debug!(
                    topic,
                    stream,
                    group,
                    "a group has not drained the stream yet"
                );
                return Ok(false);
            }
        }
        Ok(true)
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
            .all("list who holds the gaps", sql::HOLDERS, &[])
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
    pub(super) async fn catch_up_blocked(&mut self) -> Result<()> {
        if self.progress.blocked().is_empty() || Instant::now() < self.blocked_at {
            return Ok(());
        }
        self.blocked_at = Instant::now() + BLOCKED_RETRY;
        let streams: Vec<String> = self.progress.blocked().keys().cloned().collect();
        for stream in streams
            .into_iter()
            .filter(|name| !self.changing.contains(name))
            .collect::<Vec<_>>()
        {
            let (rows, to) = self.read_blocked(&stream).await?;
            let caught_up = self
                .progress
                .catch_up(&mut self.publisher, &stream, &rows, to);
            match self.session.speaking(caught_up).await? {
                Ok(true) => self.config.health.published(),
                Ok(false) => continue,
                Err(error) => {
                    if let Some(rows_max) = self.refused(&error, &rows).await? {
                        self.blocked_rows = rows_max;
                        self.blocked_at = Instant::now();
                    }
                    return Err(error);
                }
            }
            self.blocked_rows = (2 * self.blocked_rows).min(self.config.page_rows);
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
            i64::from(self.blocked_rows),
            i64::from(self.config.page_bytes),
        );
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
            [&lo, &hi, &rows_max, &bytes_max, &blocked.topic];
        let rows = self
            .session
            .all("read for a blocked stream", page_sql::BLOCKED_PAGE, &params)
            .await?;
        let rows: Vec<MessageRow> = rows.into_iter().map(MessageRow::from).collect();
        let cut = rows.len() >= self.blocked_rows as usize
            || rows
                .last()
                .is_some_and(|row| row.running_bytes() >= bytes_max);
        match rows.last() {
            Some(last) if cut => to = last.id(),
            _ => {}
        }
        Ok((rows, to))
    }
}
