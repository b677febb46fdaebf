//! The table of what came of all scenarios.

use std::{fmt::Write, fs, path::Path};

use serde::Serialize;

use crate::{
    Outcome, Result,
    evidence::{Column, Counts},
};

/// What came of a whole run of the suite.
#[derive(Debug, Default)]
pub struct Report {
    /// In the order of the scenarios.
    pub outcomes: Vec<Outcome>,
}

#[derive(Serialize)]
struct Row<'a> {
    family: u8,
    scenario: &'a str,
    control: &'a str,
    control_counts: Option<&'a Counts>,
    outbox_counts: Option<&'a Counts>,
    problems: Vec<String>,
}

impl Report {
    /// Whether every scenario has passed.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        self.outcomes
            .iter()
            .all(|outcome| outcome.problems().is_empty())
    }

    /// Writes `failures.md` and `failures.json` into a directory.
    ///
    /// # Errors
    ///
    /// The files cannot be written.
    pub fn write(&self, directory: &Path) -> Result {
        fs::create_dir_all(directory)?;
        fs::write(directory.join("failures.md"), self.markdown())?;
        let rows: Vec<Row<'_>> = self.outcomes.iter().map(row).collect();
        fs::write(
            directory.join("failures.json"),
            serde_json::to_string_pretty(&rows)?,
        )?;
        Ok(())
    }

    /// The table, each cell with the control's count and then the outbox's.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = String::from("Each cell: control / outbox. `–`: not counted.\n\n");
        let columns = Column::ALL.map(|column| column.to_string()).join(" | ");
        text += &format!(
            "| scenario | control | messages | {columns} | time to recover |  |\n|---|---|{}---|---|\n",
            "---|".repeat(Column::ALL.len() + 1)
        );
        for outcome in &self.outcomes {
            text += &line(outcome);
        }
        for outcome in &self.outcomes {
            for (arm, counts) in [
                ("control", control(outcome)),
                ("outbox", outcome.outbox.as_ref().ok()),
            ] {
                for note in counts.into_iter().flat_map(|counts| &counts.notes) {
                    let _ = write!(text, "\n- {}, {arm}: {note}", outcome.scenario.title());
                }
            }
            for problem in outcome.problems() {
                let _ = write!(text, "\n- FAILED: {}: {problem}", outcome.scenario.title());
            }
        }
        text.push('\n');
        text
    }
}

fn control(outcome: &Outcome) -> Option<&Counts> {
    outcome.control.as_ref()?.as_ref().ok()
}

fn naive(outcome: &Outcome) -> &'static str {
    match outcome.control {
        Some(_) => outcome.scenario.naive.name(),
        None => "–",
    }
}

fn line(outcome: &Outcome) -> String {
    let (control, outbox) = (control(outcome), outcome.outbox.as_ref().ok());
    let pair = |show: &dyn Fn(&Counts) -> Option<String>| {
        let show =
            |counts: Option<&Counts>| counts.and_then(show).unwrap_or_else(|| "–".to_owned());
        format!("{} / {}", show(control), show(outbox))
    };
    let mut cells = vec![outcome.scenario.title(), naive(outcome).to_owned()];
    cells.push(pair(&|counts| Some(counts.messages.to_string())));
    for column in Column::ALL {
        cells.push(pair(&|counts| Some(counts.get(column)?.to_string())));
    }
    cells.push(pair(&|counts| {
        Some(format!("{:.2} s", counts.recovery?.as_secs_f64()))
    }));
    cells.push(
        if outcome.problems().is_empty() {
            "passed"
        } else {
            "FAILED"
        }
        .to_owned(),
    );
    format!("| {} |\n", cells.join(" | "))
}

fn row(outcome: &Outcome) -> Row<'_> {
    Row {
        family: outcome.scenario.family,
        scenario: outcome.scenario.name,
        control: naive(outcome),
        control_counts: control(outcome),
        outbox_counts: outcome.outbox.as_ref().ok(),
        problems: outcome.problems(),
    }
}
