//! What a URL of Redis says, and how a connection to it is protected.

use std::path::PathBuf;

use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, TlsCertificates,
};
use secrecy::{ExposeSecret, SecretString};

use crate::error::{Error, Result};
use crate::postgres::TlsMode;

/// How a `rediss://` connection is protected, as the flags say.
#[derive(Clone, Debug, Default)]
pub struct RedisTls {
    /// How the server's certificate is checked; `verify-full` when absent.
    pub mode: Option<TlsMode>,
    /// A PEM file of trusted CAs; the system's when absent.
    pub ca_file: Option<PathBuf>,
    /// A PEM file with the client's certificate.
    pub client_cert: Option<PathBuf>,
    /// A PEM file with the key to it.
    pub client_key: Option<PathBuf>,
}

impl RedisTls {
    fn is_named(&self) -> bool {
        self.mode.is_some()
            || [&self.ca_file, &self.client_cert, &self.client_key]
                .iter()
                .any(|file| file.is_some())
    }

    /// Checks what needs no file and no server.
    fn check(&self, with_tls: bool) -> Result<()> {
        let bad = |field, problem: &str| {
            Err(Error::Config {
                field,
                problem: problem.to_owned(),
            })
        };
        if !with_tls && self.is_named() {
            return bad(
                "--redis-tls-mode",
                "and --redis-ca-file, --redis-cert-file, --redis-key-file need a rediss:// URL in --redis-url",
            );
        }
        if matches!(self.mode, Some(TlsMode::Disable | TlsMode::Prefer)) {
            return bad(
                "--redis-tls-mode",
                "must be require, verify-ca or verify-full; redis:// is without TLS",
            );
        }
        if self.client_cert.is_some() != self.client_key.is_some() {
            return bad(
                "--redis-cert-file",
                "and --redis-key-file go together; give both or neither",
            );
        }
        Ok(())
    }

    fn certificates(&self) -> Result<TlsCertificates> {
        let read = |field, file: &Option<PathBuf>| {
            let read = |file: &PathBuf| {
                std::fs::read(file).map_err(|e| Error::Config {
                    field,
                    problem: format!("{}: {e}", file.display()),
                })
            };
            file.as_ref().map(read).transpose()
        };
        let client_cert = read("--redis-cert-file", &self.client_cert)?;
        let client_key = read("--redis-key-file", &self.client_key)?;
        let client_tls = client_cert.zip(client_key);
        Ok(TlsCertificates {
            client_tls: client_tls.map(|(client_cert, client_key)| ClientTlsConfig {
                client_cert,
                client_key,
            }),
            root_cert: read("--redis-ca-file", &self.ca_file)?,
        })
    }
}

/// A URL that was understood.
#[derive(Clone)]
pub(super) struct Address {
    /// Host, port, login and database.
    info: ConnectionInfo,
    tls: Option<RedisTls>,
}

impl Address {
    /// Reads a URL that was given in this flag. The URL is never repeated.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is not understood, or contradicts the settings of TLS.
    pub(super) fn parse(field: &'static str, url: &SecretString, tls: &RedisTls) -> Result<Self> {
        let bad = |problem: &str| Error::Config {
            field,
            problem: problem.to_owned(),
        };
        let text = url.expose_secret();
        let info = text.into_connection_info().map_err(|e| {
            let problem = e.detail().unwrap_or("is no valid URL");
            bad(&format!(
                "{problem}; e.g. redis://:password@localhost:6379/0"
            ))
        })?;
        let with_tls = text.starts_with("rediss://");
        tls.check(with_tls)?;
        if text.contains('#') {
            return Err(bad(
                "must have no #fragment; --redis-tls-mode says how TLS is checked",
            ));
        }
        Ok(Address {
            info,
            tls: with_tls.then(|| tls.clone()),
        })
    }

    /// Host and port.
    pub(super) fn describe(&self) -> String {
        self.info.addr().to_string()
    }

    pub(super) fn is_with_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// What connects to it.
    ///
    /// # Errors
    ///
    /// A file of TLS that cannot be read or understood.
    pub(super) fn client(&self) -> Result<Client> {
        let failed = |source| Error::Redis {
            doing: "set up the connection",
            source,
        };
        let (Some(tls), Some((host, port))) = (&self.tls, place(self.info.addr())) else {
            return Client::open(self.info.clone()).map_err(failed);
        };
        // redis takes whatever provider the process has; an application's own choice stands.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mode = tls.mode.unwrap_or(TlsMode::VerifyFull);
        let addr = ConnectionAddr::TcpTls {
            host: host.to_owned(),
            port,
            // As in libpq, naming a CA turns `require` into `verify-ca`.
            insecure: mode == TlsMode::Require && tls.ca_file.is_none(),
            tls_params: None,
        };
        let client = Client::build_with_tls(self.info.clone().set_addr(addr), tls.certificates()?)
            .map_err(failed)?;
        if mode == TlsMode::VerifyFull {
            return Ok(client);
        }
        let info = client.get_connection_info().clone();
        let mut addr = info.addr().clone();
        addr.set_danger_accept_invalid_hostnames(true);
        Client::open(info.set_addr(addr)).map_err(failed)
    }
}

fn place(addr: &ConnectionAddr) -> Option<(&str, u16)> {
    match addr {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some((host, *port))
        }
        _ => None,
    }
}
