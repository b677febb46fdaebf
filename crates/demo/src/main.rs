//! The order shop: what the outbox is for, shown on real servers, with two of them killed in the middle.
//!
//! The files in reading order:
//!
//! 1. `shop.rs`: writes orders and their messages; how to use `outbox-producer`.
//! 2. `warehouse.rs`: ships each order once; how to use `outbox-consumer`.
//! 3. `stage.rs`: the private servers, the two databases and the relay's process.
//! 4. `story.rs`: what happens in which order, and the faults.
//! 5. `audit.rs`: what came of it, counted in the databases.
//! 6. `settings.rs`, `progress.rs`: the size, and what is shown while it runs.

mod audit;
mod progress;
mod settings;
mod shop;
mod stage;
mod story;
mod warehouse;

use std::{io, process::ExitCode};

use tokio::signal::unix::{SignalKind, signal};

use crate::{progress::Progress, settings::Settings};

/// What can go wrong here is only shown to a person.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// `EX_USAGE` of sysexits.h, as the relay has it.
const EXIT_USAGE: u8 = 64;
/// What shells give to a program that Ctrl-C ended.
const EXIT_INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let settings = match Settings::from_env() {
        Ok(settings) => settings,
        Err(problem) => {
            eprintln!("demo: {problem}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("demo: cannot start the runtime: {e}");
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(run(&settings))
}

/// Plays the story unless it is interrupted. Either way the servers are owned by the story's future: they are
/// killed, and their data is removed, when it ends or is dropped.
async fn run(settings: &Settings) -> ExitCode {
    let progress = Progress::new(settings.orders);
    let outcome = tokio::select! {
        outcome = story::play(settings, &progress) => Some(outcome),
        _ = interrupted() => None,
    };
    progress.finish();
    match outcome {
        Some(Ok(audit)) => {
            for problem in audit.problems() {
                progress.say(&problem);
            }
            // The last line, for scripts.
            progress.say(&audit.to_string());
            if audit.problems().is_empty() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Some(Err(error)) => {
            eprintln!("demo: {}", with_causes(&error));
            ExitCode::FAILURE
        }
        None => {
            eprintln!("demo: interrupted; the servers are stopped and their data is removed");
            ExitCode::from(EXIT_INTERRUPTED)
        }
    }
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

/// The error and what led to it: Postgres' own words stand in the cause.
pub(crate) fn with_causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
