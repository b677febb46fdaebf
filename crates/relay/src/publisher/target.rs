//! Where Redis is, and how to open a connection to it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client};
use secrecy::SecretString;

use super::address::{Address, RedisTls};
use super::{cluster, keys, sentinel};
use crate::error::{Error, Result, redis_fault};
use crate::protocol::failure::RedisFault;
use crate::secret_file::read_secret;

/// Where Redis is and how the connection is protected.
#[derive(Clone)]
pub struct RedisTarget {
    /// As it was understood at first.
    address: Address,
    /// Where it is read anew for each connection, with the settings of TLS that it is read with.
    file: Option<(PathBuf, RedisTls)>,
    /// The key whose slot is looked for in a cluster.
    marker_key: String,
}

impl std::fmt::Debug for RedisTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RedisTarget({})", self.describe())
    }
}

impl RedisTarget {
    /// Reads a URL.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when the URL is not understood or contradicts the TLS settings. The URL itself is
    /// never repeated.
    pub fn parse(url: &SecretString, tls: RedisTls) -> Result<Self> {
        Ok(RedisTarget {
            address: Address::parse("--redis-url", url, &tls)?,
            file: None,
            marker_key: keys("").marker,
        })
    }

    /// Reads the URL from a file, now and again for each connection, so that a password that was changed there is taken by
    /// the next one.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when the file cannot be read, and as in [`parse`](Self::parse).
    pub fn from_file(file: &Path, tls: RedisTls) -> Result<Self> {
        Ok(RedisTarget {
            address: read(file, &tls)?,
            file: Some((file.to_owned(), tls)),
            marker_key: keys("").marker,
        })
    }

    /// The same for the outbox with this prefix: in a cluster, connections then lead to the node that owns its keys.
    #[must_use]
    pub fn for_prefix(mut self, prefix: &str) -> Self {
        self.marker_key = keys(prefix).marker;
        self
    }

    /// Host and port, for logs.
    pub fn describe(&self) -> String {
        self.address.describe()
    }

    /// Opens a connection whose calls take `limit` at the most. The address is resolved anew, sentinels are asked for the
    /// primary, and in a cluster the node is looked for that owns the keys.
    ///
    /// # Errors
    ///
    /// [`Error::Redis`], [`Error::Replica`], [`Error::Tls`], [`Error::Setup`] for sentinels that know no such primary, or
    /// [`Error::Config`] for a file that cannot be read.
    pub(crate) async fn connect(&self, limit: Duration) -> Result<MultiplexedConnection> {
        let anew = self.file.as_ref().map(|(file, tls)| read(file, tls));
        let anew = anew.transpose()?;
        let address = anew.as_ref().unwrap_or(&self.address);
        if let Some(sentinels) = &address.sentinels {
            return sentinel::connect(address, sentinels, limit).await;
        }
        let with_tls = address.is_with_tls();
        let mut connection = open(address.client()?, with_tls, limit).await?;
        let Some(mut place) = address.place() else {
            return Ok(connection);
        };
        for _ in 0..cluster::REDIRECTIONS_MAX {
            let owner = cluster::owner_elsewhere(&mut connection, &place, &self.marker_key).await;
            let Some(owner) = owner else { break };
            connection = open(address.client_at(&owner)?, with_tls, limit).await?;
            place = owner;
        }
        Ok(connection)
    }
}

fn read(file: &Path, tls: &RedisTls) -> Result<Address> {
    let field = "--redis-url-file";
    Address::parse(field, &read_secret(field, file)?, tls)
}

/// Opens a connection to one server.
pub(super) async fn open(
    client: Client,
    with_tls: bool,
    limit: Duration,
) -> Result<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(limit.min(Duration::from_secs(5))))
        .set_response_timeout(Some(limit));
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .map_err(|source| match redis_fault(&source) {
            RedisFault::Tls => Error::Tls {
                server: "Redis",
                problem: format!("{source}; check --redis-tls-mode and --redis-ca-file"),
            },
            // A port without TLS says nothing to a handshake, as one that is frozen does.
            RedisFault::Connection | RedisFault::Reply(_) if with_tls => Error::Redis {
                doing: "connect with TLS",
                source,
            },
            RedisFault::Connection | RedisFault::Reply(_) => Error::Redis {
                doing: "connect",
                source,
            },
        })
}
