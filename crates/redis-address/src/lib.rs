//! Where the Redis of an outbox is, and how a connection to it is opened. The relay and the consumers share this.
//!
//! | address | leads to |
//! |---|---|
//! | `redis://user:password@host:6379/0` | one server; of a cluster, any node |
//! | `redis://user:password@host1:6379,host2:6379` | a cluster, by the first of these nodes that answers |
//! | `redis+sentinel://user:password@host1:26379,host2:26379/NAME/0` | the primary of that name, by the first sentinel that knows it |
//! | `redis+unix:///run/redis.sock` | a socket of the file system |
//!
//! With `rediss` in the place of `redis`, connections are with TLS, those to sentinels too. User and password are the
//! server's; `?sentinel_user=…&sentinel_password=…` are those of the sentinels. Ports left out are 6379, and 26379
//! for sentinels. What has a meaning of its own in a URL is written with `%` in a name or password.
//!
//! Nothing is remembered of a server that was found: each connection asks anew, so that a failover is followed.
//!
//! ```no_run
//! use std::time::Duration;
//! use outbox_redis_address::{Limits, RedisAddress};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let address = RedisAddress::parse("redis+sentinel://sentinel-1,sentinel-2,sentinel-3/mymaster")?;
//! let limits = Limits { connect: Duration::from_secs(5), response: Duration::from_secs(5) };
//! let mut primary = address.connect(None, limits).await?;
//! redis::cmd("PING").exec_async(&mut primary).await?;
//! # Ok(())
//! # }
//! ```

mod cluster;
mod error;
mod parse;
mod place;
mod sentinel;
#[cfg(feature = "tls")]
mod tls;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, RedisConnectionInfo,
    aio::MultiplexedConnection,
};

use crate::{place::Place, sentinel::Sentinels};

#[cfg(feature = "tls")]
pub use crate::tls::{Tls, TlsCheck, is_tls_failure};
pub use crate::{cluster::hash_tag, error::Error};

/// Where Redis is. Clones share which of several hosts has answered last, and ask that one first.
#[derive(Clone)]
pub struct RedisAddress {
    /// Login, database and TLS; each connection goes to a host of its own.
    info: ConnectionInfo,
    way: Way,
    #[cfg(feature = "tls")]
    tls: Option<Tls>,
    /// Index of the host that answered last.
    answered: Arc<AtomicUsize>,
}

#[derive(Clone)]
enum Way {
    /// A socket of the file system.
    Socket,
    /// One server, or several nodes of a cluster.
    Servers(Vec<Place>),
    Sentinels(Sentinels),
}

/// How long a server may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// To accept a connection and to take the login.
    pub connect: Duration,
    /// To answer a call on that connection.
    pub response: Duration,
}

impl RedisAddress {
    /// Reads an address, as [the table](crate) has them. Connects to nothing. TLS checks certificate and name of a server
    /// against the CAs of the system, unless `with_tls` (feature `tls`) says otherwise.
    ///
    /// # Errors
    ///
    /// [`Error::Address`] says what is not understood, and never repeats the address.
    pub fn parse(address: &str) -> Result<Self, Error> {
        let parse::Parsed { info, way } = parse::parse(address)?;
        Ok(Self {
            #[cfg(feature = "tls")]
            tls: tls::of_url(&info),
            info,
            way,
            answered: Arc::default(),
        })
    }

    /// The same with these settings of TLS. Their files are read for each connection.
    ///
    /// # Errors
    ///
    /// [`Error::Address`] for an address without TLS.
    #[cfg(feature = "tls")]
    pub fn with_tls(mut self, tls: Tls) -> Result<Self, Error> {
        if !self.is_with_tls() {
            return Err(Error::Address(
                "has settings of TLS and is without it; write rediss://".into(),
            ));
        }
        self.tls = Some(tls);
        Ok(self)
    }

    /// Whether connections are with TLS.
    #[must_use]
    pub fn is_with_tls(&self) -> bool {
        matches!(self.info.addr(), ConnectionAddr::TcpTls { .. })
    }

    /// Opens a connection. Names are resolved anew, sentinels are asked for the primary, and the server that they name must
    /// take itself for it.
    ///
    /// `probe` is a call that reads one of the keys that the connection is for. The node of a cluster that does not have
    /// that key says which one does, and the connection then leads there. Without a probe no cluster will do. Elsewhere
    /// either costs a round trip.
    ///
    /// # Errors
    ///
    /// [`Error::Replica`], and [`Error::Redis`] unless login or rights are refused, are outages. The others need a person. Of several hosts it is the
    /// error of the last one that was tried.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes what it has opened.
    pub async fn connect(
        &self,
        probe: Option<&Cmd>,
        limits: Limits,
    ) -> Result<MultiplexedConnection, Error> {
        let places = match &self.way {
            Way::Socket => return open(Client::open(self.info.clone()), limits).await,
            Way::Servers(places) => places,
            Way::Sentinels(sentinels) => &sentinels.places,
        };
        let first = self.answered.load(Ordering::Relaxed);
        let mut outcome = None;
        for turn in 0..places.len() {
            let index = (first + turn) % places.len();
            let place = &places[index];
            match self.connect_by(place, probe, limits).await {
                Ok(connection) => {
                    self.answered.store(index, Ordering::Relaxed);
                    return Ok(connection);
                }
                Err(error) => {
                    if places.len() > 1 {
                        tracing::debug!(%place, error = error.one_line(), "no way to Redis");
                    }
                    outcome = Some(error);
                }
            }
        }
        Err(outcome.expect("an address has at least one host"))
    }

    /// Opens the connection by one of the hosts of the address.
    async fn connect_by(
        &self,
        place: &Place,
        probe: Option<&Cmd>,
        limits: Limits,
    ) -> Result<MultiplexedConnection, Error> {
        match &self.way {
            Way::Sentinels(sentinels) => sentinel::connect(self, sentinels, place, limits).await,
            Way::Servers(places) if places.len() > 1 => {
                cluster::connect_by_node(self, place, probe, limits).await
            }
            Way::Socket | Way::Servers(_) => cluster::connect(self, place, probe, limits).await,
        }
    }

    /// Opens a connection to this very server, with the login of the address or another one.
    async fn open_at(
        &self,
        place: &Place,
        login: Option<RedisConnectionInfo>,
        limits: Limits,
    ) -> Result<MultiplexedConnection, Error> {
        let info = self.info.clone().set_addr(place.of(self.info.addr()));
        let info = match login {
            Some(login) => info.set_redis_settings(login),
            None => info,
        };
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            let opened = open(tls.client(info)?, limits).await;
            return opened.map_err(|error| error.met_at(place));
        }
        open(Client::open(info), limits).await
    }
}

/// Host and port of each server, without login.
impl fmt::Display for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.way {
            Way::Socket => self.info.addr().fmt(f),
            Way::Servers(places) => f.write_str(&place::list(places)),
            Way::Sentinels(sentinels) => write!(
                f,
                "{} of sentinels {}",
                sentinels.primary,
                place::list(&sentinels.places)
            ),
        }
    }
}

impl fmt::Debug for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisAddress({self})")
    }
}

/// The server that the client was made for, with its login and TLS.
impl From<Client> for RedisAddress {
    fn from(client: Client) -> Self {
        let info = client.get_connection_info().clone();
        Self {
            way: parse::way_of(&info),
            info,
            #[cfg(feature = "tls")]
            tls: None,
            answered: Arc::default(),
        }
    }
}

async fn open(
    client: redis::RedisResult<Client>,
    limits: Limits,
) -> Result<MultiplexedConnection, Error> {
    let client = client.map_err(|source| Error::Redis {
        doing: "set up the connection",
        source,
    })?;
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(limits.connect))
        .set_response_timeout(Some(limits.response));
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .map_err(|source| Error::Redis {
            doing: "connect",
            source,
        })
}
