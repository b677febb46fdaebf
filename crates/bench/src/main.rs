//! How fast the outbox is. Every figure is a ratio against a reference that ran on the same servers in the same
//! minutes, so that it means something on another machine too.
//!
//! The files in reading order:
//!
//! 1. `flags.rs`, `sizes.rs`: what is measured, and how much of it.
//! 2. `measures/`: one file for each measure; `mod.rs` lists them.
//! 3. `stage.rs`, `backlog.rs`, `rows.rs`: the servers, the relay's process, and the messages of all arms.
//! 4. `limit.rs`, `marking.rs`, `bare_redis.rs`: the references.
//! 5. `producers.rs`, `shop.rs`, `effects.rs`, `log_role.rs`: what producers and consumers do, and statements that are counted.
//! 6. `figures.rs`, `stats.rs`: what a measure comes to.
//! 7. `report.rs`, `charts.rs`, `machine.rs`, `progress.rs`: what is shown of it.

mod backlog;
mod bare_redis;
mod charts;
mod effects;
mod figures;
mod flags;
mod limit;
mod log_role;
mod machine;
mod marking;
mod measures;
mod producers;
mod progress;
mod report;
mod rows;
mod shop;
mod sizes;
mod stage;
mod stats;

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    flags::Flags,
    machine::Machine,
    measures::{MEASURES, Measure},
    progress::Progress,
    report::{Measured, Report},
    stage::Stage,
};

/// What can go wrong here is only shown to a person.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// What shells give to a program that Ctrl-C ended.
const EXIT_INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let flags = Flags::parse();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("bench: cannot start the runtime: {e}");
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(run(&flags))
}

/// Runs what is asked for unless it is interrupted. Either way the servers end with it.
async fn run(flags: &Flags) -> ExitCode {
    if flags.list {
        for measure in MEASURES {
            say(&format!("{:<18} {}", measure.name, measure.about));
        }
        return ExitCode::SUCCESS;
    }
    let outcome = tokio::select! {
        outcome = measure(flags) => outcome,
        _ = interrupted() => {
            eprintln!("bench: interrupted; the servers are stopped and their data is removed");
            return ExitCode::from(EXIT_INTERRUPTED);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {}", with_causes(&*error));
            ExitCode::FAILURE
        }
    }
}

/// A measure that misses its target is no failure; one that cannot be taken is, after all others were.
async fn measure(flags: &Flags) -> Result<(), Error> {
    let chosen = flags.chosen();
    let stage = Stage::set(flags.sizes(), Progress::new(chosen.len())).await?;
    let mut report = Report {
        machine: Machine::describe(&stage).await?,
        size: flags.size_name(),
        measures: Vec::new(),
    };
    let mut failed = Vec::new();
    for measure in chosen {
        match take(measure, &stage).await {
            Ok(measured) => report.measures.push(measured),
            Err(error) => {
                stage
                    .progress
                    .step(format!("{}: {}", measure.name, with_causes(&*error)));
                failed.push(measure.name);
            }
        }
        stage.progress.done();
        report.write(&flags.results)?;
    }
    stage.progress.finish();
    charts::draw(&report, &flags.charts())?;
    say(&report.to_string());
    say(&format!(
        "results: {}; charts: {}",
        flags.results.display(),
        flags.charts().display()
    ));
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("could not be measured: {}", failed.join(", ")).into())
}

async fn take(measure: &Measure, stage: &Stage) -> Result<Measured, Error> {
    stage.progress.step(measure.name);
    let begun = std::time::Instant::now();
    let outcome = (measure.take)(stage).await?;
    Ok(Measured {
        name: measure.name,
        about: measure.about,
        took_s: begun.elapsed().as_secs_f64(),
        outcome,
    })
}

/// Completes at SIGINT (Ctrl-C) or SIGTERM.
async fn interrupted() -> io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

/// A line on standard output. A reader that went away stops nothing.
fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// The error and what led to it: Postgres' own words stand in the cause.
fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
