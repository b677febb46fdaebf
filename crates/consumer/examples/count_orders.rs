//! A report that is written with one statement for each batch.
//!
//! Run `outbox-relay migrate --inbox` on the database first, then
//! `DATABASE_URL=postgres://… REDIS_URL=redis://… cargo run -p outbox-consumer --example count_orders`.
//! SIGTERM or Ctrl-C stops it.

use std::{env, error::Error};

use deadpool_postgres::{Manager, Pool};
use outbox_consumer::{Consumer, HandlerError, Message, RedisAddress, Transaction};
use tokio::signal::unix::{SignalKind, signal};
use tokio_postgres::NoTls;

const CREATE_TABLE: &str = "
    CREATE TABLE IF NOT EXISTS example_orders_per_day (day date PRIMARY KEY, orders bigint NOT NULL)";
const COUNT: &str = "
    INSERT INTO example_orders_per_day AS r (day, orders)
    SELECT (created_at AT TIME ZONE 'UTC')::date, count(*) FROM unnest($1::timestamptz[]) AS m (created_at)
    GROUP BY 1 ORDER BY 1
    ON CONFLICT (day) DO UPDATE SET orders = r.orders + excluded.orders";

/// All fresh messages of a batch; a failure of the batch brings them again one by one.
async fn count(tx: &Transaction<'_>, messages: &[Message]) -> Result<(), HandlerError> {
    let created: Vec<_> = messages.iter().map(Message::created_at).collect();
    tx.execute(COUNT, &[&created]).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let database =
        env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to the consumer's database")?;
    let redis = env::var("REDIS_URL").map_err(|_| "set REDIS_URL to the relay's Redis")?;
    let pool = Pool::builder(Manager::new(database.parse()?, NoTls)).build()?;
    pool.get().await?.batch_execute(CREATE_TABLE).await?;
    let consumer = Consumer::builder(pool, RedisAddress::parse(&redis)?, "example-report")
        .topic("orders")
        .batch(1_000)
        .build()?;
    let mut terminate = signal(SignalKind::terminate())?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    consumer.run_batches(count, shutdown).await?;
    Ok(())
}
