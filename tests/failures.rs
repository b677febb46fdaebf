//! A short form of each scenario of the failure suite, as a test of its own.

use std::{
    path::PathBuf,
    process::{ExitCode, Termination},
    time::Duration,
};

use libtest_mimic::{Arguments, Failed, Trial};
use outbox_tests::{OwnConsumer, Report, Scale, Scenario, Suite, scenarios};

/// How long the soak strikes.
const SOAK: Duration = Duration::from_secs(40);

fn main() -> impl Termination {
    let mut arguments = Arguments::from_args();
    if let (None, Ok(threads)) = (arguments.test_threads, std::env::var("RUST_TEST_THREADS")) {
        arguments.test_threads = threads.parse().ok();
    }
    // The soak and what else takes long comes first, so that the short ones fill the gaps at the end.
    let mut trials: Vec<Trial> = scenarios::all()
        .into_iter()
        .rev()
        .map(|scenario| trial(scenario.title(), scenario, None))
        .collect();
    trials.push(trial(
        "a handler of one's own in the place of ours".to_owned(),
        scenarios::all()[0],
        Some(own_handler()),
    ));
    let conclusion = libtest_mimic::run(&arguments, trials);
    if conclusion.has_failed() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// The example, which cargo builds when it is asked for all tests of the package.
fn own_handler() -> OwnConsumer {
    let programs = PathBuf::from(env!("CARGO_BIN_EXE_outbox-failures"));
    OwnConsumer {
        program: programs.with_file_name("examples").join("own_handler"),
        setup_sql: "CREATE TABLE parcels (id bigserial, message_key text)".to_owned(),
        effects_sql: "SELECT message_key FROM parcels ORDER BY id".to_owned(),
    }
}

fn trial(title: String, scenario: Scenario, own_consumer: Option<OwnConsumer>) -> Trial {
    Trial::test(title, move || passes(scenario, own_consumer))
}

fn passes(scenario: Scenario, own_consumer: Option<OwnConsumer>) -> Result<(), Failed> {
    let suite = Suite {
        programs: PathBuf::from(env!("CARGO_BIN_EXE_outbox-failures")),
        own_consumer,
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
