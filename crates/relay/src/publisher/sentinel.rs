//! Redis Sentinel: which server is the primary is asked for each connection, so a failover is followed.

use std::time::Duration;

use redis::aio::MultiplexedConnection;

use super::address::{Address, Place, Sentinels};
use super::target::open;
use crate::error::{Error, Result};

/// A sentinel that does not answer in this time is passed over.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Opens a connection to the primary that the first of the sentinels names, whose server agrees that it is one.
///
/// # Errors
///
/// What the last of the sentinels came to; [`Error::Setup`] when those that answer know no such primary.
pub(super) async fn connect(
    address: &Address,
    sentinels: &Sentinels,
    limit: Duration,
) -> Result<MultiplexedConnection> {
    let mut outcome = None;
    for sentinel in &sentinels.places {
        match through(address, sentinels, sentinel, limit).await {
            Ok(connection) => return Ok(connection),
            Err(error) => {
                tracing::debug!(%sentinel, error = error.one_line(), "no way to the primary");
                outcome = Some(error);
            }
        }
    }
    Err(outcome.expect("an address has at least one sentinel"))
}

async fn through(
    address: &Address,
    sentinels: &Sentinels,
    sentinel: &Place,
    limit: Duration,
) -> Result<MultiplexedConnection> {
    let named = primary_of(address, sentinels, sentinel, limit).await?;
    let client = address.client_at(&named)?;
    let mut connection = open(client, address.is_with_tls(), limit).await?;
    // During a failover a sentinel can be behind the others, and behind the server.
    if is_primary(&mut connection).await? {
        Ok(connection)
    } else {
        Err(Error::Replica(named.to_string()))
    }
}

async fn primary_of(
    address: &Address,
    sentinels: &Sentinels,
    sentinel: &Place,
    limit: Duration,
) -> Result<Place> {
    let client = address.client_of_sentinel(sentinels, sentinel)?;
    let mut connection = open(client, address.is_with_tls(), limit.min(ANSWER_MAX)).await?;
    let named: Option<(String, u16)> = redis::cmd("SENTINEL")
        .arg("GET-MASTER-ADDR-BY-NAME")
        .arg(&sentinels.primary)
        .query_async(&mut connection)
        .await
        .map_err(|source| Error::Redis {
            doing: "ask a sentinel for the primary",
            source,
        })?;
    let Some((host, port)) = named else {
        return Err(Error::Setup {
            problem: format!(
                "the sentinel at {sentinel} knows no primary named {:?}",
                sentinels.primary
            ),
            remedy: "check the name behind the addresses in --redis-url".into(),
        });
    };
    Ok(Place { host, port })
}

/// What the server says of itself; the rights that this needs are needed anyway.
async fn is_primary(connection: &mut MultiplexedConnection) -> Result<bool> {
    let info: String = redis::cmd("INFO")
        .arg("replication")
        .query_async(connection)
        .await
        .map_err(|source| Error::Redis {
            doing: "read INFO",
            source,
        })?;
    Ok(info.lines().any(|line| line.trim_end() == "role:master"))
}
