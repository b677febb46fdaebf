//! The order shop: each order and its message are written in one Postgres transaction.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use deadpool_postgres::{Client, Pool};
use outbox_producer::{Message, write};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::Error;

/// The topic that the shop writes to and the warehouse consumes.
pub(crate) const TOPIC: &str = "orders";

/// Tasks that take orders at the same time, each with a connection of its own.
pub(crate) const CASHIERS: usize = 8;

/// Before every ninth order a card is declined, and everything that was written for it is rolled back.
const DECLINED_EVERY: u64 = 9;

/// Few enough that cashiers now and then wait for each other at the same customer's row.
const CUSTOMERS: i64 = 500;

const CREATE_TABLES: &str = "
    CREATE TABLE customers (id bigint PRIMARY KEY, orders bigint NOT NULL DEFAULT 0);
    INSERT INTO customers (id) SELECT generate_series(0, 499);
    CREATE TABLE orders (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        customer bigint NOT NULL REFERENCES customers,
        cents bigint NOT NULL)";

/// Goes before the message: who places orders for the same customer waits here, so that the customer's messages are
/// written in the order of commits.
const COUNT_ORDER: &str = "UPDATE customers SET orders = orders + 1 WHERE id = $1";

const INSERT_ORDER: &str = "INSERT INTO orders (customer, cents) VALUES ($1, $2) RETURNING id";

const ORDER_IDS: &str = "SELECT id FROM orders";

/// Keys that the relay's cursor has passed. DISTINCT, although the outbox keeps keys unique: the number is a
/// claim of the demo.
const COUNT_SENT: &str = "SELECT count(DISTINCT message_key) FROM outbox.message_status WHERE sent";

/// What the message says.
#[derive(Serialize)]
struct OrderPlaced {
    order_id: i64,
    customer: i64,
    cents: i64,
}

/// Whether the card was accepted after everything had been written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Card {
    Accepted,
    Declined,
}

/// The shop, with counts of what it has done. Cloning shares them.
#[derive(Clone)]
pub(crate) struct Shop {
    database: Pool,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    /// The next order to take.
    next: AtomicU64,
    placed: AtomicU64,
    rolled_back: AtomicU64,
}

impl Shop {
    /// Makes the shop's own tables, beside the schema `outbox`.
    pub(crate) async fn open(database: Pool) -> Result<Self, Error> {
        database.get().await?.batch_execute(CREATE_TABLES).await?;
        Ok(Self {
            database,
            counts: Arc::default(),
        })
    }

    /// Orders whose transaction was committed.
    pub(crate) fn placed(&self) -> u64 {
        self.counts.placed.load(Ordering::SeqCst)
    }

    /// Orders whose transaction was rolled back after the message had been written.
    pub(crate) fn rolled_back(&self) -> u64 {
        self.counts.rolled_back.load(Ordering::SeqCst)
    }

    /// Places `orders` orders from several tasks. Stops at the first error.
    pub(crate) async fn take_orders(&self, orders: u64) -> Result<(), Error> {
        let mut cashiers = JoinSet::new();
        for _ in 0..CASHIERS {
            let shop = self.clone();
            cashiers.spawn(async move { shop.cashier(orders).await });
        }
        while let Some(ended) = cashiers.join_next().await {
            ended??;
        }
        Ok(())
    }

    async fn cashier(&self, orders: u64) -> Result<(), Error> {
        let mut client = self.database.get().await?;
        loop {
            let number = self.counts.next.fetch_add(1, Ordering::SeqCst);
            if number >= orders {
                return Ok(());
            }
            if number % DECLINED_EVERY == DECLINED_EVERY / 2 {
                place_order(&mut client, number + 1, Card::Declined).await?;
                self.counts.rolled_back.fetch_add(1, Ordering::SeqCst);
            }
            place_order(&mut client, number, Card::Accepted).await?;
            self.counts.placed.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The ids of all orders there are.
    pub(crate) async fn order_ids(&self) -> Result<Vec<i64>, Error> {
        let rows = self.database.get().await?.query(ORDER_IDS, &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// How many messages the relay has sent, by its own account in Postgres.
    pub(crate) async fn sent(&self) -> Result<u64, Error> {
        let row = self
            .database
            .get()
            .await?
            .query_one(COUNT_SENT, &[])
            .await?;
        Ok(u64::try_from(row.get::<_, i64>(0))?)
    }
}

/// One order: the business rows and the message, in one transaction.
async fn place_order(client: &mut Client, number: u64, card: Card) -> Result<(), Error> {
    let customer = i64::try_from(number)? % CUSTOMERS;
    let cents = 500 + i64::try_from(number)? % 9_500;
    let transaction = client.transaction().await?;

    let count_order = transaction.prepare_cached(COUNT_ORDER).await?;
    transaction.execute(&count_order, &[&customer]).await?;
    let insert_order = transaction.prepare_cached(INSERT_ORDER).await?;
    let order = transaction
        .query_one(&insert_order, &[&customer, &cents])
        .await?;
    let order_id: i64 = order.get(0);

    let placed = OrderPlaced {
        order_id,
        customer,
        cents,
    };
    let message = Message::json(TOPIC, &placed)?
        .event_type("order.placed")
        .ordering_key(format!("customer-{customer}"))
        .message_key(format!("order-{order_id}-placed"));
    write(&transaction, &message).await?;

    // A crash before the commit leaves neither the order nor the message, one after it leaves both. There is
    // no moment at which one exists without the other.
    match card {
        Card::Accepted => transaction.commit().await?,
        Card::Declined => transaction.rollback().await?,
    }
    Ok(())
}
