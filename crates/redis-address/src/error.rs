//! Why an address is not understood, or no connection came of it.

use std::path::PathBuf;

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
    pub(crate) fn one_line(&self) -> String {
        match std::error::Error::source(self) {
            Some(cause) => format!("{self}: {cause}"),
            None => self.to_string(),
        }
    }
}
