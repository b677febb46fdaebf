//! A cursor with its place in time: what the marker and the checkpoint hold.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::cursor::{Cursor, Step};
use super::layout::Layouts;

/// Which past of Postgres a cursor belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct History {
    /// The cluster's system identifier.
    pub system_id: u64,
    /// The timeline, which a promotion raises.
    pub timeline: u32,
    /// A number drawn anew each time the past turned out to be another: a restored storage snapshot
    /// keeps the other two.
    pub branch: Uuid,
}

/// Rows that may stand in the streams already, after the history changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Suspect {
    /// Rows up to this id are compared with the streams before they are published.
    pub until: i64,
    /// They were published after this time of Redis' clock, in milliseconds.
    pub since_ms: i64,
}

impl Suspect {
    /// Whether the row `id` has to be looked for in the streams when the cursor stands at `place`.
    pub fn may_stand(&self, id: i64, place: &Place) -> bool {
        // What a held stream lacks is covered by the common cursor.
        let covered = place.blocked.is_empty() && place.cursor.covers(id);
        id <= self.until && !covered
    }

    /// Whether no row is suspect any longer once the cursor of `place` made this step.
    pub fn ends_with(&self, step: &Step, place: &Place) -> bool {
        if !place.blocked.is_empty() {
            return false; // a stream that is held back has suspect rows of its own
        }
        let mut after = place.cursor.clone();
        after.apply(step);
        after.high >= self.until && after.gaps.first().is_none_or(|first| first > self.until)
    }
}

/// A stream that refuses entries, with a cursor of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Blocked {
    /// The topic whose stream it is.
    pub topic: String,
    /// What was published to it. Its `high_key` is not used.
    pub cursor: Cursor,
    /// What Redis said.
    pub reason: String,
}

/// A cursor with its place in time; both the marker and the checkpoint are one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The past it belongs to.
    pub history: History,
    /// The leadership that wrote it.
    pub epoch: i64,
    /// The page within the epoch that it followed.
    pub page: i64,
    /// What was published by then.
    pub cursor: Cursor,
    /// Redis' clock at that page, in milliseconds.
    pub redis_ms: i64,
    /// Streams that were held back, by name.
    pub blocked: BTreeMap<String, Blocked>,
    /// How the topics were spread over streams.
    pub layouts: Layouts,
}

impl Place {
    /// Up to this id every message is published for good: below `high`, the lowest gap and what streams that
    /// are held back lack. The row at `high` is left out, since the history is recognised by it.
    pub fn settled_up_to(&self) -> i64 {
        let cursors = std::iter::once(&self.cursor).chain(self.blocked.values().map(|b| &b.cursor));
        let settled =
            |c: &Cursor| (c.high - 1).min(c.gaps.first().map_or(i64::MAX, |first| first - 1));
        cursors.map(settled).min().unwrap_or(0)
    }

    /// Moves on behind a page that was published.
    pub fn pass(&mut self, step: &Step, redis_ms: i64) {
        self.cursor.apply(step);
        self.page += 1;
        self.redis_ms = redis_ms;
    }

    /// Epoch and page: the order in which the places of one past follow each other.
    pub(super) fn order(&self) -> (i64, i64) {
        (self.epoch, self.page)
    }
}
