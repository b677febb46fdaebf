//! Where Redis is, and how to open a connection to it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use outbox_redis_address::{Limits, RedisAddress};
use redis::aio::MultiplexedConnection;
use secrecy::SecretString;

use super::address::{RedisTls, of_address, parse};
use super::keys;
use crate::error::Result;
use crate::secret_file::read_secret;

/// The longest wait for a connection, whatever a call on it may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Where Redis is and how the connection is protected.
#[derive(Clone)]
pub struct RedisTarget {
    /// As it was understood at first.
    address: RedisAddress,
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
    /// [`Error::Config`](crate::Error::Config) when the URL is not understood or contradicts the TLS settings. The URL itself is
    /// never repeated.
    pub fn parse(url: &SecretString, tls: RedisTls) -> Result<Self> {
        Ok(RedisTarget {
            address: parse("--redis-url", url, &tls)?,
            file: None,
            marker_key: keys("").marker,
        })
    }

    /// Reads the URL from a file, now and again for each connection, so that a password that was changed there is taken by
    /// the next one.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) when the file cannot be read, and as in [`parse`](Self::parse).
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
        self.address.to_string()
    }

    /// Opens a connection whose calls take `limit` at the most. The address is resolved anew, sentinels are asked for the
    /// primary, and in a cluster the node is looked for that owns the keys.
    ///
    /// # Errors
    ///
    /// [`Error`](crate::Error): `Redis`, `Replica`, `Tls`, `Setup` for sentinels that know no such primary and for several servers
    /// that are no cluster, or `Config` for a file that cannot be read.
    pub(crate) async fn connect(&self, limit: Duration) -> Result<MultiplexedConnection> {
        let anew = self.file.as_ref().map(|(file, tls)| read(file, tls));
        let anew = anew.transpose()?;
        let address = anew.as_ref().unwrap_or(&self.address);
        let limits = Limits {
            connect: limit.min(CONNECT_MAX),
            response: limit,
        };
        // A read that everybody who works with the outbox may do.
        let mut probe = redis::cmd("HGETALL");
        probe.arg(&self.marker_key);
        let connection = address.connect(Some(&probe), limits).await;
        connection.map_err(|error| of_address(error, address.is_with_tls()))
    }
}

fn read(file: &Path, tls: &RedisTls) -> Result<RedisAddress> {
    let field = "--redis-url-file";
    parse(field, &read_secret(field, file)?, tls)
}
