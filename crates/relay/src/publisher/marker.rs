//! The marker and the gaps as they stand in Redis.
//!
//! The marker is a hash; the gaps are a second hash of first id to last id, so that a page writes only
//! the gaps it changed; the marker says how many there are. Times are in milliseconds, ids in decimal.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Kept;
use crate::protocol::cursor::Cursor;
use crate::protocol::layout::{Layout, Layouts};
use crate::protocol::place::{Blocked, History, Place, Suspect};
use crate::protocol::start::MarkerFound;

/// The marker's format. A relay reads this one only; the number changes when an older relay would
/// misread the marker.
const VERSION: &str = "1";

/// Name of the marker's field for a blocked stream.
pub(super) fn blocked_field(stream: &str) -> String {
    format!("blocked:{stream}")
}

/// Name of the marker's field for a topic's layout.
pub(super) fn layout_field(topic: &str) -> String {
    format!("topic:{topic}")
}

/// A blocked stream's cursor, as JSON.
#[derive(Serialize, Deserialize)]
struct BlockedValue {
    topic: String,
    high: i64,
    gaps: Vec<(i64, i64)>,
    reason: String,
}

/// The value of a blocked stream's field.
pub(super) fn blocked_value(blocked: &Blocked) -> String {
    let value = BlockedValue {
        topic: blocked.topic.clone(),
        high: blocked.cursor.high,
        gaps: blocked.cursor.gaps.iter().collect(),
        reason: blocked.reason.clone(),
    };
    serde_json::to_string(&value).expect("strings and integers are always valid JSON")
}

fn read_blocked(value: &str) -> Option<Blocked> {
    let value: BlockedValue = serde_json::from_str(value).ok()?;
    let cursor = Cursor {
        high: value.high,
        high_key: String::new(),
        gaps: value.gaps.into_iter().collect(),
    };
    Some(Blocked {
        topic: value.topic,
        cursor,
        reason: value.reason,
    })
}

/// What a marker says besides the place.
pub(super) struct About {
    /// The outbox that it belongs to.
    pub(super) outbox_id: Uuid,
    /// The take-over that wrote it.
    pub(super) leadership: Uuid,
    /// For consumers, whose window must be longer.
    pub(super) kept: Kept,
}

/// All fields and values of a marker.
pub(super) fn fields(about: &About, place: &Place, suspect: Option<Suspect>) -> Vec<String> {
    let mut fields: Vec<String> = [
        ("version", VERSION.to_owned()),
        ("outbox_id", about.outbox_id.to_string()),
        ("leadership", about.leadership.to_string()),
        ("system_id", place.history.system_id.to_string()),
        ("timeline", place.history.timeline.to_string()),
        ("branch", place.history.branch.to_string()),
        ("epoch", place.epoch.to_string()),
        ("page", place.page.to_string()),
        ("high", place.cursor.high.to_string()),
        ("high_key", place.cursor.high_key.clone()),
        ("redis_ms", place.redis_ms.to_string()),
        ("gaps", place.cursor.gaps.len().to_string()),
        ("retention_ms", about.kept.retention.as_millis().to_string()),
    ]
    .into_iter()
    .flat_map(|(name, value)| [name.to_owned(), value])
    .collect();
    if let Some(age) = about.kept.stream_max_age {
        fields.extend(["stream_max_age_ms".to_owned(), age.as_millis().to_string()]);
    }
    if let Some(suspect) = suspect {
        fields.extend(["suspect_until".to_owned(), suspect.until.to_string()]);
        fields.extend(["suspect_since_ms".to_owned(), suspect.since_ms.to_string()]);
    }
    for (stream, blocked) in &place.blocked {
        fields.extend([blocked_field(stream), blocked_value(blocked)]);
    }
    for (topic, layout) in &place.layouts {
        fields.extend([layout_field(topic), layout.encode()]);
    }
    fields
}

/// Reads what stands at the marker's key; `gaps` are its gaps.
pub(super) fn read(
    marker: &HashMap<String, String>,
    gaps: &HashMap<String, String>,
) -> MarkerFound {
    if marker.is_empty() {
        return MarkerFound::Missing;
    }
    match marker.get("version").map(String::as_str) {
        Some(VERSION) => {}
        Some(other) => {
            return MarkerFound::Foreign(format!(
                "a marker of version {other}; this relay reads {VERSION}"
            ));
        }
        None => return MarkerFound::Foreign("a hash without a version".to_owned()),
    }
    parse(marker, gaps).unwrap_or_else(|field| {
        MarkerFound::Foreign(format!("a marker whose {field} is missing or not readable"))
    })
}

fn parse(
    marker: &HashMap<String, String>,
    gaps: &HashMap<String, String>,
) -> Result<MarkerFound, &'static str> {
    fn field<T: std::str::FromStr>(
        from: &HashMap<String, String>,
        name: &'static str,
    ) -> Result<T, &'static str> {
        from.get(name)
            .and_then(|value| value.parse().ok())
            .ok_or(name)
    }
    // The gaps are a key of their own, and may go missing alone: late rows would then count as published.
    if field::<usize>(marker, "gaps")? != gaps.len() {
        return Err("list of gaps (a key of its own)");
    }
    let gaps = gaps
        .iter()
        .map(|(lo, hi)| Some((lo.parse().ok()?, hi.parse().ok()?)))
        .collect::<Option<_>>()
        .ok_or("gaps")?;
    let suspect = match marker.contains_key("suspect_until") {
        false => None,
        true => Some(Suspect {
            until: field(marker, "suspect_until")?,
            since_ms: field(marker, "suspect_since_ms")?,
        }),
    };
    let mut blocked = BTreeMap::new();
    let mut layouts = Layouts::new();
    for (name, value) in marker {
        if let Some(stream) = name.strip_prefix("blocked:") {
            blocked.insert(
                stream.to_owned(),
                read_blocked(value).ok_or("blocked stream")?,
            );
        }
        if let Some(topic) = name.strip_prefix("topic:") {
            layouts.insert(
                topic.to_owned(),
                Layout::decode(value).ok_or("layout of a topic")?,
            );
        }
    }
    Ok(MarkerFound::Marker {
        outbox_id: field(marker, "outbox_id")?,
        leadership: field(marker, "leadership")?,
        place: Place {
            history: History {
                system_id: field(marker, "system_id")?,
                timeline: field(marker, "timeline")?,
                branch: field(marker, "branch")?,
            },
            epoch: field(marker, "epoch")?,
            page: field(marker, "page")?,
            cursor: Cursor {
                high: field(marker, "high")?,
                high_key: field(marker, "high_key")?,
                gaps,
            },
            redis_ms: field(marker, "redis_ms")?,
            blocked,
            layouts,
        },
        suspect,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const ABOUT: About = About {
        outbox_id: Uuid::from_u128(1),
        leadership: Uuid::from_u128(2),
        kept: Kept {
            retention: Duration::from_secs(1),
            stream_max_age: Some(Duration::from_secs(2)),
        },
    };

    fn place() -> Place {
        Place {
            history: History {
                system_id: u64::MAX,
                timeline: 3,
                branch: Uuid::from_u128(9),
            },
            epoch: 4,
            page: 5,
            cursor: Cursor {
                high: 60,
                high_key: "Schlüssel \"60\"".into(),
                gaps: [(7, 8)].into_iter().collect(),
            },
            redis_ms: 1_700_000_000_000,
            blocked: BTreeMap::from([(
                "outbox:audit".to_owned(),
                Blocked {
                    topic: "audit".into(),
                    cursor: Cursor {
                        high: 50,
                        high_key: String::new(),
                        gaps: [(7, 8)].into_iter().collect(),
                    },
                    reason: "NOPERM".into(),
                },
            )]),
            layouts: Layouts::from([("audit".to_owned(), Layout::default().changed_to(4))]),
        }
    }

    fn hash(fields: &[String]) -> HashMap<String, String> {
        fields
            .chunks(2)
            .map(|pair| (pair[0].clone(), pair[1].clone()))
            .collect()
    }

    #[test]
    fn what_is_written_is_read_again() {
        let gaps = HashMap::from([("7".to_owned(), "8".to_owned())]);
        for suspect in [
            None,
            Some(Suspect {
                until: i64::MAX,
                since_ms: 5,
            }),
        ] {
            let marker = hash(&fields(&ABOUT, &place(), suspect));
            let found = read(&marker, &gaps);
            assert_eq!(
                found,
                MarkerFound::Marker {
                    outbox_id: ABOUT.outbox_id,
                    leadership: ABOUT.leadership,
                    place: place(),
                    suspect
                }
            );
        }
    }

    #[test]
    fn what_is_no_marker_is_said_to_be_none() {
        assert_eq!(read(&HashMap::new(), &HashMap::new()), MarkerFound::Missing);
        let mut marker = hash(&fields(&ABOUT, &place(), None));
        assert!(
            matches!(read(&marker, &HashMap::new()), MarkerFound::Foreign(what) if what.contains("list of gaps"))
        );
        marker.insert("gaps".into(), "0".into());
        marker.insert("high".into(), "many".into());
        assert!(
            matches!(read(&marker, &HashMap::new()), MarkerFound::Foreign(what) if what.contains("high"))
        );
        marker.insert("version".into(), "2".into());
        assert!(
            matches!(read(&marker, &HashMap::new()), MarkerFound::Foreign(what) if what.contains("version 2"))
        );
        marker.remove("version");
        assert!(matches!(
            read(&marker, &HashMap::new()),
            MarkerFound::Foreign(_)
        ));
    }
}
