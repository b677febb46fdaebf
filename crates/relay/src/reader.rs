//! Reads committed messages, page by page, and only what a crash of Postgres cannot take back.

use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::future::{join, join3};
use tokio_postgres::types::PgLsn;
use tokio_postgres::{Row, Statement};

use crate::error::{Error, Result};
use crate::postgres::{MessageRow, Session, page_sql, sql};
use crate::protocol::cursor::Cursor;
use crate::protocol::log::{Answer, Limits, Listed, Log, Question, Writer};
use crate::protocol::ranges::RangeSet;
use crate::publisher::PageWrite;

/// Ranges of gaps after which the relay stops reading ahead: about a hundred megabytes in all places.
pub(crate) const GAP_RANGES_MAX: usize = 500_000;

const LIMITS: Limits = Limits::of_gap_ranges(GAP_RANGES_MAX);

/// How long other commits may flush the log for us before the relay forces it.
const FLUSH_PATIENCE: Duration = Duration::from_millis(2);

/// Messages read in one go, to be published in one atomic step.
#[derive(Debug, Default)]
pub(crate) struct Page {
    /// Ascending by id: first those found in gaps, then those above `high`.
    pub(crate) rows: Vec<MessageRow>,
    /// Gaps that will never be filled.
    pub(crate) dead: RangeSet,
    /// A limit cut the page: there is more to read at once.
    pub(crate) more: bool,
    /// What publishes it, where that was sent before the reply to the page before it.
    pub(crate) sent: Option<PageWrite>,
}

impl Page {
    /// Whether there is nothing to publish and no gap to close.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.dead.is_empty()
    }
}

async fn list_writers(session: &Session, statement: &Statement) -> Result<Vec<Listed>> {
    let rows = session.rows("list the writers", statement, &[]).await?;
    let listed = |row: &Row| Listed {
        writer: Writer {
            id: row.get(0),
            prepared: row.get(1),
        },
        xid: row
            .get::<_, Option<i64>>(2)
            .and_then(|xid| u32::try_from(xid).ok()),
    };
    Ok(rows.iter().map(listed).collect())
}

fn without_ids(listed: Vec<Listed>) -> Vec<Writer> {
    listed.into_iter().map(|listed| listed.writer).collect()
}

/// Makes trips (see [`crate::protocol::log`]) over the leader's session.
#[derive(Debug)]
pub(crate) struct Reader {
    log: Log,
    writers: Statement,
    first_two: Statement,
    new_rows: Statement,
    page: Statement,
    page_with_snapshot: Statement,
    wal_flushed: Statement,
    lie_down: Statement,
    get_up: Statement,
    rows_max: u32,
    rows_now: u32,
    bytes_max: u32,
}

impl Reader {
    /// A reader that goes on from what has been published.
    pub(crate) async fn new(
        session: &Session,
        from: &Cursor,
        rows_max: u32,
        bytes_max: u32,
    ) -> Result<Self> {
        Ok(Reader {
            log: Log::new(from, LIMITS),
            writers: session
                .prepare("prepare the list of writers", page_sql::WRITERS)
                .await?,
            first_two: session
                .prepare("prepare reading", &page_sql::first_two())
                .await?,
            new_rows: session
                .prepare("prepare reading", &page_sql::new_rows())
                .await?,
            page: session
                .prepare("prepare reading", &page_sql::page())
                .await?,
            page_with_snapshot: session
                .prepare("prepare reading", &page_sql::page_with_snapshot())
                .await?,
            wal_flushed: session
                .prepare("prepare the flush check", page_sql::WAL_FLUSHED)
                .await?,
            lie_down: session.prepare("prepare sleeping", sql::LIE_DOWN).await?,
            get_up: session.prepare("prepare sleeping", sql::GET_UP).await?,
            rows_max,
            rows_now: rows_max,
            bytes_max,
        })
    }

    /// Begins again from a cursor; what was read beyond it is read once more.
    pub(crate) fn restart(&mut self, from: &Cursor) {
        self.log = Log::new(from, LIMITS);
    }

    /// Ranges of ids that may still be filled.
    pub(crate) fn gap_ranges(&self) -> usize {
        self.log.gap_ranges()
    }

    /// Reads pages of at most `rows` from now on, and one at least.
    pub(crate) fn limit_rows(&mut self, rows: u32) {
        self.rows_now = rows.clamp(1, self.rows_max);
    }

    /// Whether pages have yet to grow back to the configured size.
    pub(crate) fn is_limited(&self) -> bool {
        self.rows_now < self.rows_max
    }

    /// Lets pages grow back to the configured size.
    pub(crate) fn relax_rows(&mut self) {
        self.limit_rows(self.rows_now.saturating_mul(2));
    }

    /// Those of `writers` that are still open.
    pub(crate) async fn still_open(
        &self,
        session: &Session,
        mut writers: Vec<Writer>,
    ) -> Result<Vec<Writer>> {
        if !writers.is_empty() {
            let open = without_ids(list_writers(session, &self.writers).await?);
            writers.retain(|writer| open.contains(writer));
        }
        Ok(writers)
    }

    /// Takes the `asleep` lock, then looks who writes, then makes a trip: in one go and in this order. Says
    /// whether it got the lock, which fails while a producer probes it, and who was open.
    pub(crate) async fn lie_down(
        &mut self,
        session: &Session,
    ) -> Result<(bool, Vec<Writer>, Page)> {
        let (lie_down, writers) = (self.lie_down.clone(), self.writers.clone());
        let lie_down = pin!(session.rows("lie down", &lie_down, &[]));
        let writers = pin!(list_writers(session, &writers));
        let page = pin!(self.trip(session));
        let (locked, writers, page) = join3(lie_down, writers, page).await;
        let locked = locked?.first().is_some_and(|row| row.get(0));
        Ok((locked, without_ids(writers?), page?))
    }

    /// Gives the `asleep` lock back.
    pub(crate) fn rise<'s>(
        &self,
        session: &'s Session,
    ) -> impl Future<Output = Result<()>> + use<'s> {
        let get_up = self.get_up.clone();
        async move { session.rows("get up", &get_up, &[]).await.map(drop) }
    }

    /// One trip: who writes, and what is in the gaps and above, sent in one go and in this order. What it returns is
    /// flushed.
    pub(crate) async fn trip(&mut self, session: &Session) -> Result<Page> {
        self.trip_for(session, self.rows_now).await
    }

    /// A trip for the first row alone, which is quick.
    pub(crate) async fn trip_for_one(&mut self, session: &Session) -> Result<Page> {
        self.trip_for(session, 1).await
    }

    async fn trip_for(&mut self, session: &Session, rows_max: u32) -> Result<Page> {
        let question = self.log.short_question();
        let (writers, mut rows) = if self.log.needs_writers() {
            let writers = pin!(list_writers(session, &self.writers));
            let rows = pin!(self.read(session, &question, rows_max));
            let (writers, rows) = join(writers, rows).await;
            (Some(writers?), rows?)
        } else {
            (None, self.read(session, &question, rows_max).await?)
        };

        self.learn(session, writers).await?;
        if !self
            .log
            .may_trust(&question, rows.first().and_then(MessageRow::snapshot))
        {
            rows = self.read(session, &self.log.question(), rows_max).await?;
        }
        if let Some(inserted) = rows.first().and_then(MessageRow::unflushed) {
            self.wait_until_flushed(session, inserted).await?;
        }
        self.accept(rows, rows_max)
    }

    /// `R` and `Q`, and of `Q` one row more: without that, there is nothing to come back for.
    async fn read(
        &self,
        session: &Session,
        question: &Question,
        rows_max: u32,
    ) -> Result<Vec<MessageRow>> {
        let late_rows = i64::from(rows_max);
        let new_rows = if question.read_ahead {
            late_rows + 1
        } else {
            0
        };
        let bytes_max = i64::from(self.bytes_max);
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 6] = [
            &question.high,
            &new_rows,
            &bytes_max,
            &question.gaps_lo,
            &question.gaps_hi,
            &late_rows,
        ];
        let (statement, params) = match (question.gaps_lo.is_empty(), question.left_to.is_empty()) {
            (true, true) if new_rows == 2 => (&self.first_two, &params[..1]),
            (true, true) => (&self.new_rows, &params[..3]),
            (false, true) => (&self.page, &params[..]),
            (_, false) => (&self.page_with_snapshot, &params[..]),
        };
        let rows = session.rows("read a page", statement, params).await?;
        Ok(rows.into_iter().map(MessageRow::from).collect())
    }

    /// Takes `L` into the account, if there was one.
    async fn learn(&mut self, session: &Session, writers: Option<Vec<Listed>>) -> Result<()> {
        let Some(writers) = writers else {
            self.log.learn_nothing();
            return Ok(());
        };
        let last_value = match self.log.meets_prepared(&writers) {
            true => Some(
                session
                    .one("read the sequence", page_sql::LAST_VALUE, &[])
                    .await?
                    .get(0),
            ),
            false => None,
        };
        self.log.learn(writers, last_value);
        Ok(())
    }

    fn accept(&mut self, mut rows: Vec<MessageRow>, rows_max: u32) -> Result<Page> {
        if let Some(pair) = rows.windows(2).find(|pair| pair[0].id() >= pair[1].id()) {
            return Err(Error::Invariant(format!(
                "row {} was read after row {}",
                pair[1].id(),
                pair[0].id()
            )));
        }
        let late = rows.iter().take_while(|row| row.late()).count();
        let rows_max = rows_max as usize;
        let full = |part: &[MessageRow]| {
            part.last()
                .is_some_and(|row| row.running_bytes() >= i64::from(self.bytes_max))
        };
        let late_cut = late >= rows_max || full(&rows[..late]);
        let new_cut = rows.len() - late > rows_max || full(&rows[late..]);
        rows.truncate(late + rows_max);
        let ids: Vec<i64> = rows.iter().map(MessageRow::id).collect();
        let taken = self.log.accept(Answer {
            late: &ids[..late],
            late_cut,
            new: &ids[late..],
        });
        if !taken.new {
            rows.truncate(late);
        }
        Ok(Page {
            rows,
            dead: taken.dead,
            more: late_cut || new_cut,
            sent: None,
        })
    }

    /// The durability barrier: an asynchronous commit is visible before it is flushed, and a crash of
    /// Postgres can still take it back. Published, it would be a message without a fact.
    async fn wait_until_flushed(&self, session: &Session, inserted: PgLsn) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < FLUSH_PATIENCE {
            let rows = session
                .rows("read the log's position", &self.wal_flushed, &[])
                .await?;
            let Some(row) = rows.first() else { break };
            let (flushed, synchronous_standby): (PgLsn, bool) = (row.get(0), row.get(1));
            if synchronous_standby {
                break;
            }
            if flushed >= inserted {
                return Ok(());
            }
        }
        session.batch("flush the log", page_sql::FORCE_FLUSH).await
    }
}
