//! A consumer of one's own for the failure suite:
//!
//! ```sh
//! cargo build --release -p outbox-tests --example own_handler
//! make failures ARGS="--consumer target/release/examples/own_handler \
//!     --setup-sql 'CREATE TABLE parcels (id bigserial, message_key text)' \
//!     --effects-sql 'SELECT message_key FROM parcels ORDER BY id'"
//! ```
//!
//! Put your handler in the place of `pack`. The suite kills the program, starts it again, and counts what the query
//! returns.

use std::{env, error::Error};

use deadpool_postgres::{Manager, Pool};
use outbox_consumer::{Consumer, Message, RedisAddress, Transaction};
use tokio::signal::unix::{SignalKind, signal};
use tokio_postgres::NoTls;

const PACK: &str = "INSERT INTO parcels (message_key) VALUES ($1)";

async fn pack(tx: &Transaction<'_>, message: &Message) -> Result<(), tokio_postgres::Error> {
    tx.execute(PACK, &[&message.message_key()]).await.map(drop)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let manager = Manager::new(env::var("DATABASE_URL")?.parse()?, NoTls);
    let pool = Pool::builder(manager).build()?;
    let redis = RedisAddress::parse(&env::var("REDIS_URL")?)?;
    let consumer = Consumer::builder(pool, redis, env::var("CONSUMER_GROUP")?)
        .name(env::var("CONSUMER_NAME")?)
        .topic("orders")
        .build()?;
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async move {
        terminate.recv().await;
    };
    consumer.run(pack, stop).await?;
    Ok(())
}
