//! The purge: takes published messages out of the outbox once they are older than the retention.
//!
//! It has a session of its own, so that a large batch never holds up reading. The leader orders it
//! after each check of the history, with the highest id that may go.

use std::time::Duration;

use tokio::sync::watch;

use crate::backoff::Waits;
use crate::config::Config;
use crate::error::Result;
use crate::metric_names as names;
use crate::postgres::{HEARTBEAT, Session, sql};

/// Rows that one statement deletes.
const BATCH_ROWS: i64 = 5_000;

/// Carries out the leader's orders until the sender is gone.
pub(crate) async fn purge_on_order(config: Config, mut order: watch::Receiver<i64>) {
    let waits = Waits::new(&config);
    let mut session = None;
    while order.changed().await.is_ok() {
        order.borrow_and_update();
        if let Err(error) = purge(&config, &mut session, &order).await {
            session = None;
            tracing::warn!(
                error = error.one_line(),
                "the purge failed; it is tried again"
            );
            tokio::time::sleep(waits.slow()).await;
        }
    }
}

async fn purge(
    config: &Config,
    slot: &mut Option<Session>,
    order: &watch::Receiver<i64>,
) -> Result<()> {
    let session = match slot {
        Some(session) if !session.is_closed() => session,
        _ => {
            let session = Session::open(
                &config.postgres,
                &format!("{} purge", config.name),
                config.postgres_timeout,
            )
            .await?;
            // Between two orders it is silent, and a session that is lost is opened again.
            session.batch("set up the purge", sql::BE_JANITOR).await?;
            slot.insert(session)
        }
    };
    let retention = config.retention.as_secs_f64();
    let floor: Option<i64> = session
        .one("look for what is old", sql::PURGE_FLOOR, &[&retention])
        .await?
        .get(0);
    let Some(floor) = floor else { return Ok(()) };
    let mut reach: i64 = session
        .one("read the purge's reach", sql::PURGED_TO, &[])
        .await?
        .get(0);
    let mut purged = 0;
    // A leader that takes over anew may lower the limit, and one that is gone gives no more orders.
    while order.has_changed().is_ok() {
        let floor = floor.min(*order.borrow());
        if reach >= floor {
            break;
        }
        let row = session
            .one("purge", sql::PURGE, &[&reach, &floor, &BATCH_ROWS])
            .await?;
        let (rows, last): (i64, Option<i64>) = (row.get(0), row.get(1));
        let Some(last) = last else { break };
        purged += rows;
        reach = last;
        tokio::task::yield_now().await;
    }
    session
        .execute("forget old milestones", sql::FORGET_MILESTONES, &[&floor])
        .await?;
    if purged > 0 {
        ::metrics::counter!(names::PURGED).increment(u64::try_from(purged).unwrap_or(0));
        tracing::debug!(purged, reach, "purged published messages");
    }
    Ok(())
}

/// How finely the time of publication is recorded for a retention.
pub(crate) fn milestone_interval(retention: Duration) -> Duration {
    (retention / 60).clamp(HEARTBEAT / 10, Duration::from_secs(60))
}
