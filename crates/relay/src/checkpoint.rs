//! The checkpoint: the cursor in Postgres, written after the marker.

use std::collections::BTreeMap;

use uuid::Uuid;

use crate::error::{Error, Result};
use crate::postgres::{Session, sql};
use crate::protocol::cursor::Cursor;
use crate::protocol::layout::Layout;
use crate::protocol::place::{Blocked, History, Place};
use crate::protocol::ranges::RangeSet;

/// The bits of a system id, which Postgres holds as a signed number.
pub(crate) fn system_id_bits(system_id: u64) -> i64 {
    i64::from_ne_bytes(system_id.to_ne_bytes())
}

/// The system id of these bits.
pub(crate) fn system_id(bits: i64) -> u64 {
    u64::from_ne_bytes(bits.to_ne_bytes())
}

fn count(partitions: i32) -> u32 {
    u32::try_from(partitions).unwrap_or(1)
}

fn counts(partitions: Vec<i32>) -> Vec<u32> {
    partitions.into_iter().map(count).collect()
}

/// Reads the checkpoint; none before the first leader.
pub(crate) async fn read(session: &Session) -> Result<Option<Place>> {
    let Some(row) = session
        .at_most_one("read the checkpoint", sql::CHECKPOINT, &[])
        .await?
    else {
        return Ok(None);
    };
    let gaps = session
        .all("read the checkpoint's gaps", sql::CHECKPOINT_GAPS, &[])
        .await?;
    let blocked = session
        .all("read the blocked streams", sql::BLOCKED, &[])
        .await?;
    let layouts = session.all("read the topics", sql::LAYOUTS, &[]).await?;
    let layouts = layouts.iter().map(|row| {
        (
            row.get(0),
            Layout {
                partitions: count(row.get(1)),
                earlier: counts(row.get(2)),
            },
        )
    });
    let gaps: RangeSet = gaps.iter().map(|row| (row.get(0), row.get(1))).collect();
    let blocked = blocked
        .iter()
        .map(|row| {
            let (lo, hi): (Vec<i64>, Vec<i64>) = (row.get(4), row.get(5));
            let cursor = Cursor {
                high: row.get(2),
                high_key: String::new(),
                gaps: lo.into_iter().zip(hi).collect(),
            };
            (
                row.get::<_, String>(0),
                Blocked {
                    topic: row.get(1),
                    cursor,
                    reason: row.get(3),
                },
            )
        })
        .collect();
    Ok(Some(Place {
        history: History {
            system_id: system_id(row.get(0)),
            timeline: u32::try_from(row.get::<_, i64>(1)).unwrap_or(0),
            branch: row.get::<_, Uuid>(2),
        },
        epoch: row.get(3),
        page: row.get(4),
        cursor: Cursor {
            high: row.get(5),
            high_key: row.get(6),
            gaps,
        },
        redis_ms: row.get(7),
        blocked,
        layouts: layouts.collect(),
    }))
}

/// Writes the whole checkpoint in one transaction: at a take-over, and when the list of blocked streams
/// changed.
pub(crate) async fn write_whole(session: &Session, place: &Place) -> Result<()> {
    session.batch("begin the checkpoint", "BEGIN").await?;
    let written = write_whole_inside(session, place).await;
    // The session is given up when this fails, and the transaction with it.
    session
        .batch(
            "end the checkpoint",
            if written.is_ok() {
                "COMMIT"
            } else {
                "ROLLBACK"
            },
        )
        .await?;
    written
}

async fn write_whole_inside(session: &Session, place: &Place) -> Result<()> {
    let doing = "write the checkpoint";
    let changed = session
        .execute(
            doing,
            sql::CHECKPOINT_WHOLE,
            &[
                &system_id_bits(place.history.system_id),
                &i64::from(place.history.timeline),
                &place.history.branch,
                &place.epoch,
                &place.page,
                &place.cursor.high,
                &place.cursor.high_key,
                &place.redis_ms,
            ],
        )
        .await?;
    if changed != 1 {
        return Err(overtaken(place));
    }
    session
        .execute(doing, sql::DROP_MILESTONES, &[&place.settled_up_to()])
        .await?;
    let (lo, hi): (Vec<i64>, Vec<i64>) = place.cursor.gaps.iter().unzip();
    session.execute(doing, sql::DROP_GAPS, &[]).await?;
    session.execute(doing, sql::PUT_GAPS, &[&lo, &hi]).await?;
    let streams: Vec<&String> = place.blocked.keys().collect();
    session
        .execute(doing, sql::DROP_BLOCKED, &[&streams])
        .await?;
    for (stream, blocked) in &place.blocked {
        let (lo, hi): (Vec<i64>, Vec<i64>) = blocked.cursor.gaps.iter().unzip();
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 6] = [
            stream,
            &blocked.topic,
            &blocked.cursor.high,
            &blocked.reason,
            &lo,
            &hi,
        ];
        session.execute(doing, sql::PUT_BLOCKED, &params).await?;
    }
    for (topic, layout) in &place.layouts {
        let bits = |count: &u32| i32::try_from(*count).unwrap_or(i32::MAX);
        let earlier: Vec<i32> = layout.earlier.iter().map(bits).collect();
        session
            .execute(
                doing,
                sql::PUT_LAYOUT,
                &[topic, &bits(&layout.partitions), &earlier],
            )
            .await?;
    }
    Ok(())
}

/// Writes what changed since the last checkpoint of this leader, in one statement.
pub(crate) async fn write_step(
    session: &Session,
    place: &Place,
    gap_changes: &BTreeMap<i64, Option<i64>>,
) -> Result<()> {
    let gone: Vec<i64> = gap_changes
        .iter()
        .filter(|(_, hi)| hi.is_none())
        .map(|(lo, _)| *lo)
        .collect();
    let (lo, hi): (Vec<i64>, Vec<i64>) = gap_changes
        .iter()
        .filter_map(|(lo, hi)| Some((*lo, (*hi)?)))
        .unzip();
    let changed = session
        .execute(
            "write the checkpoint",
            sql::CHECKPOINT_STEP,
            &[
                &place.epoch,
                &place.page,
                &place.cursor.high,
                &place.cursor.high_key,
                &place.redis_ms,
                &gone,
                &lo,
                &hi,
            ],
        )
        .await?;
    if changed == 1 {
        Ok(())
    } else {
        Err(overtaken(place))
    }
}

/// A checkpoint of a later epoch stands: another relay leads.
fn overtaken(place: &Place) -> Error {
    Error::Moved {
        epoch: format!("later than {}", place.epoch),
        page: String::new(),
    }
}
