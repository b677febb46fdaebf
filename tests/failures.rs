//! A short form of each scenario of the failure suite, as a test of its own.

use std::{
    path::PathBuf,
    process::{ExitCode, Termination},
    time::Duration,
};

use libtest_mimic::{Arguments, Failed, Trial};
use outbox_tests::{Report, Scale, Scenario, Suite, scenarios};

/// How long the soak strikes.
const SOAK: Duration = Duration::from_secs(60);

fn main() -> impl Termination {
    let mut arguments = Arguments::from_args();
    if let (None, Ok(threads)) = (arguments.test_threads, std::env::var("RUST_TEST_THREADS")) {
        arguments.test_threads = threads.parse().ok();
    }
    let trials = scenarios::all().into_iter().map(trial).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if conclusion.has_failed() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

fn trial(scenario: Scenario) -> Trial {
    Trial::test(scenario.title(), move || passes(scenario))
}

fn passes(scenario: Scenario) -> Result<(), Failed> {
    let suite = Suite {
        programs: PathBuf::from(env!("CARGO_BIN_EXE_outbox-failures")),
        own_consumer: None,
        scale: Scale::Short,
        seed: 1,
        soak: SOAK,
    };
    let runtime = tokio::runtime::Runtime::new()?;
    let outcome = runtime.block_on(scenario.run(&suite));
    let report = Report {
        outcomes: vec![outcome],
    };
    if report.has_passed() {
        Ok(())
    } else {
        Err(report.markdown().into())
    }
}
