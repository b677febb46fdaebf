//! What `status` says, for people and as JSON.

mod care;
mod text;

use std::time::Duration;

use serde::{Serialize, Serializer};

pub(in crate::status) use care::Ends;
pub use care::{CaretakerShown, HoldShown, HoldStanding, MemoryShown, TrimmingShown};

use crate::pause::Pause;
use crate::protocol::place::Place;
use crate::protocol::start::MarkerFound;

/// The state of an outbox. As JSON it is a stable shape, to which fields may be added.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Status {
    /// Which outbox it is.
    pub outbox_id: String,
    /// When Postgres was asked, by its clock (RFC 3339, UTC).
    pub asked_at: String,
    /// The relay that leads; none when no relay reaches both servers.
    pub leader: Option<Leader>,
    /// Relays that stand by and reach Redis.
    pub standbys: i64,
    /// The pause, while publishing is paused.
    #[serde(serialize_with = "pause")]
    pub paused: Option<Pause>,
    /// The cursor in Postgres; none before the first leader.
    pub checkpoint: Option<CursorShown>,
    /// The cursor in Redis.
    pub marker: MarkerShown,
    /// How fast the cursor moves; none without a marker.
    pub published: Option<Rate>,
    /// What is not published: by the marker, or without one by the checkpoint.
    pub backlog: Backlog,
    /// Transactions that wrote messages and are open, the five oldest: they may hold gaps.
    pub open_writers: Vec<Holder>,
    /// Streams that refuse entries, and topics whose partitions change.
    pub blocked: Vec<BlockedStream>,
    /// Messages in `outbox.dead_letters`.
    pub dead_letters: i64,
    /// What the outbox keeps.
    pub retention: Retention,
    /// What Redis was found to have lost.
    pub redis_losses: RedisLosses,
    /// How full Redis is; none where this user may not ask.
    pub redis_memory: Option<MemoryShown>,
    /// What the leader says of its ceiling and of the groups that it holds rows for; none where no leader has said it
    /// within a minute.
    pub caretaker: Option<CaretakerShown>,
    /// The streams.
    pub streams: StreamsShown,
}

/// The relay that leads.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Leader {
    /// The name of the relay.
    pub name: String,
    /// The process id of its session in Postgres.
    pub pid: i32,
    /// For how long it has said nothing; past 5 s a standby ends its session.
    pub silent_seconds: f64,
}

/// A cursor.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct CursorShown {
    /// The leadership that wrote it.
    pub epoch: i64,
    /// The page within the epoch.
    pub page: i64,
    /// The largest id read.
    pub high: i64,
    /// Ranges of ids below it that open transactions may still fill.
    pub gap_ranges: usize,
    /// The lowest of these ids.
    pub first_gap: Option<i64>,
    /// How long ago it was written; of the checkpoint only, which stays as it is while nothing is published.
    pub age_seconds: Option<f64>,
}

/// What stands at the marker's key.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
#[non_exhaustive]
pub enum MarkerShown {
    /// A marker.
    Present(CursorShown),
    /// Nothing.
    #[default]
    Missing,
    /// Something else.
    Foreign {
        /// What it is.
        what: String,
    },
}

/// How fast the cursor moves.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Rate {
    /// Ids that it passed in a second; those of transactions that rolled back count.
    pub ids_per_second: f64,
    /// The time between the two looks.
    pub over_seconds: f64,
}

/// What is not published.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Backlog {
    /// Messages that were counted, up to 200,000.
    pub messages: i64,
    /// Their payloads, headers and ordering keys.
    pub bytes: i64,
    /// Whether all were counted.
    pub is_complete: bool,
    /// Ids that were given out and are not passed: no more messages than that wait.
    pub ids: i64,
    /// Age of the oldest of those that were counted.
    pub oldest_seconds: Option<f64>,
}

/// A transaction that wrote messages and is open.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Holder {
    /// Its backend; none for a prepared transaction.
    pub pid: Option<i32>,
    /// The name that the application gave itself.
    pub application: String,
    /// How long it has been open.
    pub age_seconds: f64,
    /// What it ran last, its first 200 characters.
    pub query: String,
    /// Its name, when it is prepared for two-phase commit.
    pub prepared: Option<String>,
}

/// A stream or a topic that is held back.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct BlockedStream {
    /// The stream, or `topic` and its name.
    pub name: String,
    /// The topic.
    pub topic: String,
    /// It has what was published up to this id.
    pub since_id: i64,
    /// Why.
    pub reason: String,
}

/// What the outbox keeps.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Retention {
    /// How long the leader keeps what is published; none without a marker.
    pub seconds: Option<f64>,
    /// Ids up to this one were purged.
    pub purged_to: i64,
    /// The oldest message that is kept.
    pub oldest_id: Option<i64>,
    /// When its transaction began (RFC 3339, UTC).
    pub oldest_created_at: Option<String>,
    /// How long ago that is.
    pub oldest_seconds: Option<f64>,
    /// How long entries stay in their streams at least; none without a marker, or where streams are never trimmed.
    pub stream_max_age_seconds: Option<f64>,
    /// Ids that the purge may take now; it does so every few seconds.
    pub purgeable_ids: i64,
}

/// What Redis was found to have lost.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct RedisLosses {
    /// How often, of the last thousand times.
    pub count: i64,
    /// The last five, the latest first.
    pub latest: Vec<RedisLoss>,
}

/// One time that a relay found Redis behind.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RedisLoss {
    /// When (RFC 3339, UTC).
    pub found_at: String,
    /// `tail`, `marker` or `all`.
    pub lost: String,
    /// The leadership that found it.
    pub epoch: i64,
    /// What Redis counted as published then; none without a marker.
    pub marker_high: Option<i64>,
    /// What Postgres counted as published then.
    pub checkpoint_high: i64,
    /// First id that was needed again and had been purged.
    pub purged_from: Option<i64>,
    /// The last of these.
    pub purged_to: Option<i64>,
}

/// The streams.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct StreamsShown {
    /// How many were found.
    pub found: usize,
    /// Whether all of them are shown; else there was no time to look further, or only the 100 longest are.
    pub is_complete: bool,
    /// Why none is shown.
    pub not_shown: Option<String>,
    /// The longest first.
    pub streams: Vec<StreamShown>,
}

/// A stream.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct StreamShown {
    /// Its key.
    pub stream: String,
    /// How many entries it has.
    pub entries: u64,
    /// What it takes, as Redis estimates from five samples; none where this user may not ask.
    pub memory_bytes: Option<u64>,
    /// How long ago its first entry was added; none where this user may not ask.
    pub oldest_entry_seconds: Option<f64>,
    /// What of it may be trimmed; none without a marker, or where this user may not ask.
    pub trimming: Option<TrimmingShown>,
    /// Its groups, up to 20.
    pub groups: Vec<GroupShown>,
    /// How many more there are.
    pub groups_not_shown: usize,
}

/// A consumer group of a stream.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct GroupShown {
    /// Its name.
    pub group: String,
    /// Consumers that Redis knows, dead ones included.
    pub consumers: u64,
    /// Entries that it has not been given; none where Redis cannot tell.
    pub lag: Option<u64>,
    /// Entries that it was given and has not acknowledged.
    pub pending: u64,
    /// How long ago the oldest of these was published.
    pub oldest_pending_seconds: Option<f64>,
    /// The last entry that it was given.
    pub last_delivered: String,
}

impl CursorShown {
    pub(super) fn new(place: &Place, age_seconds: Option<f64>) -> Self {
        CursorShown {
            epoch: place.epoch,
            page: place.page,
            high: place.cursor.high,
            gap_ranges: place.cursor.gaps.len(),
            first_gap: place.cursor.gaps.first(),
            age_seconds,
        }
    }
}

impl MarkerShown {
    pub(super) fn new(found: &MarkerFound) -> Self {
        match found {
            MarkerFound::Marker { place, .. } => {
                MarkerShown::Present(CursorShown::new(place, None))
            }
            MarkerFound::Missing => MarkerShown::Missing,
            MarkerFound::Foreign(what) => MarkerShown::Foreign { what: what.clone() },
        }
    }
}

impl Rate {
    pub(super) fn new(ids: i64, over: Duration) -> Self {
        let over_seconds = over.as_secs_f64();
        Rate {
            // A cursor that fell back published nothing.
            ids_per_second: ids.max(0) as f64 / over_seconds.max(0.001),
            over_seconds,
        }
    }
}

impl Status {
    /// The status as JSON, in one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers and strings are always valid JSON")
    }
}

fn pause<S: Serializer>(pause: &Option<Pause>, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Shown<'p> {
        since: &'p str,
        by: &'p str,
        reason: &'p str,
        age_seconds: f64,
    }
    let shown = pause.as_ref().map(|pause| Shown {
        since: &pause.since,
        by: &pause.by,
        reason: &pause.reason,
        age_seconds: pause.age.as_secs_f64(),
    });
    shown.serialize(serializer)
}
