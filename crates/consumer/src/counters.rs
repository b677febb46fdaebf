//! Counts of what one consumer has done since it was built, per stream, and how far its group is behind.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{handler_times::HandlerTimes, metric_names as names};

/// Live counts of one consumer; cloning shares them. They start at 0 and only grow.
#[derive(Debug, Clone)]
pub struct Counters(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    group: String,
    outages: AtomicU64,
    outages_metric: ::metrics::Counter,
    streams: RwLock<BTreeMap<String, Arc<StreamCells>>>,
}

/// What [`Counters::snapshot`] saw, over all streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CountersSnapshot {
    /// Messages whose effect this consumer has committed.
    pub applied: u64,
    /// Entries that were acknowledged without the handler, because the inbox had their key already.
    pub repeated: u64,
    /// Attempts that failed and were counted.
    pub failed: u64,
    /// Calls of the handler for a message that had been attempted before.
    pub retried: u64,
    /// Entries set aside as dead letters.
    pub dead: u64,
    /// Messages set aside because a dead letter holds their ordering key.
    pub held: u64,
    /// Entries taken over from other members of the group.
    pub claimed: u64,
    /// Entries that were deleted from their stream before they were handled.
    pub lost: u64,
    /// Operations that failed because of an outage and were tried again.
    pub outages: u64,
}

/// What [`Counters::streams`] saw of one stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamSnapshot {
    /// The key of the stream.
    pub stream: String,
    /// What this consumer did with its entries; `outages` is 0, since they belong to no stream.
    pub counts: CountersSnapshot,
    /// Messages that are with this consumer's handler now.
    pub in_flight: u64,
    /// How long the calls of the handler took.
    pub handler_times: HandlerTimes,
    /// How far the group is behind; none before the first look at it. Looked up every few seconds.
    pub lag: Option<Lag>,
}

/// How far a group is behind on one stream, over all its members.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lag {
    /// Entries that the group has not been given yet.
    pub entries: u64,
    /// Entries that it was given and has not acknowledged.
    pub pending: u64,
    /// Age of the oldest entry that it has not acknowledged, by the clock of Redis; zero when there is none.
    pub age: Duration,
}

/// One of the counts of a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Count {
    Applied,
    Repeated,
    Failed,
    Retried,
    Dead,
    Held,
    Claimed,
    Lost,
}

const COUNTS: [(Count, &str); 8] = [
    (Count::Applied, names::APPLIED),
    (Count::Repeated, names::REPEATED),
    (Count::Failed, names::FAILED),
    (Count::Retried, names::RETRIED),
    (Count::Dead, names::DEAD),
    (Count::Held, names::HELD),
    (Count::Claimed, names::CLAIMED),
    (Count::Lost, names::LOST),
];

/// The numbers of one stream, each beside the metric that reports it.
struct StreamCells {
    counts: [(AtomicU64, ::metrics::Counter); COUNTS.len()],
    in_flight: AtomicU64,
    in_flight_metric: ::metrics::Gauge,
    times: RwLock<HandlerTimes>,
    seconds_metric: ::metrics::Histogram,
    lag: RwLock<Option<Lag>>,
    lag_metrics: [::metrics::Gauge; 3],
}

impl Counters {
    pub(crate) fn new(group: &str) -> Self {
        Self(Arc::new(Shared {
            group: group.to_owned(),
            outages: AtomicU64::new(0),
            outages_metric: ::metrics::counter!(names::OUTAGES, names::GROUP => group.to_owned()),
            streams: RwLock::default(),
        }))
    }

    /// The counts as they are now, over all streams.
    #[must_use]
    pub fn snapshot(&self) -> CountersSnapshot {
        let mut all = CountersSnapshot {
            outages: self.0.outages.load(Ordering::Relaxed),
            ..CountersSnapshot::default()
        };
        for StreamSnapshot { counts, .. } in self.streams() {
            all.applied += counts.applied;
            all.repeated += counts.repeated;
            all.failed += counts.failed;
            all.retried += counts.retried;
            all.dead += counts.dead;
            all.held += counts.held;
            all.claimed += counts.claimed;
            all.lost += counts.lost;
        }
        all
    }

    /// The numbers of each stream as they are now, sorted by its key.
    #[must_use]
    pub fn streams(&self) -> Vec<StreamSnapshot> {
        let streams = self
            .0
            .streams
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let snapshots = streams.iter().map(|(stream, cells)| cells.snapshot(stream));
        snapshots.collect()
    }

    pub(crate) fn add(&self, stream: &str, count: Count, n: usize) {
        if n > 0 {
            let cells = self.of(stream);
            let (cell, metric) = &cells.counts[count as usize];
            cell.fetch_add(n as u64, Ordering::Relaxed);
            metric.increment(n as u64);
        }
    }

    pub(crate) fn add_outage(&self) {
        self.0.outages.fetch_add(1, Ordering::Relaxed);
        self.0.outages_metric.increment(1);
    }

    /// The handler has been given messages, and has them until the guard is dropped.
    pub(crate) fn begin(&self, stream: &str, messages: usize) -> InFlight {
        let cells = self.of(stream);
        cells
            .in_flight
            .fetch_add(messages as u64, Ordering::Relaxed);
        cells.in_flight_metric.increment(messages as f64);
        InFlight { cells, messages }
    }

    pub(crate) fn took(&self, stream: &str, time: Duration) {
        let cells = self.of(stream);
        cells
            .times
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .add(time);
        cells.seconds_metric.record(time.as_secs_f64());
    }

    pub(crate) fn set_lag(&self, stream: &str, lag: Lag) {
        let cells = self.of(stream);
        *cells.lag.write().unwrap_or_else(PoisonError::into_inner) = Some(lag);
        let [entries, pending, seconds] = &cells.lag_metrics;
        entries.set(lag.entries as f64);
        pending.set(lag.pending as f64);
        seconds.set(lag.age.as_secs_f64());
    }

    fn of(&self, stream: &str) -> Arc<StreamCells> {
        let known = self
            .0
            .streams
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(stream)
            .cloned();
        known.unwrap_or_else(|| {
            let mut streams = self
                .0
                .streams
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            let made = || Arc::new(StreamCells::new(&self.0.group, stream));
            Arc::clone(streams.entry(stream.to_owned()).or_insert_with(made))
        })
    }
}

impl StreamCells {
    fn new(group: &str, stream: &str) -> Self {
        let labels = [
            (names::GROUP, group.to_owned()),
            (names::STREAM, stream.to_owned()),
        ];
        let gauge = |name: &'static str| ::metrics::gauge!(name, &labels);
        Self {
            counts: COUNTS.map(|(_, name)| (AtomicU64::new(0), ::metrics::counter!(name, &labels))),
            in_flight: AtomicU64::new(0),
            in_flight_metric: gauge(names::IN_FLIGHT),
            times: RwLock::default(),
            seconds_metric: ::metrics::histogram!(names::HANDLER_SECONDS, &labels),
            lag: RwLock::new(None),
            lag_metrics: [
                names::LAG_ENTRIES,
                names::PENDING_ENTRIES,
                names::LAG_SECONDS,
            ]
            .map(gauge),
        }
    }

    fn snapshot(&self, stream: &str) -> StreamSnapshot {
        let count = |count: Count| self.counts[count as usize].0.load(Ordering::Relaxed);
        StreamSnapshot {
            stream: stream.to_owned(),
            counts: CountersSnapshot {
                applied: count(Count::Applied),
                repeated: count(Count::Repeated),
                failed: count(Count::Failed),
                retried: count(Count::Retried),
                dead: count(Count::Dead),
                held: count(Count::Held),
                claimed: count(Count::Claimed),
                lost: count(Count::Lost),
                outages: 0,
            },
            in_flight: self.in_flight.load(Ordering::Relaxed),
            handler_times: self
                .times
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
            lag: *self.lag.read().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

impl std::fmt::Debug for StreamCells {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.snapshot("").fmt(f)
    }
}

/// Messages that are with the handler. A handler that is broken off drops it as well.
pub(crate) struct InFlight {
    cells: Arc<StreamCells>,
    messages: usize,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.cells
            .in_flight
            .fetch_sub(self.messages as u64, Ordering::Relaxed);
        self.cells.in_flight_metric.decrement(self.messages as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_count_stands_at_its_place() {
        for (index, (count, _)) in COUNTS.into_iter().enumerate() {
            assert_eq!(count as usize, index);
        }
    }

    #[test]
    fn streams_are_counted_apart_and_summed() {
        let counters = Counters::new("shipping");
        counters.add("a", Count::Applied, 2);
        counters.add("b", Count::Applied, 3);
        counters.add("b", Count::Lost, 0);
        counters.add_outage();
        let all = counters.snapshot();
        assert_eq!((all.applied, all.lost, all.outages), (5, 0, 1));
        let streams = counters.streams();
        assert_eq!(
            (streams[0].stream.as_str(), streams[0].counts.applied),
            ("a", 2)
        );
        assert_eq!(
            (streams[1].stream.as_str(), streams[1].counts.applied),
            ("b", 3)
        );
    }

    #[test]
    fn what_is_broken_off_is_no_longer_in_flight() {
        let counters = Counters::new("shipping");
        let guard = counters.begin("a", 7);
        assert_eq!(counters.streams()[0].in_flight, 7);
        drop(guard);
        assert_eq!(counters.streams()[0].in_flight, 0);
    }
}
