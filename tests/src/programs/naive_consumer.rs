//! The consumer that people write first: no inbox.

use clap::Args;
use redis::{
    aio::MultiplexedConnection,
    streams::{StreamId, StreamReadReply},
};
use tokio_postgres::Client;

use super::{GROUP, Handler, Servers, endlessly};
use crate::{Result, order::STREAM};

const BATCH_MAX: &str = "50";
const NAME: &str = "naive";

/// A consumer without an inbox.
#[derive(Clone, Debug, Args)]
pub struct NaiveConsumer {
    #[command(flatten)]
    servers: Servers,
    #[command(flatten)]
    handler: Handler,
    /// Acknowledge before the effect instead of after it
    #[arg(long)]
    ack_first: bool,
}

struct Session {
    postgres: Client,
    redis: MultiplexedConnection,
    /// What it was given before it began is read first.
    has_own_pending: bool,
}

impl NaiveConsumer {
    pub(super) async fn run(self) -> Result {
        let connect = async || {
            let mut redis = self.servers.redis().await?;
            let made: redis::RedisResult<()> = redis::cmd("XGROUP")
                .arg(&["CREATE", STREAM, GROUP, "0", "MKSTREAM"])
                .query_async(&mut redis)
                .await;
            match made {
                Err(e) if e.code() != Some("BUSYGROUP") => return Err(e.into()),
                _ => {}
            }
            Ok(Session {
                postgres: self.servers.postgres().await?,
                redis,
                has_own_pending: true,
            })
        };
        endlessly(connect, async |session| self.pass(session).await).await
    }

    async fn pass(&self, session: &mut Session) -> Result<bool> {
        let from = if session.has_own_pending { "0" } else { ">" };
        let reply: Option<StreamReadReply> = redis::cmd("XREADGROUP")
            .arg(&[
                "GROUP", GROUP, NAME, "COUNT", BATCH_MAX, "STREAMS", STREAM, from,
            ])
            .query_async(&mut session.redis)
            .await?;
        let entries = reply
            .and_then(|mut reply| reply.keys.pop())
            .map_or(Vec::new(), |key| key.ids);
        if entries.is_empty() {
            session.has_own_pending = false;
            return Ok(false);
        }
        if self.ack_first {
            acknowledge(session, &entries).await?;
        }
        let transaction = session.postgres.transaction().await?;
        for entry in &entries {
            let key: String = entry
                .get("message_key")
                .ok_or("an entry without a message key")?;
            self.handler.pack(&transaction, &key).await?;
        }
        transaction.commit().await?;
        if !self.ack_first {
            acknowledge(session, &entries).await?;
        }
        Ok(true)
    }
}

async fn acknowledge(session: &mut Session, entries: &[StreamId]) -> Result {
    let ids: Vec<&str> = entries.iter().map(|entry| entry.id.as_str()).collect();
    redis::cmd("XACK")
        .arg(STREAM)
        .arg(GROUP)
        .arg(ids)
        .exec_async(&mut session.redis)
        .await?;
    Ok(())
}
