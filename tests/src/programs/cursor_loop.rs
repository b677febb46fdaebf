//! The relay that people write next: it remembers the last id, and does so in the same step as the entries.

use clap::Args;
use redis::aio::MultiplexedConnection;
use tokio_postgres::Client;

use super::{Servers, endlessly};
use crate::{Result, order::entry};

/// The key of the last id in Redis.
pub const CURSOR: &str = "plain:cursor";

const NEXT: &str = "SELECT id, key, ordering_key, payload::text FROM plain_outbox
    WHERE id > $1 ORDER BY id LIMIT 500";

/// A naive relay that remembers the last id.
#[derive(Clone, Debug, Args)]
pub struct CursorLoop {
    #[command(flatten)]
    servers: Servers,
}

struct Session {
    postgres: Client,
    redis: MultiplexedConnection,
}

impl CursorLoop {
    pub(super) async fn run(self) -> Result {
        let connect = async || {
            Ok(Session {
                postgres: self.servers.postgres().await?,
                redis: self.servers.redis().await?,
            })
        };
        endlessly(connect, pass).await
    }
}

async fn pass(session: &mut Session) -> Result<bool> {
    let cursor: Option<i64> = redis::cmd("GET")
        .arg(CURSOR)
        .query_async(&mut session.redis)
        .await?;
    let rows = session
        .postgres
        .query(NEXT, &[&cursor.unwrap_or(0)])
        .await?;
    let Some(last) = rows.last() else {
        return Ok(false);
    };
    let mut step = redis::pipe();
    step.atomic();
    for row in &rows {
        step.add_command(entry(row.get(1), row.get(2), row.get(3)));
    }
    step.set(CURSOR, last.get::<_, i64>(0));
    step.exec_async(&mut session.redis).await?;
    Ok(true)
}
