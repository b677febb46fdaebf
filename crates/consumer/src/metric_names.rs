//! Names of the metrics that a consumer reports through the [`metrics`](https://docs.rs/metrics) facade.
//!
//! Nothing is reported until the application installs a recorder, which it does before it runs a consumer. Each has
//! the labels [`GROUP`] and [`STREAM`], except [`OUTAGES`], which has the first only. Counters count what this process
//! did; lag and pending are of the whole group, and every member reports them.

/// Label: the consumer group.
pub const GROUP: &str = "group";
/// Label: the key of the stream.
pub const STREAM: &str = "stream";

/// Counter: messages whose effect was committed.
pub const APPLIED: &str = "outbox_consumer_applied_total";
/// Counter: entries acknowledged without the handler, because the inbox had their key already.
pub const REPEATED: &str = "outbox_consumer_repeated_total";
/// Counter: attempts that failed and were counted.
pub const FAILED: &str = "outbox_consumer_failed_total";
/// Counter: calls of the handler for a message that had been attempted before.
pub const RETRIED: &str = "outbox_consumer_retried_total";
/// Counter: entries set aside as dead letters.
pub const DEAD: &str = "outbox_consumer_dead_total";
/// Counter: messages set aside because a dead letter holds their ordering key.
pub const HELD: &str = "outbox_consumer_held_total";
/// Counter: entries taken over from other members.
pub const CLAIMED: &str = "outbox_consumer_claimed_total";
/// Counter: entries that were deleted from their stream before they were handled.
pub const LOST: &str = "outbox_consumer_lost_total";
/// Counter: operations that failed because of an outage and were tried again.
pub const OUTAGES: &str = "outbox_consumer_outages_total";
/// Gauge: messages that are with the handler now.
pub const IN_FLIGHT: &str = "outbox_consumer_in_flight";
/// Histogram: seconds that one call of the handler took.
pub const HANDLER_SECONDS: &str = "outbox_consumer_handler_seconds";
/// Gauge: entries that the group has not been given yet.
pub const LAG_ENTRIES: &str = "outbox_consumer_lag_entries";
/// Gauge: entries that the group was given and has not acknowledged.
pub const PENDING_ENTRIES: &str = "outbox_consumer_pending_entries";
/// Gauge: age in seconds of the oldest entry that the group has not acknowledged; 0 when there is none.
pub const LAG_SECONDS: &str = "outbox_consumer_lag_seconds";
