//! Names of the metrics that a relay reports through the [`metrics`](https://docs.rs/metrics) facade, with what they
//! mean. They are a public contract: a name or a meaning changes with a major version only.

/// One metric: its name, its kind as Prometheus calls it, and what it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// The name on `/metrics`.
    pub name: &'static str,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// What it means.
    pub help: &'static str,
}

macro_rules! metrics {
    ($(#[doc = $help:literal] $kind:ident $constant:ident = $name:literal;)*) => {
        $(#[doc = $help] pub const $constant: &str = $name;)*

        /// Every metric of the relay.
        pub const ALL: &[Metric] = &[
            $(Metric { name: $name, kind: stringify!($kind), help: $help.trim_ascii_start() },)*
        ];

        /// Tells the recorder what each metric means, and lets counters begin at 0: a rate is blind to a series that begins
        /// with its first event.
        pub(crate) fn describe() {
            $(metrics!(@describe $kind $constant $help);)*
            for metric in ALL.iter().filter(|metric| metric.kind == "counter") {
                if metric.name != REDIS_LOSSES {
                    ::metrics::counter!(metric.name).increment(0);
                }
            }
            for lost in LOSSES {
                ::metrics::counter!(REDIS_LOSSES, LOST => lost).increment(0);
            }
        }
    };
    (@describe counter $constant:ident $help:literal) => { ::metrics::describe_counter!($constant, $help.trim_ascii_start()) };
    (@describe gauge $constant:ident $help:literal) => { ::metrics::describe_gauge!($constant, $help.trim_ascii_start()) };
    (@describe histogram $constant:ident $help:literal) => { ::metrics::describe_histogram!($constant, $help.trim_ascii_start()) };
}

/// Label of [`REDIS_LOSSES`]: `tail`, `marker` or `all`.
pub const LOST: &str = "lost";

/// What [`LOST`] may say.
pub(crate) const LOSSES: [&str; 3] = ["tail", "marker", "all"];

metrics! {
    /// 1 on the relay that leads, 0 on any other.
    gauge LEADER = "outbox_relay_leader";
    /// 1 where `/readyz` says ready, else 0.
    gauge READY = "outbox_relay_ready";
    /// 1 while publishing is paused (`outbox-relay pause`), else 0; every relay says so.
    gauge PAUSED = "outbox_relay_paused";
    /// Number of the leadership, as the marker has it; it grows with each take-over.
    gauge EPOCH = "outbox_relay_epoch";
    /// Take-overs by this process, also those after a failure of Redis.
    counter TAKEOVERS = "outbox_relay_takeovers_total";
    /// Messages published by this process.
    counter PUBLISHED = "outbox_relay_published_messages_total";
    /// Bytes of payload, headers and ordering keys of the messages published by this process.
    counter PUBLISHED_BYTES = "outbox_relay_published_bytes_total";
    /// Pages published by this process: one transaction of Redis each.
    counter PAGES = "outbox_relay_pages_total";
    /// Seconds from handing a page to Redis until its reply.
    histogram PAGE_SECONDS = "outbox_relay_page_seconds";
    /// Seconds from the beginning of a message's transaction until it is published, for the first message of each page; by the clocks of Postgres and of this machine.
    histogram DELAY_SECONDS = "outbox_relay_publish_delay_seconds";
    /// Checkpoints written by this process.
    counter CHECKPOINTS = "outbox_relay_checkpoints_total";
    /// Largest id that was read; every message up to it is published, but for gaps and blocked streams.
    gauge HIGH = "outbox_relay_high_id";
    /// Messages that the checkpoint has not passed, counted up to 100000.
    gauge BACKLOG = "outbox_relay_backlog_messages";
    /// Age in seconds of the oldest message that the checkpoint has not passed; 0 when there is none.
    gauge OLDEST_UNPUBLISHED = "outbox_relay_oldest_unpublished_seconds";
    /// Ranges of ids below the cursor that open transactions may still fill.
    gauge GAP_RANGES = "outbox_relay_gap_ranges";
    /// Open or prepared transactions that wrote messages, counted up to 5.
    gauge HOLDERS = "outbox_relay_open_writers";
    /// Age in seconds of the oldest transaction that wrote messages and is open; 0 when there is none.
    gauge OLDEST_HOLDER = "outbox_relay_oldest_open_writer_seconds";
    /// Streams and topics that are held back: they refuse entries, or their number of partitions is to change.
    gauge BLOCKED = "outbox_relay_blocked_streams";
    /// Messages in outbox.dead_letters: Redis refused them for their size.
    gauge DEAD_LETTERS = "outbox_relay_dead_letters";
    /// Times that publishing was interrupted by Redis, by Postgres or by a changed history.
    counter INTERRUPTIONS = "outbox_relay_interruptions_total";
    /// Times that Redis was found to have lost entries (tail), only the marker (marker), or everything (all).
    counter REDIS_LOSSES = "outbox_relay_redis_losses_total";
    /// Times that entries were lost in Redis whose messages had been purged already: an ERROR line names the ids.
    counter UNRECOVERABLE = "outbox_relay_unrecoverable_losses_total";
    /// Published messages that the purge deleted.
    counter PURGED = "outbox_relay_purged_messages_total";
    /// Entries that were trimmed from streams.
    counter TRIMMED = "outbox_relay_trimmed_entries_total";
    /// Streams that are not trimmed for lack of a group, though their first entry is past --stream-max-age; 0 where it is 0.
    gauge STREAMS_WITHOUT_GROUP = "outbox_relay_streams_without_group";
    /// Part of Redis' maxmemory that is used, as the leader sees it, 0 to 1; 0 without a limit.
    gauge REDIS_MEMORY = "outbox_relay_redis_memory_ratio";
    /// 1 while publishing is paused because Redis is at --redis-memory-ceiling, else 0.
    gauge PAUSED_FOR_MEMORY = "outbox_relay_paused_for_memory";
    /// Id up to which the groups of --hold-until-acked have acknowledged everything; rows above it stay. Only with that flag.
    gauge HOLD_FLOOR = "outbox_relay_hold_floor_id";
}
