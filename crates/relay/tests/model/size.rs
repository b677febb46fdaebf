//! The bounds of a world: how often what may happen.

use outbox_relay::protocol::log::Limits;

/// How much may happen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// Ids that are given out, in all histories together.
    pub(crate) draws: u8,
    /// Ordering keys that are used; 0 stands for messages without one.
    pub(crate) orderings: &'static [u8],
    /// Transactions that are open at once.
    pub(crate) open: usize,
    /// Messages of one transaction.
    pub(crate) messages: usize,
    /// Transactions have ids, and may get them before they write a message.
    pub(crate) xids: bool,
    /// Transactions may be prepared for two-phase commit.
    pub(crate) prepares: bool,
    /// Rollbacks to a savepoint.
    pub(crate) savepoints: u8,
    /// Commits that are not flushed at once, and crashes of Postgres.
    pub(crate) postgres_crashes: u8,
    /// Times that Postgres goes back to an earlier state.
    pub(crate) fallbacks: u8,
    /// Going back raises the timeline (a promotion), or does not (a snapshot put back).
    pub(crate) promoted: bool,
    /// Crashes of the relay, or times that it gives up waiting for a reply.
    pub(crate) relay_crashes: u8,
    /// Scripts of earlier leaderships that may still arrive.
    pub(crate) late_scripts: usize,
    /// Times that Redis goes back to an earlier state.
    pub(crate) tail_losses: u8,
    /// Times that the marker alone goes missing.
    pub(crate) evictions: u8,
    /// Rows of a page in each of its parts.
    pub(crate) page_rows: usize,
    /// A page is read while another is published.
    pub(crate) reads_ahead: bool,
    /// The limits of the log.
    pub(crate) limits: Limits,
}

impl Size {
    /// Nothing but three messages of two transactions and a relay that does not fail.
    pub(crate) const SMALL: Size = Size {
        draws: 3,
        orderings: &[0],
        open: 2,
        messages: 1,
        xids: false,
        prepares: false,
        savepoints: 0,
        postgres_crashes: 0,
        fallbacks: 0,
        promoted: true,
        relay_crashes: 0,
        late_scripts: 0,
        tail_losses: 0,
        evictions: 0,
        page_rows: 2,
        reads_ahead: false,
        limits: Limits {
            gap_ranges_max: 100,
            long_trips: 1,
            left_out_min: 100,
        },
    };

    /// All of it is left.
    pub(crate) fn left(&self) -> Left {
        Left {
            draws: self.draws,
            savepoints: self.savepoints,
            postgres_crashes: self.postgres_crashes,
            fallbacks: self.fallbacks,
            relay_crashes: self.relay_crashes,
            tail_losses: self.tail_losses,
            evictions: self.evictions,
        }
    }
}

/// What is left of each bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Left {
    pub(crate) draws: u8,
    pub(crate) savepoints: u8,
    pub(crate) postgres_crashes: u8,
    pub(crate) fallbacks: u8,
    pub(crate) relay_crashes: u8,
    pub(crate) tail_losses: u8,
    pub(crate) evictions: u8,
}
