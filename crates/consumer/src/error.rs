//! What a consumer can fail with. Outages are not among it: they are waited out.

/// Why a consumer could not be built, could not start, or had to end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is out of its bounds or contradicts another one.
    #[error("setting {field}: {problem}")]
    Setting {
        /// The builder's method that sets it.
        field: &'static str,
        /// What is wrong with the value.
        problem: String,
    },
    /// The schema `inbox` is missing, or not of a version that this crate works with.
    #[error(
        "the inbox schema has version {found} where {min} to {max} is needed: run `outbox-relay migrate --inbox`"
    )]
    Schema {
        /// The version found, 0 when there is no schema.
        found: i32,
        /// The lowest version that is accepted.
        min: i32,
        /// The highest version that is accepted.
        max: i32,
    },
    /// The database does not store text as UTF-8, so that some keys could not be recorded.
    #[error("the inbox database has encoding {0} where UTF8 is needed")]
    Encoding(String),
    /// A server refuses the credentials or the database that the consumer was given.
    #[error("{server} refuses the connection: {reason}")]
    Refused {
        /// `Postgres` or `Redis`.
        server: &'static str,
        /// What the server said.
        reason: String,
    },
    /// The connection pool was closed while the consumer ran.
    #[error("the Postgres connection pool was closed")]
    PoolClosed,
    /// The consumer's thread could not be started.
    #[error("could not start the consumer's thread")]
    Thread(#[source] std::io::Error),
    /// The consumer's thread ended unexpectedly, which is a bug in this crate.
    #[error("the consumer's thread ended unexpectedly")]
    Ended,
}
