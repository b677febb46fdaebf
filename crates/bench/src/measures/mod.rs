//! The measures. Each runs its arms one after the other, as often as the size says, and compares within a repetition.

mod barrier;
mod consumer;
mod drain_topics;
mod drain_vs_limit;
mod drain_vs_loop;
mod drain_with_purge;
mod end_to_end;
mod held_xmin;
mod idle;
mod latency;
mod memory;
mod producer_busy;
mod producer_cost;
mod wal;

use futures_util::future::{FutureExt as _, LocalBoxFuture};

pub(crate) use producer_busy::{ALWAYS, OURS, WITHOUT};

use crate::{Error, figures::Outcome, stage::Stage};

/// One measure.
pub(crate) struct Measure {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) take: for<'s> fn(&'s Stage) -> LocalBoxFuture<'s, Result<Outcome, Error>>,
}

macro_rules! measure {
    ($name:ident, $about:literal) => {
        Measure {
            name: stringify!($name),
            about: $about,
            take: |stage| $name::take(stage).boxed_local(),
        }
    };
}

/// All measures, in the order in which they are taken.
pub(crate) const MEASURES: &[Measure] = &[
    measure!(
        drain_vs_limit,
        "a backlog into one stream, beside pipelined XADDs of the same entries"
    ),
    measure!(
        drain_vs_loop,
        "a backlog, beside a loop of SKIP LOCKED, XADD and UPDATE"
    ),
    measure!(
        drain_with_purge,
        "a backlog while the purge catches up, beside the loop with DELETE"
    ),
    measure!(
        drain_topics,
        "a backlog of 100 topics and 100,000 ordering keys, beside one of a single topic"
    ),
    measure!(
        memory,
        "the relay's peak memory, of many messages and of large ones"
    ),
    measure!(
        latency,
        "from commit to XREAD, beside an application that commits and then XADDs"
    ),
    measure!(
        producer_busy,
        "32 clients with order and message while the relay drains, by way of waking it"
    ),
    measure!(
        producer_cost,
        "transactions of order and message, beside the order alone; no relay"
    ),
    measure!(idle, "the relay with nothing to do"),
    measure!(
        held_xmin,
        "5,000 messages/s under a transaction that stays open, purge on; the loop beside it"
    ),
    measure!(
        wal,
        "WAL of a message until it is sent, beside its INSERT alone"
    ),
    measure!(
        barrier,
        "commits that the relay forces to have read rows flushed"
    ),
    measure!(
        consumer,
        "one consumer with its inbox, beside the same inserts without Redis and inbox"
    ),
    measure!(
        end_to_end,
        "producers, relay and two consumers at once, from commit to effect"
    ),
];
