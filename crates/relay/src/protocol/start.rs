//! What a leader continues from: the start table.
//!
//! Postgres is the authority and Redis a copy of it, but only Redis knows what it still holds. The
//! marker in Redis is written in one step with each page, so within one history it is exact. The
//! checkpoint in Postgres follows it. When Postgres has another past than the marker (failover,
//! restore), ids were given out again, and neither may be believed further than both reach.

mod lower;

use std::collections::BTreeMap;

use uuid::Uuid;

use self::lower::{lower, lower_blocked};
use super::cursor::Cursor;
use super::layout::Layouts;
use super::place::{Blocked, History, Place, Suspect};

/// What stands at the marker's key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum MarkerFound {
    /// Nothing.
    Missing,
    /// Something else, described.
    Foreign(String),
    /// A marker.
    Marker {
        /// The outbox that it belongs to.
        outbox_id: Uuid,
        /// The take-over that wrote it. Unlike an epoch, it never comes twice.
        leadership: Uuid,
        /// How far that outbox was published.
        place: Place,
        /// Rows that were still to be compared with the streams.
        suspect: Option<Suspect>,
    },
}

/// What Postgres holds besides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// This outbox.
    pub outbox_id: Uuid,
    /// The cluster's system identifier now.
    pub system_id: u64,
    /// The timeline now.
    pub timeline: u32,
    /// The last id that the sequence gave out; 0 before the first.
    pub last_value: i64,
    /// The `message_key` of the row at the marker's `high`, when there is such a row.
    pub key_at_marker: Option<String>,
    /// The checkpoint.
    pub checkpoint: Option<Place>,
    /// System ids that the operator accepted (`outbox-relay adopt`).
    pub adopted_from: Vec<u64>,
    /// Ids up to this one may have been purged.
    pub purged_to: i64,
    /// The entry of the row at the checkpoint's `high` still stands in its stream.
    pub checkpoint_stands: bool,
}

/// What to do when Redis lost the marker and the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnRedisLoss {
    /// Publish again what the outbox still has.
    Replay,
    /// Go on after the checkpoint.
    Resume,
}

/// Why a relay does not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The marker's key holds something else, described.
    NotAMarker(String),
    /// The marker belongs to another outbox.
    OtherOutbox {
        /// The outbox of the marker.
        marker: Uuid,
        /// The outbox of this database.
        database: Uuid,
    },
    /// The cursor belongs to another cluster, which nobody has adopted.
    OtherCluster {
        /// The system id of the cursor.
        cursor: u64,
        /// The system id of this cluster.
        database: u64,
    },
    /// The marker has seen a later timeline: this is an old primary.
    OldPrimary {
        /// The timeline of the marker.
        marker: u32,
        /// The timeline of this server.
        database: u32,
    },
}

/// Which row of the start table applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// Neither marker nor checkpoint: the first start.
    First,
    /// The marker is exact: nothing doubled.
    Marker,
    /// Redis lost its tail, and the marker with it: exactly the lost messages go out again.
    LostTail,
    /// Only the marker is gone.
    LostMarker,
    /// Redis is empty, and everything that the outbox has goes out again.
    Replay,
    /// Redis is empty, and the relay goes on after the checkpoint.
    Resume,
    /// Postgres has another past.
    OtherHistory,
}

/// Where the relay goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The row of the start table.
    pub case: Case,
    /// What counts as published. Its `high_key` is empty where the row at `high` must be looked up.
    pub cursor: Cursor,
    /// Streams that are held back further.
    pub blocked: BTreeMap<String, Blocked>,
    /// How the topics are spread over streams.
    pub layouts: Layouts,
    /// Rows to compare with the streams before they are published.
    pub suspect: Option<Suspect>,
    /// The past turned out to be another: draw a new branch.
    pub new_branch: bool,
    /// The branch to keep otherwise.
    pub branch: Option<Uuid>,
    /// The epoch of this leadership.
    pub epoch: i64,
    /// Redis' clock up to which the cursor's pages were published, in milliseconds.
    pub redis_ms: i64,
    /// Ids that would have to go out and may have been purged: first and last.
    pub purged: Option<(i64, i64)>,
}

impl Plan {
    /// The place that the leadership begins at. `cursor` is the plan's with the key of its row looked up,
    /// `fresh` a branch that was never drawn before.
    pub fn place(&self, cursor: Cursor, facts: &Facts, fresh: Uuid) -> Place {
        Place {
            history: History {
                system_id: facts.system_id,
                timeline: facts.timeline,
                branch: self.branch.filter(|_| !self.new_branch).unwrap_or(fresh),
            },
            epoch: self.epoch,
            page: 0,
            cursor,
            redis_ms: self.redis_ms,
            blocked: self.blocked.clone(),
            layouts: self.layouts.clone(),
        }
    }
}

/// Whether the past that a marker belongs to is the one of this server.
///
/// # Errors
///
/// The refusals that only an operator can settle.
fn same_history(marker: &Place, facts: &Facts) -> Result<bool, Refusal> {
    let theirs = &marker.history;
    if theirs.system_id != facts.system_id {
        return match facts.adopted_from.contains(&theirs.system_id) {
            true => Ok(false),
            false => Err(Refusal::OtherCluster {
                cursor: theirs.system_id,
                database: facts.system_id,
            }),
        };
    }
    if facts.timeline < theirs.timeline {
        return Err(Refusal::OldPrimary {
            marker: theirs.timeline,
            database: facts.timeline,
        });
    }
    let row_stands =
        marker.cursor.high == 0 || facts.key_at_marker.as_ref() == Some(&marker.cursor.high_key);
    let could_follow = facts
        .checkpoint
        .as_ref()
        .is_none_or(|checkpoint| follows(checkpoint, marker));
    Ok(facts.timeline == theirs.timeline
        && row_stands
        && facts.last_value >= marker.cursor.high
        && could_follow)
}

/// Whether Redis fell back to before a change of history that the checkpoint has seen.
///
/// Ids that the marker counts as published were then given out again, and what was published under them is what
/// Redis has lost. So the checkpoint's word is about lost entries and the marker's about other rows, and where the
/// two pasts parted is not known: everything is compared with the streams.
fn lost_a_branch(marker: &Place, checkpoint: &Place, facts: &Facts) -> bool {
    let other_row =
        marker.cursor.high > 0 && facts.key_at_marker.as_ref() != Some(&marker.cursor.high_key);
    let other_branch = checkpoint.history.branch != marker.history.branch;
    marker.order() < checkpoint.order() && (other_branch || other_row)
}

/// Whether marker and checkpoint can be two moments of one past, in either order.
fn follows(checkpoint: &Place, marker: &Place) -> bool {
    checkpoint.history.branch == marker.history.branch
        && match checkpoint.order().cmp(&marker.order()) {
            std::cmp::Ordering::Less => checkpoint.cursor.high <= marker.cursor.high,
            std::cmp::Ordering::Equal => checkpoint.cursor.high == marker.cursor.high,
            std::cmp::Ordering::Greater => checkpoint.cursor.high >= marker.cursor.high,
        }
}

/// The start table: what a leader continues from.
///
/// # Errors
///
/// A [`Refusal`] where going on could lose or double messages and a person must decide.
pub fn plan(
    found: &MarkerFound,
    facts: &Facts,
    on_redis_loss: OnRedisLoss,
) -> Result<Plan, Refusal> {
    match found {
        MarkerFound::Foreign(what) => Err(Refusal::NotAMarker(what.clone())),
        MarkerFound::Missing => plan_without_marker(facts, on_redis_loss),
        MarkerFound::Marker { outbox_id, .. } if *outbox_id != facts.outbox_id => {
            Err(Refusal::OtherOutbox {
                marker: *outbox_id,
                database: facts.outbox_id,
            })
        }
        MarkerFound::Marker { place, suspect, .. } => plan_with_marker(place, *suspect, facts),
    }
}

fn plan_with_marker(
    marker: &Place,
    suspect: Option<Suspect>,
    facts: &Facts,
) -> Result<Plan, Refusal> {
    let checkpoint = facts.checkpoint.as_ref();
    let epoch = checkpoint.map_or(0, |c| c.epoch).max(marker.epoch) + 1;
    // The marker's word alone counts: it is about the streams that stand beside it.
    let mut layouts = marker.layouts.clone();
    for topic in checkpoint.into_iter().flat_map(|c| c.layouts.keys()) {
        layouts.entry(topic.clone()).or_default();
    }
    if same_history(marker, facts)? {
        let lost_tail = checkpoint.is_some_and(|c| marker.order() < c.order());
        let purged = purged(&marker.cursor, facts);
        return Ok(Plan {
            case: if lost_tail {
                Case::LostTail
            } else {
                Case::Marker
            },
            cursor: marker.cursor.clone(),
            blocked: marker.blocked.clone(),
            layouts,
            suspect,
            new_branch: false,
            branch: Some(marker.history.branch),
            epoch,
            redis_ms: marker.redis_ms,
            purged,
        });
    }
    let nothing = Cursor::default();
    let reach = checkpoint.map_or(&nothing, |c| &c.cursor);
    let common = lower(&marker.cursor, reach);
    let (cursor, since_ms) = if checkpoint.is_some_and(|c| lost_a_branch(marker, c, facts)) {
        (nothing, 0)
    } else {
        let since_ms = checkpoint.map_or(0, |c| c.redis_ms).min(marker.redis_ms);
        (common, since_ms)
    };
    let until = checkpoint
        .map_or(0, |c| c.cursor.high)
        .max(marker.cursor.high);
    let suspect = Suspect {
        until: suspect.map_or(until, |s| s.until.max(until)),
        since_ms: suspect.map_or(since_ms, |s| s.since_ms.min(since_ms)),
    };
    let purged = purged(&cursor, facts);
    Ok(Plan {
        case: Case::OtherHistory,
        blocked: lower_blocked(&cursor, &layouts, std::iter::once(marker).chain(checkpoint)),
        cursor,
        layouts,
        suspect: Some(suspect),
        new_branch: true,
        branch: None,
        epoch,
        redis_ms: since_ms,
        purged,
    })
}

fn plan_without_marker(facts: &Facts, on_redis_loss: OnRedisLoss) -> Result<Plan, Refusal> {
    let Some(checkpoint) = &facts.checkpoint else {
        return Ok(Plan {
            case: Case::First,
            cursor: Cursor::default(),
            blocked: BTreeMap::new(),
            layouts: Layouts::new(),
            suspect: None,
            new_branch: true,
            branch: None,
            epoch: 1,
            redis_ms: 0,
            purged: None,
        });
    };
    let theirs = checkpoint.history.system_id;
    if theirs != facts.system_id && !facts.adopted_from.contains(&theirs) {
        return Err(Refusal::OtherCluster {
            cursor: theirs,
            database: facts.system_id,
        });
    }
    let resumed = Plan {
        case: Case::LostMarker,
        cursor: checkpoint.cursor.clone(),
        blocked: checkpoint.blocked.clone(),
        layouts: checkpoint.layouts.clone(),
        suspect: Some(Suspect {
            until: i64::MAX,
            since_ms: checkpoint.redis_ms,
        }),
        new_branch: true,
        branch: None,
        epoch: checkpoint.epoch + 1,
        redis_ms: checkpoint.redis_ms,
        purged: purged(&checkpoint.cursor, facts),
    };
    // A checkpoint of nothing loses nothing: the first pages may stand, or not, and are compared.
    if facts.checkpoint_stands || checkpoint.cursor.high == 0 {
        // What was published after the checkpoint is not known; nothing above `last_value` was.
        return Ok(Plan {
            suspect: resumed.suspect.map(|s| Suspect {
                until: facts.last_value,
                ..s
            }),
            ..resumed
        });
    }
    Ok(match on_redis_loss {
        OnRedisLoss::Resume => Plan {
            case: Case::Resume,
            suspect: None,
            ..resumed
        },
        OnRedisLoss::Replay => Plan {
            case: Case::Replay,
            cursor: Cursor::default(),
            blocked: BTreeMap::new(),
            suspect: None,
            redis_ms: 0,
            purged: purged(&Cursor::default(), facts),
            ..resumed
        },
    })
}

/// The ids below the purge's reach that a cursor has not published.
fn purged(cursor: &Cursor, facts: &Facts) -> Option<(i64, i64)> {
    let gone = Cursor {
        high: facts.purged_to,
        ..Cursor::default()
    };
    let missing = cursor.behind(&gone);
    let last = missing.iter().next_back().map(|(_, hi)| hi)?;
    Some((missing.first()?, last))
}

#[cfg(test)]
mod tests;
