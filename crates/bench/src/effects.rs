//! What consumers do: a row for each message.

use deadpool_postgres::{Manager, Pool};
use outbox_consumer::{Message, Transaction};
use outbox_testkit::Redis;
use tokio_postgres::NoTls;

use crate::{
    Error,
    bare_redis::BareRedis,
    rows::{ONE_TOPIC, row},
    stage::Stage,
};

/// A copy of the orders, as a service keeps it that reads them, found by their key; and the least that can be written.
pub(crate) const CREATE_EFFECTS: &str = "
    CREATE TABLE orders_seen (
        order_key text PRIMARY KEY, customer text, placed jsonb NOT NULL, at timestamptz NOT NULL DEFAULT now());
    CREATE TABLE notes (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, order_key text NOT NULL, customer text,
        at timestamptz NOT NULL DEFAULT now())";

pub(crate) const INSERT_ORDER: &str =
    "INSERT INTO orders_seen (order_key, customer, placed) VALUES ($1, $2, $3::text::jsonb)";

pub(crate) const INSERT_ORDERS: &str = "
    INSERT INTO orders_seen (order_key, customer, placed)
    SELECT k, c, p::jsonb FROM unnest($1::text[], $2::text[], $3::text[]) AS o(k, c, p)";

pub(crate) const INSERT_NOTES: &str =
    "INSERT INTO notes (order_key, customer) SELECT * FROM unnest($1::text[], $2::text[])";

/// Requests that are under way at a time while a stream is filled.
const CHUNK: u64 = 500;

/// A handler that writes the orders of a batch with one statement.
pub(crate) async fn apply_orders(
    tx: &Transaction<'_>,
    messages: &[Message],
) -> Result<(), tokio_postgres::Error> {
    let (keys, customers) = keys_of(messages);
    let placed: Vec<&str> = messages.iter().map(placed).collect();
    let insert = tx.prepare_cached(INSERT_ORDERS).await?;
    tx.execute(&insert, &[&keys, &customers, &placed])
        .await
        .map(drop)
}

/// A handler that writes the least for a batch with one statement.
pub(crate) async fn apply_notes(
    tx: &Transaction<'_>,
    messages: &[Message],
) -> Result<(), tokio_postgres::Error> {
    let (keys, customers) = keys_of(messages);
    let insert = tx.prepare_cached(INSERT_NOTES).await?;
    tx.execute(&insert, &[&keys, &customers]).await.map(drop)
}

/// A handler that writes one order.
pub(crate) async fn apply_order(
    tx: &Transaction<'_>,
    message: &Message,
) -> Result<(), tokio_postgres::Error> {
    let insert = tx.prepare_cached(INSERT_ORDER).await?;
    let (key, customer) = (message.message_key(), message.ordering_key());
    tx.execute(&insert, &[&key, &customer, &placed(message)])
        .await
        .map(drop)
}

fn keys_of(messages: &[Message]) -> (Vec<&str>, Vec<Option<&str>>) {
    messages
        .iter()
        .map(|message| (message.message_key(), message.ordering_key()))
        .unzip()
}

fn placed(message: &Message) -> &str {
    str::from_utf8(message.payload()).expect("every payload here is JSON")
}

/// Connections for a member or two.
pub(crate) fn pool(stage: &Stage, database: &str) -> Result<Pool, Error> {
    let manager = Manager::new(stage.url(database).parse()?, NoTls);
    Ok(Pool::builder(manager).max_size(10).build()?)
}

/// Adds entries 1 to `count`, as the relay would have.
pub(crate) async fn fill_stream(redis: &Redis, count: u64) -> Result<(), Error> {
    let mut bare = BareRedis::connect(redis.port()).await?;
    let mut first = 1;
    while first <= count {
        let last = (first + CHUNK - 1).min(count);
        let mut requests = Vec::new();
        (first..=last).for_each(|number| row(number, ONE_TOPIC).xadd(number, &mut requests));
        bare.send(&requests).await?;
        bare.added(usize::try_from(last - first + 1)?).await?;
        first = last + 1;
    }
    Ok(())
}
