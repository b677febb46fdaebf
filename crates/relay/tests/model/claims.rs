//! What must hold in every state, and what must happen in some.

use std::collections::{BTreeMap, BTreeSet};

use stateright::{Model, Property};

use crate::model::{Outbox, State, Step};
use crate::postgres::Message;
use crate::redis::Script;
use crate::relay::{Relay, Trip, streams};

/// Whenever the relay has nothing left to do, each message that Postgres keeps is in its stream.
pub(crate) const NOTHING_LOST: &str = "nothing lost";
/// Left alone, the relay gets there, and no gap stays open.
pub(crate) const GETS_THERE: &str = "left alone, the relay gets everything out";
/// No entry whose message was never committed.
pub(crate) const NO_PHANTOM: &str = "no phantom";
/// No message stands in a stream twice, unless Postgres changed its history.
pub(crate) const DOUBLED: &str = "doubled only after a change of history";
/// Messages of one ordering key stand in the order in which they were committed.
pub(crate) const ORDER: &str = "order for each ordering key";

pub(crate) const LATE: &str = "a gap is filled late";
pub(crate) const ROLLED_BACK: &str = "a gap is closed by a rollback";
pub(crate) const TOO_LATE: &str = "a page of an earlier leadership comes too late";
pub(crate) const REPUBLISHED: &str = "a lost tail is published again";
pub(crate) const GIVEN_AGAIN: &str = "ids are given out again";
pub(crate) const RESTED: &str = "all ids are drawn and the relay has nothing left to do";
pub(crate) const LEFT_OUT: &str = "a gap is left to a long transaction";
pub(crate) const TWICE: &str = "an answer does not count and is asked for again";
pub(crate) const AHEAD: &str = "a page is read while another is published";
pub(crate) const BEHIND: &str = "a page is sent before the reply to another";

/// All claims.
pub(crate) fn all() -> Vec<Property<Outbox>> {
    vec![
        Property::always(NOTHING_LOST, |model: &Outbox, state: &State| {
            !rests(model, state) || all_published(state)
        }),
        Property::always(GETS_THERE, gets_there),
        Property::always(NO_PHANTOM, |_, state: &State| {
            let committed = |m: &Message| state.postgres.rows.get(&m.id) == Some(m);
            let mut entries = state.redis.entries();
            entries.all(|entry| committed(entry) || state.forgotten.contains(entry))
        }),
        Property::always(DOUBLED, |model: &Outbox, state: &State| {
            state.left.fallbacks < model.size.fallbacks || !is_doubled(state)
        }),
        Property::always(ORDER, |_, state: &State| is_ordered(state)),
        Property::sometimes(LATE, |_, state: &State| {
            let late = |entries: &Vec<Message>| entries.windows(2).any(|e| e[0].id > e[1].id);
            state.redis.streams.values().any(late)
        }),
        Property::sometimes(ROLLED_BACK, |_, state: &State| {
            let Relay::Leading(leader) = &state.relay else {
                return false;
            };
            let cursor = &leader.place.cursor;
            (1..cursor.high).any(|id| cursor.covers(id) && !state.postgres.rows.contains_key(&id))
        }),
        Property::sometimes(TOO_LATE, |model: &Outbox, state: &State| {
            let refused = |script: &Script| match script {
                Script::Page(page) => !state.redis.would_take(page, model.wrong),
                Script::Take(_) => false,
            };
            state.late.iter().any(refused)
        }),
        Property::sometimes(REPUBLISHED, |model: &Outbox, state: &State| {
            state.lost_entries > 0 && rests(model, state) && state.redis.entries().count() > 1
        }),
        Property::sometimes(GIVEN_AGAIN, |model: &Outbox, state: &State| {
            let again = |m: &Message| state.postgres.rows.get(&m.id).is_some_and(|row| row != m);
            rests(model, state) && state.redis.entries().any(again)
        }),
        Property::sometimes(RESTED, |model: &Outbox, state: &State| {
            state.left.draws == 0 && rests(model, state) && state.postgres.rows.len() > 1
        }),
        Property::sometimes(LEFT_OUT, |_, state: &State| {
            let Relay::Leading(leader) = &state.relay else {
                return false;
            };
            matches!(&leader.trip, Trip::Listed(question, _) if !question.left_to.is_empty())
        }),
        Property::sometimes(
            TWICE,
            |_, state: &State| matches!(&state.relay, Relay::Leading(leader) if leader.trip == Trip::Again),
        ),
        Property::sometimes(AHEAD, |_, state: &State| {
            let Relay::Leading(leader) = &state.relay else {
                return false;
            };
            !leader.sent.is_empty() && leader.trip != Trip::Home
        }),
        Property::sometimes(
            BEHIND,
            |_, state: &State| matches!(&state.relay, Relay::Leading(leader) if leader.sent.len() > 1),
        ),
    ]
}

/// Whether the relay leads and has nothing left to do: a look at both servers would show it nothing new.
fn rests(model: &Outbox, state: &State) -> bool {
    let Relay::Leading(leader) = &state.relay else {
        return false;
    };
    if !leader.is_idle() || !model.owns_marker(state) {
        return false;
    }
    let question = leader.log.question();
    state.postgres.late_rows(&question, 1).is_empty()
        && state
            .postgres
            .rows
            .range(question.high + 1..)
            .next()
            .is_none()
}

fn all_published(state: &State) -> bool {
    let Relay::Leading(leader) = &state.relay else {
        return false;
    };
    let mut rows = state.postgres.rows.values();
    rows.all(|row| {
        let streams = streams(row, &leader.place);
        streams.iter().any(|stream| state.redis.holds(stream, row))
    })
}

/// Steps after which a relay that is left alone has everything out.
const STEPS_MAX: usize = 60;

fn gets_there(model: &Outbox, state: &State) -> bool {
    let at_rest = match &state.relay {
        Relay::Down => true,
        Relay::Leading(leader) => leader.is_idle() && state.left.draws == 0,
        Relay::Taking(_) | Relay::Taken(_) => false,
        Relay::Refused => return false,
    };
    if !at_rest || !state.postgres.open.is_empty() {
        return true;
    }
    let mut state = state.clone();
    for _ in 0..STEPS_MAX {
        let step = match &state.relay {
            Relay::Refused => return false,
            Relay::Down => Step::TakeOver,
            Relay::Taking(_) => Step::Arrive,
            Relay::Taken(_) => Step::WriteCheckpoint,
            Relay::Leading(leader) if !leader.sent.is_empty() => Step::Arrive,
            Relay::Leading(_) if !model.owns_marker(&state) => Step::NoticeMarker,
            Relay::Leading(leader) if leader.log.needs_writers() && leader.trip == Trip::Home => {
                Step::ListWriters
            }
            Relay::Leading(_) if rests(model, &state) => return all_published(&state),
            Relay::Leading(_) => Step::Read,
        };
        let Some(next) = model.next_state(&state, step) else {
            return false;
        };
        state = next;
    }
    false
}

fn is_doubled(state: &State) -> bool {
    let mut seen = BTreeSet::new();
    !state.redis.entries().all(|entry| seen.insert(entry))
}

/// Whether the first entries of what Postgres keeps stand in order.
fn is_ordered(state: &State) -> bool {
    state.redis.streams.values().all(|entries| {
        let mut last: BTreeMap<u8, i64> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let kept = entries.iter().filter(|entry| {
            entry.ordering > 0 && state.postgres.rows.get(&entry.id) == Some(entry)
        });
        kept.filter(|entry| seen.insert(**entry)).all(|entry| {
            last.insert(entry.ordering, entry.id)
                .is_none_or(|id| id < entry.id)
        })
    })
}
