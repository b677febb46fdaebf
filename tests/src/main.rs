//! `outbox-failures`: runs the failure suite and prints what came of it.

#![allow(clippy::print_stdout, reason = "the report is the output")]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, Parser, Subcommand};
use outbox_tests::{OwnConsumerFlags, Program, Report, Result, Scale, Suite, scenarios};

/// Strikes real servers and processes with faults, and counts what naive code and what the outbox lose, double or make up
#[derive(Parser)]
#[command(name = "outbox-failures", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the scenarios and writes failures.md and failures.json
    Run(Run),
    /// Runs one of the suite's own programs
    #[command(hide = true)]
    Program {
        #[command(subcommand)]
        program: Program,
    },
}

#[derive(Args)]
struct Run {
    /// Only scenarios whose number or name contains this; may be repeated
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Fewer messages, as in `make test`
    #[arg(long)]
    short: bool,
    /// What random moments and faults are drawn from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds that the soak strikes
    #[arg(long, default_value_t = 120)]
    soak_seconds: u64,
    /// Directory of the report
    #[arg(long, default_value = "target")]
    report: PathBuf,
    #[command(flatten)]
    own_consumer: OwnConsumerFlags,
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()),
        )
        .with_writer(std::io::stderr)
        .init();
    match Cli::parse().command {
        Command::Run(run) => run.run().await,
        Command::Program { program } => program.run().await.map(|()| ExitCode::SUCCESS),
    }
}

impl Run {
    async fn run(self) -> Result<ExitCode> {
        let suite = Suite {
            programs: std::env::current_exe()?,
            own_consumer: self.own_consumer.own_consumer(),
            scale: if self.short {
                Scale::Short
            } else {
                Scale::Full
            },
            seed: self.seed,
            soak: Duration::from_secs(self.soak_seconds),
        };
        let mut report = Report::default();
        for scenario in scenarios::all() {
            let title = scenario.title();
            if !self.only.is_empty() && !self.only.iter().any(|text| title.contains(text.as_str()))
            {
                continue;
            }
            eprintln!("{title} …");
            let outcome = scenario.run(&suite).await;
            for problem in outcome.problems() {
                eprintln!("    FAILED: {problem}");
            }
            report.outcomes.push(outcome);
        }
        if report.outcomes.is_empty() {
            return Err("--only: no scenario has this in its number or name".into());
        }
        report.write(&self.report)?;
        println!("{}", report.markdown());
        Ok(if report.has_passed() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}
