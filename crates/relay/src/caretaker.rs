//! The caretaker: looks after Redis while the leader publishes. It trims the streams, sees what the groups named by
//! `--hold-until-acked` have acknowledged, watches the memory, and leaves a report of that for `status`.
//!
//! It has a task and a connection of its own, so that none of it holds up publishing, and rests after each call four
//! times as long as the call took. The leader tells it what is settled, and asks it how far the purge may go and
//! whether Redis is full.

mod hold;
mod memory;
mod report;
mod round;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use self::hold::Ledger;
use self::memory::{Gauge, Turn};
use self::report::Reporter;
use self::round::Seen;
use crate::config::Config;
use crate::error::{Error, Result, redis_fault};
use crate::health::Note;
use crate::janitor::milestone_interval;
use crate::metric_names as names;
use crate::protocol::failure::{RedisFault, ReplyCode};
use crate::publisher::{Memory, Tending, Trim};

/// How often the memory is looked at.
const MEMORY_INTERVAL: Duration = Duration::from_secs(1);

/// Longest time between two rounds over the streams while Redis is full: trimming is what makes room.
const ROUND_WHEN_FULL: Duration = Duration::from_secs(5);

/// Shortest wait between two looks whether something is due.
const SHORTEST_WAIT: Duration = Duration::from_millis(50);

/// How much longer than a call took nothing is asked after it.
const REST_FACTOR: u32 = 4;

/// What the leader knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Order {
    /// Up to this id every message is published for good.
    pub(crate) settled: i64,
    /// Entries from this time of Redis' clock on may be looked for by the next take-over; in milliseconds.
    pub(crate) keep_from_ms: i64,
}

/// What the leader is told.
#[derive(Clone, Copy, Debug)]
struct Findings {
    /// Rows up to this id may be purged, as far as groups are concerned.
    purge_floor: i64,
    /// Redis' memory is at the ceiling.
    is_full: bool,
}

/// The leader's side. The task ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Caretaker {
    orders: watch::Sender<Order>,
    findings: watch::Receiver<Findings>,
}

impl Caretaker {
    /// Starts the task, which does nothing to streams before the first order.
    pub(crate) fn start(config: &Config) -> Self {
        let (orders, order) = watch::channel(Order::default());
        // Rows that are held stay until it is known what the groups have acknowledged.
        let held = !config.hold_until_acked.is_empty();
        let (tell, findings) = watch::channel(Findings {
            purge_floor: if held { 0 } else { i64::MAX },
            is_full: false,
        });
        let rounds = Rounds {
            config: config.clone(),
            order,
            tell,
            ledger: Ledger::default(),
            gauge: Gauge::new(config.redis_memory_ceiling),
            reporter: Reporter::new(config),
            memory_at: Instant::now(),
            without_group: BTreeSet::new(),
            is_refusal_told: false,
            holder: None,
        };
        tokio::spawn(rounds.go_on());
        Caretaker { orders, findings }
    }

    /// Says what is settled by now.
    pub(crate) fn order(&self, order: Order) {
        self.orders.send_replace(order);
    }

    /// The id up to which rows may be purged, as far as groups that hold rows are concerned.
    pub(crate) fn purge_floor(&self) -> i64 {
        self.findings.borrow().purge_floor
    }

    /// Whether publishing has to wait until Redis has room again.
    pub(crate) fn redis_is_full(&self) -> bool {
        self.findings.borrow().is_full
    }
}

/// The task's side.
struct Rounds {
    config: Config,
    order: watch::Receiver<Order>,
    tell: watch::Sender<Findings>,
    ledger: Ledger,
    gauge: Gauge,
    reporter: Reporter,
    memory_at: Instant,
    /// Streams that were said to have no group.
    without_group: BTreeSet<String>,
    /// It was said that streams refuse.
    is_refusal_told: bool,
    /// Who was said to hold rows.
    holder: Option<(String, String)>,
}

impl Rounds {
    /// Goes on until the leader drops its side. Whatever fails is tried again, and told once.
    async fn go_on(mut self) {
        let mut tending = None;
        let mut is_told = false;
        let mut round_at = Instant::now();
        while !self.is_over() {
            let outcome = self.step(&mut tending, &mut round_at).await;
            let wait = match outcome {
                Ok(()) => {
                    is_told = false;
                    let until_round = round_at.saturating_duration_since(Instant::now());
                    until_round.clamp(SHORTEST_WAIT, MEMORY_INTERVAL)
                }
                Err(error) => {
                    tending = None;
                    self.say_full(false); // the leader finds out by itself
                    if !std::mem::replace(&mut is_told, true) {
                        tracing::warn!(
                            error = error.one_line(),
                            "cannot look after the streams; trying again"
                        );
                    }
                    MEMORY_INTERVAL
                }
            };
            tokio::time::sleep(wait).await;
        }
        self.config.health.note(Note::RedisFull, None);
        ::metrics::gauge!(names::PAUSED_FOR_MEMORY).set(0.0);
    }

    fn is_over(&self) -> bool {
        self.order.has_changed().is_err()
    }

    async fn step(&mut self, slot: &mut Option<Tending>, round_at: &mut Instant) -> Result<()> {
        let config = &self.config;
        let tending = match slot {
            Some(tending) => tending,
            None => {
                let (redis, prefix) = (&config.redis, &config.stream_prefix);
                slot.insert(Tending::connect(redis, prefix, config.redis_timeout).await?)
            }
        };
        self.watch_memory(tending).await?;
        if *self.order.borrow() == Order::default() || Instant::now() < *round_at {
            return Ok(());
        }
        if self.config.stream_max_age.is_some() || !self.config.hold_until_acked.is_empty() {
            self.round(tending).await?;
        }
        *round_at = Instant::now() + self.interval();
        Ok(())
    }

    /// Time between two rounds.
    fn interval(&self) -> Duration {
        let age = self.config.stream_max_age.unwrap_or(Duration::MAX);
        let interval = milestone_interval(age.min(self.config.retention));
        if self.gauge.is_full {
            interval.min(ROUND_WHEN_FULL)
        } else {
            interval
        }
    }

    /// Looks at the memory when that is due, and tells `status` of it.
    async fn watch_memory(&mut self, tending: &mut Tending) -> Result<()> {
        if Instant::now() < self.memory_at {
            return Ok(());
        }
        let memory = tending.memory().await?;
        self.memory_at = Instant::now() + MEMORY_INTERVAL;
        ::metrics::gauge!(names::REDIS_MEMORY).set(memory.ratio());
        let (used, maxmemory) = (memory.used, memory.max);
        match self.gauge.see(memory) {
            Turn::Same => {}
            Turn::Filling => tracing::warn!(used, maxmemory, "Redis fills up"),
            Turn::Full => tracing::warn!(
                used,
                maxmemory,
                "publishing is paused: Redis' memory is at --redis-memory-ceiling"
            ),
            Turn::Room => {
                tracing::info!(used, maxmemory, "publishing goes on: Redis has room again")
            }
        }
        self.say_full(self.gauge.is_full);
        if self.gauge.is_full {
            // Stated anew each time: a take-over forgets what was stated before.
            self.config
                .health
                .note(Note::RedisFull, Some(self.why_paused(memory)));
        }
        self.leave_report(tending).await
    }

    fn why_paused(&self, memory: Memory) -> String {
        format!(
            "publishing is paused until Redis has room: {:.0} % of maxmemory are used and --redis-memory-ceiling is {} %",
            memory.ratio() * 100.0,
            self.config.redis_memory_ceiling.unwrap_or_default()
        )
    }

    fn say_full(&self, is_full: bool) {
        self.tell.send_modify(|findings| findings.is_full = is_full);
        ::metrics::gauge!(names::PAUSED_FOR_MEMORY).set(if is_full { 1.0 } else { 0.0 });
        if !is_full {
            self.config.health.note(Note::RedisFull, None);
        }
    }

    /// One round over all streams.
    async fn round(&mut self, tending: &mut Tending) -> Result<()> {
        // Before any stream is looked at: what is settled by now stands in them.
        let order = *self.order.borrow_and_update();
        let mut seen = Seen {
            order,
            trimmed: 0,
            without_group: BTreeSet::new(),
            last_ms: 0,
            oldest: vec![None; self.config.hold_until_acked.len()],
        };
        let mut from = 0;
        loop {
            let begun = Instant::now();
            let (next, streams) = tending.scan(from).await?;
            self.rest_after(begun, tending).await?;
            for (stream, topic) in streams {
                self.tend(tending, &stream, &topic, &mut seen).await?;
                if self.is_over() {
                    return Ok(());
                }
            }
            from = next;
            if from == 0 {
                break;
            }
        }
        self.report(seen);
        Ok(())
    }

    /// Gives Redis to others for a while, and looks at the memory meanwhile.
    async fn rest_after(&mut self, begun: Instant, tending: &mut Tending) -> Result<()> {
        tokio::time::sleep(begun.elapsed() * REST_FACTOR).await;
        self.watch_memory(tending).await
    }

    /// Looks after one stream, step by step.
    async fn tend(
        &mut self,
        tending: &mut Tending,
        stream: &str,
        topic: &str,
        seen: &mut Seen,
    ) -> Result<()> {
        let holds = self.config.hold_until_acked.clone();
        let (indices, groups): (Vec<usize>, Vec<&str>) = holds
            .iter()
            .enumerate()
            .filter(|(_, hold)| hold.is_about(topic))
            .map(|(index, hold)| (index, hold.group.as_str()))
            .unzip();
        loop {
            // What the leader fears for by now, and not at the beginning of a long round.
            let keep_from_ms = self.order.borrow().keep_from_ms;
            let age = self.config.stream_max_age;
            let begun = Instant::now();
            let tended = match tending
                .tend(stream, Trim { age, keep_from_ms }, &groups)
                .await
            {
                Err(error) if is_about_the_stream(&error) => {
                    for index in indices {
                        seen.oldest[index] = Some((0, stream.to_owned()));
                    }
                    if !std::mem::replace(&mut self.is_refusal_told, true) {
                        tracing::warn!(
                            stream,
                            error = error.one_line(),
                            "a stream cannot be looked after and is not trimmed"
                        );
                    }
                    return Ok(());
                }
                other => other?,
            };
            self.rest_after(begun, tending).await?;
            let Some(tended) = tended else { return Ok(()) };
            seen.trimmed += tended.trimmed;
            if tended.trimmed > 0 {
                ::metrics::counter!(names::TRIMMED).increment(tended.trimmed);
            }
            if !tended.has_more || self.is_over() {
                seen.stream(stream, &indices, &tended);
                return Ok(());
            }
        }
    }
}

/// A key that this user may not touch, a command that a script may not run, or another type by now: the other streams
/// go on.
fn is_about_the_stream(error: &Error) -> bool {
    let Error::Redis { source, .. } = error else {
        return false;
    };
    matches!(
        redis_fault(source),
        RedisFault::Reply(ReplyCode::NoPerm | ReplyCode::WrongType | ReplyCode::Err)
    )
}
