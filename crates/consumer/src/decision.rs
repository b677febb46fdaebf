//! What an error means: pure functions from SQLSTATE and Redis error code to what is done about it.

use std::time::Duration;

use redis::{ErrorKind, RedisError};

/// What went wrong, as far as it makes a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The connection to Postgres could not be made or was lost.
    PostgresLost,
    /// Postgres did not answer in time.
    PostgresSilent,
    /// Postgres cannot work now: shutdown, start-up, no room, no slots, I/O errors.
    PostgresUnavailable,
    /// Another transaction was in the way (40001, 40P01); it may pass when it runs again.
    Conflict,
    /// A key stands in a unique index already (23505).
    UniqueViolation,
    /// The server has become a standby (25006); after a failover the next connection finds the primary.
    PostgresReadOnly,
    /// A prepared statement is gone (26000); a new connection prepares it again.
    StatementGone,
    /// Postgres refuses the role, its password, its rights, or the database.
    PostgresRefused,
    /// A schema, table or column is missing.
    SchemaMissing,
    /// Every other answer of Postgres.
    OtherSql,
    /// Another member has the stream now, or it was given up meanwhile.
    LeaseLost,
    /// The pool was closed by the application.
    PoolClosed,
    /// The handler returned an error of its own.
    HandlerError,
    /// The handler panicked.
    HandlerPanic,
    /// The handler asked to be called again after this time.
    HandlerPostpones(Duration),
    /// The handler said that no further attempt can succeed.
    HandlerRejects,
    /// The connection to Redis could not be made or was lost.
    RedisLost,
    /// Redis did not answer in time.
    RedisSilent,
    /// NOGROUP: the group or its stream is gone.
    GroupGone,
    /// BUSYGROUP: the group that was to be made is there.
    GroupExists,
    /// UNBLOCKED: the stream went away, or the server became a replica, while we waited.
    Unblocked,
    /// READONLY: the server has become a replica.
    RedisReadOnly,
    /// Redis refuses the user or the password.
    RedisRefused,
    /// Redis denies a command or a key (NOPERM), or the key holds something else (WRONGTYPE).
    RedisForbids,
    /// MOVED, CROSSSLOT: Redis is a cluster, and the keys are not in one slot of this node.
    ManySlots,
    /// Every other answer of Redis.
    OtherRedis,
}

/// Whose statement met the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// One of this crate.
    Library,
    /// One of the handler, or the commit of what it wrote.
    Handler,
}

/// What is done about a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Wait and do the same again, without limit; nothing is counted.
    Retry,
    /// Make the group anew from the start of the stream, then go on.
    RemakeGroup,
    /// The message failed: one attempt is counted.
    CountAttempt,
    /// The message failed for good: it becomes a dead letter, whatever attempts are left.
    SetAside,
    /// What is in hand of the stream is dropped; its owner finds it pending.
    Yield,
    /// A person must act: at the start the consumer ends with an error, later it goes on trying.
    Misconfigured,
    /// The consumer ends with an error.
    End,
}

impl Decision {
    /// Whether it is the message that failed, and not a server.
    pub(crate) fn blames_the_message(self) -> bool {
        match self {
            Decision::CountAttempt | Decision::SetAside => true,
            Decision::Retry
            | Decision::RemakeGroup
            | Decision::Yield
            | Decision::Misconfigured
            | Decision::End => false,
        }
    }
}

/// The one place where it is decided what a fault means.
pub(crate) fn decide(origin: Origin, fault: Fault) -> Decision {
    match fault {
        Fault::PostgresLost
        | Fault::PostgresSilent
        | Fault::PostgresUnavailable
        | Fault::Conflict
        | Fault::PostgresReadOnly
        | Fault::StatementGone
        | Fault::RedisLost
        | Fault::RedisSilent
        | Fault::RedisReadOnly
        | Fault::GroupExists
        | Fault::OtherRedis => Decision::Retry,
        Fault::GroupGone | Fault::Unblocked => Decision::RemakeGroup,
        Fault::RedisRefused | Fault::RedisForbids | Fault::ManySlots => Decision::Misconfigured,
        Fault::HandlerError | Fault::HandlerPanic | Fault::HandlerPostpones(_) => {
            Decision::CountAttempt
        }
        Fault::HandlerRejects => Decision::SetAside,
        Fault::PostgresRefused | Fault::SchemaMissing => match origin {
            Origin::Library => Decision::Misconfigured,
            Origin::Handler => Decision::CountAttempt,
        },
        // What this crate sends was checked before, so an answer nobody foresaw is the server's affair.
        Fault::UniqueViolation | Fault::OtherSql => match origin {
            Origin::Library => Decision::Retry,
            Origin::Handler => Decision::CountAttempt,
        },
        Fault::LeaseLost => Decision::Yield,
        Fault::PoolClosed => Decision::End,
    }
}

/// The fault that a SQLSTATE stands for.
pub(crate) fn fault_of_sqlstate(code: &str) -> Fault {
    match code {
        "40001" | "40P01" | "40000" | "40003" => return Fault::Conflict,
        // 25P03: the handler's transaction was idle for longer than a frozen process may block others.
        "57P01" | "57P02" | "57P03" | "57P05" | "25P03" => return Fault::PostgresUnavailable,
        "23505" => return Fault::UniqueViolation,
        "25006" => return Fault::PostgresReadOnly,
        "26000" => return Fault::StatementGone,
        "3D000" | "42501" => return Fault::PostgresRefused,
        "3F000" | "42P01" | "42703" => return Fault::SchemaMissing,
        _ => {}
    }
    match code.get(..2) {
        Some("08") => Fault::PostgresLost,
        Some("28") => Fault::PostgresRefused,
        Some("53" | "58") => Fault::PostgresUnavailable,
        _ => Fault::OtherSql,
    }
}

/// The fault that an error of the Redis client stands for.
pub(crate) fn fault_of_redis(error: &RedisError) -> Fault {
    if let Some(code) = error.code() {
        return fault_of_redis_code(code);
    }
    match error.kind() {
        ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig => Fault::RedisRefused,
        _ if error.is_timeout() => Fault::RedisSilent,
        _ if error.is_unrecoverable_error() => Fault::RedisLost,
        _ => Fault::OtherRedis,
    }
}

fn fault_of_redis_code(code: &str) -> Fault {
    match code {
        "NOGROUP" => Fault::GroupGone,
        "BUSYGROUP" => Fault::GroupExists,
        "UNBLOCKED" => Fault::Unblocked,
        "READONLY" => Fault::RedisReadOnly,
        "WRONGPASS" | "NOAUTH" => Fault::RedisRefused,
        "NOPERM" | "WRONGTYPE" => Fault::RedisForbids,
        "MOVED" | "CROSSSLOT" => Fault::ManySlots,
        _ => Fault::OtherRedis,
    }
}

/// Whether a connection to Redis that met this fault is given up, so that the address is looked up anew.
pub(crate) fn ends_redis_connection(fault: Fault) -> bool {
    match fault {
        Fault::RedisLost
        | Fault::RedisSilent
        | Fault::RedisReadOnly
        | Fault::RedisRefused
        | Fault::Unblocked => true,
        Fault::GroupGone
        | Fault::GroupExists
        | Fault::RedisForbids
        | Fault::ManySlots
        | Fault::OtherRedis
        | Fault::PostgresLost
        | Fault::PostgresSilent
        | Fault::PostgresUnavailable
        | Fault::Conflict
        | Fault::UniqueViolation
        | Fault::PostgresReadOnly
        | Fault::StatementGone
        | Fault::PostgresRefused
        | Fault::SchemaMissing
        | Fault::OtherSql
        | Fault::LeaseLost
        | Fault::PoolClosed
        | Fault::HandlerError
        | Fault::HandlerPanic
        | Fault::HandlerPostpones(_)
        | Fault::HandlerRejects => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sqlstate_leads_to_its_decision() {
        use Decision::{CountAttempt, Misconfigured, Retry};
        let table = [
            // code, in a statement of this crate, in the handler
            ("40001", Retry, Retry),
            ("40P01", Retry, Retry),
            ("08006", Retry, Retry),
            ("57P01", Retry, Retry),
            ("57P02", Retry, Retry),
            ("57P03", Retry, Retry),
            ("53100", Retry, Retry),
            ("53300", Retry, Retry),
            ("58030", Retry, Retry),
            ("25006", Retry, Retry),
            ("25P03", Retry, Retry),
            ("26000", Retry, Retry),
            ("28P01", Misconfigured, CountAttempt),
            ("28000", Misconfigured, CountAttempt),
            ("42501", Misconfigured, CountAttempt),
            ("3D000", Misconfigured, CountAttempt),
            ("3F000", Misconfigured, CountAttempt),
            ("42P01", Misconfigured, CountAttempt),
            ("23505", Retry, CountAttempt),
            ("23503", Retry, CountAttempt),
            ("25P02", Retry, CountAttempt),
            ("22P02", Retry, CountAttempt),
            ("55P03", Retry, CountAttempt),
            ("57014", Retry, CountAttempt),
            ("P0001", Retry, CountAttempt),
            ("XX000", Retry, CountAttempt),
            ("", Retry, CountAttempt),
        ];
        for (code, library, handler) in table {
            let fault = fault_of_sqlstate(code);
            assert_eq!(
                decide(Origin::Library, fault),
                library,
                "{code} in the library"
            );
            assert_eq!(
                decide(Origin::Handler, fault),
                handler,
                "{code} in the handler"
            );
        }
    }

    #[test]
    fn each_redis_code_leads_to_its_decision() {
        let table = [
            ("NOGROUP", Decision::RemakeGroup),
            ("UNBLOCKED", Decision::RemakeGroup),
            ("WRONGPASS", Decision::Misconfigured),
            ("NOAUTH", Decision::Misconfigured),
            ("LOADING", Decision::Retry),
            ("OOM", Decision::Retry),
            ("MISCONF", Decision::Retry),
            ("READONLY", Decision::Retry),
            ("NOREPLICAS", Decision::Retry),
            ("CLUSTERDOWN", Decision::Retry),
            ("MASTERDOWN", Decision::Retry),
            ("TRYAGAIN", Decision::Retry),
            ("BUSY", Decision::Retry),
            ("NOPERM", Decision::Misconfigured),
            ("WRONGTYPE", Decision::Misconfigured),
            ("MOVED", Decision::Misconfigured),
            ("CROSSSLOT", Decision::Misconfigured),
            ("ERR", Decision::Retry),
        ];
        for (code, decision) in table {
            assert_eq!(
                decide(Origin::Library, fault_of_redis_code(code)),
                decision,
                "{code}"
            );
        }
    }

    #[test]
    fn handlers_own_errors_count_and_lost_connections_do_not() {
        assert_eq!(
            decide(Origin::Handler, Fault::HandlerError),
            Decision::CountAttempt
        );
        assert_eq!(
            decide(Origin::Handler, Fault::HandlerPanic),
            Decision::CountAttempt
        );
        assert_eq!(
            decide(
                Origin::Handler,
                Fault::HandlerPostpones(Duration::from_secs(1))
            ),
            Decision::CountAttempt
        );
        assert_eq!(
            decide(Origin::Handler, Fault::HandlerRejects),
            Decision::SetAside
        );
        assert_eq!(
            decide(Origin::Handler, Fault::PostgresLost),
            Decision::Retry
        );
        assert_eq!(
            decide(Origin::Handler, Fault::PostgresSilent),
            Decision::Retry
        );
        assert_eq!(decide(Origin::Library, Fault::PoolClosed), Decision::End);
    }
}
