//! What one round over the streams has seen, and what follows from it.

use std::collections::BTreeSet;

use super::{Order, Rounds};
use crate::config::Hold;
use crate::metric_names as names;
use crate::publisher::{Standing, Tended};

/// What one round has seen.
pub(super) struct Seen {
    pub(super) order: Order,
    pub(super) trimmed: u64,
    pub(super) without_group: BTreeSet<String>,
    /// The youngest entry of all streams.
    pub(super) last_ms: u64,
    /// For each hold the oldest entry that is not acknowledged (0: all of it), and its stream.
    pub(super) oldest: Vec<Option<(u64, String)>>,
}

impl Rounds {
    /// Draws the conclusions of a whole round.
    pub(super) fn report(&mut self, seen: Seen) {
        ::metrics::gauge!(names::STREAMS_WITHOUT_GROUP).set(seen.without_group.len() as f64);
        for stream in seen.without_group.difference(&self.without_group) {
            tracing::warn!(
                stream,
                "a stream without a group is not trimmed: it grows until a group has read it, or somebody deletes it"
            );
        }
        if seen.trimmed > 0 {
            tracing::debug!(entries = seen.trimmed, "trimmed the streams");
        }
        self.report_hold(&seen);
        self.reporter.saw(&self.config, &seen);
        self.without_group = seen.without_group;
    }

    fn report_hold(&mut self, seen: &Seen) {
        if seen.oldest.is_empty() {
            return;
        }
        self.ledger.note(seen.order.settled, seen.last_ms);
        let oldest = seen.oldest.iter().zip(&self.config.hold_until_acked);
        let oldest = oldest
            .filter_map(|(oldest, hold)| oldest.as_ref().map(|(ms, stream)| (*ms, stream, hold)))
            .min_by_key(|(ms, ..)| *ms);
        let oldest_ms = oldest.map_or(u64::MAX, |(ms, ..)| ms);
        let purge_floor = self.ledger.acknowledged_up_to(oldest_ms);
        self.tell
            .send_modify(|findings| findings.purge_floor = purge_floor);
        ::metrics::gauge!(names::HOLD_FLOOR).set(purge_floor as f64);
        // A group that is behind by less than the retention holds up nothing.
        let retention_ms = u64::try_from(self.config.retention.as_millis()).unwrap_or(u64::MAX);
        let oldest = oldest.filter(|(ms, ..)| ms.saturating_add(retention_ms) < seen.last_ms);
        let holder = oldest.map(|(_, stream, hold)| (hold.group.clone(), stream.clone()));
        if let Some((oldest_ms, stream, hold)) = oldest
            && holder != self.holder
        {
            let group = &hold.group;
            if oldest_ms == 0 {
                tracing::warn!(
                    group,
                    stream,
                    "no row is purged: a group of --hold-until-acked is not on this stream"
                );
            } else {
                tracing::info!(
                    group,
                    stream,
                    oldest_ms,
                    purge_floor,
                    "rows stay in the outbox until the group has acknowledged them"
                );
            }
        }
        self.holder = holder;
    }
}

impl Seen {
    pub(super) fn stream(&mut self, stream: &str, holds: &[usize], tended: &Tended) {
        self.last_ms = self.last_ms.max(tended.last_ms);
        if tended.groups == 0 && tended.is_overdue {
            self.without_group.insert(stream.to_owned());
        }
        for (index, standing) in holds.iter().zip(&tended.standings) {
            let oldest_ms = match standing {
                Standing::Done => continue,
                Standing::Absent => 0,
                Standing::Behind(ms) => *ms,
            };
            let oldest = &mut self.oldest[*index];
            if oldest.as_ref().is_none_or(|(ms, _)| oldest_ms < *ms) {
                *oldest = Some((oldest_ms, stream.to_owned()));
            }
        }
    }
}

impl Hold {
    pub(super) fn is_about(&self, topic: &str) -> bool {
        self.topics.is_empty() || self.topics.iter().any(|of| of == topic)
    }
}
