//! What every transaction of this crate begins with, and what is ready before it does.
//!
//! A server does not see for hours that a socket is dead, and as long keeps what its transaction has locked: a keeper
//! could not renew its leases, and no member could begin. So none is open without a limit.

use std::time::Duration;

use deadpool_postgres::Object;
use tokio_postgres::Statement;

use crate::{builder::Settings, inbox::Inbox, queries, trouble::Trouble};

/// The statements, by how long the transaction may stand idle.
pub(crate) struct Openings {
    /// With a handler, or with Redis asked in between: longer than the signs of life are apart, and a process that is
    /// frozen in the middle keeps its locks for no longer than this.
    pub(crate) long: String,
    /// Statements of this crate alone.
    pub(crate) short: String,
    /// The same, not flushed.
    pub(crate) brief: String,
}

impl Openings {
    pub(crate) fn new(settings: &Settings) -> Self {
        let response = settings.response_timeout;
        // Below the response timeout, so that the server gives up a wait for another member's lock before
        // we give up the connection; else each try would leave a waiting backend behind.
        let lock = response * 4 / 5;
        let with_limits = |begin, idle| {
            format!(
                "{begin}; SET LOCAL lock_timeout = {}; SET LOCAL idle_in_transaction_session_timeout = {}",
                milliseconds(lock),
                milliseconds(idle)
            )
        };
        Self {
            long: with_limits(queries::DURABLE, settings.claim_after),
            short: with_limits(queries::DURABLE, response),
            brief: with_limits(queries::NOT_FLUSHED, response),
        }
    }
}

/// At least 1: 0 would mean without a limit.
fn milliseconds(limit: Duration) -> u128 {
    limit.as_millis().max(1)
}

/// What is expected of the keys of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keys {
    /// The inbox has none of them, and each stands once: much the cheaper, and it fails where that is wrong.
    AllNew,
    /// Some may be known.
    MayBeKnown,
}

impl Keys {
    fn taken_by(self) -> &'static str {
        match self {
            Keys::AllNew => queries::TAKE_NEW_KEYS,
            Keys::MayBeKnown => queries::TAKE_KEYS,
        }
    }
}

/// The statements around a handler, prepared.
pub(crate) struct Statements {
    pub(crate) hold_lease: Statement,
    pub(crate) take_keys: Statement,
    pub(crate) still_ours: Statement,
}

impl Inbox {
    /// What [`take_effect`](Self::take_effect) needs. Before the transaction begins, which has no limits yet: to prepare a
    /// statement locks its tables.
    pub(crate) async fn prepare(
        &self,
        connection: &Object,
        keys: Keys,
    ) -> Result<Statements, Trouble> {
        self.bounded(async {
            Ok(Statements {
                hold_lease: connection.prepare_cached(queries::HOLD_LEASE).await?,
                take_keys: connection.prepare_cached(keys.taken_by()).await?,
                still_ours: connection.prepare_cached(queries::STILL_OURS).await?,
            })
        })
        .await
    }
}
