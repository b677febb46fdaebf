//! Where Postgres is, and how to open a connection to it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::poll_fn;
use secrecy::SecretString;
use tokio::sync::{Mutex, Notify};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::address::{Address, place, with_cause};
use crate::error::{Error, Result, postgres_fault};
use crate::protocol::failure::{Meaning, PostgresFault};
use crate::secret_file::read_secret;

type Connected = (
    Client,
    Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>,
);

/// Where Postgres is and how the connection is protected.
#[derive(Clone)]
pub struct PostgresTarget {
    /// As it was understood at first.
    address: Address,
    /// Where it is read anew for each connection.
    file: Option<PathBuf>,
    /// The flag that named it, for whoever is to mend it.
    pub(super) flag: &'static str,
    /// Whether a connection was seen to keep its backend; shared by all copies.
    pub(super) is_direct: Arc<Mutex<bool>>,
}

impl std::fmt::Debug for PostgresTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PostgresTarget({})", self.describe())
    }
}

impl PostgresTarget {
    /// Reads a URL with the TLS parameters of libpq. Of several hosts, the one that takes writes is used.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when the URL is not understood. The URL itself is never repeated.
    pub fn parse(url: &SecretString) -> Result<Self> {
        Self::parse_of("--database-url", url)
    }

    /// The same of another flag.
    pub(crate) fn parse_of(flag: &'static str, url: &SecretString) -> Result<Self> {
        Ok(PostgresTarget {
            address: Address::parse(flag, url)?,
            file: None,
            flag,
            is_direct: Arc::default(),
        })
    }

    /// Reads the URL from a file, now and again for each connection, so that a password that was changed there is taken by
    /// the next one.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when the file cannot be read, and as in [`parse`](Self::parse).
    pub fn from_file(file: &Path) -> Result<Self> {
        Self::from_file_of("--database-url-file", file)
    }

    /// The same of another flag.
    pub(crate) fn from_file_of(flag: &'static str, file: &Path) -> Result<Self> {
        Ok(PostgresTarget {
            address: read(flag, file)?,
            file: Some(file.to_owned()),
            flag,
            is_direct: Arc::default(),
        })
    }

    /// User, hosts with ports, and database, for logs; never the password.
    pub fn describe(&self) -> String {
        self.address.describe()
    }

    /// Opens a connection. Its notifications ring the bell that comes with it.
    ///
    /// The task that drives the connection ends with the client, or when the connection is lost. Each host may take
    /// `limit`.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`], [`Error::Tls`] or [`Error::Timeout`]; of several hosts, the first error that a person must
    /// mend, else the last one. [`Error::Config`] for a file that cannot be read.
    pub(crate) async fn connect(
        &self,
        application_name: &str,
        limit: Duration,
    ) -> Result<(Client, Arc<Notify>)> {
        let file = self.file.as_deref();
        let anew = file.map(|file| read(self.flag, file)).transpose()?;
        let address = anew.as_ref().unwrap_or(&self.address);
        let connector = MakeRustlsConnect::new(address.tls.client_config()?);
        let mut worst: Option<Error> = None;
        for host in &address.hosts {
            let mut host = host.clone();
            host.application_name(application_name);
            let connecting = connect_to(&host, connector.clone(), limit);
            match connecting.await {
                Ok((client, connection)) => return Ok((client, drive(connection))),
                Err(failed) => {
                    let error = self.error_of(failed, address, &host, limit);
                    tracing::debug!(
                        host = place(&host),
                        error = error.one_line(),
                        "no connection"
                    );
                    if worst.as_ref().map(Error::meaning) != Some(Meaning::Setup) {
                        worst = Some(error);
                    }
                }
            }
        }
        Err(worst.expect("an address has at least one host"))
    }

    /// Why there is no connection to a host.
    fn error_of(
        &self,
        failed: Option<tokio_postgres::Error>,
        address: &Address,
        host: &Config,
        limit: Duration,
    ) -> Error {
        let Some(source) = failed else {
            return Error::Timeout {
                server: "Postgres",
                doing: "connect",
                limit,
            };
        };
        if matches!(postgres_fault(&source), PostgresFault::Tls) {
            return Error::Tls {
                server: "Postgres",
                problem: format!(
                    "{} (sslmode {:?}); check sslmode and sslrootcert in {}",
                    with_cause(&source),
                    address.tls.mode,
                    self.flag
                ),
            };
        }
        Error::Connect {
            place: address.place_of(host),
            flag: self.flag,
            source,
        }
    }
}

fn read(flag: &'static str, file: &Path) -> Result<Address> {
    Address::parse(flag, &read_secret(flag, file)?)
}

/// Connects, or says why not; nothing where no answer came in time.
async fn connect_to(
    host: &Config,
    connector: MakeRustlsConnect,
    limit: Duration,
) -> Result<Connected, Option<tokio_postgres::Error>> {
    match tokio::time::timeout(limit, host.connect(connector)).await {
        Err(_) => Err(None),
        Ok(connected) => connected.map_err(Some),
    }
}

/// Drives a connection until its end, and returns the bell that its notifications ring.
fn drive(
    mut connection: Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>,
) -> Arc<Notify> {
    let doorbell = Arc::new(Notify::new());
    let ring = doorbell.clone();
    tokio::spawn(async move {
        loop {
            match poll_fn(|cx| connection.poll_message(cx)).await {
                Some(Ok(AsyncMessage::Notification(_))) => ring.notify_one(),
                Some(Ok(_)) => {}
                Some(Err(_)) | None => break,
            }
        }
        // Whoever sleeps on the bell finds the connection closed.
        ring.notify_one();
    });
    doorbell
}
