//! What the caretaker tells `status`: settings of this relay, and what its last round saw.

use std::time::{Duration, Instant};

use super::Rounds;
use super::round::Seen;
use crate::config::{Config, Hold};
use crate::error::{Error, Result, redis_fault};
use crate::protocol::failure::RedisFault;
use crate::publisher::{CareReport, HeldFor, HeldStanding, Tending};

/// How often the report is left anew while nothing changes; a part of the time after which it is forgotten.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// The report that was left last.
#[derive(Debug, Default)]
pub(super) struct Reporter {
    /// What the last round saw of the groups that hold rows.
    holds: Vec<HeldFor>,
    left: Option<(CareReport, Instant)>,
}

impl Reporter {
    pub(super) fn new(config: &Config) -> Self {
        let not_known = |hold: &Hold| held_for(hold, HeldStanding::NotKnown);
        Reporter {
            holds: config.hold_until_acked.iter().map(not_known).collect(),
            left: None,
        }
    }

    /// Takes in what a whole round has seen.
    pub(super) fn saw(&mut self, config: &Config, seen: &Seen) {
        let holds = seen.oldest.iter().zip(&config.hold_until_acked);
        let standing = |oldest: &Option<(u64, String)>| match oldest {
            None => HeldStanding::Acknowledged,
            Some((0, stream)) => HeldStanding::Absent {
                stream: stream.clone(),
            },
            Some((oldest_ms, stream)) => HeldStanding::Behind {
                stream: stream.clone(),
                oldest_ms: *oldest_ms,
            },
        };
        self.holds = holds
            .map(|(oldest, hold)| held_for(hold, standing(oldest)))
            .collect();
    }
}

impl Rounds {
    /// Leaves a report where it has changed, or was left some time ago.
    pub(super) async fn leave_report(&mut self, tending: &mut Tending) -> Result<()> {
        let report = self.report_now();
        if let Some((left, at)) = &self.reporter.left
            && *left == report
            && at.elapsed() < REPORT_INTERVAL
        {
            return Ok(());
        }
        match tending.leave_report(&report).await {
            // Nothing depends on it: a Redis that refuses it, for lack of a right or as it refuses all writes, is looked
            // after as before.
            Err(Error::Redis { source, .. })
                if matches!(redis_fault(&source), RedisFault::Reply(_)) =>
            {
                tracing::debug!(%source, "no report for status could be left");
            }
            other => other?,
        }
        self.reporter.left = Some((report, Instant::now()));
        Ok(())
    }

    fn report_now(&self) -> CareReport {
        let config = &self.config;
        let is_held = !config.hold_until_acked.is_empty();
        CareReport {
            relay: config.name.clone(),
            memory_ceiling_percent: config.redis_memory_ceiling,
            paused_by_ceiling: self.gauge.is_full,
            holds: self.reporter.holds.clone(),
            hold_floor_id: is_held.then(|| self.tell.borrow().purge_floor),
        }
    }
}

fn held_for(hold: &Hold, standing: HeldStanding) -> HeldFor {
    HeldFor {
        group: hold.group.clone(),
        topics: hold.topics.clone(),
        standing,
    }
}
