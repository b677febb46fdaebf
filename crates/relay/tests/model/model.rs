//! The states of the whole and the steps between them.

use std::collections::BTreeSet;
use std::sync::Arc;

use stateright::{Model, Property};

use crate::claims;
use crate::postgres::{Message, Postgres};
use crate::redis::{Redis, Script};
use crate::relay::{self, Relay, Trip};
use crate::size::{Left, Size};
use crate::wrong::Wrong;

/// A state of the whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) postgres: Postgres,
    /// What Postgres may go back to: the state at a moment that is chosen freely, at first an empty one.
    pub(crate) earlier_postgres: Option<Arc<Postgres>>,
    pub(crate) redis: Redis,
    /// The same of Redis.
    pub(crate) earlier_redis: Option<Arc<Redis>>,
    pub(crate) relay: Relay,
    /// Scripts of earlier leaderships on their way to Redis.
    pub(crate) late: Vec<Script>,
    pub(crate) left: Left,
    /// Messages that were committed and flushed, and that Postgres has forgotten.
    pub(crate) forgotten: BTreeSet<Message>,
    /// Entries that Redis has lost.
    pub(crate) lost_entries: usize,
    /// Branches drawn.
    branches: u8,
    /// Leaderships drawn.
    leaderships: u8,
    histories: u8,
}

/// One step of somebody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Begin {
        ordering: u8,
        early: bool,
    },
    Lock(usize),
    Draw(usize),
    Prepare(usize),
    Commit {
        at: usize,
        lazily: bool,
    },
    RollBack(usize),
    RollBackToSavepoint(usize),
    TakeOver,
    /// The first script of the leader arrives, and so does the reply.
    Arrive,
    /// A script of an earlier leadership arrives.
    ArriveLate(usize),
    WriteCheckpoint,
    ListWriters,
    Read,
    /// The leader finds another marker than its own.
    NoticeMarker,
    CrashRelay,
    CrashPostgres,
    CopyPostgres,
    FallBackPostgres,
    CopyRedis,
    LoseTail,
    EvictMarker,
}

/// The whole, in one size.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    pub(crate) size: Size,
    pub(crate) wrong: Wrong,
}

impl Outbox {
    fn steps_of_producers(&self, state: &State, steps: &mut Vec<Step>) {
        let (size, open) = (&self.size, &state.postgres.open);
        let undrawn = open.iter().filter(|t| !t.drew).count();
        let spare = usize::from(state.left.draws) > undrawn;
        if open.len() < size.open && spare {
            for ordering in size.orderings {
                // The producer holds the row that its messages are about.
                if *ordering > 0 && open.iter().any(|t| t.ordering == *ordering) {
                    continue;
                }
                for early in [false, true] {
                    if !early || size.xids {
                        let ordering = *ordering;
                        steps.push(Step::Begin { ordering, early });
                    }
                }
            }
        }
        for (at, transaction) in open.iter().enumerate() {
            if transaction.prepared {
                steps.push(Step::Commit { at, lazily: false });
                steps.push(Step::RollBack(at));
                continue;
            }
            if !transaction.locked && (!transaction.drew || spare) {
                steps.push(Step::Lock(at));
            }
            let draws = transaction.ids.len() < size.messages && (!transaction.drew || spare);
            if transaction.locked && draws {
                steps.push(Step::Draw(at));
            }
            if !transaction.drew {
                continue;
            }
            steps.push(Step::Commit { at, lazily: false });
            if state.left.postgres_crashes > 0 {
                steps.push(Step::Commit { at, lazily: true });
            }
            steps.push(Step::RollBack(at));
            if state.left.savepoints > 0 && transaction.locked {
                steps.push(Step::RollBackToSavepoint(at));
            }
            if size.prepares && transaction.locked {
                steps.push(Step::Prepare(at));
            }
        }
    }

    fn steps_of_relay(&self, state: &State, steps: &mut Vec<Step>) {
        match &state.relay {
            Relay::Refused => {}
            Relay::Down => steps.push(Step::TakeOver),
            Relay::Taking(_) => steps.push(Step::Arrive),
            Relay::Taken(_) => steps.push(Step::WriteCheckpoint),
            Relay::Leading(leader) => {
                if !leader.sent.is_empty() {
                    steps.push(Step::Arrive);
                } else if !self.owns_marker(state) {
                    steps.push(Step::NoticeMarker);
                }
                if leader.needs_checkpoint() {
                    steps.push(Step::WriteCheckpoint);
                }
                if leader.may_read(&self.size) {
                    let lists = leader.trip == Trip::Home && leader.log.needs_writers();
                    steps.push(if lists { Step::ListWriters } else { Step::Read });
                }
            }
        }
    }

    fn steps_of_faults(&self, state: &State, steps: &mut Vec<Step>) {
        let left = &state.left;
        for at in 0..state.late.len() {
            steps.push(Step::ArriveLate(at));
        }
        if left.relay_crashes > 0 && !matches!(state.relay, Relay::Down | Relay::Refused) {
            steps.push(Step::CrashRelay);
        }
        if left.postgres_crashes > 0 {
            steps.push(Step::CrashPostgres);
        }
        if left.fallbacks > 0 {
            if state.earlier_postgres.is_none() {
                steps.push(Step::CopyPostgres);
            }
            steps.push(Step::FallBackPostgres);
        }
        if left.tail_losses > 0 {
            if state.earlier_redis.is_none() {
                steps.push(Step::CopyRedis);
            }
            steps.push(Step::LoseTail);
        }
        if left.evictions > 0 && state.redis.marker.is_some() {
            steps.push(Step::EvictMarker);
        }
    }

    /// Whether the leader finds the marker where it left it.
    pub(crate) fn owns_marker(&self, state: &State) -> bool {
        let Relay::Leading(leader) = &state.relay else {
            return false;
        };
        let own = |(leadership, page): (u8, i64)| {
            (leadership == leader.leadership || self.wrong == Wrong::NoEpoch)
                && (page == leader.place.page || self.wrong == Wrong::NoPageNumber)
        };
        state.redis.position().is_some_and(own)
    }

    /// The relay is gone; its scripts may be on their way.
    fn end_relay(&self, state: &mut State) {
        let scripts = std::mem::replace(&mut state.relay, Relay::Down).sent();
        self.leave(state, scripts);
    }

    fn leave(&self, state: &mut State, scripts: impl IntoIterator<Item = Script>) {
        state.late.extend(scripts);
        state.late.truncate(self.size.late_scripts);
    }

    fn step(&self, state: &mut State, step: Step) {
        let State {
            postgres, redis, ..
        } = state;
        match step {
            Step::Begin { ordering, early } => postgres.begin(ordering, early),
            Step::Lock(at) => postgres.open[at].locked = true,
            Step::Draw(at) => {
                postgres.draw(at, self.size.xids);
                state.left.draws -= 1;
            }
            Step::Prepare(at) => postgres.open[at].prepared = true,
            Step::Commit { at, lazily } => {
                postgres.end(at, true, lazily);
                if !lazily {
                    self.flush(postgres);
                }
            }
            Step::RollBack(at) => postgres.end(at, false, true),
            Step::RollBackToSavepoint(at) => {
                postgres.rollback_to_savepoint(at);
                state.left.savepoints -= 1;
            }
            Step::TakeOver => {
                let fresh = u128::from(state.branches) + 2;
                state.leaderships += 1;
                let leadership = state.leaderships;
                state.relay = relay::take_over(postgres, redis, fresh, leadership, self.wrong);
                if let Relay::Taking(take) = &state.relay
                    && take.place.history.branch.as_u128() == fresh
                {
                    state.branches += 1;
                }
            }
            Step::Arrive => {
                if let Some((script, behind)) = state.relay.sent().split_first() {
                    let done = redis.run(script, self.wrong);
                    let relay = std::mem::replace(&mut state.relay, Relay::Down);
                    state.relay = relay.receive(done, redis);
                    if !done {
                        self.leave(state, behind.iter().cloned());
                    }
                }
            }
            Step::ArriveLate(at) => {
                let script = state.late.remove(at);
                redis.run(&script, self.wrong);
            }
            Step::WriteCheckpoint => {
                let relay = std::mem::replace(&mut state.relay, Relay::Down);
                state.relay = relay.write_checkpoint(postgres, &self.size);
                self.flush(postgres);
            }
            Step::ListWriters => {
                if let Relay::Leading(leader) = &mut state.relay {
                    leader.list(postgres, self.wrong);
                }
            }
            Step::Read => {
                if let Relay::Leading(leader) = &mut state.relay {
                    leader.read(postgres, redis, &self.size, self.wrong);
                }
            }
            Step::NoticeMarker => state.relay = Relay::Down,
            Step::CrashRelay => {
                state.left.relay_crashes -= 1;
                self.end_relay(state);
            }
            other => self.fault(state, &other),
        }
    }

    /// Only where Postgres crashes it matters what is flushed.
    fn flush(&self, postgres: &mut Postgres) {
        if self.size.postgres_crashes > 0 {
            postgres.flush();
        }
    }

    fn fault(&self, state: &mut State, step: &Step) {
        match step {
            Step::CrashPostgres => {
                state.left.postgres_crashes -= 1;
                state.histories += 1;
                state.postgres.crash(state.histories);
                self.end_relay(state);
            }
            Step::CopyPostgres => state.earlier_postgres = Some(Arc::new(state.postgres.copied())),
            Step::FallBackPostgres => {
                state.left.fallbacks -= 1;
                state.histories += 1;
                let earlier = state.earlier_postgres.take();
                let earlier = earlier.map_or_else(Postgres::new, |copy| (*copy).clone());
                let rows = state.postgres.rows.values();
                let forgotten = rows.filter(|row| !earlier.rows.contains_key(&row.id));
                state.forgotten.extend(forgotten.copied());
                let promoted = self.size.promoted;
                state
                    .postgres
                    .fall_back_to(&earlier, state.histories, promoted);
                self.end_relay(state);
            }
            Step::CopyRedis => state.earlier_redis = Some(Arc::new(state.redis.clone())),
            Step::LoseTail => {
                state.left.tail_losses -= 1;
                let earlier = state.earlier_redis.take();
                let earlier = earlier.map_or_else(Redis::default, |copy| (*copy).clone());
                state.lost_entries += state.redis.entries().count() - earlier.entries().count();
                state.redis = earlier;
            }
            Step::EvictMarker => {
                state.left.evictions -= 1;
                state.redis.marker = None;
            }
            other => unreachable!("{other:?} is no fault"),
        }
    }
}

impl Model for Outbox {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            postgres: Postgres::new(),
            earlier_postgres: None,
            redis: Redis::default(),
            earlier_redis: None,
            relay: Relay::Down,
            late: Vec::new(),
            left: self.size.left(),
            forgotten: BTreeSet::new(),
            lost_entries: 0,
            branches: 0,
            leaderships: 0,
            histories: 0,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        self.steps_of_producers(state, steps);
        self.steps_of_relay(state, steps);
        self.steps_of_faults(state, steps);
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        self.step(&mut next, step);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        claims::all()
    }
}
