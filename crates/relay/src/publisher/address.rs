//! What a URL of Redis says, and how a connection to it is protected.

use std::path::PathBuf;

use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo,
    RedisConnectionInfo, TlsCertificates,
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

/// Host and port of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) host: String,
    pub(super) port: u16,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Who is asked for the primary.
#[derive(Clone)]
pub(super) struct Sentinels {
    pub(super) places: Vec<Place>,
    /// The name under which they watch it.
    pub(super) primary: String,
    user: Option<String>,
    password: Option<SecretString>,
}

/// A URL that was understood.
#[derive(Clone)]
pub(super) struct Address {
    /// Login and database, and where the server is unless sentinels say that.
    info: ConnectionInfo,
    tls: Option<RedisTls>,
    pub(super) sentinels: Option<Sentinels>,
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
        if text.contains('#') {
            return Err(bad(
                "must have no #fragment; --redis-tls-mode says how TLS is checked",
            ));
        }
        let (plain, sentinels) = match text.split_once("+sentinel://") {
            Some((scheme, rest)) => {
                let (plain, sentinels) = parse_sentinels(scheme, rest).map_err(|e| {
                    bad(&format!(
                        "{e}; e.g. redis+sentinel://:password@host1:26379,host2:26379/mymaster/0"
                    ))
                })?;
                (plain, Some(sentinels))
            }
            None => (text.to_owned(), None),
        };
        let info = plain.as_str().into_connection_info().map_err(|e| {
            let problem = e.detail().unwrap_or("is no valid URL");
            bad(&format!(
                "{problem}; e.g. redis://:password@localhost:6379/0"
            ))
        })?;
        let with_tls = plain.starts_with("rediss://");
        tls.check(with_tls)?;
        Ok(Address {
            info,
            tls: with_tls.then(|| tls.clone()),
            sentinels,
        })
    }

    /// Host and port, or whom the sentinels are asked for.
    pub(super) fn describe(&self) -> String {
        match &self.sentinels {
            None => self.info.addr().to_string(),
            Some(sentinels) => {
                let places: Vec<String> =
                    sentinels.places.iter().map(ToString::to_string).collect();
                format!("{} of sentinels {}", sentinels.primary, places.join(","))
            }
        }
    }

    pub(super) fn is_with_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Host and port; none for a socket of the file system.
    pub(super) fn place(&self) -> Option<Place> {
        match self.info.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                Some(Place {
                    host: host.clone(),
                    port: *port,
                })
            }
            _ => None,
        }
    }

    /// What connects to the server of the URL.
    ///
    /// # Errors
    ///
    /// A file of TLS that cannot be read or understood.
    pub(super) fn client(&self) -> Result<Client> {
        match self.place() {
            Some(place) => self.client_at(&place),
            None => Client::open(self.info.clone()).map_err(not_set_up),
        }
    }

    /// What connects to another server with the same login, database and TLS.
    ///
    /// # Errors
    ///
    /// As for [`client`](Self::client).
    pub(super) fn client_at(&self, place: &Place) -> Result<Client> {
        self.client_with(place, self.info.redis_settings().clone())
    }

    /// What connects to a sentinel.
    ///
    /// # Errors
    ///
    /// As for [`client`](Self::client).
    pub(super) fn client_of_sentinel(
        &self,
        sentinels: &Sentinels,
        place: &Place,
    ) -> Result<Client> {
        let mut login = RedisConnectionInfo::default();
        if let Some(user) = &sentinels.user {
            login = login.set_username(user);
        }
        if let Some(password) = &sentinels.password {
            login = login.set_password(password.expose_secret());
        }
        self.client_with(place, login)
    }

    fn client_with(&self, place: &Place, login: RedisConnectionInfo) -> Result<Client> {
        let info = self.info.clone().set_redis_settings(login);
        let Some(tls) = &self.tls else {
            let addr = ConnectionAddr::Tcp(place.host.clone(), place.port);
            return Client::open(info.set_addr(addr)).map_err(not_set_up);
        };
        // redis takes whatever provider the process has; an application's own choice stands.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mode = tls.mode.unwrap_or(TlsMode::VerifyFull);
        let addr = ConnectionAddr::TcpTls {
            host: place.host.clone(),
            port: place.port,
            // As in libpq, naming a CA turns `require` into `verify-ca`.
            insecure: mode == TlsMode::Require && tls.ca_file.is_none(),
            tls_params: None,
        };
        let client =
            Client::build_with_tls(info.set_addr(addr), tls.certificates()?).map_err(not_set_up)?;
        if mode == TlsMode::VerifyFull {
            return Ok(client);
        }
        let info = client.get_connection_info().clone();
        let mut addr = info.addr().clone();
        addr.set_danger_accept_invalid_hostnames(true);
        Client::open(info.set_addr(addr)).map_err(not_set_up)
    }
}

fn not_set_up(source: redis::RedisError) -> Error {
    Error::Redis {
        doing: "set up the connection",
        source,
    }
}

/// Reads `user:password@host:port,host:port/NAME/db?sentinel_password=…`, and returns the URL of a server with the same login
/// and database besides.
fn parse_sentinels(scheme: &str, rest: &str) -> Result<(String, Sentinels), String> {
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (login, rest) = match rest.rsplit_once('@') {
        Some((login, rest)) => (format!("{login}@"), rest),
        None => (String::new(), rest),
    };
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (primary, database) = path.split_once('/').unwrap_or((path, "0"));
    if primary.is_empty() {
        return Err("names no primary behind the sentinels".into());
    }
    let place = |text: &str| {
        let (host, port) = text.rsplit_once(':').unwrap_or((text, "26379"));
        let port = port.parse().map_err(|_| "has a port that is no number")?;
        if host.is_empty() {
            return Err("names a sentinel without a host");
        }
        Ok(Place {
            host: host.trim_matches(['[', ']']).to_owned(),
            port,
        })
    };
    let places: Result<Vec<Place>, &str> = hosts.split(',').map(place).collect();
    let mut sentinels = Sentinels {
        places: places?,
        primary: primary.to_owned(),
        user: None,
        password: None,
    };
    for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "sentinel_user" => sentinels.user = Some(value.into_owned()),
            "sentinel_password" => sentinels.password = Some(SecretString::from(&*value)),
            _ => return Err("knows sentinel_user and sentinel_password behind the ?".into()),
        }
    }
    // The host stands in for the one that the sentinels name.
    let url = format!("{scheme}://{login}sentinels.invalid/{database}");
    Ok((url, sentinels))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Address> {
        Address::parse(
            "--redis-url",
            &SecretString::from(url),
            &RedisTls::default(),
        )
    }

    #[test]
    fn sentinels_are_read_with_login_and_database() {
        let url = "redis+sentinel://u:p%40w@a:1,b,[::1]:3/shop/2?sentinel_password=s";
        let address = parse(url).unwrap();
        assert_eq!(address.describe(), "shop of sentinels a:1,b:26379,::1:3");
        let login = address.info.redis_settings();
        assert_eq!(
            (login.username(), login.password()),
            (Some("u"), Some("p@w"))
        );
        assert_eq!(login.db(), 2);
        assert!(!address.is_with_tls());
        assert!(parse("rediss+sentinel://a/shop").unwrap().is_with_tls());
    }

    #[test]
    fn sentinels_that_are_not_understood_are_refused() {
        for url in [
            "redis+sentinel://a:1",
            "redis+sentinel://a:1/",
            "redis+sentinel://a:port/shop",
            "redis+sentinel://,b/shop",
            "redis+sentinel://a/shop/first",
            "redis+sentinel://a/shop?colour=red",
            "http+sentinel://a/shop",
        ] {
            let refusal = parse(url).err().unwrap_or_else(|| panic!("{url}"));
            assert!(matches!(refusal, Error::Config { .. }), "{url}: {refusal}");
        }
    }
}
