//! Where Redis is, and how to open a connection to it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, IntoConnectionInfo, TlsCertificates};
use secrecy::{ExposeSecret, SecretString};

use crate::error::{Error, Result, redis_fault};
use crate::postgres::TlsMode;
use crate::protocol::failure::RedisFault;

/// Where Redis is and how the connection is protected.
#[derive(Clone)]
pub struct RedisTarget {
    url: SecretString,
    described: String,
    tls: Option<(TlsMode, Option<PathBuf>)>,
}

impl std::fmt::Debug for RedisTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RedisTarget({})", self.described)
    }
}

impl RedisTarget {
    /// Reads a URL.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when the URL is not understood or contradicts the TLS settings. The URL itself is
    /// never repeated.
    pub fn parse(
        url: &SecretString,
        mode: Option<TlsMode>,
        ca_file: Option<&Path>,
    ) -> Result<Self> {
        let bad = |field, problem: &str| Error::Config {
            field,
            problem: problem.to_owned(),
        };
        let text = url.expose_secret();
        let info = text.into_connection_info().map_err(|e| {
            let problem = e
                .detail()
                .map_or_else(|| "is no valid URL".to_owned(), str::to_owned);
            bad(
                "--redis-url",
                &format!("{problem}; e.g. redis://:password@localhost:6379/0"),
            )
        })?;
        let with_tls = text.starts_with("rediss://");
        if !with_tls && (mode.is_some() || ca_file.is_some()) {
            return Err(bad(
                "--redis-tls-mode",
                "and --redis-ca-file need a rediss:// URL in --redis-url",
            ));
        }
        if text.contains('#') {
            return Err(bad(
                "--redis-url",
                "must have no #fragment; --redis-tls-mode says how TLS is checked",
            ));
        }
        let mode = mode.unwrap_or(TlsMode::VerifyFull);
        if matches!(mode, TlsMode::Disable | TlsMode::Prefer) {
            return Err(bad(
                "--redis-tls-mode",
                "must be require, verify-ca or verify-full; redis:// is without TLS",
            ));
        }
        Ok(RedisTarget {
            url: url.clone(),
            described: info.addr().to_string(),
            tls: with_tls.then(|| (mode, ca_file.map(Path::to_owned))),
        })
    }

    /// Host and port, for logs.
    pub fn describe(&self) -> &str {
        &self.described
    }

    /// Opens a connection whose calls take `limit` at the most. The address is resolved anew.
    ///
    /// # Errors
    ///
    /// [`Error::Redis`], [`Error::Tls`], or [`Error::Config`] for a CA file that cannot be read.
    pub(crate) async fn connect(&self, limit: Duration) -> Result<MultiplexedConnection> {
        let client = self.client()?;
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
                RedisFault::Connection | RedisFault::Reply(_) if self.tls.is_some() => {
                    Error::Redis {
                        doing: "connect with TLS",
                        source,
                    }
                }
                RedisFault::Connection | RedisFault::Reply(_) => Error::Redis {
                    doing: "connect",
                    source,
                },
            })
    }

    fn client(&self) -> Result<Client> {
        let failed = |source| Error::Redis {
            doing: "set up the connection",
            source,
        };
        let url = self.url.expose_secret();
        let Some((mode, ca_file)) = &self.tls else {
            return Client::open(url.to_owned()).map_err(failed);
        };
        let root_cert = match ca_file {
            None => None,
            Some(file) => Some(std::fs::read(file).map_err(|e| Error::Config {
                field: "--redis-ca-file",
                problem: format!("{}: {e}", file.display()),
            })?),
        };
        // redis takes whatever provider the process has; an application's own choice stands.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // As in libpq, naming a CA turns `require` into `verify-ca`.
        let unchecked = *mode == TlsMode::Require && root_cert.is_none();
        let url = if unchecked {
            format!("{url}#insecure")
        } else {
            url.to_owned()
        };
        let client = match root_cert {
            None => Client::open(url),
            Some(root_cert) => Client::build_with_tls(
                url,
                TlsCertificates {
                    client_tls: None,
                    root_cert: Some(root_cert),
                },
            ),
        }
        .map_err(failed)?;
        if unchecked || *mode == TlsMode::VerifyFull {
            return Ok(client);
        }
        let info = client.get_connection_info().clone();
        let mut addr = info.addr().clone();
        addr.set_danger_accept_invalid_hostnames(true);
        Client::open(info.set_addr(addr)).map_err(failed)
    }
}
