//! Redis Sentinel: which server is the primary is asked for each connection, so a failover is followed.

use std::time::Duration;

use redis::{RedisConnectionInfo, aio::MultiplexedConnection};

use crate::{Error, Limits, RedisAddress, cluster::hello, place::Place};

/// A sentinel that does not answer in this time is passed over.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Who is asked for the primary.
#[derive(Clone)]
pub(crate) struct Sentinels {
    pub(crate) places: Vec<Place>,
    /// The name under which they watch it.
    pub(crate) primary: String,
    /// Their login, which is not the primary's.
    pub(crate) login: RedisConnectionInfo,
}

/// Opens a connection to the primary that this sentinel names, if the server agrees that it is one.
pub(crate) async fn connect(
    address: &RedisAddress,
    sentinels: &Sentinels,
    sentinel: &Place,
    limits: Limits,
) -> Result<MultiplexedConnection, Error> {
    let named = primary_of(address, sentinels, sentinel, limits).await?;
    let mut connection = address.open_at(&named, None, limits).await?;
    // During a failover a sentinel can be behind the others, and behind the server.
    if hello(&mut connection, &named).await?.role == "master" {
        Ok(connection)
    } else {
        Err(Error::Replica(named.to_string()))
    }
}

async fn primary_of(
    address: &RedisAddress,
    sentinels: &Sentinels,
    sentinel: &Place,
    limits: Limits,
) -> Result<Place, Error> {
    let limits = Limits {
        connect: limits.connect.min(ANSWER_MAX),
        response: limits.response.min(ANSWER_MAX),
    };
    let login = Some(sentinels.login.clone());
    let opened = address.open_at(sentinel, login, limits).await;
    let mut connection = opened.map_err(|error| match error {
        // Its login is not the server's, and which of the two was refused is told.
        Error::Redis { source, .. } => Error::Redis {
            doing: "connect to a sentinel",
            source,
        },
        other => other,
    })?;
    let named: Option<(String, u16)> = redis::cmd("SENTINEL")
        .arg("GET-MASTER-ADDR-BY-NAME")
        .arg(&sentinels.primary)
        .query_async(&mut connection)
        .await
        .map_err(|source| Error::Redis {
            doing: "ask a sentinel for the primary",
            source,
        })
        .map_err(|error| error.met_at(sentinel))?;
    match named {
        Some((host, port)) => Ok(Place { host, port }),
        None => Err(Error::UnknownPrimary {
            sentinel: sentinel.to_string(),
            primary: sentinels.primary.clone(),
        }),
    }
}
