//! What a relay says of itself: whether it does its work and, if not, why.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// A backlog that is older than this, with nothing published for as long and no reason known, is a relay that hangs.
const STALLED_AFTER: Duration = Duration::from_secs(30);

/// The state of one relay; cloning shares it.
#[derive(Clone, Debug)]
pub struct Health(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    phase: Phase,
    published_at: Instant,
    backlog: Backlog,
    notes: BTreeMap<Note, String>,
}

/// What a relay is at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It has not reached both servers yet.
    Starting,
    /// Another relay leads.
    StandingBy,
    /// It leads and publishes.
    Leading,
    /// It cannot work, and tries again.
    Interrupted(String),
    /// It was told to stop.
    Stopping,
}

/// What is not published yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backlog {
    pub(crate) messages: i64,
    pub(crate) oldest: Duration,
}

/// A known reason for messages to wait while the relay works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Note {
    /// A person paused publishing.
    Paused,
    /// Streams that refuse entries, and topics whose partitions change.
    Blocked,
    /// So many ids wait for an open transaction that nothing newer is read.
    GapBound,
    /// Redis' memory is at the ceiling.
    RedisFull,
}

/// An answer for `/readyz`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// Whether the relay leads and publishes, or stands by and could take over.
    pub is_ready: bool,
    /// What it is at, and why.
    pub reason: String,
}

impl Default for Health {
    fn default() -> Self {
        Health(Arc::new(Mutex::new(State {
            phase: Phase::Starting,
            published_at: Instant::now(),
            backlog: Backlog::default(),
            notes: BTreeMap::new(),
        })))
    }
}

impl Health {
    /// Whether the relay does its work now.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        self.lock().readiness()
    }

    pub(crate) fn enter(&self, phase: Phase) {
        let mut state = self.lock();
        let leads = phase == Phase::Leading;
        if leads {
            // What is waited for is known again soon after a take-over.
            state.published_at = Instant::now();
            state.notes.clear();
        }
        state.phase = phase;
        drop(state);
        ::metrics::gauge!(crate::metric_names::LEADER).set(if leads { 1.0 } else { 0.0 });
    }

    pub(crate) fn published(&self) {
        self.lock().published_at = Instant::now();
    }

    pub(crate) fn saw_backlog(&self, backlog: Backlog) {
        self.lock().backlog = backlog;
    }

    /// States a reason for messages to wait, or takes it back.
    pub(crate) fn note(&self, note: Note, reason: Option<String>) {
        let mut state = self.lock();
        match reason {
            Some(reason) => state.notes.insert(note, reason),
            None => state.notes.remove(&note),
        };
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change under this lock is complete before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn readiness(&self) -> Readiness {
        let idle = self.published_at.elapsed();
        let stalled = self.phase == Phase::Leading
            && self.notes.is_empty()
            && idle >= STALLED_AFTER
            && self.backlog.messages > 0
            && self.backlog.oldest >= STALLED_AFTER;
        let mut reason = self.phase.to_string();
        if stalled {
            reason = format!(
                "leading, but nothing was published for {} s while {} messages wait, the oldest for {} s, and no reason \
                 is known",
                idle.as_secs(),
                self.backlog.messages,
                self.backlog.oldest.as_secs()
            );
        }
        for note in self.notes.values() {
            reason = format!("{reason}; {note}");
        }
        let works = matches!(self.phase, Phase::Leading | Phase::StandingBy);
        Readiness {
            is_ready: works && !stalled,
            reason,
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Phase::Starting => f.write_str("starting: both servers were not reached yet"),
            Phase::StandingBy => f.write_str("standing by: another relay leads"),
            Phase::Leading => f.write_str("leading"),
            Phase::Interrupted(why) => write!(f, "interrupted: {why}"),
            Phase::Stopping => f.write_str("stopping"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn old_backlog() -> Backlog {
        Backlog {
            messages: 3,
            oldest: 2 * STALLED_AFTER,
        }
    }

    fn leading_without_publishing(backlog: Backlog) -> Health {
        let health = Health::default();
        health.enter(Phase::Leading);
        let mut state = health.lock();
        state.published_at = Instant::now().checked_sub(2 * STALLED_AFTER).unwrap();
        state.backlog = backlog;
        drop(state);
        health
    }

    #[test]
    fn a_relay_is_ready_while_it_leads_or_stands_by() {
        let health = Health::default();
        assert!(!health.readiness().is_ready);
        for (phase, is_ready) in [
            (Phase::StandingBy, true),
            (Phase::Leading, true),
            (Phase::Interrupted("no Redis".to_owned()), false),
            (Phase::Stopping, false),
        ] {
            health.enter(phase);
            assert_eq!(health.readiness().is_ready, is_ready, "{health:?}");
        }
    }

    #[test]
    fn a_leader_that_publishes_nothing_of_an_old_backlog_is_not_ready() {
        let readiness = leading_without_publishing(old_backlog()).readiness();
        assert!(!readiness.is_ready, "{readiness:?}");
        assert!(
            readiness.reason.contains("3 messages wait"),
            "{readiness:?}"
        );
    }

    #[test]
    fn one_that_publishes_has_a_reason_or_nothing_to_do_is_ready() {
        let publishing = leading_without_publishing(old_backlog());
        publishing.published();
        assert!(publishing.readiness().is_ready);

        let idle = leading_without_publishing(Backlog::default());
        assert!(idle.readiness().is_ready);

        let waiting = leading_without_publishing(old_backlog());
        waiting.note(Note::GapBound, Some("a transaction is open".to_owned()));
        let readiness = waiting.readiness();
        assert!(readiness.is_ready);
        assert_eq!(readiness.reason, "leading; a transaction is open");
        waiting.note(Note::GapBound, None);
        assert!(!waiting.readiness().is_ready);
    }
}
