//! Host and port of a server.

use std::fmt;

use redis::ConnectionAddr;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Of IPv6 without brackets, as Redis names it.
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Place {
    /// Reads `host:port`, `host`, `[::1]:port` or `[::1]`.
    pub(crate) fn parse(text: &str, default_port: u16) -> Result<Self, &'static str> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, behind) = rest.split_once(']').ok_or("has a [ without its ]")?;
                let port = match behind {
                    "" => None,
                    behind => Some(behind.strip_prefix(':').ok_or("has text behind a ]")?),
                };
                (host, port)
            }
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        if host.is_empty() {
            return Err("names a server without a host");
        }
        let port = match port {
            None => default_port,
            Some(port) => port.parse().map_err(|_| "has a port that is no number")?,
        };
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }

    /// Where a server is; none for a socket of the file system.
    pub(crate) fn from(addr: &ConnectionAddr) -> Option<Self> {
        match addr {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                Some(Self {
                    host: host.clone(),
                    port: *port,
                })
            }
            _ => None,
        }
    }

    /// An address of this server, with the TLS of another one.
    pub(crate) fn of(&self, like: &ConnectionAddr) -> ConnectionAddr {
        let mut addr = like.clone();
        if let ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } =
            &mut addr
        {
            self.host.clone_into(host);
            *port = self.port;
        }
        addr
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "[{host}]:{port}")
        } else {
            write!(f, "{host}:{port}")
        }
    }
}

pub(crate) fn list(places: &[Place]) -> String {
    let places: Vec<String> = places.iter().map(ToString::to_string).collect();
    places.join(",")
}
