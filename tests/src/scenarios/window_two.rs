//! Window two: the message is on its way, and Postgres takes the order back.

use futures_util::future::try_join_all;
use outbox_testkit::{Direction, Matcher};
use tokio_postgres::error::SqlState;

use crate::{
    Result, Scenario, Stage,
    evidence::Column,
    link::{Moment, Net},
    programs::ORDER_FAILED,
    scenario::{Forgets, Naive, Shows},
    stage::{DEADLINE, Setting, until},
};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario::new(
        2,
        "a constraint refuses orders at their commit",
        Naive::EnqueueThenCommit,
        Shows::Harm(Column::Phantom),
        |stage| Box::pin(constraint_refuses(stage)),
    )
    .setting(WITHOUT_ROLLBACKS)
    .repeatable(),
    Scenario::new(
        2,
        "orders are the victims of deadlocks at their commit",
        Naive::EnqueueThenCommit,
        Shows::Harm(Column::Phantom),
        |stage| Box::pin(deadlocks(stage)),
    )
    .setting(WITHOUT_ROLLBACKS)
    .repeatable(),
    Scenario::new(
        2,
        "the application is killed before its commit arrives",
        Naive::EnqueueThenCommit,
        Shows::Harm(Column::Phantom),
        |stage| Box::pin(application_is_killed(stage)),
    )
    .setting(WITHOUT_ROLLBACKS)
    .repeatable(),
    Scenario::new(
        2,
        "Postgres crashes with commits that are written and not flushed",
        Naive::EnqueueThenCommit,
        Shows::Harm(Column::Phantom),
        |stage| Box::pin(crashes_before_flush(stage)),
    )
    .setting(WITHOUT_ROLLBACKS)
    .repeatable(),
    Scenario::new(
        2,
        "Postgres crashes with commits that are visible and not flushed",
        Naive::EnqueueThenCommit,
        Shows::Harm(Column::Phantom),
        |stage| Box::pin(crashes_with_visible_commits(stage)),
    )
    .forgets(Forgets::Unflushed)
    .setting(ASYNCHRONOUS),
];

/// What the control shows is to be the work of the fault.
const WITHOUT_ROLLBACKS: Setting = Setting {
    shop: &["--rollback-percent", "0"],
    ..Setting::USUAL
};

/// Commits are visible long before they are flushed.
const ASYNCHRONOUS: Setting = Setting {
    postgres: |builder| {
        builder
            .setting("wal_writer_delay", "10s")
            .setting("wal_writer_flush_after", "1GB")
            .setting("autovacuum", "off")
    },
    shop: &["--rollback-percent", "0", "--synchronous-commit", "off"],
    ..Setting::USUAL
};

/// Deaths of the application in a run.
const DEATHS: usize = 10;

/// Customers of the shop that are in a deadlock at the same time.
const DEADLOCKED: [&str; 4] = ["c0", "c1", "c2", "c3"];

/// Orders that are acknowledged while the relay waits for the flush.
const UNFLUSHED: usize = 30;

/// Half of the customers have credit for so many orders more; it is charged at the commit, after all else.
const GRANT_CREDIT: &str = "
    CREATE TABLE credit (customer text PRIMARY KEY, orders_left bigint NOT NULL CHECK (orders_left >= 0));
    INSERT INTO credit SELECT name, 5 FROM customers WHERE right(name, 1) < '5';
    CREATE FUNCTION charge_order() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        UPDATE credit SET orders_left = orders_left - 1 WHERE customer = split_part(NEW.key, '-', 1);
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER charged AFTER INSERT ON orders
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION charge_order()";
const RAISE_CREDIT: &str = "UPDATE credit SET orders_left = 1000000";
const END_CREDIT: &str = "
    DROP TRIGGER charged ON orders;
    DROP FUNCTION charge_order;
    DROP TABLE credit";

/// Long enough that Postgres ends the other side of the deadlock first, which looks for one after a second.
const BE_NO_VICTIM: &str = "SET deadlock_timeout = '2s'";
const LOCK_CREDIT: &str = "UPDATE credit SET orders_left = orders_left WHERE customer = $1";
const LOCK_CUSTOMER: &str = "UPDATE customers SET orders = orders WHERE name = $1";
/// Not by `pg_stat_activity`, which does not change within a transaction.
const IS_WAITED_FOR: &str = "SELECT EXISTS (
    SELECT FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid)))";

/// Each commit waits between its record and the flush, for others that would be flushed with it.
const DELAY_COMMITS: &[&str] = &[
    "ALTER SYSTEM SET commit_delay = 100000",
    "ALTER SYSTEM SET commit_siblings = 0",
    "SELECT pg_reload_conf()",
];
const HASTEN_COMMITS: &[&str] = &[
    "ALTER SYSTEM RESET commit_delay",
    "ALTER SYSTEM RESET commit_siblings",
    "SELECT pg_reload_conf()",
];
const COMMITS_WAIT: &str = "
    SELECT count(*) >= 3 AND pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()
    FROM pg_stat_activity WHERE state = 'active' AND query = 'COMMIT'";

/// The credit of customers ends, and the shop learns that at the commit of an order.
async fn constraint_refuses(stage: &mut Stage) -> Result {
    let client = stage.shop_client().await?;
    let before = orders_failed(stage);
    client.batch_execute(GRANT_CREDIT).await?;
    let wanted = before + stage.suite.scale.pick(50, 500);
    until(DEADLINE, "orders that were refused", || async {
        Ok(orders_failed(stage) >= wanted)
    })
    .await?;
    client.batch_execute(END_CREDIT).await?;
    Ok(())
}

fn orders_failed(stage: &Stage) -> usize {
    let lines = stage.shops.iter().flat_map(|shop| shop.process.lines());
    lines.filter(|line| line.contains(ORDER_FAILED)).count()
}

/// Somebody locks the credit of a customer and then the customer; the shop does it in the other order.
async fn deadlocks(stage: &mut Stage) -> Result {
    let client = stage.shop_client().await?;
    client.batch_execute(GRANT_CREDIT).await?;
    client.batch_execute(RAISE_CREDIT).await?;
    for _ in 0..stage.suite.scale.pick(1, 5) {
        try_join_all(DEADLOCKED.map(|customer| deadlock(stage, customer))).await?;
    }
    client.batch_execute(END_CREDIT).await?;
    Ok(())
}

/// Makes one deadlock in which an order is the victim.
async fn deadlock(stage: &Stage, customer: &str) -> Result {
    let mut client = stage.shop_client().await?;
    client.batch_execute(BE_NO_VICTIM).await?;
    loop {
        let transaction = client.transaction().await?;
        transaction.execute(LOCK_CREDIT, &[&customer]).await?;
        until(DEADLINE, "an order that waits at its commit", || async {
            Ok(transaction.query_one(IS_WAITED_FOR, &[]).await?.get(0))
        })
        .await?;
        match transaction.execute(LOCK_CUSTOMER, &[&customer]).await {
            Ok(_) => return Ok(()),
            // The order had waited for longer than a second by then, and did not look again.
            Err(e) if e.code() == Some(&SqlState::T_R_DEADLOCK_DETECTED) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Kills the shop when a commit is on its way, several times.
async fn application_is_killed(stage: &mut Stage) -> Result {
    let commit = Moment::new(Net::Postgres, Matcher::sql("COMMIT"), Direction::Request);
    for _ in 0..DEATHS {
        let (_, commit) = commit.first_of(&stage.shops).await?;
        stage.kill_shops();
        commit.drop_it();
        stage.start_shop().await?;
    }
    Ok(())
}

/// Kills Postgres, several times, when it has written commits and nobody has been told of them yet.
async fn crashes_before_flush(stage: &mut Stage) -> Result {
    alter_system(stage, DELAY_COMMITS).await?;
    for _ in 0..stage.suite.scale.pick(3, 10) {
        let client = stage.shop_client().await?;
        until(DEADLINE, "commits that wait for the flush", || async {
            Ok(client.query_one(COMMITS_WAIT, &[]).await?.get(0))
        })
        .await?;
        stage.servers.postgres.kill9().await?;
        stage.servers.postgres.start_again().await?;
    }
    alter_system(stage, HASTEN_COMMITS).await
}

/// One by one: ALTER SYSTEM refuses to run within a transaction.
async fn alter_system(stage: &Stage, statements: &[&str]) -> Result {
    let client = stage.shop_client().await?;
    for statement in statements {
        client.batch_execute(statement).await?;
    }
    Ok(())
}

/// Kills Postgres, several times, when it has acknowledged commits that it has not flushed, and the relay has read
/// them and asks for the flush.
async fn crashes_with_visible_commits(stage: &mut Stage) -> Result {
    let flush = Moment::new(
        Net::Postgres,
        Matcher::sql("pg_logical_emit_message"),
        Direction::Request,
    );
    let crashes = stage.suite.scale.pick(4, 20);
    for _ in 0..crashes {
        let held = match stage.carriers.as_slice() {
            // The control has none.
            [] => None,
            relays => Some(flush.first_of(relays).await?),
        };
        stage.orders_acknowledged(UNFLUSHED).await?;
        stage.servers.postgres.kill9().await?;
        if let Some((_, held)) = held {
            held.drop_it();
        }
        stage.servers.postgres.start_again().await?;
    }
    let forgotten = forgotten(stage).await?;
    if forgotten == 0 {
        return Err("no crash took a commit back, so nothing was shown".into());
    }
    stage.note(format!(
        "{crashes} crashes took {forgotten} acknowledged commits back"
    ));
    Ok(())
}

/// How many acknowledged orders Postgres does not have.
async fn forgotten(stage: &Stage) -> Result<usize> {
    let acknowledged: Vec<String> = stage.acknowledged()?.into_iter().collect();
    let sql = "SELECT count(*) FROM unnest($1::text[]) AS acknowledged (key)
        WHERE key NOT IN (SELECT key FROM orders)";
    let client = stage.shop_client().await?;
    let count: i64 = client.query_one(sql, &[&acknowledged]).await?.get(0);
    Ok(usize::try_from(count)?)
}
