//! The warehouse: two members of one consumer group ship each order once, into a database of their own.

use deadpool_postgres::Pool;
use outbox_consumer::{Consumer, Counters, HandlerError, Message, Transaction};
use serde::Deserialize;
use tokio::{sync::watch, task::JoinSet};

use crate::{Error, shop::TOPIC, stage::STREAM_PREFIX};

/// The consumer group.
pub(crate) const GROUP: &str = "warehouse";

/// Members of the group. In a real system they are processes on different machines.
const MEMBERS: usize = 2;

/// No unique key: an order that is shipped twice has to show.
const CREATE_TABLES: &str = "
    CREATE TABLE shipments (order_id bigint NOT NULL, customer bigint NOT NULL, cents bigint NOT NULL)";

const INSERT_SHIPMENT: &str =
    "INSERT INTO shipments (order_id, customer, cents) VALUES ($1, $2, $3)";

const SHIPPED_ORDER_IDS: &str = "SELECT order_id FROM shipments";

const COUNT_DEAD_LETTERS: &str = "SELECT count(*) FROM inbox.dead_letters";

/// What the shop's message says.
#[derive(Deserialize)]
struct OrderPlaced {
    order_id: i64,
    customer: i64,
    cents: i64,
}

/// The warehouse with its running consumers.
pub(crate) struct Warehouse {
    database: Pool,
    counters: Vec<Counters>,
    stop: watch::Sender<bool>,
    members: JoinSet<Result<(), outbox_consumer::Error>>,
}

impl Warehouse {
    /// Makes the warehouse's own table, beside the schema `inbox`, and starts its consumers.
    pub(crate) async fn open(database: Pool, redis_url: &str) -> Result<Self, Error> {
        database.get().await?.batch_execute(CREATE_TABLES).await?;
        let (stop, _) = watch::channel(false);
        let mut members = JoinSet::new();
        let mut counters = Vec::new();
        for member in 1..=MEMBERS {
            let redis = redis::Client::open(redis_url)?;
            let consumer = Consumer::builder(database.clone(), redis, GROUP)
                .topic(TOPIC)
                .stream_prefix(STREAM_PREFIX)
                .name(format!("warehouse-{member}"))
                .build()?;
            counters.push(consumer.counters());
            let mut stopped = stop.subscribe();
            members.spawn(consumer.run(ship, async move {
                // An error means that the warehouse is gone, which is a reason to stop too.
                let _ = stopped.wait_for(|stop| *stop).await;
            }));
        }
        Ok(Self {
            database,
            counters,
            stop,
            members,
        })
    }

    /// The consumers' own account of what they do.
    pub(crate) fn counts(&self) -> Counts {
        Counts(self.counters.clone())
    }

    /// Completes when a consumer ends although nobody stopped it.
    pub(crate) async fn failure(&mut self) -> Error {
        match self.members.join_next().await {
            Some(Ok(Ok(()))) => "a consumer stopped by itself".into(),
            Some(Ok(Err(e))) => e.into(),
            Some(Err(e)) => e.into(),
            None => "there is no consumer".into(),
        }
    }

    /// Stops the consumers: each finishes and acknowledges what it is doing.
    pub(crate) async fn close(&mut self) -> Result<(), Error> {
        let _ = self.stop.send(true);
        while let Some(ended) = self.members.join_next().await {
            ended??;
        }
        Ok(())
    }

    /// The order of each shipment, as often as it was shipped.
    pub(crate) async fn shipped_order_ids(&self) -> Result<Vec<i64>, Error> {
        let client = self.database.get().await?;
        let rows = client.query(SHIPPED_ORDER_IDS, &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Messages that the consumers have set aside.
    pub(crate) async fn dead_letters(&self) -> Result<u64, Error> {
        let client = self.database.get().await?;
        let row = client.query_one(COUNT_DEAD_LETTERS, &[]).await?;
        Ok(u64::try_from(row.get::<_, i64>(0))?)
    }
}

/// Live counts of all members.
pub(crate) struct Counts(Vec<Counters>);

impl Counts {
    /// Orders shipped so far.
    pub(crate) fn shipped(&self) -> u64 {
        self.0.iter().map(|c| c.snapshot().applied).sum()
    }

    /// Repeats that the inbox has kept from being shipped again.
    pub(crate) fn absorbed(&self) -> u64 {
        self.0.iter().map(|c| c.snapshot().repeated).sum()
    }
}

/// The handler. What it writes commits together with the key of the message, or not at all: when the same message
/// comes again, its key is there and the handler is not called.
async fn ship(transaction: &Transaction<'_>, message: &Message) -> Result<(), HandlerError> {
    let order: OrderPlaced = message.json()?;
    let insert = transaction.prepare_cached(INSERT_SHIPMENT).await?;
    transaction
        .execute(&insert, &[&order.order_id, &order.customer, &order.cents])
        .await?;
    Ok(())
}
