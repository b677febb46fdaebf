//! Where Postgres is, and how to open a connection to it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::poll_fn;
use secrecy::{ExposeSecret, SecretString};
use tokio::sync::Notify;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::{AsyncMessage, Client};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::tls::{TlsMode, TlsSettings};
use crate::error::{Error, Result, postgres_fault};
use crate::protocol::failure::PostgresFault;

/// How long a dead peer may stay unnoticed by the kernel.
const KEEPALIVE: Duration = Duration::from_secs(3);

/// Where Postgres is and how the connection is protected.
#[derive(Clone)]
pub struct PostgresTarget {
    config: tokio_postgres::Config,
    tls: TlsSettings,
}

impl std::fmt::Debug for PostgresTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PostgresTarget({})", self.describe())
    }
}

impl PostgresTarget {
    /// Reads a URL with the TLS parameters of libpq.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when the URL is not understood. The URL itself is never repeated.
    pub fn parse(url: &SecretString) -> Result<Self> {
        let bad = |problem: String| Error::Config {
            field: "--database-url",
            problem,
        };
        let text = url.expose_secret();
        if !text.starts_with("postgres://") && !text.starts_with("postgresql://") {
            return Err(bad("must start with postgres:// or postgresql://".into()));
        }
        let (base, query) = text.split_once('?').unwrap_or((text, ""));
        let mut rest = url::form_urlencoded::Serializer::new(String::new());
        let (mut mode, mut tls) = (
            None,
            TlsSettings {
                mode: TlsMode::Disable,
                ca_file: None,
                client_cert: None,
                client_key: None,
            },
        );
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "sslmode" => mode = Some(tls_mode(&value).ok_or_else(|| bad(format!(
                    "sslmode={value} is not known; use disable, prefer, require, verify-ca or verify-full")))?),
                "sslrootcert" => tls.ca_file = Some(PathBuf::from(&*value)),
                "sslcert" => tls.client_cert = Some(PathBuf::from(&*value)),
                "sslkey" => tls.client_key = Some(PathBuf::from(&*value)),
                _ => {
                    rest.append_pair(&name, &value);
                }
            }
        }
        let default = if tls.ca_file.is_some() {
            TlsMode::VerifyFull
        } else {
            TlsMode::Disable
        };
        tls.mode = mode.unwrap_or(default);
        if tls.mode == TlsMode::Disable && (tls.ca_file.is_some() || tls.client_cert.is_some()) {
            return Err(bad(
                "sslmode=disable contradicts sslrootcert and sslcert; drop one of them".into(),
            ));
        }
        // Parameters of the server's own are read again by tokio-postgres, which wants %20 for a space.
        let rest = rest.finish().replace('+', "%20");
        let mut config: tokio_postgres::Config = format!("{base}?{rest}")
            .parse()
            .map_err(|e: tokio_postgres::Error| bad(with_cause(&e)))?;
        if config.get_hosts().is_empty() {
            return Err(bad(
                "names no host, e.g. postgres://user@localhost:5432/database".into(),
            ));
        }
        if config.get_user().is_none() {
            return Err(bad(
                "names no user, e.g. postgres://user@localhost:5432/database".into(),
            ));
        }
        config.ssl_mode(match tls.mode {
            TlsMode::Disable => SslMode::Disable,
            TlsMode::Prefer => SslMode::Prefer,
            TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => SslMode::Require,
        });
        config
            .keepalives_idle(KEEPALIVE)
            .keepalives_interval(KEEPALIVE)
            .keepalives_retries(2)
            .tcp_user_timeout(3 * KEEPALIVE);
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(Duration::from_secs(5));
        }
        Ok(PostgresTarget { config, tls })
    }

    /// Host, port, database and user, for logs; never the password.
    pub fn describe(&self) -> String {
        let host = match self.config.get_hosts().first() {
            Some(Host::Tcp(host)) => host.clone(),
            #[cfg(unix)]
            Some(Host::Unix(path)) => path.display().to_string(),
            None => String::new(),
        };
        let port = self.config.get_ports().first().copied().unwrap_or(5432);
        let user = self.config.get_user().unwrap_or_default();
        format!(
            "{user}@{host}:{port}/{}",
            self.config.get_dbname().unwrap_or(user)
        )
    }

    /// Opens a connection. Its notifications ring the bell that comes with it.
    ///
    /// The task that drives the connection ends with the client, or when the connection is lost.
    ///
    /// # Errors
    ///
    /// [`Error::Postgres`], [`Error::Tls`] or [`Error::Timeout`].
    pub(crate) async fn connect(
        &self,
        application_name: &str,
        limit: Duration,
    ) -> Result<(Client, Arc<Notify>)> {
        let mut config = self.config.clone();
        config.application_name(application_name);
        let connector = MakeRustlsConnect::new(self.tls.client_config()?);
        let connected = tokio::time::timeout(limit, config.connect(connector)).await;
        let (client, mut connection) = match connected {
            Err(_) => {
                return Err(Error::Timeout {
                    server: "Postgres",
                    doing: "connect",
                    limit,
                });
            }
            Ok(Err(source)) if matches!(postgres_fault(&source), PostgresFault::Tls) => {
                return Err(Error::Tls {
                    server: "Postgres",
                    problem: self.explain_tls(&source),
                });
            }
            Ok(Err(source)) => {
                return Err(Error::Postgres {
                    doing: "connect",
                    source,
                });
            }
            Ok(Ok(connected)) => connected,
        };
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
        Ok((client, doorbell))
    }

    fn explain_tls(&self, error: &tokio_postgres::Error) -> String {
        format!(
            "{} (sslmode {:?}); check sslmode and sslrootcert in --database-url",
            with_cause(error),
            self.tls.mode
        )
    }
}

fn tls_mode(name: &str) -> Option<TlsMode> {
    Some(match name {
        "disable" => TlsMode::Disable,
        "prefer" => TlsMode::Prefer,
        "require" => TlsMode::Require,
        "verify-ca" => TlsMode::VerifyCa,
        "verify-full" => TlsMode::VerifyFull,
        _ => return None,
    })
}

fn with_cause(error: &tokio_postgres::Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
