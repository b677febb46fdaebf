//! Taking over: reads marker, checkpoint and facts, asks the start table, and writes a marker of a new epoch.

use std::collections::{BTreeMap, HashMap};

use uuid::Uuid;

use crate::checkpoint;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::metric_names as names;
use crate::postgres::{Session, operator_sql, sql};
use crate::progress::{Progress, TAIL_ENTRIES_MAX};
use crate::protocol::cursor::Cursor;
use crate::protocol::layout::streams_of;
use crate::protocol::place::{Blocked, Place};
use crate::protocol::start::{self, Case, Facts, MarkerFound, Plan};
use crate::publisher::{Kept, Publisher};

/// How often the marker may change between being read and being taken, before that counts as an error.
const TRIES_MAX: usize = 3;

/// A leadership that has begun.
#[derive(Debug)]
pub(crate) struct TakenOver {
    pub(crate) progress: Progress,
    /// Up to this id, messages go out again after a loss, at the replay rate.
    pub(crate) replay_until: i64,
}

/// Takes over: from here on only this relay can publish.
///
/// A crash between the marker and the checkpoint leaves the marker ahead, or in another branch, and
/// the next take-over reads both again.
///
/// # Errors
///
/// [`Error::Refused`] where a person must decide, or that of a server.
pub(crate) async fn take_over(
    session: &Session,
    publisher: &mut Publisher,
    config: &Config,
) -> Result<TakenOver> {
    let mut tries = 0;
    loop {
        match try_take_over(session, publisher, config).await {
            // A page of the leader before was under way; it is in the marker now.
            Err(Error::Moved { .. }) if tries < TRIES_MAX => tries += 1,
            other => return other,
        }
    }
}

async fn try_take_over(
    session: &Session,
    publisher: &mut Publisher,
    config: &Config,
) -> Result<TakenOver> {
    let found = publisher.marker().await?;
    let facts = read_facts(session, publisher, &found, &config.stream_prefix).await?;
    let plan = start::plan(&found, &facts, config.on_redis_loss).map_err(Error::Refused)?;
    let cursor = anchored(session, plan.cursor.clone()).await?;
    let place = plan.place(cursor, &facts, Uuid::new_v4());
    publisher
        .take(
            &found,
            facts.outbox_id,
            &place,
            plan.suspect,
            Kept {
                retention: config.retention,
                stream_max_age: config.stream_max_age,
            },
        )
        .await?;
    // Only now: during an outage every try would say that it leads.
    report(&plan, &place.cursor, &facts, &found);
    record_loss(session, &plan, &facts, &found).await;
    let mut progress = Progress::new(place, plan.suspect, config.stream_prefix.clone());
    progress.checkpoint(session).await?;
    let replay_until = match plan.case {
        Case::Replay | Case::LostTail => facts.checkpoint.as_ref().map_or(0, |c| c.cursor.high),
        Case::First | Case::Marker | Case::LostMarker | Case::Resume | Case::OtherHistory => 0,
    };
    Ok(TakenOver {
        progress,
        replay_until,
    })
}

async fn read_facts(
    session: &Session,
    publisher: &mut Publisher,
    found: &MarkerFound,
    prefix: &str,
) -> Result<Facts> {
    let marker_high = match found {
        MarkerFound::Marker { place, .. } => place.cursor.high,
        MarkerFound::Missing | MarkerFound::Foreign(_) => 0,
    };
    let row = session
        .one(
            "read the facts of this database",
            sql::FACTS,
            &[&marker_high],
        )
        .await?;
    let checkpoint = checkpoint::read(session).await?;
    let mut facts = Facts {
        outbox_id: row.get(0),
        adopted_from: row
            .get::<_, Vec<i64>>(1)
            .into_iter()
            .map(checkpoint::system_id)
            .collect(),
        system_id: checkpoint::system_id(row.get(2)),
        timeline: u32::try_from(row.get::<_, i64>(3)).unwrap_or(0),
        last_value: row.get(4),
        key_at_marker: row.get(5),
        purged_to: row.get(6),
        checkpoint,
        checkpoint_stands: false,
    };
    if *found == MarkerFound::Missing
        && let Some(checkpoint) = &facts.checkpoint
    {
        facts.checkpoint_stands = stands(session, publisher, checkpoint, prefix).await?;
    }
    Ok(facts)
}

/// Whether the streams that the checkpoint speaks of are still there: whether one of the latest rows that it counts as
/// published stands in its stream.
async fn stands(
    session: &Session,
    publisher: &mut Publisher,
    checkpoint: &Place,
    prefix: &str,
) -> Result<bool> {
    let mut wanted: BTreeMap<String, HashMap<i64, String>> = BTreeMap::new();
    for row in session
        .all(
            "read the last published rows",
            sql::LATEST,
            &[&checkpoint.cursor.high],
        )
        .await?
    {
        let (id, topic): (i64, String) = (row.get(0), row.get(1));
        let (ordering_key, key): (Option<String>, String) = (row.get(2), row.get(3));
        let lacks = |blocked: &Blocked| blocked.topic == topic && !blocked.cursor.covers(id);
        if !checkpoint.cursor.covers(id) || checkpoint.blocked.values().any(lacks) {
            continue;
        }
        let layout = checkpoint.layouts.get(&topic).cloned().unwrap_or_default();
        for stream in streams_of(prefix, &topic, &layout, ordering_key.as_deref(), &key) {
            wanted.entry(stream).or_default().insert(id, key.clone());
        }
    }
    for (stream, keys) in wanted {
        let tail = publisher.tail(&stream, checkpoint.redis_ms, TAIL_ENTRIES_MAX, |id| {
            keys.contains_key(&id)
        });
        if tail
            .await?
            .0
            .iter()
            .any(|(id, key)| keys.get(id) == Some(key))
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes sure that the row at `high` exists and is published, and that its key is known: the next check
/// of the history goes by it.
async fn anchored(session: &Session, mut cursor: Cursor) -> Result<Cursor> {
    while cursor.lacks_key() {
        let row = session
            .at_most_one("find the last published row", sql::ANCHOR, &[&cursor.high])
            .await?;
        cursor.anchor(row.map(|row| (row.get(0), row.get(1))));
    }
    Ok(cursor)
}

/// What Redis lost, as metric and table name it.
fn lost(case: Case) -> Option<&'static str> {
    match case {
        Case::First | Case::Marker | Case::OtherHistory => None,
        Case::LostTail => Some("tail"),
        Case::LostMarker => Some("marker"),
        Case::Replay | Case::Resume => Some("all"),
    }
}

/// Keeps a record of a loss for `status`. A crash before it loses the record and no message; so does a role that may not
/// write it.
async fn record_loss(session: &Session, plan: &Plan, facts: &Facts, found: &MarkerFound) {
    let Some(lost) = lost(plan.case) else {
        return;
    };
    let marker_high = match found {
        MarkerFound::Marker { place, .. } => Some(place.cursor.high),
        MarkerFound::Missing | MarkerFound::Foreign(_) => None,
    };
    let checkpoint_high = facts.checkpoint.as_ref().map_or(0, |c| c.cursor.high);
    let (purged_from, purged_to) = plan.purged.unzip();
    let params: [&(dyn tokio_postgres::types::ToSql + Sync); 6] = [
        &lost,
        &plan.epoch,
        &marker_high,
        &checkpoint_high,
        &purged_from,
        &purged_to,
    ];
    let doing = "record the loss";
    let recorded = async {
        session
            .execute(doing, operator_sql::RECORD_LOSS, &params)
            .await?;
        session
            .execute(doing, operator_sql::FORGET_LOSSES, &[])
            .await
    };
    if let Err(error) = recorded.await {
        tracing::warn!(error = error.one_line(), "the loss is not recorded");
    }
}

fn report(plan: &Plan, cursor: &Cursor, facts: &Facts, found: &MarkerFound) {
    let checkpoint = facts.checkpoint.as_ref().map_or(0, |c| c.cursor.high);
    let marker = match found {
        MarkerFound::Marker { place, .. } => place.cursor.high,
        MarkerFound::Missing | MarkerFound::Foreign(_) => 0,
    };
    let (epoch, high) = (plan.epoch, cursor.high);
    ::metrics::counter!(names::TAKEOVERS).increment(1);
    ::metrics::gauge!(names::EPOCH).set(epoch as f64);
    if let Some(lost) = lost(plan.case) {
        ::metrics::counter!(names::REDIS_LOSSES, names::LOST => lost).increment(1);
    }
    match plan.case {
        Case::First => tracing::info!(epoch, "leading; nothing was published before"),
        Case::Marker => tracing::info!(epoch, high, "leading; going on behind the marker"),
        Case::LostTail => tracing::warn!(
            epoch,
            high,
            checkpoint,
            "Redis lost its latest entries; exactly those go out again"
        ),
        Case::LostMarker => tracing::warn!(
            epoch,
            high,
            "the marker was missing in Redis but the streams stand; going on behind the checkpoint"
        ),
        Case::Replay => tracing::warn!(
            epoch,
            checkpoint,
            "Redis came back without its streams; all that the outbox has goes out again"
        ),
        Case::Resume => tracing::warn!(
            epoch,
            high,
            "Redis came back without its streams; going on behind the checkpoint"
        ),
        Case::OtherHistory => tracing::warn!(
            epoch,
            high,
            marker,
            checkpoint,
            "Postgres has another past than the marker (failover or restore); \
             going on from the lower cursor, without what stands in the streams"
        ),
    }
    if let Some((first, last)) = plan.purged {
        ::metrics::counter!(names::UNRECOVERABLE).increment(1);
        tracing::error!(
            first,
            last,
            "messages that would go out again are purged from the outbox: \
            those of this range that were published before are lost in Redis"
        );
    }
}
