//! Where the search for entries that were given out before stands: our own, and those that other members left.

use std::time::Duration;

use tokio::time::Instant;

/// The start of a stream, and where XAUTOCLAIM's cursor is after the last entry.
pub(crate) const START: &str = "0-0";

/// What the search in one stream does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Look whether other members hold anything.
    Look,
    /// Read the entries that are pending for our own name, after this one.
    Own { after: String },
    /// Claim what others hold, from this cursor on: at once, or what nobody has touched for the claim time, be it
    /// under our own name. XAUTOCLAIM looks at a part of the list each time, so the cursor is carried until it wraps;
    /// else the tail is never reached.
    Claim { cursor: String, at_once: bool },
    /// Nothing, until then.
    Rest { until: Instant },
}

/// The search in one stream.
///
/// The owner of a stream claims whatever others hold, at once, and before it reads anything new: what the last owner was
/// given comes before it. Members that share a stream take up their own entries first. Then all claim, from time to
/// time, what nobody has touched for the claim time. Such entries can stand under our own name, too: a Redis that fell
/// back to an earlier state without a disconnect gives us again what we have acknowledged.
#[derive(Debug)]
pub(crate) struct Search {
    owner: bool,
    interval: Duration,
    step: Step,
}

impl Search {
    pub(crate) fn new(owner: bool, interval: Duration) -> Self {
        let mut search = Self {
            owner,
            interval,
            step: Step::Look,
        };
        search.restart();
        search
    }

    /// The next step; none while the search rests.
    pub(crate) fn step(&self, now: Instant) -> Option<Step> {
        match &self.step {
            Step::Rest { until } => (now >= *until).then(|| claim_from_start(false)),
            step => Some(step.clone()),
        }
    }

    /// Whether new entries must wait for the search.
    pub(crate) fn comes_first(&self) -> bool {
        match self.step {
            Step::Look | Step::Own { .. } => true,
            Step::Claim { .. } => self.owner,
            Step::Rest { .. } => false,
        }
    }

    /// Begins again: a reply may have been lost, and with it entries that are now ours.
    pub(crate) fn restart(&mut self) {
        self.step = if self.owner {
            Step::Look
        } else {
            own_from_start()
        };
    }

    /// Takes what was seen of other members' entries.
    pub(crate) fn others_hold(&mut self, anything: bool) {
        self.step = if anything {
            claim_from_start(true)
        } else {
            own_from_start()
        };
    }

    /// Other members hold entries that come before what was read now.
    pub(crate) fn claim_all(&mut self) {
        self.step = claim_from_start(true);
    }

    /// Goes on after the last of our own entries that was read; if there was none, that part is over.
    pub(crate) fn read_own(&mut self, last: Option<&str>, now: Instant) {
        self.step = match last {
            Some(last) => Step::Own {
                after: last.to_owned(),
            },
            None if self.owner => self.rest(now),
            None => claim_from_start(false),
        };
    }

    /// Takes the cursor that XAUTOCLAIM returned.
    pub(crate) fn claimed(&mut self, cursor: String, at_once: bool, now: Instant) {
        self.step = if cursor != START {
            Step::Claim { cursor, at_once }
        } else {
            self.rest(now)
        };
    }

    fn rest(&self, now: Instant) -> Step {
        Step::Rest {
            until: now + self.interval,
        }
    }
}

fn own_from_start() -> Step {
    Step::Own {
        after: START.to_owned(),
    }
}

fn claim_from_start(at_once: bool) -> Step {
    Step::Claim {
        cursor: START.to_owned(),
        at_once,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);

    #[test]
    fn who_shares_a_stream_reads_its_own_and_then_walks_with_a_carried_cursor() {
        let (mut search, now) = (Search::new(false, INTERVAL), Instant::now());
        assert_eq!(search.step(now), Some(own_from_start()));
        search.read_own(Some("7-0"), now);
        let after = "7-0".to_owned();
        assert_eq!(search.step(now), Some(Step::Own { after }));
        search.read_own(None, now);
        assert_eq!(search.step(now), Some(claim_from_start(false)));
        assert!(!search.comes_first());
        search.claimed("5-0".to_owned(), false, now);
        let cursor = "5-0".to_owned();
        assert_eq!(
            search.step(now),
            Some(Step::Claim {
                cursor,
                at_once: false
            })
        );
        search.claimed(START.to_owned(), false, now);
        assert_eq!(search.step(now), None);
        assert_eq!(search.step(now + INTERVAL), Some(claim_from_start(false)));
    }

    #[test]
    fn an_owner_reads_nothing_new_before_it_has_what_others_hold() {
        let (mut search, now) = (Search::new(true, INTERVAL), Instant::now());
        assert_eq!(search.step(now), Some(Step::Look));
        search.others_hold(true);
        assert!(search.comes_first());
        search.claimed("5-0".to_owned(), true, now);
        assert!(search.comes_first());
        search.claimed(START.to_owned(), true, now);
        assert!(!search.comes_first());
        assert_eq!(search.step(now), None);
        search.restart();
        search.others_hold(false);
        assert_eq!(search.step(now), Some(own_from_start()));
        search.read_own(None, now);
        assert_eq!(search.step(now), None);
        assert_eq!(search.step(now + INTERVAL), Some(claim_from_start(false)));
    }
}
