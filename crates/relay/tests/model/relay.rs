//! The relay: what `takeover.rs`, `reader.rs`, `progress.rs` and `leader.rs` do around the functions of the
//! protocol, cut into the steps between which others may act.

use std::collections::VecDeque;

use outbox_relay::protocol::cursor::Cursor;
use outbox_relay::protocol::layout::streams_of;
use outbox_relay::protocol::log::{Answer, Listed, Log, Question};
use outbox_relay::protocol::place::{Blocked, Place, Suspect};
use outbox_relay::protocol::ranges::RangeSet;
use outbox_relay::protocol::start::{self, Facts, MarkerFound, OnRedisLoss};
use uuid::Uuid;

use crate::postgres::{Message, Postgres};
use crate::redis::{OUTBOX, PageScript, Redis, Script, Take};
use crate::size::Size;
use crate::wrong::Wrong;

const PREFIX: &str = "outbox:";
const TOPIC: &str = "orders";
const SYSTEM_ID: u64 = 7;

/// Where the relay stands. There is one: a standby that becomes the leader has nothing of its own to go on from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Relay {
    /// Nobody leads; somebody may take over.
    Down,
    /// `take.lua` is under way.
    Taking(Box<Take>),
    /// The marker is taken, and the checkpoint is to be written.
    Taken(Box<Take>),
    Leading(Box<Leader>),
    /// A person must decide.
    Refused,
}

/// A leadership.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Leader {
    pub(crate) leadership: u8,
    pub(crate) place: Place,
    pub(crate) suspect: Option<Suspect>,
    pub(crate) log: Log,
    pub(crate) trip: Trip,
    /// The pages that are under way, the first to be run first.
    pub(crate) sent: VecDeque<PageScript>,
    /// The page that was read meanwhile.
    ahead: Option<Page>,
    checkpointed: i64,
    /// Transactions that the snapshot of the last `Q` listed, for the variant that goes by these.
    listed: Vec<u32>,
}

/// How far a trip has come.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Trip {
    /// Not begun.
    Home,
    /// `L` was asked for.
    Listed(Question, Vec<Listed>),
    /// The answer to a short question did not count: all gaps are asked for.
    Again,
    /// `R` was read, and `Q` not yet, in the variant that reads them apart.
    HalfRead(Question, Vec<Message>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Page {
    rows: Vec<Message>,
    dead: RangeSet,
}

/// The stream of a message, and those of earlier layouts.
pub(crate) fn streams(message: &Message, place: &Place) -> Vec<String> {
    let layout = place.layouts.get(TOPIC).cloned().unwrap_or_default();
    let key = message.message_key();
    streams_of(PREFIX, TOPIC, &layout, message.ordering_key(), &key)
}

/// `takeover::try_take_over` up to its script; `fresh` and `leadership` were never drawn before.
pub(crate) fn take_over(
    postgres: &Postgres,
    redis: &Redis,
    fresh: u128,
    leadership: u8,
    wrong: Wrong,
) -> Relay {
    let found = redis.found();
    let facts = read_facts(postgres, redis, &found, wrong);
    let Ok(plan) = start::plan(&found, &facts, OnRedisLoss::Replay) else {
        return Relay::Refused;
    };
    let cursor = anchored(postgres, plan.cursor.clone());
    Relay::Taking(Box::new(Take {
        found: redis.position(),
        leadership,
        place: plan.place(cursor, &facts, Uuid::from_u128(fresh)),
        suspect: plan.suspect,
    }))
}

fn read_facts(postgres: &Postgres, redis: &Redis, found: &MarkerFound, wrong: Wrong) -> Facts {
    let marker = match found {
        MarkerFound::Marker { place, .. } => Some(place),
        MarkerFound::Missing | MarkerFound::Foreign(_) => None,
    };
    let row = marker.and_then(|place| postgres.rows.get(&place.cursor.high));
    let mut facts = Facts {
        outbox_id: OUTBOX,
        system_id: SYSTEM_ID,
        timeline: postgres.timeline,
        last_value: postgres.last_value,
        key_at_marker: row.map(Message::message_key),
        checkpoint: postgres.checkpoint.clone(),
        adopted_from: Vec::new(),
        purged_to: 0,
        checkpoint_stands: false,
    };
    if let (None, Some(checkpoint)) = (marker, &postgres.checkpoint) {
        facts.checkpoint_stands = stands(postgres, redis, checkpoint);
    }
    if let (Wrong::NoHistoryCheck, Some(marker)) = (wrong, marker) {
        facts.timeline = marker.history.timeline;
        facts.last_value = facts.last_value.max(marker.cursor.high);
        facts.key_at_marker = Some(marker.cursor.high_key.clone());
        facts.checkpoint = facts.checkpoint.filter(|c| c.history == marker.history);
    }
    facts
}

/// `takeover::stands`.
fn stands(postgres: &Postgres, redis: &Redis, checkpoint: &Place) -> bool {
    let lacks = |blocked: &Blocked, id| !blocked.cursor.covers(id);
    let covered = postgres.rows.values().filter(|row| {
        let mut blocked = checkpoint.blocked.values();
        checkpoint.cursor.covers(row.id) && !blocked.any(|b| lacks(b, row.id))
    });
    let stands = |row: &Message| {
        let streams = streams(row, checkpoint);
        streams.iter().any(|stream| redis.holds(stream, row))
    };
    covered.into_iter().any(stands)
}

/// `takeover::anchored`.
fn anchored(postgres: &Postgres, mut cursor: Cursor) -> Cursor {
    while cursor.lacks_key() {
        let nearest = postgres.rows.range(..=cursor.high).next_back();
        cursor.anchor(nearest.map(|(id, row)| (*id, row.message_key())));
    }
    cursor
}

impl Relay {
    /// The scripts that are under way.
    pub(crate) fn sent(&self) -> Vec<Script> {
        match self {
            Relay::Taking(take) => vec![Script::Take(take.clone())],
            Relay::Leading(leader) => {
                let pages = leader.sent.iter().cloned();
                pages.map(|page| Script::Page(Box::new(page))).collect()
            }
            Relay::Down | Relay::Taken(_) | Relay::Refused => Vec::new(),
        }
    }

    /// The reply to the script that was under way. Where the marker had moved, the same relay takes over anew.
    pub(crate) fn receive(self, done: bool, redis: &Redis) -> Relay {
        match self {
            Relay::Taking(take) if done => Relay::Taken(take),
            Relay::Leading(mut leader) if done => {
                leader.published(redis);
                Relay::Leading(leader)
            }
            _ => Relay::Down,
        }
    }

    /// Writes the checkpoint, which a later epoch prevents.
    pub(crate) fn write_checkpoint(self, postgres: &mut Postgres, size: &Size) -> Relay {
        let place = match &self {
            Relay::Taken(take) => &take.place,
            Relay::Leading(leader) => &leader.place,
            _ => return self,
        };
        if postgres
            .checkpoint
            .as_ref()
            .is_some_and(|c| c.epoch > place.epoch)
        {
            return Relay::Down;
        }
        postgres.checkpoint = Some(place.clone());
        match self {
            Relay::Taken(take) => Relay::Leading(Box::new(Leader::new(*take, size))),
            Relay::Leading(mut leader) => {
                leader.checkpointed = leader.place.page;
                Relay::Leading(leader)
            }
            other => other,
        }
    }
}

impl Leader {
    fn new(take: Take, size: &Size) -> Self {
        Leader {
            leadership: take.leadership,
            log: Log::new(&take.place.cursor, size.limits),
            checkpointed: take.place.page,
            place: take.place,
            suspect: take.suspect,
            trip: Trip::Home,
            sent: VecDeque::new(),
            ahead: None,
            listed: Vec::new(),
        }
    }

    pub(crate) fn needs_checkpoint(&self) -> bool {
        self.checkpointed != self.place.page
    }

    /// Whether a page may be read now: one ahead of those that are under way.
    pub(crate) fn may_read(&self, size: &Size) -> bool {
        self.ahead.is_none() && (self.sent.is_empty() || size.reads_ahead)
    }

    /// Whether nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.sent.is_empty() && self.ahead.is_none() && self.trip == Trip::Home
    }

    /// Begins a trip that needs `L`.
    pub(crate) fn list(&mut self, postgres: &Postgres, wrong: Wrong) {
        let question = self.log.short_question();
        let mut writers = postgres.writers();
        if wrong == Wrong::GapsBySnapshot {
            writers.retain(|w| w.xid.is_some_and(|xid| self.listed.contains(&xid)));
        }
        self.trip = Trip::Listed(question, writers);
    }

    /// `R` and `Q`, and what follows from the answer.
    pub(crate) fn read(
        &mut self,
        postgres: &mut Postgres,
        redis: &Redis,
        size: &Size,
        wrong: Wrong,
    ) {
        let question = match std::mem::replace(&mut self.trip, Trip::Home) {
            Trip::Home => {
                let question = self.log.short_question();
                self.log.learn_nothing();
                question
            }
            Trip::Listed(question, writers) => {
                let prepared = self.log.meets_prepared(&writers);
                self.log
                    .learn(writers, prepared.then_some(postgres.last_value));
                question
            }
            Trip::Again => self.log.question(),
            Trip::HalfRead(question, late) => {
                let new = postgres.new_rows(&question, size.page_rows);
                return self.accept(postgres, redis, size, wrong, late, new);
            }
        };
        let late = postgres.late_rows(&question, size.page_rows);
        if wrong == Wrong::TwoSnapshots {
            self.trip = Trip::HalfRead(question, late);
            return;
        }
        let new = postgres.new_rows(&question, size.page_rows);
        let snapshot = (!late.is_empty() || !new.is_empty()).then(|| postgres.snapshot());
        if !self.log.may_trust(&question, snapshot.as_deref()) {
            self.trip = Trip::Again;
            return;
        }
        self.accept(postgres, redis, size, wrong, late, new);
    }

    fn accept(
        &mut self,
        postgres: &mut Postgres,
        redis: &Redis,
        size: &Size,
        wrong: Wrong,
        late: Vec<Message>,
        new: Vec<Message>,
    ) {
        let ids = |rows: &[Message]| rows.iter().map(|row| row.id).collect::<Vec<i64>>();
        let taken = self.log.accept(Answer {
            late: &ids(&late),
            late_cut: late.len() >= size.page_rows && wrong != Wrong::CutAsComplete,
            new: &ids(&new),
        });
        self.log = self.log.renumbered();
        if wrong == Wrong::GapsBySnapshot {
            self.listed = postgres.listed_in_snapshot();
        }
        let mut rows = late;
        if taken.new {
            rows.extend(new);
        }
        if rows.is_empty() && taken.dead.is_empty() {
            return;
        }
        if !rows.is_empty() && wrong != Wrong::NoBarrier {
            postgres.flush();
        }
        self.ahead = Some(Page {
            rows,
            dead: taken.dead,
        });
        self.send(redis);
    }

    /// `Progress::write_of`, and `write_behind` where a page is under way already.
    fn send(&mut self, redis: &Redis) {
        let ordinary = self.suspect.is_none();
        if self.sent.len() > usize::from(ordinary) {
            return;
        }
        let Some(page) = self.ahead.take() else {
            return;
        };
        let mut cursor = self.place.cursor.clone();
        for before in &self.sent {
            cursor.apply(&before.step);
        }
        let keys: Vec<String> = page.rows.iter().map(Message::message_key).collect();
        let rows = page.rows.iter().map(|row| row.id);
        let rows = rows.zip(keys.iter().map(String::as_str));
        let step = cursor.step(rows, &page.dead);
        let stands = |row: &Message, streams: &[String]| {
            self.suspect
                .is_some_and(|s| s.may_stand(row.id, &self.place))
                && streams.iter().any(|stream| redis.holds(stream, row))
        };
        let mut entries = Vec::new();
        for row in &page.rows {
            let mut streams = streams(row, &self.place);
            if !stands(row, &streams) {
                entries.push((streams.swap_remove(0), *row));
            }
        }
        self.sent.push_back(PageScript {
            leadership: self.leadership,
            page: self.place.page + self.sent.len() as i64,
            entries,
            ranges: cursor.gap_ranges_after(&step),
            drop_suspect: self
                .suspect
                .is_some_and(|s| s.ends_with(&step, &self.place)),
            step,
        });
    }

    /// `Progress::passed`.
    fn published(&mut self, redis: &Redis) {
        let Some(page) = self.sent.pop_front() else {
            return;
        };
        if self
            .suspect
            .is_some_and(|s| s.ends_with(&page.step, &self.place))
        {
            self.suspect = None;
        }
        self.place.pass(&page.step, 0);
        self.send(redis);
    }
}
