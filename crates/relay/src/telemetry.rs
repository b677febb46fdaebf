//! Logs: one line an event, on standard error.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::error::{Error, Result};

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

/// Sends the logs of this process to standard error. `filter` is a level, or a list such as
/// `info,outbox_relay=debug`.
///
/// # Errors
///
/// [`Error::Config`] for a filter that is not understood.
pub fn log_to_stderr(format: LogFormat, filter: &str) -> Result<()> {
    let filter = EnvFilter::try_new(filter).map_err(|e| Error::Config {
        field: "--log",
        problem: format!("{e}; use e.g. info or outbox_relay=debug"),
    })?;
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    // A second call, from a test, keeps the first.
    let _ = match format {
        LogFormat::Text => subscriber
            .with_ansi(std::io::stderr().is_terminal())
            .try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    };
    Ok(())
}
