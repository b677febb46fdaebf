//! How Redis is looked after: its memory, what the running leader says of its caretaker, and what of a stream may go.

use std::fmt;

use serde::Serialize;

use super::text::bytes;
use crate::dead_letters::printable;
use crate::publisher::{CareReport, HeldStanding, Memory};
use crate::status::outbox::rounded;

/// How full Redis is.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct MemoryShown {
    /// Bytes that count for `maxmemory`.
    pub used_bytes: u64,
    /// `maxmemory` in bytes; 0 is no limit.
    pub max_bytes: u64,
    /// The part that is used; none without a limit.
    pub used_percent: Option<f64>,
}

/// What the leader that runs says of itself; it does so every ten seconds, and at each change.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct CaretakerShown {
    /// The leader's name.
    pub relay: String,
    /// How long ago it said so.
    pub age_seconds: f64,
    /// Its `--redis-memory-ceiling`; none for no ceiling.
    pub memory_ceiling_percent: Option<u32>,
    /// Publishing is paused because the memory is at the ceiling.
    pub paused_by_ceiling: bool,
    /// Rows above this id stay for the groups of `--hold-until-acked`; none without that flag.
    pub hold_floor_id: Option<i64>,
    /// These groups.
    pub holds: Vec<HoldShown>,
}

/// A group that rows are held for.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct HoldShown {
    /// The group.
    pub group: String,
    /// The topics that it is held to; all where there are none.
    pub topics: Vec<String>,
    /// How far it has got.
    #[serde(flatten)]
    pub standing: HoldStanding,
}

/// How far a group that rows are held for has got, as the leader's last round over the streams saw it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
#[non_exhaustive]
pub enum HoldStanding {
    /// The leader has not finished a round yet.
    NotKnown,
    /// It has acknowledged everything.
    Acknowledged,
    /// It has not acknowledged everything.
    Behind {
        /// Where it is furthest behind.
        stream: String,
        /// How long ago the oldest entry that it has not acknowledged was published.
        oldest_seconds: f64,
    },
    /// It has not acknowledged anything of a stream: nothing is purged.
    Absent {
        /// The stream that has no such group, or that the relay may not ask.
        stream: String,
    },
}

/// What of a stream may be trimmed, by its groups and by `--stream-max-age` as the marker has it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
#[non_exhaustive]
pub enum TrimmingShown {
    /// `--stream-max-age` is 0: streams are never trimmed.
    Off,
    /// No entry is old enough.
    Young,
    /// Only its last entry is old enough, which always stays.
    LastEntry,
    /// Old entries go with the leader's next round.
    Due {
        /// For how long the oldest entry has been past the age.
        overdue_seconds: f64,
    },
    /// Old entries stay, as no group reads the stream.
    NoGroup {
        /// For how long the oldest entry has been past the age.
        overdue_seconds: f64,
    },
    /// Old entries stay, as a group has not been given or has not acknowledged the oldest of them.
    Held {
        /// The group that is furthest behind.
        group: String,
        /// For how long the oldest entry has been past the age.
        overdue_seconds: f64,
    },
    /// Its last entry is no message of a relay, so nothing of it is trimmed.
    Foreign,
}

/// The first and the last entry of a stream, in milliseconds, and whether the last is a message of a relay.
#[derive(Clone, Copy, Debug)]
pub(in crate::status) struct Ends {
    pub(in crate::status) first_ms: u64,
    pub(in crate::status) last_ms: u64,
    pub(in crate::status) is_ours: bool,
}

impl MemoryShown {
    pub(in crate::status) fn new(memory: Memory) -> Self {
        MemoryShown {
            used_bytes: memory.used,
            max_bytes: memory.max,
            used_percent: (memory.max > 0).then(|| memory.ratio() * 100.0),
        }
    }
}

impl CaretakerShown {
    pub(in crate::status) fn new(report: CareReport, at_ms: u64, now_ms: u64) -> Self {
        let hold = |held: crate::publisher::HeldFor| HoldShown {
            group: held.group,
            topics: held.topics,
            standing: match held.standing {
                HeldStanding::NotKnown => HoldStanding::NotKnown,
                HeldStanding::Acknowledged => HoldStanding::Acknowledged,
                HeldStanding::Behind { stream, oldest_ms } => HoldStanding::Behind {
                    stream,
                    oldest_seconds: ago(oldest_ms, now_ms),
                },
                HeldStanding::Absent { stream } => HoldStanding::Absent { stream },
            },
        };
        CaretakerShown {
            relay: report.relay,
            age_seconds: ago(at_ms, now_ms),
            memory_ceiling_percent: report.memory_ceiling_percent,
            paused_by_ceiling: report.paused_by_ceiling,
            hold_floor_id: report.hold_floor_id,
            holds: report.holds.into_iter().map(hold).collect(),
        }
    }
}

impl TrimmingShown {
    /// What `trim.lua` would make of a stream, to the millisecond. `groups`: each with the time of the entry from which on it
    /// needs the stream. `age_ms`: none for streams that are never trimmed.
    pub(in crate::status) fn judge(
        ends: Ends,
        groups: &[(String, u64)],
        age_ms: Option<u64>,
        now_ms: u64,
    ) -> Self {
        let Some(age_ms) = age_ms else {
            return TrimmingShown::Off;
        };
        let cut_ms = now_ms.saturating_sub(age_ms);
        if ends.first_ms >= cut_ms {
            return TrimmingShown::Young;
        }
        if !ends.is_ours {
            return TrimmingShown::Foreign;
        }
        let overdue_seconds = ago(ends.first_ms, cut_ms);
        let Some((group, needs_ms)) = groups.iter().min_by_key(|(_, ms)| *ms) else {
            return TrimmingShown::NoGroup { overdue_seconds };
        };
        if ends.first_ms < cut_ms.min(ends.last_ms).min(*needs_ms) {
            TrimmingShown::Due { overdue_seconds }
        } else if ends.first_ms >= ends.last_ms {
            TrimmingShown::LastEntry
        } else {
            TrimmingShown::Held {
                group: group.clone(),
                overdue_seconds,
            }
        }
    }
}

fn ago(then_ms: u64, now_ms: u64) -> f64 {
    now_ms.saturating_sub(then_ms) as f64 / 1_000.0
}

impl fmt::Display for MemoryShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = bytes(self.used_bytes);
        match self.used_percent {
            Some(percent) => write!(
                f,
                "{percent:.1} % of maxmemory, {used} of {}",
                bytes(self.max_bytes)
            ),
            None => write!(f, "{used}, no limit (maxmemory is not set)"),
        }
    }
}

impl CaretakerShown {
    /// The ceiling, and whether publishing is paused by it.
    pub(super) fn ceiling(&self) -> String {
        match (self.memory_ceiling_percent, self.paused_by_ceiling) {
            (None, _) => "none: publishing goes on until Redis refuses".to_owned(),
            (Some(percent), false) => format!("{percent} % of maxmemory, not reached"),
            (Some(percent), true) => {
                format!("{percent} % of maxmemory: publishing is PAUSED until Redis has room")
            }
        }
    }
}

impl fmt::Display for HoldShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "group {}", printable(&self.group))?;
        if !self.topics.is_empty() {
            write!(f, " ({})", printable(&self.topics.join(", ")))?;
        }
        match &self.standing {
            HoldStanding::NotKnown => f.write_str(": not known before the leader's first round"),
            HoldStanding::Acknowledged => f.write_str(": has acknowledged everything"),
            HoldStanding::Behind {
                stream,
                oldest_seconds,
            } => write!(
                f,
                ": has not acknowledged an entry of {} ago in {}",
                rounded(*oldest_seconds),
                printable(stream)
            ),
            HoldStanding::Absent { stream } => {
                write!(f, ": is not on {}, so nothing is purged", printable(stream))
            }
        }
    }
}

impl fmt::Display for TrimmingShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TrimmingShown::Off => f.write_str("off (--stream-max-age 0)"),
            TrimmingShown::Young => f.write_str("nothing is old enough"),
            TrimmingShown::LastEntry => f.write_str("only the last entry is left, which stays"),
            TrimmingShown::Due { overdue_seconds } => write!(
                f,
                "due for {}, with the leader's next round",
                rounded(*overdue_seconds)
            ),
            TrimmingShown::NoGroup { overdue_seconds } => write!(
                f,
                "none for {}: no group reads the stream",
                rounded(*overdue_seconds)
            ),
            TrimmingShown::Held {
                group,
                overdue_seconds,
            } => write!(
                f,
                "none for {}: group {} has not acknowledged the oldest entries",
                rounded(*overdue_seconds),
                printable(group)
            ),
            TrimmingShown::Foreign => f.write_str("none: the last entry is no message of a relay"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_go_is_what_every_group_has_acknowledged_and_is_old() {
        let groups = |needs: &[u64]| -> Vec<(String, u64)> {
            let named = needs.iter().enumerate();
            named.map(|(n, ms)| (format!("g{n}"), *ms)).collect()
        };
        let stream = |first_ms, last_ms| Ends {
            first_ms,
            last_ms,
            is_ours: true,
        };
        let overdue_seconds = 4.0;
        let foreign = Ends {
            is_ours: false,
            ..stream(1_000, 9_000)
        };
        let held = |group: &str| TrimmingShown::Held {
            group: group.into(),
            overdue_seconds,
        };
        // Now it is 10 s, and entries may go after 5 s: those before 5,000.
        for (ends, needs, expected) in [
            (stream(5_000, 9_000), vec![], TrimmingShown::Young),
            (foreign, vec![9_000], TrimmingShown::Foreign),
            (
                stream(1_000, 9_000),
                vec![],
                TrimmingShown::NoGroup { overdue_seconds },
            ),
            (stream(1_000, 9_000), vec![9_000, 1_000], held("g1")),
            (stream(1_000, 9_000), vec![0], held("g0")),
            (
                stream(1_000, 9_000),
                vec![2_000],
                TrimmingShown::Due { overdue_seconds },
            ),
            (stream(1_000, 1_000), vec![1_000], TrimmingShown::LastEntry),
        ] {
            let judged = TrimmingShown::judge(ends, &groups(&needs), Some(5_000), 10_000);
            assert_eq!(judged, expected, "{ends:?} {needs:?}");
        }
        let off = TrimmingShown::judge(stream(1, 2), &[], None, 10_000);
        assert_eq!(off, TrimmingShown::Off);
    }
}
