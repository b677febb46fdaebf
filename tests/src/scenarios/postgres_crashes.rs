//! Postgres crashes, restarts or ends sessions, and forgets nothing.

use std::time::Instant;

use outbox_testkit::Shutdown;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    Result, Scenario, Stage,
    programs::NAIVE_NAME,
    scenario::{Naive, Shows},
    stage::{DEADLINE, RELAY_NAME, until},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new(
        5,
        "Postgres is killed with -9 and recovers",
        Naive::CursorLoop,
        Shows::Nothing,
        |stage| Box::pin(killed(stage)),
    )
    .repeatable(),
    Scenario::new(
        5,
        "Postgres restarts at once, without a checkpoint",
        Naive::CursorLoop,
        Shows::Nothing,
        |stage| Box::pin(restarted(stage)),
    )
    .repeatable(),
    Scenario::new(
        5,
        "each of the relay's sessions is terminated",
        Naive::CursorLoop,
        Shows::Nothing,
        |stage| Box::pin(sessions_terminated(stage)),
    )
    .repeatable(),
];

/// How often Postgres goes down in a run, short and full.
const CRASHES: (usize, usize) = (2, 10);

/// Rounds of terminating all sessions, short and full.
const TERMINATIONS: (usize, usize) = (5, 50);

/// Orders from one blow to the next.
const ORDERS_BETWEEN: std::ops::Range<usize> = 20..200;

const SESSIONS: &str = "SELECT pid FROM pg_stat_activity
    WHERE starts_with(application_name, $1) OR application_name = $2";
const TERMINATE: &str = "SELECT pg_terminate_backend($1)";
const IS_GONE: &str = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $1";

async fn killed(stage: &mut Stage) -> Result {
    let mut random = StdRng::seed_from_u64(stage.suite.seed);
    for _ in 0..stage.suite.scale.pick(CRASHES.0, CRASHES.1) {
        let orders = random.random_range(ORDERS_BETWEEN);
        stage.orders_acknowledged(orders).await?;
        stage.mark_struck();
        stage.servers.postgres.kill9().await?;
        stage.servers.postgres.start_again().await?;
    }
    Ok(())
}

async fn restarted(stage: &mut Stage) -> Result {
    let mut random = StdRng::seed_from_u64(stage.suite.seed);
    for _ in 0..stage.suite.scale.pick(CRASHES.0, CRASHES.1) {
        let orders = random.random_range(ORDERS_BETWEEN);
        stage.orders_acknowledged(orders).await?;
        stage.mark_struck();
        stage.servers.postgres.restart(Shutdown::Immediate).await?;
    }
    Ok(())
}

/// Ends one session of the carriers after the other, and again those that they open instead.
async fn sessions_terminated(stage: &mut Stage) -> Result {
    let mut random = StdRng::seed_from_u64(stage.suite.seed);
    let client = stage.shop_client().await?;
    let mut ended = 0;
    let rounds = stage.suite.scale.pick(TERMINATIONS.0, TERMINATIONS.1);
    for _ in 0..rounds {
        until(DEADLINE, "a session of the carriers", || async {
            let sessions = client.query(SESSIONS, &[&RELAY_NAME, &NAIVE_NAME]).await?;
            Ok(!sessions.is_empty())
        })
        .await?;
        for session in client.query(SESSIONS, &[&RELAY_NAME, &NAIVE_NAME]).await? {
            let pid: i32 = session.get(0);
            stage.mark_struck();
            client.execute(TERMINATE, &[&pid]).await?;
            until(DEADLINE, "the end of a session", || async {
                Ok(client.query_one(IS_GONE, &[&pid]).await?.get(0))
            })
            .await?;
            ended += 1;
            let orders = random.random_range(ORDERS_BETWEEN);
            stage.orders_acknowledged(orders).await?;
        }
        if stage.recovered(Instant::now()).await?.is_none() {
            return Err("no message came through after a session was terminated".into());
        }
    }
    stage.note(format!("{ended} sessions terminated"));
    Ok(())
}
