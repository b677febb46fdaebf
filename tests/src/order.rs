//! What the shop writes: an order with its message, in one of the ways that people write them.
//!
//! A key says all that is to be counted: `customer-number-random`. The number is the customer's count of orders, drawn
//! under the lock of the customer's row, so that committed orders of a customer have rising numbers.

use clap::ValueEnum;
use outbox_producer::{Message, write};
use redis::aio::MultiplexedConnection;
use tokio_postgres::{Client, Transaction};

use crate::Result;

/// The topic of all messages.
pub(crate) const TOPIC: &str = "orders";

/// The stream of [`TOPIC`]: the relay's default prefix and the topic. The naive code writes to the same.
pub(crate) const STREAM: &str = "outbox:orders";

/// Without unique keys on what is counted. `plain_outbox` is the table of the naive loops.
pub(crate) const SHOP_TABLES: &str = "
    CREATE TABLE customers (name text PRIMARY KEY, orders bigint NOT NULL);
    CREATE TABLE orders (key text NOT NULL);
    CREATE TABLE plain_outbox (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        key text NOT NULL,
        ordering_key text NOT NULL,
        payload json NOT NULL,
        sent_at timestamptz);
    CREATE INDEX plain_outbox_unsent ON plain_outbox (id) WHERE sent_at IS NULL";

/// Locks the customer until the transaction ends, before anything of the order is written.
const COUNT_ORDER: &str = "INSERT INTO customers AS c VALUES ($1, 1)
    ON CONFLICT (name) DO UPDATE SET orders = c.orders + 1 RETURNING orders";
const INSERT_ORDER: &str = "INSERT INTO orders (key) VALUES ($1)";
const INSERT_PLAIN: &str =
    "INSERT INTO plain_outbox (key, ordering_key, payload) VALUES ($1, $2, $3::text::json)";

/// Every payload; 200 bytes, as a small event has.
const PAYLOAD_PADDING: usize = 200;

/// How an order's message gets on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Way {
    /// Into `outbox.messages`, in the order's transaction.
    Outbox,
    /// Into the table of a naive loop, in the order's transaction.
    Plain,
    /// XADD after the commit.
    CommitThenEnqueue,
    /// XADD before the commit.
    EnqueueThenCommit,
}

/// What happens at the end of an order's transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Commit,
    RollBack,
}

/// Characters of each key, so that a file of keys can be counted by its size.
pub(crate) const KEY_LEN: usize = 32;

/// The Redis of an application that enqueues by itself; connected when it is first needed, and again after an error.
#[derive(Debug)]
pub(crate) struct Queue {
    url: String,
    connection: Option<MultiplexedConnection>,
}

impl Queue {
    pub(crate) fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            connection: None,
        }
    }

    async fn add(&mut self, key: &str, customer: &str, payload: &str) -> Result {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                let client = redis::Client::open(self.url.as_str())?;
                client.get_multiplexed_async_connection().await?
            }
        };
        entry(key, customer, payload)
            .exec_async(&mut connection)
            .await?;
        self.connection = Some(connection);
        Ok(())
    }
}

/// A key that no other order has.
fn key(customer: &str, number: i64) -> String {
    let head = format!("{customer}-{number}-");
    let random = format!("{:032x}", rand::random::<u128>());
    format!("{head}{}", &random[..KEY_LEN.saturating_sub(head.len())])
}

/// The customer and the number of a key of this module; `None` for any other key.
pub(crate) fn customer_and_number(key: &str) -> Option<(&str, i64)> {
    let (head, _random) = key.rsplit_once('-')?;
    let (customer, number) = head.rsplit_once('-')?;
    Some((customer, number.parse().ok()?))
}

/// Places one order and returns its key, once Postgres has acknowledged the commit and, in the two naive ways, Redis
/// the entry. After a rollback it returns the key of the order that must leave no trace.
///
/// # Errors
///
/// A server refused or could not be reached; whether the order was committed is then unknown.
pub(crate) async fn place(
    client: &mut Client,
    queue: &mut Queue,
    way: Way,
    customer: &str,
    end: End,
) -> Result<String> {
    let transaction = client.transaction().await?;
    let key = write_order(&transaction, queue, way, customer).await?;
    match end {
        End::Commit => transaction.commit().await?,
        End::RollBack => transaction.rollback().await?,
    }
    if way == Way::CommitThenEnqueue && end == End::Commit {
        queue.add(&key, customer, &payload(&key)).await?;
    }
    Ok(key)
}

/// What an order does before the end of its transaction; returns its key.
///
/// # Errors
///
/// A server refused or could not be reached.
pub(crate) async fn write_order(
    transaction: &Transaction<'_>,
    queue: &mut Queue,
    way: Way,
    customer: &str,
) -> Result<String> {
    let number: i64 = transaction
        .query_one(COUNT_ORDER, &[&customer])
        .await?
        .get(0);
    let key = key(customer, number);
    transaction.execute(INSERT_ORDER, &[&key]).await?;
    let payload = payload(&key);
    match way {
        Way::Outbox => write_message(transaction, &key, customer, payload).await?,
        Way::Plain => {
            transaction
                .execute(INSERT_PLAIN, &[&key, &customer, &payload])
                .await?;
        }
        Way::EnqueueThenCommit => queue.add(&key, customer, &payload).await?,
        Way::CommitThenEnqueue => {}
    }
    Ok(key)
}

fn payload(key: &str) -> String {
    format!(r#"{{"order":"{key}","note":"{:.<PAYLOAD_PADDING$}"}}"#, "")
}

async fn write_message(
    transaction: &Transaction<'_>,
    key: &str,
    customer: &str,
    payload: String,
) -> Result {
    let message = Message::raw_json(TOPIC, payload)
        .message_key(key)
        .ordering_key(customer);
    write(transaction, &message).await?;
    Ok(())
}

/// The XADD of naive code.
pub(crate) fn entry(key: &str, customer: &str, payload: &str) -> redis::Cmd {
    let mut add = redis::cmd("XADD");
    add.arg(STREAM).arg("*").arg(&[
        ("message_key", key),
        ("ordering_key", customer),
        ("payload", payload),
    ]);
    add
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_one_length_and_say_their_customer_and_number() {
        for (customer, number) in [("c1", 1), ("c49", 1_234_567)] {
            let key = key(customer, number);
            assert_eq!(key.len(), KEY_LEN);
            assert_eq!(customer_and_number(&key), Some((customer, number)));
        }
        assert_eq!(customer_and_number("poison"), None);
    }
}
