//! `outbox-relay config check`.

use std::process::ExitCode;

use outbox_relay::{Config, Result, RunFlags, ServerFlags};

use super::Settings;
use crate::{exit_code, say};

/// Says where each setting comes from and what is wrong with either server. The exit code is that of the worst.
///
/// # Errors
///
/// The first setting that is missing, out of its bounds, or against another one.
pub(crate) async fn check(
    servers: &ServerFlags,
    flags: RunFlags,
    settings: &Settings,
) -> Result<ExitCode> {
    for setting in settings.all() {
        say(&format!(
            "{:<24} {:<32} {}",
            setting.key, setting.value, setting.origin
        ));
    }
    let config = Config::new(servers, flags)?;
    let checked = outbox_relay::check_servers(&config).await;
    let mut code = 0;
    for (server, place, outcome) in [
        ("Postgres", config.postgres.describe(), checked.postgres),
        ("Redis", config.redis.describe(), checked.redis),
    ] {
        match outcome {
            Ok(()) => say(&format!("{server} at {place}: nothing is wrong")),
            Err(error) => {
                say(&format!("{server} at {place}: {}", error.one_line()));
                code = code.max(exit_code(&error));
            }
        }
    }
    Ok(ExitCode::from(code))
}
