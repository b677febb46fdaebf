//! The consumer: each message has one effect.

use std::time::Duration;

use clap::Args;
use deadpool_postgres::{Manager, Pool};
use outbox_consumer::{Consumer, Message, Transaction};
use tokio_postgres::NoTls;

use super::{GROUP, Handler, Servers};
use crate::{Result, order::TOPIC};

/// A consumer as the library's documentation has it.
#[derive(Clone, Debug, Args)]
pub struct Warehouse {
    #[command(flatten)]
    servers: Servers,
    #[command(flatten)]
    handler: Handler,
    /// Name of this member of the group
    #[arg(long, env = "CONSUMER_NAME")]
    name: Option<String>,
    /// Most messages in one transaction
    #[arg(long, default_value_t = 100)]
    batch: usize,
    /// How long a silent member may hold messages before another claims them, in milliseconds
    #[arg(long, default_value_t = 3_000)]
    claim_after_ms: u64,
}

impl Warehouse {
    pub(super) async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> Result {
        let manager = Manager::new(self.servers.database_url.parse()?, NoTls);
        let pool = Pool::builder(manager).max_size(4).build()?;
        let redis = redis::Client::open(self.servers.redis_url.as_str())?;
        let mut builder = Consumer::builder(pool, redis, GROUP)
            .topic(TOPIC)
            .stream_prefix("outbox:")
            .batch(self.batch)
            .claim_after(Duration::from_millis(self.claim_after_ms));
        if let Some(name) = self.name {
            builder = builder.name(name);
        }
        let handler = self.handler;
        let pack = async move |tx: &Transaction<'_>, message: &Message| {
            handler.pack(tx, message.message_key()).await
        };
        builder.build()?.run(pack, stop).await?;
        Ok(())
    }
}
