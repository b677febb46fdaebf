//! What is left in the end, and what is counted in it.

use std::{
    cell::Cell,
    collections::{HashMap, HashSet},
    fmt,
    time::{Duration, Instant},
};

use outbox_testkit::{Process, relay_binary};
use serde::Serialize;

use crate::{
    Result,
    order::{Way, customer_and_number},
    programs::{CURSOR, EFFECT_KEYS, GROUP},
    stage::{Arm, DEADLINE, Stage, failed, until},
};

/// How long the rest of a run may take: what a dead consumer had read ahead runs one by one, on machines of any speed.
const SETTLE_DEADLINE: Duration = Duration::from_secs(180);

const SENT: &str = "SELECT count(*) = 0 FROM outbox.message_status WHERE NOT sent";
const MARKED: &str = "SELECT count(*) = 0 FROM plain_outbox WHERE sent_at IS NULL";
const PASSED: &str = "SELECT coalesce(max(id), 0) <= $1 FROM plain_outbox";
const ORDERS: &str = "SELECT key FROM orders";
const EFFECTS: &str = "SELECT count(*) FROM effects";
const DEAD: &str = "SELECT message_key FROM inbox.dead_letters WHERE consumer_group = $1";

/// A column of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// Facts without a message in the stream, or without an effect.
    Lost,
    /// Messages without a fact.
    Phantom,
    /// Entries beyond the first of their key.
    DoubledInStream,
    /// Effects beyond the first of their key.
    DoubledEffects,
    /// Messages that stand, or effects that came, behind a later one of the same customer.
    OutOfOrder,
    /// Facts that were committed and that Postgres does not have any more.
    LostByPostgres,
}

impl Column {
    /// All, in the report's order.
    pub const ALL: [Column; 6] = [
        Column::Lost,
        Column::Phantom,
        Column::DoubledInStream,
        Column::DoubledEffects,
        Column::OutOfOrder,
        Column::LostByPostgres,
    ];
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Column::Lost => "lost",
            Column::Phantom => "phantom",
            Column::DoubledInStream => "doubled in stream",
            Column::DoubledEffects => "doubled effects",
            Column::OutOfOrder => "out of order",
            Column::LostByPostgres => "lost by Postgres",
        })
    }
}

/// What was counted in one run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counts {
    /// Facts in the end.
    pub messages: usize,
    lost: usize,
    phantom: usize,
    doubled_in_stream: usize,
    /// `None` where nobody consumed.
    doubled_effects: Option<usize>,
    out_of_order: usize,
    lost_by_postgres: usize,
    /// From the blow until a message written after the fault stood in the stream.
    #[serde(serialize_with = "seconds")]
    pub recovery: Option<Duration>,
    /// Measurements of the scenario.
    pub notes: Vec<String>,
}

fn seconds<S: serde::Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64()).serialize(serializer)
}

impl Counts {
    /// One of the counts; `None` where it was not counted.
    #[must_use]
    pub fn get(&self, column: Column) -> Option<usize> {
        match column {
            Column::Lost => Some(self.lost),
            Column::Phantom => Some(self.phantom),
            Column::DoubledInStream => Some(self.doubled_in_stream),
            Column::DoubledEffects => self.doubled_effects,
            Column::OutOfOrder => Some(self.out_of_order),
            Column::LostByPostgres => Some(self.lost_by_postgres),
        }
    }
}

/// The keys that are left in the end.
#[derive(Debug, Default)]
pub(crate) struct Evidence {
    orders: HashSet<String>,
    /// Committed once, as a shop or a witness saw.
    committed: HashSet<String>,
    /// In the stream's order.
    stream: Vec<String>,
    /// In the order of the effects; `None` where nobody consumed.
    effects: Option<Vec<String>>,
    /// Set aside by the consumer's group, and meant to be.
    set_aside: HashSet<String>,
}

impl Evidence {
    /// Waits until everything has arrived, or nothing more comes, and takes stock.
    pub(crate) async fn after_settling(stage: &Stage) -> Result<Self> {
        let seen = Cell::new((0, Instant::now()));
        // What has not settled in time is counted as it is: lost, where it is missing.
        let settled = until(SETTLE_DEADLINE, "a run with nothing left to do", || async {
            match stage.settled().await {
                Ok(()) => Ok(true),
                Err(_) if stage.has_given_up(&seen).await? => Ok(true),
                Err(what_is_left) => Err(what_is_left),
            }
        })
        .await;
        let mut evidence = Self::take(stage).await?;
        evidence.keep_poison(stage).await?;
        if let (Arm::Outbox, Err(e)) = (stage.arm, settled) {
            let counts = evidence.counts(false);
            let words = stage.last_words();
            return Err(format!("{e}; so far {counts:?}\n{words}").into());
        }
        Ok(evidence)
    }

    async fn take(stage: &Stage) -> Result<Self> {
        let orders = keys(&stage.shop_client().await?, ORDERS).await?;
        let mut committed = stage.acknowledged()?;
        committed.extend(stage.witnessed.iter().cloned());
        let effects = if stage.has_consumer() {
            let sql = match (&stage.suite.own_consumer, stage.arm) {
                (Some(own), Arm::Outbox) => own.effects_sql.as_str(),
                _ => EFFECT_KEYS,
            };
            Some(keys(&stage.warehouse_client().await?, sql).await?)
        } else {
            None
        };
        Ok(Self {
            orders: orders.into_iter().collect(),
            committed,
            stream: stage.follow_from_start().await?.rest().await?,
            effects,
            set_aside: HashSet::new(),
        })
    }

    async fn keep_poison(&mut self, stage: &Stage) -> Result {
        if stage.arm == Arm::Outbox {
            let client = stage.warehouse_client().await?;
            let dead = client.query(DEAD, &[&GROUP]).await?;
            let dead = dead.iter().map(|row| row.get::<_, String>(0));
            self.set_aside = dead.filter(|key| stage.poison.contains(key)).collect();
        }
        Ok(())
    }

    /// Counts. `published_may_be_forgotten`: an entry of a fact that Postgres forgot is no phantom.
    pub(crate) fn counts(&self, published_may_be_forgotten: bool) -> Counts {
        let in_stream: HashSet<&str> = self.stream.iter().map(String::as_str).collect();
        let effects = self.effects.as_deref();
        let applied: Option<HashSet<&str>> =
            effects.map(|effects| effects.iter().map(String::as_str).collect());
        let has_effect = |key: &String| match &applied {
            Some(applied) => applied.contains(key.as_str()) || self.set_aside.contains(key),
            None => true,
        };
        let lost = |key: &&String| !in_stream.contains(key.as_str()) || !has_effect(key);
        let excused = |key: &str| published_may_be_forgotten && self.committed.contains(key);
        let seen: HashSet<&str> = in_stream
            .iter()
            .chain(applied.iter().flatten())
            .copied()
            .collect();
        let phantom = seen
            .into_iter()
            .filter(|key| !self.orders.contains(*key) && !excused(key));
        Counts {
            messages: self.orders.len(),
            lost: self.orders.iter().filter(lost).count(),
            phantom: phantom.count(),
            doubled_in_stream: self.stream.len() - in_stream.len(),
            doubled_effects: effects
                .zip(applied.as_ref())
                .map(|(all, once)| all.len() - once.len()),
            out_of_order: self.out_of_order(&self.stream)
                + effects.map_or(0, |effects| self.out_of_order(effects)),
            lost_by_postgres: self.committed.difference(&self.orders).count(),
            ..Counts::default()
        }
    }

    /// Keys whose first place is behind a later number of their customer. Numbers of forgotten orders are given again,
    /// so they do not count.
    fn out_of_order(&self, keys: &[String]) -> usize {
        let mut latest: HashMap<&str, i64> = HashMap::new();
        let mut seen: HashSet<&str> = HashSet::new();
        let mut count = 0;
        for key in keys.iter().filter(|key| self.orders.contains(*key)) {
            let Some((customer, number)) = customer_and_number(key) else {
                continue;
            };
            if !seen.insert(key) {
                continue;
            }
            let latest = latest.entry(customer).or_insert(number);
            if number < *latest {
                count += 1;
            }
            *latest = number.max(*latest);
        }
        count
    }
}

impl Stage {
    /// Has the relay hold rows, entries and inbox against each other, by its own rules.
    pub(crate) async fn verified(&self) -> Result {
        let mut verify = Process::builder(relay_binary())
            .args(["verify", "--complete"])
            .env(
                "DATABASE_URL",
                self.servers.postgres.url(&self.servers.shop),
            )
            .env("REDIS_URL", self.servers.redis.url());
        if self.suite.own_consumer.is_none() {
            let server = self.servers.warehouse_server;
            verify = verify
                .args(["--group", GROUP])
                .env("INBOX_DATABASE_URL", server.url(&self.servers.warehouse));
        }
        let verify = verify.spawn()?;
        if !verify.wait(DEADLINE).await?.success() {
            return Err(failed("outbox-relay verify", &verify).into());
        }
        Ok(())
    }

    /// Whether naive code has done nothing for as long as it is waited for. `seen` is what there was, and since when.
    async fn has_given_up(&self, seen: &Cell<(i64, Instant)>) -> Result<bool> {
        if self.arm == Arm::Outbox {
            return Ok(false);
        }
        let mut count = self.stream_len().await?;
        if self.has_consumer() {
            let client = self.warehouse_client().await?;
            count += client.query_one(EFFECTS, &[]).await?.get::<_, i64>(0);
        }
        if count != seen.get().0 {
            seen.set((count, Instant::now()));
        }
        Ok(seen.get().1.elapsed() > self.arm.patience())
    }

    /// Nothing is left to do for anybody; the error says what is.
    pub(crate) async fn settled(&self) -> Result {
        let client = self.shop_client().await?;
        let mut redis = self.servers.redis.connect().await?;
        let carried = match self.way() {
            Way::Outbox => client.query_one(SENT, &[]).await?.get(0),
            Way::Plain if self.naive().keeps_cursor() => {
                let cursor: Option<i64> = redis::cmd("GET")
                    .arg(CURSOR)
                    .query_async(&mut redis)
                    .await?;
                client
                    .query_one(PASSED, &[&cursor.unwrap_or(0)])
                    .await?
                    .get(0)
            }
            Way::Plain => client.query_one(MARKED, &[]).await?.get(0),
            Way::CommitThenEnqueue | Way::EnqueueThenCommit => true,
        };
        if !carried {
            return Err("messages are left to be published".into());
        }
        if self.has_consumer() {
            let last = self.last_entry().await?;
            self.has_passed(last).await?;
        }
        Ok(())
    }
}

async fn keys(client: &tokio_postgres::Client, sql: &str) -> Result<Vec<String>> {
    let rows = client.query(sql, &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(keys: &[&str]) -> HashSet<String> {
        keys.iter().map(|key| (*key).to_owned()).collect()
    }

    fn list(keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| (*key).to_owned()).collect()
    }

    #[test]
    fn each_column_counts_its_own_kind() {
        let evidence = Evidence {
            orders: set(&["a-1-x", "a-2-x", "a-3-x", "b-1-x", "b-2-x"]),
            committed: set(&["a-1-x", "a-9-gone"]),
            // a-3 is missing, a-1 is behind a-2, b-1 stands twice, and b-8 has no order.
            stream: list(&["a-2-x", "a-1-x", "b-1-x", "b-1-x", "b-2-x", "b-8-x"]),
            effects: Some(list(&["a-2-x", "b-1-x", "b-2-x", "b-2-x", "b-2-x"])),
            set_aside: HashSet::new(),
        };
        let counts = evidence.counts(false);
        let all: Vec<_> = Column::ALL
            .iter()
            .map(|column| counts.get(*column))
            .collect();
        // Lost: a-3 is nowhere, and a-1 has no effect.
        assert_eq!(all, [Some(2), Some(1), Some(1), Some(2), Some(1), Some(1)]);
        assert_eq!(counts.messages, 5);
    }

    #[test]
    fn what_postgres_forgot_may_have_been_published_only_where_that_is_said() {
        let evidence = Evidence {
            orders: set(&["a-1-x", "a-1-new"]),
            committed: set(&["a-1-x", "a-1-gone", "a-2-gone"]),
            stream: list(&["a-1-x", "a-1-gone", "a-2-gone", "a-1-new"]),
            ..Evidence::default()
        };
        let counts = evidence.counts(true);
        assert_eq!(counts.get(Column::Phantom), Some(0));
        assert_eq!(counts.get(Column::LostByPostgres), Some(2));
        assert_eq!(counts.get(Column::OutOfOrder), Some(0));
        assert_eq!(counts.get(Column::DoubledEffects), None);
        assert_eq!(evidence.counts(false).get(Column::Phantom), Some(2));
    }
}
