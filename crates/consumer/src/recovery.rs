//! Where the search for entries that were given out before stands: our own, and those of dead members.

use std::time::Duration;

use tokio::time::Instant;

/// The start of a stream, and where XAUTOCLAIM's cursor is after the last entry.
pub(crate) const START: &str = "0-0";

/// Reads the entries that are pending for our own name, source after source.
#[derive(Debug)]
pub(crate) struct OwnPending {
    sources: usize,
    source: usize,
    after: String,
}

impl OwnPending {
    pub(crate) fn new(sources: usize) -> Self {
        Self {
            sources,
            source: 0,
            after: START.to_owned(),
        }
    }

    /// The source to read and the entry to read after; none when all are done.
    pub(crate) fn position(&self) -> Option<(usize, &str)> {
        (self.source < self.sources).then_some((self.source, self.after.as_str()))
    }

    /// Goes on after the last entry that was read, or to the next source if there was none.
    pub(crate) fn advance(&mut self, last: Option<&str>) {
        match last {
            Some(last) => last.clone_into(&mut self.after),
            None => {
                self.source += 1;
                START.clone_into(&mut self.after);
            }
        }
    }

    /// Begins again: a reply may have been lost, and with it entries that are now ours.
    pub(crate) fn restart(&mut self) {
        *self = Self::new(self.sources);
    }
}

/// The walk over all pending entries of the group for those whose member is dead. XAUTOCLAIM looks at a
/// part of the list each time, so the cursor is carried until it wraps; else the tail is never reached.
#[derive(Debug)]
pub(crate) struct Walk {
    sources: usize,
    source: usize,
    cursor: String,
    interval: Duration,
    next_at: Instant,
}

impl Walk {
    pub(crate) fn new(sources: usize, interval: Duration) -> Self {
        Self {
            sources,
            source: 0,
            cursor: START.to_owned(),
            interval,
            next_at: Instant::now(),
        }
    }

    /// The source and cursor of the next step, if a walk is under way or due.
    pub(crate) fn position(&self, now: Instant) -> Option<(usize, &str)> {
        (self.is_under_way() || now >= self.next_at).then_some((self.source, self.cursor.as_str()))
    }

    pub(crate) fn is_under_way(&self) -> bool {
        self.source > 0 || self.cursor != START
    }

    /// Takes the cursor that a step returned. After the last source the walk rests.
    pub(crate) fn advance(&mut self, cursor: String, now: Instant) {
        if cursor == START {
            self.source += 1;
            if self.source >= self.sources {
                self.source = 0;
                self.next_at = now + self.interval;
            }
        }
        self.cursor = cursor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_entries_are_read_to_the_end_of_each_source() {
        let mut own = OwnPending::new(2);
        assert_eq!(own.position(), Some((0, START)));
        own.advance(Some("7-0"));
        assert_eq!(own.position(), Some((0, "7-0")));
        own.advance(None);
        assert_eq!(own.position(), Some((1, START)));
        own.advance(None);
        assert_eq!(own.position(), None);
        own.restart();
        assert_eq!(own.position(), Some((0, START)));
    }

    #[test]
    fn a_walk_carries_its_cursor_until_it_wraps_and_then_rests() {
        let interval = Duration::from_secs(30);
        let mut walk = Walk::new(2, interval);
        let now = Instant::now();
        assert_eq!(walk.position(now), Some((0, START)));
        walk.advance("5-0".to_owned(), now);
        assert_eq!(walk.position(now), Some((0, "5-0")));
        walk.advance(START.to_owned(), now);
        assert!(walk.is_under_way());
        assert_eq!(walk.position(now), Some((1, START)));
        walk.advance(START.to_owned(), now);
        assert!(!walk.is_under_way());
        assert_eq!(walk.position(now), None);
        assert_eq!(walk.position(now + interval), Some((0, START)));
    }
}
