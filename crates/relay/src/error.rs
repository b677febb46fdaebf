//! The crate's error: what was being done, what went wrong, and the remedy where there is one.

use std::borrow::Cow;
use std::time::Duration;

use outbox_redis_address::is_tls_failure;
use tokio_postgres::error::SqlState;

use crate::protocol::failure::{self, Meaning, PostgresFault, RedisFault, ReplyCode};
use crate::protocol::start::Refusal;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the relay, or one of its commands, could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is wrong; exit code 64.
    #[error("{field}: {problem}")]
    Config {
        /// The flag.
        field: &'static str,
        /// What is wrong with it, and what is allowed.
        problem: String,
    },
    /// A call to Postgres failed.
    #[error("Postgres: {doing} failed")]
    Postgres {
        /// What was being done.
        doing: &'static str,
        /// What Postgres said.
        source: tokio_postgres::Error,
    },
    /// There is no connection to Postgres.
    #[error("Postgres at {place}: no connection")]
    Connect {
        /// User, host, port and database.
        place: String,
        /// The flag that says so.
        flag: &'static str,
        /// Why there is none.
        source: tokio_postgres::Error,
    },
    /// A call to Redis failed.
    #[error("Redis: {doing} failed")]
    Redis {
        /// What was being done.
        doing: &'static str,
        /// What Redis said.
        source: redis::RedisError,
    },
    /// TLS could not be set up, or the server offers none.
    #[error("TLS to {server}: {problem}")]
    Tls {
        /// Postgres or Redis.
        server: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A server did not answer in time.
    #[error("{server} did not answer within {limit:?} ({doing})")]
    Timeout {
        /// Postgres or Redis.
        server: &'static str,
        /// What was being done.
        doing: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// A server or a schema is not as the relay needs it.
    #[error("{problem}; {remedy}")]
    Setup {
        /// What is not as it should be.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// The start table refuses to go on.
    #[error("{}", describe_refusal(.0))]
    Refused(Refusal),
    /// Redis was asked for as a primary and is a replica: a failover is under way.
    #[error("Redis at {0} is a replica, although a sentinel names it as the primary")]
    Replica(String),
    /// Another relay leads: the marker is no longer ours.
    #[error(
        "the marker in Redis is at epoch {epoch}, page {page}, and not where this relay left it"
    )]
    Moved {
        /// The epoch found; empty when the marker is gone.
        epoch: String,
        /// The page found.
        page: String,
    },
    /// Postgres has another past than a moment ago.
    #[error("the history of Postgres changed under the relay: {0}")]
    HistoryChanged(&'static str),
    /// This relay gave up its leadership to a standby that reaches Redis.
    #[error("gave up the leadership: Redis was out of reach for {0:?} and a standby reaches it")]
    Yielded(Duration),
    /// Something that the protocol rules out.
    #[error("broken invariant: {0}")]
    Invariant(String),
}

impl Error {
    /// What the error means for a relay that runs.
    pub fn meaning(&self) -> Meaning {
        match self {
            Error::Config { .. } | Error::Tls { .. } | Error::Setup { .. } | Error::Refused(_) => {
                Meaning::Setup
            }
            Error::Postgres { source, .. } | Error::Connect { source, .. } => {
                failure::of_postgres(postgres_fault(source))
            }
            Error::Redis { source, .. } => failure::of_redis(redis_fault(source)),
            Error::Timeout { .. }
            | Error::Replica(_)
            | Error::Moved { .. }
            | Error::HistoryChanged(_)
            | Error::Yielded(_)
            | Error::Invariant(_) => Meaning::Outage,
        }
    }

    /// Whether Redis, and not Postgres, is what failed.
    pub fn is_redis(&self) -> bool {
        matches!(
            self,
            Error::Redis { .. }
                | Error::Tls {
                    server: "Redis",
                    ..
                }
                | Error::Timeout {
                    server: "Redis",
                    ..
                }
                | Error::Replica(_)
                | Error::Moved { .. }
        )
    }

    /// Whether Redis answered with an error, so that the connection is as good as before. A server that is not the one to
    /// write to any more is left: the address is resolved anew.
    pub(crate) fn is_reply(&self) -> bool {
        match self {
            Error::Redis { source, .. } => {
                !source.is_unrecoverable_error()
                    && matches!(redis_fault(source), RedisFault::Reply(code) if !matches!(
                        code,
                        ReplyCode::Err
                            | ReplyCode::Moved
                            | ReplyCode::ReadOnly
                            | ReplyCode::MasterDown
                            | ReplyCode::ClusterDown
                    ))
            }
            Error::Moved { .. } | Error::HistoryChanged(_) => true,
            _ => false,
        }
    }

    /// The error with its causes in one line, and the remedy where one is known.
    pub fn one_line(&self) -> String {
        let mut line = self.with_causes();
        if let Some(remedy) = self.remedy() {
            line.push_str("; ");
            line.push_str(&remedy);
        }
        line
    }

    /// The same, but that a right is missing is met by this remedy: what the owner of a schema does, nobody is granted.
    pub(crate) fn or_owner(self, remedy: &str) -> Self {
        match &self {
            Error::Postgres { source, .. }
                if source.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) =>
            {
                Error::Setup {
                    problem: self.with_causes(),
                    remedy: remedy.to_owned(),
                }
            }
            _ => self,
        }
    }

    fn with_causes(&self) -> String {
        let mut line = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let text = error.to_string();
            if !line.contains(&text) {
                line.push_str(": ");
                line.push_str(&text);
            }
            cause = error.source();
        }
        line.replace('\n', " ")
    }

    fn remedy(&self) -> Option<Cow<'static, str>> {
        match self {
            Error::Postgres { source, .. } => remedy_in_postgres(postgres_fault(source)),
            Error::Connect { source, flag, .. } => {
                remedy_of_connecting(postgres_fault(source), flag)
            }
            Error::Redis { source, .. } => remedy_in_redis(redis_fault(source)).map(Cow::Borrowed),
            Error::Timeout { server, .. } => Some(
                format!("check the address, and whether {server} is overloaded, frozen or cut off")
                    .into(),
            ),
            _ => None,
        }
    }
}

/// Of a session that was open.
fn remedy_in_postgres(fault: PostgresFault<'_>) -> Option<Cow<'static, str>> {
    Some(Cow::Borrowed(match fault {
        PostgresFault::State("42501") => {
            "grant the role what it needs: `outbox-relay grants` prints it"
        }
        PostgresFault::State("3F000" | "42P01" | "42883" | "42703") => "run `outbox-relay migrate`",
        PostgresFault::State(_) => return None,
        PostgresFault::Connection | PostgresFault::Tls => {
            "see whether Postgres runs; its log says why it ended the session"
        }
    }))
}

/// Of an address that is in this flag.
fn remedy_of_connecting(fault: PostgresFault<'_>, flag: &str) -> Option<Cow<'static, str>> {
    let remedy = match fault {
        PostgresFault::State("28P01" | "28000") => {
            format!("check user, password and sslmode (TLS) in {flag}, and pg_hba.conf")
        }
        PostgresFault::State("3D000") => format!("check the database name in {flag}"),
        PostgresFault::State("42501") => {
            "let the role in: GRANT CONNECT ON DATABASE, as the owner of the database".to_owned()
        }
        PostgresFault::State("53300") => {
            "end sessions that nobody needs, or raise max_connections".to_owned()
        }
        PostgresFault::State(_) => return None,
        PostgresFault::Connection => {
            format!("check host and port in {flag}, and that Postgres runs there")
        }
        PostgresFault::Tls => format!("check sslmode and sslrootcert in {flag}"),
    };
    Some(Cow::Owned(remedy))
}

fn remedy_in_redis(fault: RedisFault) -> Option<&'static str> {
    match fault {
        RedisFault::Reply(ReplyCode::NoAuth | ReplyCode::WrongPass) => {
            Some("check user and password in --redis-url")
        }
        RedisFault::Reply(ReplyCode::NoPerm) => Some(
            "give the Redis user its rights: `outbox-relay grants --redis` prints the relay's, and `rewind` needs \
                 XGROUP|SETID besides",
        ),
        RedisFault::Reply(_) => None,
        RedisFault::Connection => Some(
            "check host and port in --redis-url, that Redis runs there, and whether it wants TLS (rediss://)",
        ),
        RedisFault::Tls => Some("check --redis-tls-mode and --redis-ca-file"),
    }
}

/// Sorts a Postgres error for [`failure::of_postgres`].
pub(crate) fn postgres_fault(error: &tokio_postgres::Error) -> PostgresFault<'_> {
    if let Some(state) = error.code() {
        return PostgresFault::State(state.code());
    }
    // tokio-postgres offers no question for these two but its text of the kind, which is its own.
    match error.to_string().split(':').next() {
        Some("error performing TLS handshake") => PostgresFault::Tls,
        Some("authentication error" | "invalid configuration") => PostgresFault::State("28P01"),
        // With TLS 1.3 the server looks at the client's certificate once the handshake is over for the client.
        _ if is_tls_failure(error) => PostgresFault::Tls,
        _ => PostgresFault::Connection,
    }
}

/// Sorts a Redis error for [`failure::of_redis`].
pub(crate) fn redis_fault(error: &redis::RedisError) -> RedisFault {
    match error.kind() {
        redis::ErrorKind::AuthenticationFailed => RedisFault::Reply(
            error
                .code()
                .map_or(ReplyCode::WrongPass, reply_code_of_login),
        ),
        redis::ErrorKind::InvalidClientConfig => RedisFault::Tls,
        _ if is_tls_failure(error) => RedisFault::Tls,
        _ => match error.code() {
            Some(code) => RedisFault::Reply(ReplyCode::parse(code)),
            None => RedisFault::Connection,
        },
    }
}

fn reply_code_of_login(code: &str) -> ReplyCode {
    match ReplyCode::parse(code) {
        // Servers that have no password set, or only one user, answer AUTH with ERR.
        ReplyCode::Err | ReplyCode::Unknown => ReplyCode::WrongPass,
        code => code,
    }
}

fn describe_refusal(refusal: &Refusal) -> String {
    match refusal {
        Refusal::NotAMarker(what) => format!(
            "the marker's key in Redis holds something else ({what}); \
             choose another --stream-prefix, or delete that key if nothing needs it"
        ),
        Refusal::OtherOutbox { marker, database } => format!(
            "the marker in Redis belongs to outbox {marker} and this database is outbox {database}; \
             choose another --stream-prefix or another Redis"
        ),
        Refusal::OtherCluster { cursor, database } => format!(
            "the cursor belongs to the Postgres cluster with system id {cursor} and this is {database}: a copy or a \
             restored dump; if this database takes over for the other, run `outbox-relay adopt`, otherwise choose \
             another Redis"
        ),
        Refusal::OldPrimary { marker, database } => format!(
            "the marker has seen timeline {marker} of Postgres and this server is on {database}: an old primary that \
             came back; point --database-url at the present primary"
        ),
    }
}
