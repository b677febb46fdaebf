//! A warehouse that ships each order once: routes by event type, typed payloads, explicit outcomes, and numbers.
//!
//! Run `outbox-relay migrate --inbox` on the database first, then
//! `DATABASE_URL=postgres://… REDIS_URL=redis://… cargo run -p outbox-consumer --example ship_orders`.
//! SIGTERM or Ctrl-C stops it.

use std::{env, error::Error, time::Duration};

use deadpool_postgres::{Manager, Pool};
use outbox_consumer::{
    Consumer, Counters, HandlerError, Message, OnDeadLetter, RedisAddress, Router, Transaction,
};
use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio_postgres::NoTls;
use tracing_subscriber::EnvFilter;

const CREATE_TABLE: &str = "
    CREATE TABLE IF NOT EXISTS example_shipments (order_id bigint PRIMARY KEY, cents bigint NOT NULL)";
const INSERT_SHIPMENT: &str = "INSERT INTO example_shipments (order_id, cents) VALUES ($1, $2)";
const DELETE_SHIPMENT: &str = "DELETE FROM example_shipments WHERE order_id = $1";

#[derive(Deserialize)]
struct OrderPlaced {
    order_id: i64,
    cents: i64,
}

#[derive(Deserialize)]
struct OrderCancelled {
    order_id: i64,
}

/// Commits together with the key of the message, or not at all.
async fn ship(
    tx: &Transaction<'_>,
    message: &Message,
    order: OrderPlaced,
) -> Result<(), HandlerError> {
    if order.cents < 0 {
        // No further attempt can help: a dead letter at once, for a person to look at.
        return Err(HandlerError::reject("a negative price"));
    }
    tracing::info!(order.order_id, attempt = message.attempt(), age = ?message.age(), "shipping");
    // Any other error is tried again, up to five times.
    tx.execute(INSERT_SHIPMENT, &[&order.order_id, &order.cents])
        .await?;
    Ok(())
}

async fn cancel(
    tx: &Transaction<'_>,
    _: &Message,
    order: OrderCancelled,
) -> Result<(), HandlerError> {
    if tx.execute(DELETE_SHIPMENT, &[&order.order_id]).await? == 0 {
        return Err(HandlerError::retry_after(
            Duration::from_secs(10),
            "not shipped yet",
        ));
    }
    Ok(())
}

async fn report(counters: Counters) {
    loop {
        tokio::time::sleep(Duration::from_secs(5)).await;
        for stream in counters.streams() {
            tracing::info!(stream = stream.stream, applied = stream.counts.applied, lag = ?stream.lag, "so far");
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).init();
    let database =
        env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to the consumer's database")?;
    let redis = env::var("REDIS_URL").map_err(|_| "set REDIS_URL to the relay's Redis")?;
    let pool = Pool::builder(Manager::new(database.parse()?, NoTls)).build()?;
    pool.get().await?.batch_execute(CREATE_TABLE).await?;

    let consumer = Consumer::builder(pool, RedisAddress::parse(&redis)?, "example-shipping")
        .topic("orders")
        .on_dead_letter(OnDeadLetter::HoldKey)
        .build()?;
    let router = Router::new()
        .on_json("order.placed", ship)
        .on_json("order.cancelled", cancel)
        .ignore_others();
    tokio::spawn(report(consumer.counters()));
    let mut terminate = signal(SignalKind::terminate())?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    consumer.run_handler(router, shutdown).await?;
    Ok(())
}
