//! The command line.

use std::path::PathBuf;

use clap::{Parser, builder::PossibleValuesParser};

use crate::{
    measures::{MEASURES, Measure},
    sizes::{FULL, QUICK, Sizes, TINY},
};

/// How fast the outbox is, on private servers, each figure beside a reference of the same run
#[derive(Parser, Debug)]
#[command(name = "outbox-bench", version)]
pub(crate) struct Flags {
    /// Smaller sizes: all measures in about three minutes
    #[arg(long)]
    quick: bool,

    /// Sizes that show that it runs, and measure nothing
    #[arg(long, hide = true, conflicts_with = "quick")]
    tiny: bool,

    /// Take this measure only; may be given several times
    #[arg(long, value_name = "MEASURE", value_parser = PossibleValuesParser::new(MEASURES.iter().map(|m| m.name)))]
    only: Vec<String>,

    /// List the measures
    #[arg(long)]
    pub(crate) list: bool,

    /// Rows that the drain measures use, instead of the size's
    #[arg(long, value_name = "ROWS")]
    drain_rows: Option<u64>,

    /// Where the results go, as JSON
    #[arg(long, default_value = "target/bench/results.json", value_name = "FILE")]
    pub(crate) results: PathBuf,

    /// Where the charts go [default: docs/bench; of a quick run beside the results]
    #[arg(long, value_name = "DIR")]
    charts: Option<PathBuf>,
}

impl Flags {
    pub(crate) fn sizes(&self) -> Sizes {
        let sizes = match (self.quick, self.tiny) {
            (true, _) => QUICK,
            (_, true) => TINY,
            _ => FULL,
        };
        Sizes {
            drain_rows: self.drain_rows.unwrap_or(sizes.drain_rows),
            ..sizes
        }
    }

    pub(crate) fn size_name(&self) -> &'static str {
        match (self.quick, self.tiny) {
            (true, _) => "quick",
            (_, true) => "tiny",
            _ => "full",
        }
    }

    /// The charts of the documentation are those of full runs.
    pub(crate) fn charts(&self) -> PathBuf {
        let beside = || match self.quick || self.tiny {
            true => self.results.parent().map(PathBuf::from).unwrap_or_default(),
            false => PathBuf::from("docs/bench"),
        };
        self.charts.clone().unwrap_or_else(beside)
    }

    /// The measures to take, in their order.
    pub(crate) fn chosen(&self) -> Vec<&'static Measure> {
        let wanted = |measure: &&Measure| {
            self.only.is_empty() || self.only.iter().any(|name| name == measure.name)
        };
        MEASURES.iter().filter(wanted).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        use clap::CommandFactory as _;
        Flags::command().debug_assert();
    }

    #[test]
    fn a_quick_run_leaves_the_charts_of_the_documentation_alone() {
        let quick = Flags::parse_from(["outbox-bench", "--quick", "--only", "idle"]);
        assert_eq!(quick.charts(), PathBuf::from("target/bench"));
        assert_eq!(quick.chosen().len(), 1);
        let full = Flags::parse_from(["outbox-bench"]);
        assert_eq!(full.charts(), PathBuf::from("docs/bench"));
        assert_eq!(full.chosen().len(), MEASURES.len());
    }
}
