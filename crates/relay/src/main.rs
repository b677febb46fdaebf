//! The daemon and its command line.

mod command_line;
mod manual;
mod operate;
mod settings;

use std::process::ExitCode;

use clap::error::ErrorKind;
use outbox_relay::{Config, Error, Result, Schema, ServerFlags};

use self::command_line::{Cli, Command, ConfigCommand, MigrateFlags, TopicsCommand};
use self::settings::{Refused, Settings};

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    let (cli, settings) = match settings::read::<Cli>(&args) {
        Ok(read) => read,
        Err(Refused::CommandLine(error)) => {
            let _ = error.print();
            let asked = matches!(
                error.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            );
            return ExitCode::from(if asked { 0 } else { 64 });
        }
        Err(Refused::File(line)) => {
            eprintln!("outbox-relay: {line}");
            return ExitCode::from(64);
        }
    };
    // One thread: what the relay does between two servers is too little for several, and waking one another costs
    // them more than it gains (measured: docs/bench/notes.md).
    let done = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::Setup {
            problem: format!("cannot start the runtime: {e}"),
            remedy: "check ulimits".into(),
        })
        .and_then(|runtime| {
            let done = runtime.block_on(execute(cli, &settings));
            // What waits for a server that is out of reach is not waited for.
            runtime.shutdown_background();
            done
        });
    match done {
        Ok(code) => code,
        Err(error) => {
            let place = match &error {
                Error::Config { field, .. } => settings.place_of(field),
                _ => None,
            };
            let place = place.map(|place| format!(" ({place})")).unwrap_or_default();
            eprintln!("outbox-relay: {}{place}", error.one_line());
            ExitCode::from(exit_code(&error))
        }
    }
}

fn exit_code(error: &Error) -> u8 {
    if matches!(error, Error::Config { .. }) {
        64
    } else {
        1
    }
}

async fn execute(cli: Cli, settings: &Settings) -> Result<ExitCode> {
    outbox_relay::log_to_stderr(cli.log_format, &cli.log)?;
    let servers = cli.servers;
    match cli.command {
        Command::Run(flags) => {
            let config = Config::new(&servers, *flags)?;
            if let Some(address) = config.listen {
                outbox_relay::serve_http(address, config.health.clone()).await?;
            }
            run(config).await?;
        }
        Command::Migrate(flags) => migrate(&servers, &flags).await?,
        Command::DeadLetters { inbox, command } => {
            let database = match inbox.postgres()? {
                Some(database) => database,
                None => servers.postgres()?,
            };
            say(&outbox_relay::dead_letters(&database, &command).await?);
        }
        Command::Rewind(flags) => operate::rewind(&servers, &flags).await?,
        Command::Trace(flags) => operate::trace(&servers, &flags).await?,
        Command::Replay(flags) => operate::replay(&servers, &flags).await?,
        Command::Verify(flags) => return operate::verify(&servers, &flags).await,
        Command::Doctor(flags) => return operate::doctor(&servers, &flags).await,
        Command::Grants(flags) => say(&outbox_relay::grants(&flags, &servers.prefix()?)?),
        Command::Status(flags) => operate::status(&servers, &flags).await?,
        Command::Pause { reason } => operate::pause(&servers, &reason).await?,
        Command::Resume => operate::resume(&servers).await?,
        Command::Ready { listen } => {
            let readiness = outbox_relay::ask_readiness(listen).await?;
            say(&readiness.reason);
            return Ok(ExitCode::from(u8::from(!readiness.is_ready)));
        }
        Command::Config(ConfigCommand::Docs) => {
            say(settings::document(&<Cli as clap::CommandFactory>::command()).trim_end());
        }
        Command::Completions { shell } => {
            let script = manual::completions(<Cli as clap::CommandFactory>::command(), shell);
            say(script.trim_end());
        }
        Command::Man { dir } => {
            let command = <Cli as clap::CommandFactory>::command();
            match dir {
                Some(dir) => manual::write_pages(command, &dir)?,
                None => say(manual::page(command)?.trim_end()),
            }
        }
        Command::Config(ConfigCommand::Check(flags)) => {
            return settings::check(&servers, *flags, settings).await;
        }
        Command::Topics(command) => topics(&servers, command).await?,
        Command::Adopt => {
            let past =
                outbox_relay::adopt(&servers.postgres()?, &servers.redis()?, &servers.prefix()?)
                    .await?;
            match past.as_slice() {
                [] => say("nothing to adopt: the cursor is this cluster's own"),
                past => say(&format!(
                    "adopted the cursor of cluster {past:?}; a relay may now start here"
                )),
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn topics(servers: &ServerFlags, command: TopicsCommand) -> Result<()> {
    match command {
        TopicsCommand::List => {
            for topic in outbox_relay::list_topics(&servers.postgres()?).await? {
                let wanted = topic
                    .wanted
                    .map(|wanted| format!(", changing to {wanted}"))
                    .unwrap_or_default();
                say(&format!(
                    "{}: {} partitions{wanted}",
                    topic.topic, topic.partitions
                ));
            }
        }
        TopicsCommand::Set {
            topic,
            partitions,
            at_once,
        } => {
            let present =
                outbox_relay::set_partitions(&servers.postgres()?, &topic, partitions, at_once)
                    .await?;
            say(&format!(
                "{topic} has {present} partitions; the leader changes that to {partitions} {}",
                if at_once {
                    "at once"
                } else {
                    "when all groups have drained its streams (see outbox-relay status)"
                }
            ));
        }
    }
    Ok(())
}

async fn migrate(servers: &ServerFlags, flags: &MigrateFlags) -> Result<()> {
    let schema = if flags.inbox {
        Schema::Inbox
    } else {
        Schema::Outbox
    };
    if flags.print {
        say(&schema.migrations().join("\n"));
        return Ok(());
    }
    let done = outbox_relay::migrate(&servers.postgres()?, schema).await?;
    say(&match done.from {
        Some(from) if from == done.to => {
            format!("schema {} is at version {} already", schema.name(), done.to)
        }
        Some(from) => format!(
            "schema {} upgraded from version {from} to {}",
            schema.name(),
            done.to
        ),
        None => format!("schema {} created at version {}", schema.name(), done.to),
    });
    Ok(())
}

/// Runs a relay, and sends its spans to a collector where one is named.
async fn run(config: Config) -> Result<()> {
    #[cfg(feature = "otlp")]
    {
        let endpoint = config.otlp_endpoint.as_deref();
        let export = endpoint.map(outbox_relay::export_traces).transpose()?;
        let done = outbox_relay::run(config, told_to_stop()).await;
        if let Some(export) = export {
            // It blocks its thread, and waits a second at the most.
            let _ = tokio::task::spawn_blocking(move || export.end()).await;
        }
        done
    }
    #[cfg(not(feature = "otlp"))]
    {
        if config.otlp_endpoint.is_some() {
            tracing::warn!("spans go nowhere: this binary was built without the feature otlp");
        }
        outbox_relay::run(config, told_to_stop()).await
    }
}

/// Completes at SIGTERM or SIGINT.
async fn told_to_stop() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        match (
            signal(SignalKind::terminate()),
            signal(SignalKind::interrupt()),
        ) {
            (Ok(mut terminate), Ok(mut interrupt)) => {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
            }
            _ => std::future::pending().await,
        }
    }
    #[cfg(not(unix))]
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}

/// Writes the answer of a command to standard output.
fn say(text: &str) {
    use std::io::Write;
    // A reader that went away is no failure of the command.
    let _ = writeln!(std::io::stdout(), "{text}");
}
