//! Looks every few seconds at what is not published yet and who holds it up, for metrics and readiness. On a session
//! of its own: it goes on while the leader waits for Redis, and on standbys, too.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::error::Result;
use crate::health::Backlog;
use crate::metric_names as names;
use crate::postgres::{Session, sql};
use crate::status::seconds;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(5);

/// Messages that are counted.
const BACKLOG_ROWS_MAX: i64 = 100_000;

/// Looks until told to stop. Whatever fails is tried again at the next look: whoever publishes reports it.
pub(crate) async fn observe(config: &Config, stop: &CancellationToken) {
    let name = format!("{} observer", config.name);
    let mut session = None;
    while !stop.is_cancelled() {
        if let Err(error) = look(config, &name, &mut session).await {
            tracing::debug!(error = error.one_line(), "cannot look at the backlog");
            session = None;
        }
        let readiness = config.health.readiness();
        ::metrics::gauge!(names::READY).set(if readiness.is_ready { 1.0 } else { 0.0 });
        let _ = tokio::time::timeout(INTERVAL, stop.cancelled()).await;
    }
}

async fn look(config: &Config, name: &str, slot: &mut Option<Session>) -> Result<()> {
    let session = match slot {
        Some(session) if !session.is_closed() => session,
        _ => {
            let session = Session::open(&config.postgres, name, config.postgres_timeout).await?;
            // Between two looks it is silent.
            session.batch("set up the observer", sql::BE_SILENT).await?;
            slot.insert(session)
        }
    };
    let row = session
        .one("count the backlog", sql::BACKLOG, &[&BACKLOG_ROWS_MAX])
        .await?;
    let backlog = Backlog {
        messages: row.get(0),
        oldest: row.get::<_, Option<f64>>(1).map_or(Duration::ZERO, seconds),
    };
    config.health.saw_backlog(backlog);
    let holders = session.all("list the writers", sql::HOLDERS, &[]).await?;
    let oldest_holder = holders
        .iter()
        .map(|row| row.get::<_, f64>(3))
        .fold(0.0, f64::max);
    let dead_letters: i64 = session
        .one("count the dead letters", sql::DEAD_LETTERS, &[])
        .await?
        .get(0);
    let paused = crate::pause::read(session).await?.is_some();
    for (name, value) in [
        (names::PAUSED, if paused { 1.0 } else { 0.0 }),
        (names::BACKLOG, backlog.messages as f64),
        (names::OLDEST_UNPUBLISHED, backlog.oldest.as_secs_f64()),
        (names::HOLDERS, holders.len() as f64),
        (names::OLDEST_HOLDER, oldest_holder),
        (names::DEAD_LETTERS, dead_letters as f64),
    ] {
        ::metrics::gauge!(name).set(value);
    }
    Ok(())
}
