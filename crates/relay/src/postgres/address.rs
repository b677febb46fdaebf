//! What a URL of Postgres says, read as libpq reads it.

use std::path::PathBuf;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};

use super::tls::{TlsMode, TlsSettings};
use crate::error::{Error, Result};

/// How long a dead peer may stay unnoticed by the kernel.
const KEEPALIVE: Duration = Duration::from_secs(3);

/// What `sslrootcert` says for the authorities that the system trusts.
const SYSTEM_AUTHORITIES: &str = "system";

/// A URL that was understood.
#[derive(Clone)]
pub(super) struct Address {
    /// One for each host, in their order. tokio-postgres would go through them as well, but a host that accepts and then
    /// says nothing would keep it from the next one.
    pub(super) hosts: Vec<Config>,
    pub(super) tls: TlsSettings,
}

impl Address {
    /// Reads a URL that was given in this flag. The URL is never repeated.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when it is not understood.
    pub(super) fn parse(field: &'static str, url: &SecretString) -> Result<Self> {
        let bad = |problem: String| Error::Config { field, problem };
        let text = url.expose_secret();
        if !text.starts_with("postgres://") && !text.starts_with("postgresql://") {
            return Err(bad("must start with postgres:// or postgresql://".into()));
        }
        let (base, query) = text.split_once('?').unwrap_or((text, ""));
        let (tls, rest) = tls_parameters(query).map_err(bad)?;
        let config: Config = format!("{base}?{rest}")
            .parse()
            .map_err(|e: tokio_postgres::Error| bad(with_cause(&e)))?;
        let count = config.get_hosts().len().max(config.get_hostaddrs().len());
        if count == 0 {
            return Err(bad(
                "names no host, e.g. postgres://user@localhost:5432/database".into(),
            ));
        }
        if config.get_user().is_none() {
            return Err(bad(
                "names no user, e.g. postgres://user@localhost:5432/database".into(),
            ));
        }
        let ports = config.get_ports().len();
        if ports > 1 && ports != count {
            return Err(bad(format!(
                "names {count} hosts and {ports} ports; give each host a port, or one for all"
            )));
        }
        let hosts = (0..count).map(|host| one_host(&config, host, tls.mode));
        Ok(Address {
            hosts: hosts.collect(),
            tls,
        })
    }

    /// User, hosts with ports, and database, for logs; never the password.
    pub(super) fn describe(&self) -> String {
        let places: Vec<String> = self.hosts.iter().map(place).collect();
        self.describe_at(&places.join(","))
    }

    /// The same of one of the hosts.
    pub(super) fn place_of(&self, host: &Config) -> String {
        self.describe_at(&place(host))
    }

    fn describe_at(&self, places: &str) -> String {
        let first = self.hosts.first();
        let user = first.and_then(Config::get_user).unwrap_or_default();
        let database = first.and_then(Config::get_dbname).unwrap_or(user);
        format!("{user}@{places}/{database}")
    }
}

/// Host and port.
pub(super) fn place(host: &Config) -> String {
    let name = match host.get_hosts().first() {
        Some(Host::Tcp(name)) => name.clone(),
        #[cfg(unix)]
        Some(Host::Unix(path)) => path.display().to_string(),
        None => host
            .get_hostaddrs()
            .first()
            .map(ToString::to_string)
            .unwrap_or_default(),
    };
    let port = host.get_ports().first().copied().unwrap_or(5432);
    format!("{name}:{port}")
}

/// Takes out of the query what is about TLS, and returns the rest.
fn tls_parameters(query: &str) -> Result<(TlsSettings, String), String> {
    let mut rest = url::form_urlencoded::Serializer::new(String::new());
    let (mut mode, mut system) = (None, false);
    let mut tls = TlsSettings {
        mode: TlsMode::Disable,
        ca_file: None,
        client_cert: None,
        client_key: None,
    };
    for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "sslmode" => mode = Some(tls_mode(&value).ok_or_else(|| format!(
                "sslmode={value} is not known; use disable, prefer, require, verify-ca or verify-full"))?),
            "sslrootcert" if value == SYSTEM_AUTHORITIES => system = true,
            "sslrootcert" => tls.ca_file = Some(PathBuf::from(&*value)),
            "sslcert" => tls.client_cert = Some(PathBuf::from(&*value)),
            "sslkey" => tls.client_key = Some(PathBuf::from(&*value)),
            _ => {
                rest.append_pair(&name, &value);
            }
        }
    }
    let named = system
        || [&tls.ca_file, &tls.client_cert, &tls.client_key]
            .iter()
            .any(|file| file.is_some());
    tls.mode = match (mode, named) {
        (Some(mode), _) => mode,
        // Once TLS is on, everything is checked.
        (None, true) => TlsMode::VerifyFull,
        (None, false) => TlsMode::Disable,
    };
    if tls.mode == TlsMode::Disable && named {
        return Err(
            "sslmode=disable contradicts sslrootcert, sslcert and sslkey; drop one of them".into(),
        );
    }
    if tls.client_cert.is_some() != tls.client_key.is_some() {
        return Err("sslcert and sslkey go together; give both or neither".into());
    }
    // Anybody can have a certificate of a public authority, so libpq refuses this, too.
    if system && tls.mode != TlsMode::VerifyFull {
        return Err("sslrootcert=system needs sslmode=verify-full".into());
    }
    // Parameters of the server's own are read again by tokio-postgres, which wants %20 for a space.
    Ok((tls, rest.finish().replace('+', "%20")))
}

/// The settings of one of the hosts.
fn one_host(all: &Config, host: usize, mode: TlsMode) -> Config {
    let mut one = Config::new();
    match all.get_hosts().get(host) {
        Some(Host::Tcp(name)) => {
            one.host(name);
        }
        #[cfg(unix)]
        Some(Host::Unix(path)) => {
            one.host_path(path);
        }
        None => {}
    }
    if let Some(address) = all.get_hostaddrs().get(host) {
        one.hostaddr(*address);
    }
    let ports = all.get_ports();
    one.port(ports.get(host).or(ports.first()).copied().unwrap_or(5432));
    one.user(all.get_user().unwrap_or_default());
    if let Some(password) = all.get_password() {
        one.password(password);
    }
    if let Some(name) = all.get_dbname() {
        one.dbname(name);
    }
    if let Some(options) = all.get_options() {
        one.options(options);
    }
    one.ssl_mode(match mode {
        TlsMode::Disable => SslMode::Disable,
        TlsMode::Prefer => SslMode::Prefer,
        TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => SslMode::Require,
    });
    one.ssl_negotiation(all.get_ssl_negotiation());
    one.channel_binding(all.get_channel_binding());
    // Of several hosts one is the primary, and no other is of use to a relay. Of one host, a standby gets a message of
    // its own.
    let several = all.get_hosts().len().max(all.get_hostaddrs().len()) > 1;
    one.target_session_attrs(match all.get_target_session_attrs() {
        TargetSessionAttrs::Any if several => TargetSessionAttrs::ReadWrite,
        asked => asked,
    });
    one.keepalives_idle(KEEPALIVE)
        .keepalives_interval(KEEPALIVE)
        .keepalives_retries(2)
        .tcp_user_timeout(3 * KEEPALIVE);
    let limit = all.get_connect_timeout().copied();
    one.connect_timeout(limit.unwrap_or(Duration::from_secs(5)));
    one
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

pub(super) fn with_cause(error: &tokio_postgres::Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Address> {
        Address::parse("--database-url", &SecretString::from(url))
    }

    #[test]
    fn several_hosts_are_tried_in_their_order_for_the_primary() {
        let address = parse("postgres://u:pw@a:1,b:2,c:3/shop?connect_timeout=2").unwrap();
        assert_eq!(address.describe(), "u@a:1,b:2,c:3/shop");
        for host in &address.hosts {
            assert_eq!(
                host.get_target_session_attrs(),
                TargetSessionAttrs::ReadWrite
            );
            assert_eq!(host.get_password(), Some(&b"pw"[..]));
            assert_eq!(host.get_connect_timeout(), Some(&Duration::from_secs(2)));
        }
        let one = parse("postgres://u@a/shop").unwrap();
        assert_eq!(
            one.hosts[0].get_target_session_attrs(),
            TargetSessionAttrs::Any
        );
    }

    #[test]
    fn everything_is_checked_once_tls_is_on() {
        for (query, mode) in [
            ("", TlsMode::Disable),
            ("?sslmode=require", TlsMode::Require),
            ("?sslrootcert=ca.pem", TlsMode::VerifyFull),
            ("?sslrootcert=system", TlsMode::VerifyFull),
            ("?sslcert=c.pem&sslkey=k.pem", TlsMode::VerifyFull),
        ] {
            let address = parse(&format!("postgres://u@a/shop{query}")).unwrap();
            assert_eq!(address.tls.mode, mode, "{query}");
        }
        for query in [
            "sslmode=disable&sslrootcert=ca.pem",
            "sslmode=disable&sslcert=c.pem&sslkey=k.pem",
            "sslcert=c.pem",
            "sslmode=require&sslkey=k.pem",
            "sslmode=require&sslrootcert=system",
            "sslmode=always",
        ] {
            assert!(
                parse(&format!("postgres://u@a/shop?{query}")).is_err(),
                "{query}"
            );
        }
    }
}
