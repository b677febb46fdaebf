//! Runs a relay: stand by, lead, and begin again whenever the leadership is lost.

use std::cell::Cell;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::backoff::Waits;
use crate::config::Config;
use crate::elect::stand_by;
use crate::error::{Error, Result};
use crate::health::Phase;
use crate::leader::lead;
use crate::metric_names as names;
use crate::observer::observe;
use crate::protocol::failure::Meaning;

/// How long a relay may take to finish its page and write the checkpoint once it is told to stop.
const STOP_LIMIT: Duration = Duration::from_secs(8);

/// The same failure is logged again after this long.
const LOG_AGAIN: Duration = Duration::from_secs(30);

/// Runs a relay until `shutdown` completes. Then it finishes the page at hand, writes the checkpoint and
/// returns, within 10 seconds.
///
/// # Errors
///
/// Only at start: a set-up that is wrong, or a server that stays out of reach for
/// [`Config::start_timeout`]. Once both servers were reached, every failure is met by trying again.
///
/// # Cancel safety
///
/// Dropping the future is as safe as killing the process: nothing is lost, and the next leader goes on
/// behind the marker.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<()> {
    let stop = CancellationToken::new();
    let _stop_observing = stop.clone().drop_guard();
    let (observed, observing) = (config.clone(), stop.clone());
    tokio::spawn(async move { observe(&observed, &observing).await });
    let mut relay = std::pin::pin!(keep_running(&config, &stop));
    let mut shutdown = std::pin::pin!(shutdown);
    // Not the leader's loop: this only turns the caller's signal into the order to stop.
    match futures_util::future::select(&mut relay, &mut shutdown).await {
        futures_util::future::Either::Left((done, _)) => return done,
        futures_util::future::Either::Right(((), _)) => {
            config.health.enter(Phase::Stopping);
            stop.cancel();
        }
    }
    match tokio::time::timeout(STOP_LIMIT, relay).await {
        Ok(done) => done,
        Err(_) => {
            tracing::warn!(
                "stopped without waiting for a server any longer; the next leader goes on behind the marker"
            );
            Ok(())
        }
    }
}

async fn keep_running(config: &Config, stop: &CancellationToken) -> Result<()> {
    let begun = Instant::now();
    let mut waits = Waits::new(config);
    let mut started = false;
    let mut logged: Option<(String, Instant)> = None;
    while !stop.is_cancelled() {
        let working = Cell::new(false);
        let outcome = match stand_by(config, stop, &working).await {
            Ok(None) => return Ok(()),
            Ok(Some((session, publisher))) => {
                lead(config, session, publisher, stop, &working).await
            }
            Err(error) => Err(error),
        };
        let Err(error) = outcome else { return Ok(()) };
        if working.get() {
            started = true;
            waits.reset();
        }
        let setup = error.meaning() == Meaning::Setup;
        if !started && (setup || begun.elapsed() >= config.start_timeout) {
            return Err(error);
        }
        ::metrics::counter!(names::INTERRUPTIONS).increment(1);
        config.health.enter(Phase::Interrupted(error.one_line()));
        log(&error, &mut logged);
        let wait = match &error {
            Error::Yielded(_) => Duration::from_secs(2), // the standby tries once within this time
            _ if setup => waits.slow(),
            _ => waits.next(),
        };
        let _ = tokio::time::timeout(wait, stop.cancelled()).await;
    }
    Ok(())
}

fn log(error: &Error, logged: &mut Option<(String, Instant)>) {
    let line = error.one_line();
    if logged
        .as_ref()
        .is_some_and(|(last, at)| *last == line && at.elapsed() < LOG_AGAIN)
    {
        return;
    }
    match error.meaning() {
        Meaning::Setup => tracing::error!(error = line, "cannot work; trying again, slowly"),
        Meaning::Outage | Meaning::StreamRefuses => {
            tracing::warn!(error = line, "a server is out of reach; trying again");
        }
    }
    *logged = Some((line, Instant::now()));
}
