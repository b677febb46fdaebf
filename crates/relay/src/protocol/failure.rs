//! What an error means for the relay. Decided by SQLSTATE and by Redis' error code, never by the
//! text behind them, which changes with version and language.

/// What the relay does about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The server cannot now. Back off and try again; nothing is spent and nothing skipped.
    Outage,
    /// The set-up is wrong: exit at start. A relay that ran already keeps trying, slowly.
    Setup,
    /// One stream refuses entries: the others go on without it.
    StreamRefuses,
}

/// How a call to Redis failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RedisFault {
    /// The socket closed, or never opened, or no reply came in time.
    Connection,
    /// The handshake of TLS failed.
    Tls,
    /// Redis replied with an error.
    Reply(ReplyCode),
}

/// The first word of an error reply of Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyCode {
    /// `ERR`, which has no meaning of its own.
    Err,
    /// Memory is at `maxmemory`.
    Oom,
    /// This server is a replica.
    ReadOnly,
    /// The data set is being loaded.
    Loading,
    /// Snapshots fail, and writes are refused for it.
    Misconf,
    /// Too few replicas.
    NoReplicas,
    /// The cluster does not serve this slot.
    ClusterDown,
    /// A slot is being moved.
    TryAgain,
    /// A replica without its master.
    MasterDown,
    /// A script runs for too long.
    Busy,
    /// The slot lives on another node.
    Moved,
    /// The slot is moving to another node.
    Ask,
    /// Keys in more than one slot.
    CrossSlot,
    /// The script is not cached.
    NoScript,
    /// The key holds another type.
    WrongType,
    /// The user may not do this.
    NoPerm,
    /// No user name and password were given.
    NoAuth,
    /// The user name or password is wrong.
    WrongPass,
    /// Any other.
    Unknown,
}

impl ReplyCode {
    /// Reads the first word of an error reply.
    pub fn parse(word: &str) -> Self {
        match word {
            "ERR" => Self::Err,
            "OOM" => Self::Oom,
            "READONLY" => Self::ReadOnly,
            "LOADING" => Self::Loading,
            "MISCONF" => Self::Misconf,
            "NOREPLICAS" => Self::NoReplicas,
            "CLUSTERDOWN" => Self::ClusterDown,
            "TRYAGAIN" => Self::TryAgain,
            "MASTERDOWN" => Self::MasterDown,
            "BUSY" => Self::Busy,
            "MOVED" => Self::Moved,
            "ASK" => Self::Ask,
            "CROSSSLOT" => Self::CrossSlot,
            "NOSCRIPT" => Self::NoScript,
            "WRONGTYPE" => Self::WrongType,
            "NOPERM" => Self::NoPerm,
            "NOAUTH" => Self::NoAuth,
            "WRONGPASS" => Self::WrongPass,
            _ => Self::Unknown,
        }
    }
}

/// What a failed call to Redis means.
pub fn of_redis(fault: RedisFault) -> Meaning {
    match fault {
        RedisFault::Connection => Meaning::Outage,
        RedisFault::Tls => Meaning::Setup,
        RedisFault::Reply(code) => match code {
            ReplyCode::NoPerm | ReplyCode::NoAuth | ReplyCode::WrongPass | ReplyCode::CrossSlot => {
                Meaning::Setup
            }
            ReplyCode::Err
            | ReplyCode::Oom
            | ReplyCode::ReadOnly
            | ReplyCode::Loading
            | ReplyCode::Misconf
            | ReplyCode::NoReplicas
            | ReplyCode::ClusterDown
            | ReplyCode::TryAgain
            | ReplyCode::MasterDown
            | ReplyCode::Busy
            | ReplyCode::Moved
            | ReplyCode::Ask
            | ReplyCode::NoScript
            | ReplyCode::WrongType
            | ReplyCode::Unknown => Meaning::Outage,
        },
    }
}

/// What it means that one stream of a page refused its entry.
///
/// `ERR` is what an exhausted stream id says: nothing else about a well-formed XADD fails with it.
pub fn of_stream(code: ReplyCode) -> Meaning {
    match code {
        ReplyCode::WrongType | ReplyCode::NoPerm | ReplyCode::Err => Meaning::StreamRefuses,
        ReplyCode::Oom
        | ReplyCode::ReadOnly
        | ReplyCode::Loading
        | ReplyCode::Misconf
        | ReplyCode::NoReplicas
        | ReplyCode::ClusterDown
        | ReplyCode::TryAgain
        | ReplyCode::MasterDown
        | ReplyCode::Busy
        | ReplyCode::Moved
        | ReplyCode::Ask
        | ReplyCode::CrossSlot
        | ReplyCode::NoScript
        | ReplyCode::NoAuth
        | ReplyCode::WrongPass
        | ReplyCode::Unknown => Meaning::Outage,
    }
}

/// How a call to Postgres failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostgresFault<'a> {
    /// The socket closed, or never opened, or no answer came in time.
    Connection,
    /// The handshake of TLS failed, or the server offers none.
    Tls,
    /// The server answered with this SQLSTATE.
    State(&'a str),
}

/// What a failed call to Postgres means.
pub fn of_postgres(fault: PostgresFault<'_>) -> Meaning {
    match fault {
        PostgresFault::Connection => Meaning::Outage,
        PostgresFault::Tls => Meaning::Setup,
        PostgresFault::State(state) => match state {
            // Wrong password or user, no such database, missing rights, missing schema, table,
            // function or column.
            "28P01" | "28000" | "3D000" | "42501" | "3F000" | "42P01" | "42883" | "42703" => {
                Meaning::Setup
            }
            _ => Meaning::Outage,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_spends_nothing() {
        for code in [
            "OOM",
            "READONLY",
            "LOADING",
            "MISCONF",
            "NOREPLICAS",
            "CLUSTERDOWN",
            "TRYAGAIN",
            "MASTERDOWN",
            "BUSY",
            "UNHEARDOF",
        ] {
            let code = ReplyCode::parse(code);
            assert_eq!(
                of_redis(RedisFault::Reply(code)),
                Meaning::Outage,
                "{code:?}"
            );
            assert_eq!(of_stream(code), Meaning::Outage, "{code:?}");
        }
        assert_eq!(of_redis(RedisFault::Reply(ReplyCode::Err)), Meaning::Outage);
        assert_eq!(of_redis(RedisFault::Connection), Meaning::Outage);
        for state in [
            "40001", "40P01", "57P01", "57P03", "53300", "08006", "XX000", "25006",
        ] {
            assert_eq!(
                of_postgres(PostgresFault::State(state)),
                Meaning::Outage,
                "{state}"
            );
        }
        assert_eq!(of_postgres(PostgresFault::Connection), Meaning::Outage);
    }

    #[test]
    fn a_wrong_set_up_is_told_apart() {
        for code in ["NOAUTH", "WRONGPASS", "NOPERM", "CROSSSLOT"] {
            assert_eq!(
                of_redis(RedisFault::Reply(ReplyCode::parse(code))),
                Meaning::Setup,
                "{code}"
            );
        }
        for state in ["28P01", "28000", "3D000", "42501", "3F000", "42P01"] {
            assert_eq!(
                of_postgres(PostgresFault::State(state)),
                Meaning::Setup,
                "{state}"
            );
        }
        assert_eq!(of_redis(RedisFault::Tls), Meaning::Setup);
        assert_eq!(of_postgres(PostgresFault::Tls), Meaning::Setup);
    }

    #[test]
    fn one_stream_is_told_from_the_whole() {
        for code in ["WRONGTYPE", "NOPERM", "ERR"] {
            assert_eq!(
                of_stream(ReplyCode::parse(code)),
                Meaning::StreamRefuses,
                "{code}"
            );
        }
    }
}
