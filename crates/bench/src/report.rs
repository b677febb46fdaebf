//! The table and the results file.

use std::{fmt, fs, path::Path};

use serde::Serialize;

use crate::{Error, figures::Figure, figures::Outcome, machine::Machine};

/// One measure with its outcome.
#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) took_s: f64,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

/// Everything of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) machine: Machine,
    pub(crate) size: &'static str,
    pub(crate) measures: Vec<Measured>,
}

impl Report {
    /// Writes the results as JSON.
    pub(crate) fn write(&self, path: &Path) -> Result<(), Error> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        Ok(fs::write(path, serde_json::to_string_pretty(self)? + "\n")?)
    }

    /// A measure that was taken.
    pub(crate) fn outcome(&self, name: &str) -> Option<&Outcome> {
        self.measures
            .iter()
            .find(|measured| measured.name == name)
            .map(|measured| &measured.outcome)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = &self.machine;
        writeln!(f, "{}; kernel {}", machine.short(), machine.kernel)?;
        writeln!(
            f,
            "fsync={} synchronous_commit={} {}; {} run",
            machine.fsync,
            machine.synchronous_commit,
            machine.postgres_settings.join(" "),
            self.size
        )?;
        for measured in &self.measures {
            writeln!(
                f,
                "\n{} ({:.0} s): {}",
                measured.name, measured.took_s, measured.about
            )?;
            writeln!(
                f,
                "  {:<46} {:>12} {:>12} {:>12}  {:<9} reached",
                "", "median", "min", "max", "target"
            )?;
            for figure in &measured.outcome.figures {
                writeln!(f, "  {}", line(figure))?;
            }
        }
        Ok(())
    }
}

fn line(figure: &Figure) -> String {
    let name = if figure.unit.is_empty() {
        figure.name.clone()
    } else {
        format!("{}, {}", figure.name, figure.unit)
    };
    let target = figure
        .target
        .map_or_else(String::new, |target| target.to_string());
    let reached = match figure.reached {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "",
    };
    let summary = figure.summary;
    let line = format!(
        "{name:<46} {:>12} {:>12} {:>12}  {target:<9} {reached}",
        number(summary.median),
        number(summary.min),
        number(summary.max)
    );
    line.trim_end().to_owned()
}

/// With three digits that say something, or all before the point.
pub(crate) fn number(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Target;

    #[test]
    fn numbers_are_as_exact_as_they_are_read() {
        assert_eq!(number(123_456.7), "123457");
        assert_eq!(number(12.34), "12.3");
        assert_eq!(number(1.234), "1.23");
        assert_eq!(number(0.012_34), "0.012");
        assert_eq!(number(0.0), "0");
    }

    #[test]
    fn a_line_says_what_was_not_reached() {
        let outcome = Outcome::default()
            .must("ratio", "", &[0.4, 0.5, 0.3], Target::AtLeast(0.55))
            .beside("relay", "rows/s", &[1_000.0]);
        let text = line(&outcome.figures[0]);
        assert!(text.starts_with("ratio "), "{text}");
        assert!(
            text.ends_with("0.400        0.300        0.500  >= 0.55   NO"),
            "{text}"
        );
        assert!(line(&outcome.figures[1]).ends_with("1000"));
    }
}
