//! What the leader reports of its place: how far the cursor is, and the reasons for messages to wait.

use super::Leader;
use crate::health::Note;
use crate::metric_names as names;
use crate::reader::GAP_RANGES_MAX;

impl Leader<'_> {
    /// Says how far the cursor is and what is held back.
    pub(super) fn tell_place(&self) {
        let place = &self.progress.place;
        let gap_ranges = self.reader.gap_ranges();
        ::metrics::gauge!(names::HIGH).set(place.cursor.high as f64);
        ::metrics::gauge!(names::GAP_RANGES).set(gap_ranges as f64);
        ::metrics::gauge!(names::BLOCKED).set(place.blocked.len() as f64);
        let blocked = (!place.blocked.is_empty()).then(|| {
            let held: Vec<String> = place
                .blocked
                .iter()
                .map(|(stream, blocked)| format!("{stream} is held back: {}", blocked.reason))
                .collect();
            held.join("; ")
        });
        self.config.health.note(Note::Blocked, blocked);
        let bound = (gap_ranges >= GAP_RANGES_MAX).then(|| {
            "too many ids wait for an open transaction; outbox-relay status names it".to_owned()
        });
        self.config.health.note(Note::GapBound, bound);
    }
}
