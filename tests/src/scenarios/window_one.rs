//! Window one: Postgres commits, and the application dies, or Redis refuses, before the message is on its way.

use outbox_testkit::{Direction, Matcher};

use crate::{
    Result, Scenario, Stage,
    evidence::Column,
    scenario::{Naive, Shows},
    stage::{DEADLINE, until},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new(
        1,
        "the application dies after its commit",
        Naive::CommitThenEnqueue,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(application_dies_after_commit(stage)),
    )
    .repeatable(),
    Scenario::new(
        1,
        "Redis refuses connections for a while",
        Naive::CommitThenEnqueue,
        Shows::Harm(Column::Lost),
        |stage| Box::pin(redis_refuses(stage)),
    )
    .repeatable(),
];

/// Deaths in a run.
const DEATHS: usize = 10;

/// Orders while Redis refuses.
const ORDERS_WITHOUT_REDIS: usize = 200;

/// Kills the shop when Postgres has committed and the shop does not know yet, several times.
async fn application_dies_after_commit(stage: &mut Stage) -> Result {
    for _ in 0..DEATHS {
        let shop = &stage.shops[0];
        let committed = shop
            .link
            .postgres
            .hold(Matcher::sql("COMMIT"), Direction::Reply);
        committed.reached().await?;
        stage.kill_shops();
        committed.drop_it();
        stage.start_shop().await?;
    }
    Ok(())
}

/// Every connection to Redis is reset, and no new one is let in, while orders are placed.
async fn redis_refuses(stage: &mut Stage) -> Result {
    for link in stage.links() {
        link.redis.refuse().await?;
    }
    orders_without_redis(stage).await?;
    for link in stage.links() {
        link.redis.pass().await?;
    }
    Ok(())
}

/// Waits for committed orders: a naive shop acknowledges none without Redis.
async fn orders_without_redis(stage: &Stage) -> Result {
    let client = stage.shop_client().await?;
    let count = async || -> Result<i64> {
        Ok(client
            .query_one("SELECT count(*) FROM orders", &[])
            .await?
            .get(0))
    };
    let before = count().await?;
    let wanted = before + i64::try_from(ORDERS_WITHOUT_REDIS)?;
    until(DEADLINE, "orders without Redis", || async {
        Ok(count().await? >= wanted)
    })
    .await
}
