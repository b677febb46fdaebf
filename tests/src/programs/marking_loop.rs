//! The relay that people write first: it marks what it has sent.

use clap::Args;
use redis::aio::MultiplexedConnection;
use tokio_postgres::Client;

use super::{Servers, endlessly};
use crate::{Result, order::entry};

const TAKE: &str = "SELECT id, key, ordering_key, payload::text FROM plain_outbox
    WHERE sent_at IS NULL ORDER BY id LIMIT 500 FOR UPDATE SKIP LOCKED";
const LOOK: &str = "SELECT id, key, ordering_key, payload::text FROM plain_outbox
    WHERE sent_at IS NULL ORDER BY id LIMIT 500";
const MARK: &str = "UPDATE plain_outbox SET sent_at = now() WHERE id = ANY($1)";

/// A naive relay that marks what it has sent.
#[derive(Clone, Debug, Args)]
pub struct MarkingLoop {
    #[command(flatten)]
    servers: Servers,
    /// Read rows without locking them
    #[arg(long)]
    without_lock: bool,
}

struct Session {
    postgres: Client,
    redis: MultiplexedConnection,
}

impl MarkingLoop {
    pub(super) async fn run(self) -> Result {
        let connect = async || {
            Ok(Session {
                postgres: self.servers.postgres().await?,
                redis: self.servers.redis().await?,
            })
        };
        endlessly(connect, async |session| self.pass(session).await).await
    }

    async fn pass(&self, session: &mut Session) -> Result<bool> {
        let transaction = session.postgres.transaction().await?;
        let sql = if self.without_lock { LOOK } else { TAKE };
        let rows = transaction.query(sql, &[]).await?;
        if rows.is_empty() {
            return Ok(false);
        }
        let mut entries = redis::pipe();
        for row in &rows {
            entries.add_command(entry(row.get(1), row.get(2), row.get(3)));
        }
        entries.exec_async(&mut session.redis).await?;
        // A crash here has sent what nobody marks.
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        transaction.execute(MARK, &[&ids]).await?;
        transaction.commit().await?;
        Ok(true)
    }
}
