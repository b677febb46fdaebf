//! One finding: what was seen, what it means, and what to do.

use serde::Serialize;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing, or not to be seen with the rights of this role.
    Note,
    /// Works, and will hurt some day.
    Warning,
    /// Does not work, or loses messages.
    Error,
}

/// What one check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// Where: `postgres`, `redis` or `streams`.
    pub area: &'static str,
    /// The check.
    pub check: &'static str,
    /// What was seen.
    pub found: String,
    /// What follows from it; empty where all is well.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub means: &'static str,
    /// What to do; empty where there is nothing to do.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub remedy: String,
}

/// A value, or why it could not be had.
pub(super) type Seen<T> = std::result::Result<T, String>;

/// All findings of an area begin here.
#[derive(Clone, Copy)]
pub(super) struct Check {
    pub(super) area: &'static str,
    pub(super) name: &'static str,
}

impl Check {
    pub(super) fn ok(self, found: impl Into<String>) -> Finding {
        self.finding(Level::Ok, found, "", "")
    }

    pub(super) fn note(
        self,
        found: impl Into<String>,
        means: &'static str,
        remedy: impl Into<String>,
    ) -> Finding {
        self.finding(Level::Note, found, means, remedy)
    }

    pub(super) fn warning(
        self,
        found: impl Into<String>,
        means: &'static str,
        remedy: impl Into<String>,
    ) -> Finding {
        self.finding(Level::Warning, found, means, remedy)
    }

    pub(super) fn error(
        self,
        found: impl Into<String>,
        means: &'static str,
        remedy: impl Into<String>,
    ) -> Finding {
        self.finding(Level::Error, found, means, remedy)
    }

    /// The check could not be made; that is no fault of what was to be checked.
    pub(super) fn unseen(self, why: &str) -> Finding {
        self.note(
            format!("could not be looked at: {why}"),
            "nothing is known about it",
            "",
        )
    }

    fn finding(
        self,
        level: Level,
        found: impl Into<String>,
        means: &'static str,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding {
            level,
            area: self.area,
            check: self.name,
            found: found.into(),
            means,
            remedy: remedy.into(),
        }
    }
}

/// Bytes as people read them.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if bytes < 1_000 {
        return format!("{bytes} bytes");
    }
    let mut value = bytes as f64 / 1_000.0;
    let mut unit = 0;
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1_000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_their_unit() {
        let shown = [12, 1_500, 999_999, 2_000_000_000].map(size);
        assert_eq!(shown, ["12 bytes", "1.5 kB", "1.0 MB", "2.0 GB"]);
    }

    #[test]
    fn the_worst_level_is_the_largest() {
        assert!(Level::Error > Level::Warning && Level::Warning > Level::Note);
        assert!(Level::Note > Level::Ok);
    }
}
