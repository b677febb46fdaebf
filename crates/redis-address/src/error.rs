//! Why an address is not understood, or no connection came of it.

use std::path::PathBuf;

use crate::place::Place;

#[cfg(feature = "tls")]
use crate::tls::is_tls_failure;

/// No connection is with it.
#[cfg(not(feature = "tls"))]
fn is_tls_failure(_: &redis::RedisError) -> bool {
    false
}

/// Why an address is not understood, or no connection came of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address is not understood; the text says what is wrong, and how it could be written.
    #[error("the address of Redis {0}")]
    Address(String),
    /// A file of TLS cannot be read.
    #[error("{setting}: {}", path.display())]
    File {
        /// The setting of TLS that names it, as the field of `Tls` is called.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it cannot be read.
        source: std::io::Error,
    },
    /// A sentinel answers, and does not know this primary.
    #[error("the sentinel at {sentinel} knows no primary named {primary:?}")]
    UnknownPrimary {
        /// Host and port.
        sentinel: String,
        /// The name that was asked for.
        primary: String,
    },
    /// A sentinel names a server as the primary that takes itself for a replica: a failover is under way.
    #[error("Redis at {0} is a replica, although a sentinel names it as the primary")]
    Replica(String),
    /// One of several servers is not the node of a cluster.
    #[error(
        "the address names several servers, which only the nodes of a cluster can be, and Redis at {0} is none"
    )]
    NoCluster(String),
    /// The server is a node of a cluster, and no probe says which of its nodes is wanted.
    #[error("Redis at {0} is a node of a cluster, and the keys are in more than one hash slot")]
    ManySlots(String),
    /// TLS with a server failed: its certificate was refused, or ours by it, or it speaks without TLS.
    #[error("TLS to Redis at {server} failed (see check, ca_file and client_cert in Tls)")]
    Tls {
        /// Host and port; a sentinel's, or the server's.
        server: String,
        /// What was refused.
        source: redis::RedisError,
    },
    /// Redis is out of reach, or refuses.
    #[error("Redis: {doing} failed")]
    Redis {
        /// What was being done.
        doing: &'static str,
        /// What Redis said.
        source: redis::RedisError,
    },
}

impl Error {
    /// The same, in words of its own if TLS with this server is what failed. It may come with the first call only: with
    /// TLS 1.3 a server looks at the client's certificate once the handshake is over for the client.
    pub(crate) fn met_at(self, server: &Place) -> Self {
        match self {
            Self::Redis { source, .. } if is_tls_failure(&source) => Self::Tls {
                server: server.to_string(),
                source,
            },
            other => other,
        }
    }

    pub(crate) fn one_line(&self) -> String {
        match std::error::Error::source(self) {
            Some(cause) => format!("{self}: {cause}"),
            None => self.to_string(),
        }
    }
}
