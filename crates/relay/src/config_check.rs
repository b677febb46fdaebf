//! `outbox-relay config check`: whether both servers are as a relay with this configuration needs them.

use std::time::Duration;

use crate::config::Config;
use crate::error::Result;
use crate::postgres::Session;
use crate::publisher::Publisher;

/// Longest wait for each server: the check is asked by somebody who waits for the answer.
const LIMIT_MAX: Duration = Duration::from_secs(5);

/// What connecting to each of the servers came to.
#[derive(Debug)]
#[non_exhaustive]
pub struct ServersChecked {
    /// Whether Postgres and its schema are as a relay needs them.
    pub postgres: Result<()>,
    /// Whether Redis is as a relay needs it.
    pub redis: Result<()>,
}

/// Connects to both servers as a relay does, and changes nothing in either.
pub async fn check_servers(config: &Config) -> ServersChecked {
    let limit = config.postgres_timeout.min(LIMIT_MAX);
    let postgres = Session::open(&config.postgres, "outbox-relay config", limit);
    let limit = config.redis_timeout.min(LIMIT_MAX);
    let redis = Publisher::connect(&config.redis, &config.stream_prefix, limit);
    let (postgres, redis) = futures_util::future::join(postgres, redis).await;
    ServersChecked {
        postgres: postgres.map(drop),
        redis: redis.map(drop),
    }
}
