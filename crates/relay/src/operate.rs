//! The commands for whoever is on call: what they say, and until when.

use std::process::ExitCode;

use futures_util::future::{Either, select};
use outbox_relay::protocol::failure::Meaning;
use outbox_relay::{
    DoctorFlags, ReplayFlags, Replayed, Result, RewindFlags, ServerFlags, StatusFlags,
    StatusLooker, TraceFlags, VerifyFlags,
};

use super::{say, told_to_stop};

pub(super) async fn status(servers: &ServerFlags, flags: &StatusFlags) -> Result<()> {
    let (postgres, redis, prefix) = (servers.postgres()?, servers.redis()?, servers.prefix()?);
    let interval = flags.interval()?;
    let mut looker = StatusLooker::new(&postgres, &redis, &prefix, &flags.topics);
    let mut stop = std::pin::pin!(told_to_stop());
    let mut looks = 0_u64;
    loop {
        let look = std::pin::pin!(looker.look());
        let look = match select(look, stop.as_mut()).await {
            Either::Left((look, _)) => look,
            Either::Right(_) => return Ok(()),
        };
        let text = match look {
            Ok(status) if flags.json => status.to_json(),
            Ok(status) => status.to_string(),
            // A server that goes away while somebody watches may come back.
            Err(error) if looks > 0 && error.meaning() == Meaning::Outage => error.one_line(),
            Err(error) => return Err(error),
        };
        let Some(interval) = interval else {
            say(&text);
            return Ok(());
        };
        looks += 1;
        redraw(&text, flags.json);
        let rest = std::pin::pin!(tokio::time::sleep(interval));
        if let Either::Right(_) = select(rest, stop.as_mut()).await {
            return Ok(());
        }
    }
}

/// Puts a text in the place of the one before on a terminal, and behind it elsewhere.
fn redraw(text: &str, json: bool) {
    use std::io::IsTerminal;
    if json {
        say(text);
    } else if std::io::stdout().is_terminal() {
        say(&format!("\x1b[H\x1b[2J{text}"));
    } else {
        say(&format!("{text}\n"));
    }
}

pub(super) async fn doctor(servers: &ServerFlags, flags: &DoctorFlags) -> Result<ExitCode> {
    let report =
        outbox_relay::doctor(&servers.postgres()?, &servers.redis()?, &servers.prefix()?).await?;
    say(&if flags.json {
        report.to_json()
    } else {
        report.to_string()
    });
    Ok(ExitCode::from(report.exit_code()))
}

pub(super) async fn pause(servers: &ServerFlags, reason: &str) -> Result<()> {
    let fresh = outbox_relay::pause(&servers.postgres()?, reason).await?;
    say(if fresh {
        "paused; the leader stops within its poll interval, and `outbox-relay resume` lets it go on"
    } else {
        "was paused already; the reason is replaced"
    });
    Ok(())
}

pub(super) async fn resume(servers: &ServerFlags) -> Result<()> {
    match outbox_relay::resume(&servers.postgres()?).await? {
        Some(lasted) => say(&format!(
            "publishing goes on after {}",
            humantime::format_duration(std::time::Duration::from_secs(lasted.as_secs()))
        )),
        None => say("was not paused"),
    }
    Ok(())
}

pub(super) async fn trace(servers: &ServerFlags, flags: &TraceFlags) -> Result<()> {
    let (postgres, redis, prefix) = (servers.postgres()?, servers.redis()?, servers.prefix()?);
    let trace = outbox_relay::trace(&postgres, &redis, &prefix, flags).await?;
    say(&if flags.json {
        trace.to_json()
    } else {
        trace.to_string()
    });
    Ok(())
}

pub(super) async fn replay(servers: &ServerFlags, flags: &ReplayFlags) -> Result<()> {
    let (postgres, redis, prefix) = (servers.postgres()?, servers.redis()?, servers.prefix()?);
    let replay = std::pin::pin!(outbox_relay::replay(&postgres, &redis, &prefix, flags));
    let stop = std::pin::pin!(told_to_stop());
    let replayed = match select(replay, stop).await {
        Either::Left((replayed, _)) => replayed?,
        Either::Right(_) => {
            say("stopped; the same command goes on from there");
            return Ok(());
        }
    };
    match replayed {
        Replayed::Done { messages, ids } => say(&format!(
            "published {messages} messages again, of the ids {} to {}",
            ids.0, ids.1
        )),
        Replayed::Before { messages } => say(&format!(
            "was done before: {messages} messages; another --name begins anew"
        )),
        Replayed::Counted(topics) => {
            for topic in &topics {
                say(&format!(
                    "{}: {} messages, {} bytes, ids {} to {}",
                    topic.topic, topic.messages, topic.bytes, topic.first_id, topic.last_id
                ));
            }
            let messages: i64 = topics.iter().map(|topic| topic.messages).sum();
            say(&format!("{messages} messages in {} topics", topics.len()));
        }
        _ => {}
    }
    Ok(())
}

pub(super) async fn verify(servers: &ServerFlags, flags: &VerifyFlags) -> Result<ExitCode> {
    let report = outbox_relay::verify(
        &servers.postgres()?,
        &servers.redis()?,
        &servers.prefix()?,
        flags,
    )
    .await?;
    say(&if flags.json {
        report.to_json()
    } else {
        report.to_string()
    });
    Ok(if report.wrong {
        ExitCode::from(2)
    } else {
        ExitCode::SUCCESS
    })
}

pub(super) async fn rewind(servers: &ServerFlags, flags: &RewindFlags) -> Result<()> {
    for done in outbox_relay::rewind(&servers.redis()?, &servers.prefix()?, flags).await? {
        match done.to {
            Some(to) => say(&format!(
                "{}: set back from {} to {to}",
                done.stream, done.from
            )),
            None => say(&format!(
                "{}: stands at {}, which is not later",
                done.stream, done.from
            )),
        }
    }
    Ok(())
}
