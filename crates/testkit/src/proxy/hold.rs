//! Stopping a connection at a chosen request.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::watch;

use super::{
    Shared,
    frames::{Frames, ReplyEnd},
    link::Reset,
};
use crate::Error;

/// How long [`Hold::reached`] waits.
const REACHED_DEADLINE: Duration = Duration::from_secs(30);

/// What a request has to contain.
#[derive(Clone, Debug)]
pub struct Matcher {
    pattern: Pattern,
    /// The how manieth match counts, from 1.
    nth: usize,
}

#[derive(Clone, Debug)]
enum Pattern {
    /// Anywhere in the client's bytes. Empty: any request.
    Bytes(Vec<u8>),
    /// In the text of a Postgres statement that is run. In small letters.
    Sql(Vec<u8>),
}

impl Matcher {
    /// A request with these bytes in it, also when they arrive in several pieces. Empty: any request.
    pub fn bytes(bytes: impl AsRef<[u8]>) -> Self {
        Self {
            pattern: Pattern::Bytes(bytes.as_ref().to_vec()),
            nth: 1,
        }
    }

    /// A Redis command, written as the client writes it (`EVALSHA`). No payload is taken for it.
    pub fn redis(command: &str) -> Self {
        Self::bytes(format!("\r\n${}\r\n{command}\r\n", command.len()))
    }

    /// A Postgres statement that is run, with this text in it, in capitals or not; prepared statements count each
    /// time they are executed, not when they are prepared. Not seen inside TLS.
    pub fn sql(text: &str) -> Self {
        Self {
            pattern: Pattern::Sql(text.to_ascii_lowercase().into_bytes()),
            nth: 1,
        }
    }

    /// The n-th match instead of the first, counted from 1 over all connections of the proxy.
    pub fn nth(mut self, n: usize) -> Self {
        self.nth = n.max(1);
        self
    }
}

/// What is held when a request matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The request and everything the client sends after it: the server has not executed it.
    Request,
    /// Everything the server sends from then on: it has executed the request, and the client does not know.
    Reply,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Waiting,
    /// The request has passed; its reply has not come yet.
    Matched,
    Reached,
    Released,
    Dropped,
}

#[derive(Debug)]
pub(super) struct HoldState {
    id: u64,
    matcher: Matcher,
    direction: Direction,
    matches: AtomicUsize,
    phase: watch::Sender<Phase>,
}

impl HoldState {
    pub(super) fn new(id: u64, matcher: Matcher, direction: Direction) -> Self {
        let phase = watch::Sender::new(Phase::Waiting);
        Self {
            id,
            matcher,
            direction,
            matches: AtomicUsize::new(0),
            phase,
        }
    }

    pub(super) fn direction(&self) -> Direction {
        self.direction
    }

    /// Counts a match; whether it is the one to hold.
    pub(super) fn claim(&self) -> bool {
        let nth = self.matches.fetch_add(1, Ordering::SeqCst) + 1;
        nth == self.matcher.nth && self.advance(Phase::Matched)
    }

    pub(super) fn reach(&self) {
        self.advance(Phase::Reached);
    }

    /// Waits for the test's word: to go on, or to reset the connection.
    pub(super) async fn decision(&self) -> Result<(), Reset> {
        let mut phase = self.phase.subscribe();
        match phase
            .wait_for(|phase| *phase >= Phase::Released)
            .await
            .map(|phase| *phase)
        {
            Ok(Phase::Released) => Ok(()),
            _ => Err(Reset),
        }
    }

    /// Phases only go forward.
    fn advance(&self, to: Phase) -> bool {
        self.phase.send_if_modified(|phase| {
            let forward = *phase < to;
            if forward {
                *phase = to;
            }
            forward
        })
    }
}

/// A request or reply that is stopped when it passes; made by [`Proxy::hold`](super::Proxy::hold). Going out of
/// scope releases it.
#[derive(Debug)]
#[must_use = "dropped, it holds nothing"]
pub struct Hold {
    state: Arc<HoldState>,
    shared: Arc<Shared>,
}

impl Hold {
    pub(super) fn new(state: Arc<HoldState>, shared: Arc<Shared>) -> Self {
        Self { state, shared }
    }

    /// Waits until the request is held ([`Direction::Request`]), or its reply has come and is held
    /// ([`Direction::Reply`]: the server has executed it, and for Postgres committed it).
    ///
    /// # Errors
    ///
    /// No such request or reply came within 30 s.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again: what is held stays held.
    pub async fn reached(&self) -> Result<(), Error> {
        self.reached_within(REACHED_DEADLINE).await
    }

    /// As [`reached`](Self::reached) with another deadline.
    ///
    /// # Errors
    ///
    /// No such request or reply came in time.
    ///
    /// # Cancel safety
    ///
    /// Can be dropped and called again: what is held stays held.
    pub async fn reached_within(&self, deadline: Duration) -> Result<(), Error> {
        let mut phase = self.state.phase.subscribe();
        let reached = phase.wait_for(|phase| *phase >= Phase::Reached);
        if tokio::time::timeout(deadline, reached)
            .await
            .is_ok_and(|phase| phase.is_ok())
        {
            return Ok(());
        }
        let matches = self.state.matches.load(Ordering::SeqCst);
        Err(Error::timed_out(
            format!(
                "{:?} of {:?} to be held",
                self.state.direction, self.state.matcher
            ),
            deadline,
            format!("{matches} matches, {:?}", *self.state.phase.borrow()),
        ))
    }

    /// Whether the request or reply is held by now.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        *self.state.phase.borrow() >= Phase::Reached
    }

    /// Forwards what was held, and everything after it, also when the client is gone by now: so a request of a
    /// dead client arrives late.
    pub fn release(self) {
        self.state.advance(Phase::Released);
    }

    /// Forgets what was held and resets the connection to both sides.
    pub fn drop_it(self) {
        self.state.advance(Phase::Dropped);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.state.advance(Phase::Released);
        self.shared
            .lock()
            .holds
            .retain(|hold| hold.id != self.state.id);
    }
}

/// A match in a chunk of requests.
#[derive(Debug)]
pub(super) struct Hit {
    /// Nothing from here on is part of an earlier request.
    pub(super) start: usize,
    pub(super) hold: Arc<HoldState>,
}

/// Looks for the patterns of all holds in one connection's requests.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    frames: Frames,
    /// For each hold: the end of the bytes since it was set, as far as a match could begin there.
    tails: HashMap<u64, Vec<u8>>,
}

impl Scanner {
    /// Every match that ends in this chunk, in order.
    pub(super) fn scan(&mut self, chunk: &[u8], holds: &[Arc<HoldState>]) -> Vec<Hit> {
        let statements = self.frames.read(chunk);
        self.tails
            .retain(|id, _| holds.iter().any(|hold| hold.id == *id));
        let mut hits = Vec::new();
        for hold in holds {
            let starts = match &hold.matcher.pattern {
                Pattern::Bytes(pattern) => {
                    search(self.tails.entry(hold.id).or_default(), chunk, pattern)
                }
                Pattern::Sql(text) => statements
                    .iter()
                    .filter(|statement| contains(&statement.sql.to_ascii_lowercase(), text))
                    .map(|statement| statement.start)
                    .collect(),
            };
            hits.extend(starts.into_iter().map(|start| Hit {
                start,
                hold: Arc::clone(hold),
            }));
        }
        hits.sort_by_key(|hit| hit.start);
        hits
    }

    pub(super) fn reply_end(&self) -> ReplyEnd {
        self.frames.reply_end()
    }
}

/// Where matches that end in `chunk` start, 0 for those that started before it. Moves `tail` on.
fn search(tail: &mut Vec<u8>, chunk: &[u8], pattern: &[u8]) -> Vec<usize> {
    if pattern.is_empty() {
        return vec![0];
    }
    let before = tail.len();
    tail.extend_from_slice(chunk);
    let starts = tail
        .windows(pattern.len())
        .enumerate()
        .filter(|(_, window)| *window == pattern)
        .map(|(start, _)| start.saturating_sub(before))
        .collect();
    // One byte less than the pattern: no match is found twice.
    tail.drain(..tail.len().saturating_sub(pattern.len() - 1));
    starts
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    part.is_empty() || text.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_found_once_however_the_bytes_are_cut() {
        let bytes = b"one EVALSHA two EVALSHA";
        for chunk_bytes in 1..=bytes.len() {
            let mut tail = Vec::new();
            let found: usize = bytes
                .chunks(chunk_bytes)
                .map(|chunk| search(&mut tail, chunk, b"EVALSHA").len())
                .sum();
            assert_eq!(found, 2, "chunks of {chunk_bytes}");
        }
    }

    #[test]
    fn a_match_starts_where_its_first_byte_is() {
        assert_eq!(search(&mut Vec::new(), b"one EVALSHA", b"EVALSHA"), [4]);
        assert_eq!(search(&mut b"EVAL".to_vec(), b"SHA", b"EVALSHA"), [0]);
    }
}
