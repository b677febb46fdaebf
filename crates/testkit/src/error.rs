//! What goes wrong in the kit itself, told so that a failed test needs no second look.

use std::{fmt, io, time::Duration};

/// Why the kit could not do what the test asked for.
///
/// `Debug` prints the same text as `Display`, with the causes and the tail of the server's log, because
/// `unwrap` in a test shows `Debug`.
pub struct Error(Box<Kind>);

enum Kind {
    NotInstalled {
        what: &'static str,
        looked_in: Vec<String>,
        remedy: String,
    },
    Server {
        what: String,
        log_tail: String,
    },
    Command {
        program: String,
        outcome: String,
        output: String,
    },
    Io {
        what: String,
        source: io::Error,
    },
    Postgres {
        what: String,
        source: tokio_postgres::Error,
        log_tail: String,
    },
    Redis {
        what: String,
        source: redis::RedisError,
        log_tail: String,
    },
    TimedOut {
        what: String,
        after: Duration,
        seen: String,
    },
    Misuse {
        what: String,
    },
}

impl Error {
    pub(crate) fn not_installed(
        what: &'static str,
        looked_in: Vec<String>,
        remedy: String,
    ) -> Self {
        Self(Box::new(Kind::NotInstalled {
            what,
            looked_in,
            remedy,
        }))
    }

    pub(crate) fn server(what: impl Into<String>, log_tail: String) -> Self {
        Self(Box::new(Kind::Server {
            what: what.into(),
            log_tail,
        }))
    }

    pub(crate) fn command(program: String, outcome: String, output: String) -> Self {
        Self(Box::new(Kind::Command {
            program,
            outcome,
            output,
        }))
    }

    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Self {
        Self(Box::new(Kind::Io {
            what: what.into(),
            source,
        }))
    }

    pub(crate) fn postgres(
        what: impl Into<String>,
        source: tokio_postgres::Error,
        log_tail: String,
    ) -> Self {
        Self(Box::new(Kind::Postgres {
            what: what.into(),
            source,
            log_tail,
        }))
    }

    pub(crate) fn redis(
        what: impl Into<String>,
        source: redis::RedisError,
        log_tail: String,
    ) -> Self {
        Self(Box::new(Kind::Redis {
            what: what.into(),
            source,
            log_tail,
        }))
    }

    pub(crate) fn timed_out(what: impl Into<String>, after: Duration, seen: String) -> Self {
        Self(Box::new(Kind::TimedOut {
            what: what.into(),
            after,
            seen,
        }))
    }

    pub(crate) fn misuse(what: impl Into<String>) -> Self {
        Self(Box::new(Kind::Misuse { what: what.into() }))
    }

    /// Whether the kit waited for something that did not happen in time.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(*self.0, Kind::TimedOut { .. })
    }

    /// Whether a server or one of its tools is not installed on this machine.
    #[must_use]
    pub fn is_not_installed(&self) -> bool {
        matches!(*self.0, Kind::NotInstalled { .. })
    }

    /// The SQLSTATE, when a Postgres server answered with an error.
    #[must_use]
    pub fn sql_state(&self) -> Option<&tokio_postgres::error::SqlState> {
        match &*self.0 {
            Kind::Postgres { source, .. } => source.code(),
            _ => None,
        }
    }
}

fn write_log(f: &mut fmt::Formatter<'_>, log_tail: &str) -> fmt::Result {
    if log_tail.is_empty() {
        return Ok(());
    }
    write!(f, "\nthe end of its log:\n{log_tail}")
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Kind::NotInstalled {
                what,
                looked_in,
                remedy,
            } => {
                write!(f, "{what} not found in {}; {remedy}", looked_in.join(", "))
            }
            Kind::Server { what, log_tail } => {
                f.write_str(what)?;
                write_log(f, log_tail)
            }
            Kind::Command {
                program,
                outcome,
                output,
            } => {
                write!(f, "{program} {outcome}: {output}")
            }
            Kind::Io { what, source } => write!(f, "{what}: {source}"),
            Kind::Postgres {
                what,
                source,
                log_tail,
            } => {
                // The driver's Display says only "db error"; the server's message is in the cause.
                match source.as_db_error() {
                    Some(db) => write!(f, "{what}: {db} (SQLSTATE {})", db.code().code())?,
                    None => match std::error::Error::source(source) {
                        Some(cause) => write!(f, "{what}: {source}: {cause}")?,
                        None => write!(f, "{what}: {source}")?,
                    },
                }
                write_log(f, log_tail)
            }
            Kind::Redis {
                what,
                source,
                log_tail,
            } => {
                write!(f, "{what}: {source}")?;
                write_log(f, log_tail)
            }
            Kind::TimedOut { what, after, seen } => {
                write!(f, "waited {after:?} for {what}; last seen: {seen}")
            }
            Kind::Misuse { what } => f.write_str(what),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &*self.0 {
            Kind::Io { source, .. } => Some(source),
            Kind::Postgres { source, .. } => Some(source),
            Kind::Redis { source, .. } => Some(source),
            _ => None,
        }
    }
}
