//! Redis: streams and the marker, the two scripts that write them, and what a loss leaves.

use std::collections::BTreeMap;

use outbox_relay::protocol::cursor::{Cursor, Step};
use outbox_relay::protocol::layout::Layouts;
use outbox_relay::protocol::place::{History, Place, Suspect};
use outbox_relay::protocol::start::MarkerFound;
use uuid::Uuid;

use crate::postgres::Message;
use crate::wrong::Wrong;

/// The outbox of the model.
pub(crate) const OUTBOX: Uuid = Uuid::from_u128(1);

/// The marker's hash and the hash of its gaps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Marker {
    /// The take-over that wrote it.
    pub(crate) leadership: u8,
    pub(crate) history: History,
    pub(crate) epoch: i64,
    pub(crate) page: i64,
    pub(crate) high: i64,
    pub(crate) high_key: String,
    /// How many gaps there should be.
    pub(crate) ranges: usize,
    pub(crate) suspect: Option<Suspect>,
    /// First id to last id, changed by delta.
    pub(crate) gaps: BTreeMap<i64, i64>,
}

/// The server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Redis {
    pub(crate) marker: Option<Marker>,
    pub(crate) streams: BTreeMap<String, Vec<Message>>,
}

/// A script with its arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Script {
    /// `take.lua`.
    Take(Box<Take>),
    /// `page.lua`.
    Page(Box<PageScript>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Take {
    /// Leadership and page of the marker that was read.
    pub(crate) found: Option<(u8, i64)>,
    pub(crate) leadership: u8,
    pub(crate) place: Place,
    pub(crate) suspect: Option<Suspect>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PageScript {
    pub(crate) leadership: u8,
    pub(crate) page: i64,
    pub(crate) entries: Vec<(String, Message)>,
    pub(crate) step: Step,
    pub(crate) ranges: usize,
    pub(crate) drop_suspect: bool,
}

impl Redis {
    /// Leadership and page of the marker.
    pub(crate) fn position(&self) -> Option<(u8, i64)> {
        self.marker.as_ref().map(|m| (m.leadership, m.page))
    }

    /// What stands at the marker's key.
    pub(crate) fn found(&self) -> MarkerFound {
        let Some(marker) = &self.marker else {
            return MarkerFound::Missing;
        };
        if marker.ranges != marker.gaps.len() {
            return MarkerFound::Foreign("list of gaps".to_owned());
        }
        MarkerFound::Marker {
            outbox_id: OUTBOX,
            leadership: Uuid::from_u128(marker.leadership.into()),
            place: Place {
                history: marker.history.clone(),
                epoch: marker.epoch,
                page: marker.page,
                cursor: Cursor {
                    high: marker.high,
                    high_key: marker.high_key.clone(),
                    gaps: marker.gaps.iter().map(|(lo, hi)| (*lo, *hi)).collect(),
                },
                redis_ms: 0,
                blocked: BTreeMap::new(),
                layouts: Layouts::new(),
            },
            suspect: marker.suspect,
        }
    }

    /// Whether a message stands in a stream.
    pub(crate) fn holds(&self, stream: &str, message: &Message) -> bool {
        self.streams
            .get(stream)
            .is_some_and(|entries| entries.contains(message))
    }

    /// All entries, stream after stream.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &Message> {
        self.streams.values().flatten()
    }

    /// Whether a page would be published.
    pub(crate) fn would_take(&self, page: &PageScript, wrong: Wrong) -> bool {
        self.marker.as_ref().is_some_and(|marker| {
            (marker.leadership == page.leadership || wrong == Wrong::NoEpoch)
                && (marker.page == page.page || wrong == Wrong::NoPageNumber)
        })
    }

    /// Runs a script as a whole; false when it does nothing because the marker moved.
    pub(crate) fn run(&mut self, script: &Script, wrong: Wrong) -> bool {
        match script {
            Script::Take(take) => self.take(take),
            Script::Page(page) => self.publish(page, wrong),
        }
    }

    fn take(&mut self, take: &Take) -> bool {
        if self.position() != take.found {
            return false;
        }
        let place = take.place.clone();
        self.marker = Some(Marker {
            leadership: take.leadership,
            history: place.history,
            epoch: place.epoch,
            page: place.page,
            high: place.cursor.high,
            high_key: place.cursor.high_key,
            ranges: place.cursor.gaps.len(),
            suspect: take.suspect,
            gaps: place.cursor.gaps.iter().collect(),
        });
        true
    }

    fn publish(&mut self, page: &PageScript, wrong: Wrong) -> bool {
        if !self.would_take(page, wrong) {
            return false;
        }
        let Some(marker) = &mut self.marker else {
            return false;
        };
        for (stream, message) in &page.entries {
            let entries = self.streams.entry(stream.clone()).or_default();
            entries.push(*message);
        }
        marker.page = page.page + 1;
        marker.ranges = page.ranges;
        if let Some((high, key)) = &page.step.high {
            (marker.high, marker.high_key) = (*high, key.clone());
        }
        if page.drop_suspect {
            marker.suspect = None;
        }
        for lo in &page.step.unset {
            marker.gaps.remove(lo);
        }
        marker.gaps.extend(page.step.set.iter().copied());
        true
    }
}
