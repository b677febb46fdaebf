//! Where Redis is, as the flags say: the address itself is read by `outbox-redis-address`.

use std::path::PathBuf;

use outbox_redis_address::{Error as AddressError, RedisAddress, Tls, TlsCheck};
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

    /// Checks what needs no file and no server. None for a connection without TLS.
    fn settle(&self, with_tls: bool) -> Result<Option<Tls>> {
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
        let check = match self.mode.unwrap_or(TlsMode::VerifyFull) {
            TlsMode::Disable | TlsMode::Prefer => {
                return bad(
                    "--redis-tls-mode",
                    "must be require, verify-ca or verify-full; redis:// is without TLS",
                );
            }
            // As in libpq, naming a CA turns `require` into `verify-ca`.
            TlsMode::Require if self.ca_file.is_none() => TlsCheck::Nothing,
            TlsMode::Require | TlsMode::VerifyCa => TlsCheck::Ca,
            TlsMode::VerifyFull => TlsCheck::Full,
        };
        if self.client_cert.is_some() != self.client_key.is_some() {
            return bad(
                "--redis-cert-file",
                "and --redis-key-file go together; give both or neither",
            );
        }
        Ok(with_tls.then(|| Tls {
            check,
            ca_file: self.ca_file.clone(),
            client_cert: self.client_cert.clone(),
            client_key: self.client_key.clone(),
        }))
    }
}

/// Reads a URL that was given in this flag. The URL is never repeated.
///
/// # Errors
///
/// [`Error::Config`] when it is not understood, or contradicts the settings of TLS.
pub(super) fn parse(
    field: &'static str,
    url: &SecretString,
    tls: &RedisTls,
) -> Result<RedisAddress> {
    let bad = |error: AddressError| match error {
        AddressError::Address(problem) => Error::Config { field, problem },
        other => of_address(other, false),
    };
    let address = RedisAddress::parse(url.expose_secret()).map_err(bad)?;
    match tls.settle(address.is_with_tls())? {
        Some(tls) => address.with_tls(tls).map_err(bad),
        None => Ok(address),
    }
}

/// What went wrong on the way to a connection, in the words of the flags.
pub(super) fn of_address(error: AddressError, with_tls: bool) -> Error {
    match error {
        // A port without TLS says nothing to a handshake, as one that is frozen does.
        AddressError::Redis {
            doing: "connect",
            source,
        } if with_tls => Error::Redis {
            doing: "connect with TLS",
            source,
        },
        AddressError::Redis { doing, source } => Error::Redis { doing, source },
        AddressError::Tls { server, source } => Error::Tls {
            server: "Redis",
            problem: format!(
                "{server}: {source}; check --redis-tls-mode, --redis-ca-file and --redis-cert-file"
            ),
        },
        AddressError::Replica(server) => Error::Replica(server),
        AddressError::File {
            setting,
            path,
            source,
        } => Error::Config {
            field: match setting {
                "ca_file" => "--redis-ca-file",
                "client_cert" => "--redis-cert-file",
                _ => "--redis-key-file",
            },
            problem: format!("{}: {source}", path.display()),
        },
        AddressError::UnknownPrimary { .. } => Error::Setup {
            problem: error.to_string(),
            remedy: "check the name behind the addresses in --redis-url".into(),
        },
        AddressError::NoCluster(_) => Error::Setup {
            problem: error.to_string(),
            remedy: "name one server in --redis-url, or the sentinels that watch the servers (redis+sentinel://)"
                .into(),
        },
        other => Error::Config {
            field: "--redis-url",
            problem: other.to_string(),
        },
    }
}
