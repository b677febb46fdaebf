//! What marker and checkpoint both count as published, for when neither may be believed further.

use std::collections::BTreeMap;

use crate::protocol::cursor::Cursor;
use crate::protocol::layout::{Layouts, hold_name, stream_name};
use crate::protocol::place::{Blocked, Place};
use crate::protocol::ranges::RangeSet;

/// What both cursors count as published: the lower `high`, and the gaps of both.
pub(super) fn lower(a: &Cursor, b: &Cursor) -> Cursor {
    let mut high = a.high.min(b.high);
    let gaps = a.gaps.clone().union(&b.gaps).up_to(high);
    // The other cursor may have a gap right at this `high`.
    if let Some((lo, _)) = gaps.range_around(high) {
        high = lo - 1;
    }
    let gaps: RangeSet = gaps.up_to(high);
    Cursor {
        high,
        high_key: String::new(),
        gaps,
    }
}

/// Streams and topics that one of the places held back, each with what all of them had published to it.
///
/// A topic becomes one where the places differ in kind, or in the layout that a stream is of: what it lacks
/// belongs into the present streams.
pub(super) fn lower_blocked<'a>(
    cursor: &Cursor,
    layouts: &Layouts,
    places: impl Iterator<Item = &'a Place>,
) -> BTreeMap<String, Blocked> {
    let mut all: BTreeMap<String, Blocked> = BTreeMap::new();
    let add = |name: String, blocked: &Blocked, all: &mut BTreeMap<String, Blocked>| {
        let before = all.get(&name).map_or(cursor, |other| &other.cursor);
        let cursor = lower(before, &blocked.cursor);
        all.insert(
            name,
            Blocked {
                cursor,
                ..blocked.clone()
            },
        );
    };
    let every: Vec<(&String, &Blocked)> = places.flat_map(|place| &place.blocked).collect();
    for (name, blocked) in &every {
        let hold = hold_name(&blocked.topic);
        let partitions = layouts
            .get(&blocked.topic)
            .map_or(1, |layout| layout.partitions);
        let present = |name: &str| {
            (0..partitions)
                .any(|number| name.ends_with(&stream_name("", &blocked.topic, number, partitions)))
        };
        let mut same_topic = every
            .iter()
            .filter(|(_, other)| other.topic == blocked.topic);
        let whole = same_topic.any(|(other, _)| **other == hold || !present(other));
        add(
            if whole { hold } else { (*name).clone() },
            blocked,
            &mut all,
        );
    }
    all
}
