//! What Postgres says.

use std::time::Duration;

use super::report::{
    Backlog, CursorShown, Holder, Leader, RedisLoss, RedisLosses, Retention, Status,
};
use super::seconds;
use crate::error::Result;
use crate::postgres::{Session, operator_sql, sql};
use crate::protocol::cursor::Cursor;
use crate::protocol::place::Place;

/// Rows that are counted before the backlog is called "at least".
const BACKLOG_ROWS_MAX: i64 = 200_000;

/// Ranges of gaps in which rows are looked for.
const GAP_RANGES_MAX: usize = 10_000;

/// Losses of Redis that are shown.
const LOSSES_MAX: i64 = 5;

/// Asks Postgres; what Redis says is left empty. `published` is the cursor that counts.
pub(super) async fn ask(
    session: &Session,
    published: Option<&Place>,
    checkpoint: Option<&Place>,
    retention: Option<Duration>,
) -> Result<Status> {
    let identity = session
        .one("read the outbox's id", operator_sql::IDENTITY, &[])
        .await?;
    let leader = session
        .at_most_one("look for the leader", sql::LEADER, &[])
        .await?;
    let leader = leader.map(|row| Leader {
        name: row.get::<_, Option<String>>(1).unwrap_or_default(),
        pid: row.get(0),
        silent_seconds: row.get::<_, Option<f64>>(2).unwrap_or_default(),
    });
    let checkpoint = match checkpoint {
        Some(place) => {
            let age = session
                .at_most_one("read the checkpoint", operator_sql::CHECKPOINT_AGE, &[])
                .await?;
            let age = age.map(|row| row.get::<_, f64>(0));
            Some(CursorShown::new(place, age))
        }
        None => None,
    };
    let nothing = Cursor::default();
    let cursor = published.map_or(&nothing, |place| &place.cursor);
    Ok(Status {
        outbox_id: identity.get(0),
        asked_at: identity.get(1),
        leader,
        standbys: session
            .one("count the standbys", sql::STANDBYS, &[])
            .await?
            .get(0),
        backlog: backlog(session, cursor).await?,
        open_writers: holders(session).await?,
        dead_letters: session
            .one("count the dead letters", sql::DEAD_LETTERS, &[])
            .await?
            .get(0),
        retention: kept(session, retention, published).await?,
        redis_losses: losses(session).await?,
        checkpoint,
        ..Status::default()
    })
}

async fn backlog(session: &Session, cursor: &Cursor) -> Result<Backlog> {
    let (lo, hi): (Vec<i64>, Vec<i64>) = cursor.gaps.iter().take(GAP_RANGES_MAX).unzip();
    let all_gaps = cursor.gaps.len() <= GAP_RANGES_MAX;
    let row = session
        .one(
            "count the backlog",
            operator_sql::NOT_PUBLISHED,
            &[&lo, &hi, &cursor.high, &BACKLOG_ROWS_MAX],
        )
        .await?;
    let (messages, last_value): (i64, i64) = (row.get(0), row.get(3));
    let in_gaps: i64 = cursor.gaps.iter().map(|(lo, hi)| hi - lo + 1).sum();
    Ok(Backlog {
        messages,
        bytes: row.get(1),
        is_complete: all_gaps && messages < BACKLOG_ROWS_MAX,
        ids: (last_value - cursor.high).max(0) + in_gaps,
        oldest_seconds: row.get(2),
    })
}

async fn holders(session: &Session) -> Result<Vec<Holder>> {
    let rows = session.all("list the writers", sql::HOLDERS, &[]).await?;
    Ok(rows
        .iter()
        .map(|row| Holder {
            pid: row.get(1),
            application: row.get(2),
            age_seconds: row.get(3),
            query: row.get(4),
            prepared: row.get(5),
        })
        .collect())
}

async fn kept(
    session: &Session,
    retention: Option<Duration>,
    published: Option<&Place>,
) -> Result<Retention> {
    // Without a leader ever there is no retention, and nothing was published before it.
    let since = retention.unwrap_or(Duration::MAX).as_secs_f64().min(1e10);
    let row = session
        .one("look for what is kept", operator_sql::RETENTION, &[&since])
        .await?;
    let (purged_to, floor): (i64, Option<i64>) = (row.get(0), row.get(4));
    let settled = published.map_or(0, Place::settled_up_to);
    Ok(Retention {
        seconds: retention.map(|retention| retention.as_secs_f64()),
        purged_to,
        oldest_id: row.get(1),
        oldest_created_at: row.get(2),
        oldest_seconds: row.get(3),
        stream_max_age_seconds: None,
        purgeable_ids: (floor.unwrap_or(0).min(settled) - purged_to).max(0),
    })
}

async fn losses(session: &Session) -> Result<RedisLosses> {
    let rows = session
        .all(
            "read the losses of Redis",
            operator_sql::LOSSES,
            &[&LOSSES_MAX],
        )
        .await?;
    Ok(RedisLosses {
        count: rows.first().map_or(0, |row| row.get(7)),
        latest: rows
            .iter()
            .map(|row| RedisLoss {
                found_at: row.get(0),
                lost: row.get(1),
                epoch: row.get(2),
                marker_high: row.get(3),
                checkpoint_high: row.get(4),
                purged_from: row.get(5),
                purged_to: row.get(6),
            })
            .collect(),
    })
}

/// For lines about time.
pub(super) fn rounded(time: f64) -> humantime::FormattedDuration {
    let ms = u64::try_from(seconds(time).as_millis()).unwrap_or(u64::MAX);
    // Nobody reads the milliseconds of a long time.
    humantime::format_duration(Duration::from_millis(if ms >= 60_000 {
        ms / 1_000 * 1_000
    } else {
        ms
    }))
}
