//! Standing by until this relay is the leader.

use std::cell::Cell;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::error::Result;
use crate::health::Phase;
use crate::postgres::{Session, sql};
use crate::publisher::Publisher;

/// How often a standby tries for the lock.
const TRY_INTERVAL: Duration = Duration::from_millis(800);

/// A leader whose session shows no progress for this long is frozen or cut off; it speaks every 1.2 s.
const FROZEN_AFTER_SECONDS: f64 = 5.0;

/// Waits until this relay holds the leader's lock; none when it was told to stop.
///
/// A relay that does not reach Redis tries for nothing. One that does says so by a shared lock, and a
/// leader without Redis makes room for it. `working` is set once it stands by.
///
/// # Errors
///
/// That one of the servers is out of reach.
pub(crate) async fn stand_by(
    config: &Config,
    stop: &CancellationToken,
    working: &Cell<bool>,
) -> Result<Option<(Session, Publisher)>> {
    let session = Session::open(&config.postgres, &config.name, config.postgres_timeout).await?;
    let mut publisher =
        Publisher::connect(&config.redis, &config.stream_prefix, config.redis_timeout).await?;
    let mut announced = false;
    while !stop.is_cancelled() {
        session.speaking(publisher.ping()).await??;
        if session
            .one("try for the leadership", sql::TRY_LEAD, &[])
            .await?
            .get(0)
        {
            if announced {
                session
                    .one("stand by no longer", sql::NOT_READY, &[])
                    .await?;
            }
            return Ok(Some((session, publisher)));
        }
        if !announced {
            session.one("stand by", sql::READY, &[]).await?;
            tracing::info!("standing by: another relay leads");
            announced = true;
            config.health.enter(Phase::StandingBy);
            working.set(true);
        }
        end_frozen_leader(&session).await?;
        let _ = tokio::time::timeout(TRY_INTERVAL, stop.cancelled()).await;
    }
    Ok(None)
}

/// Ends the session of a leader that shows no progress. A frozen process keeps its connection, and so the
/// lock, for ever; the epoch keeps it from publishing once it thaws.
async fn end_frozen_leader(session: &Session) -> Result<()> {
    let Some(row) = session
        .at_most_one("look at the leader", sql::LEADER, &[])
        .await?
    else {
        return Ok(());
    };
    let (pid, name, silent): (i32, Option<String>, Option<f64>) =
        (row.get(0), row.get(1), row.get(2));
    let Some(silent) = silent.filter(|silent| *silent > FROZEN_AFTER_SECONDS) else {
        return Ok(());
    };
    tracing::warn!(
        pid,
        leader = name,
        silent_seconds = silent,
        "the leader shows no progress; ending its session"
    );
    session
        .one("end the leader's session", sql::END_SESSION, &[&pid])
        .await?;
    Ok(())
}
