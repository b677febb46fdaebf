//! The worlds that are searched. Each bounds all but a few kinds of events, since every kind multiplies the states.

use outbox_relay::protocol::log::Limits;

use crate::claims;
use crate::size::Size;

/// A size with a name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct World {
    pub(crate) name: &'static str,
    pub(crate) size: Size,
    /// States that there are at the least: a model that does nothing must not pass.
    pub(crate) states_min: usize,
    /// What must happen in it.
    pub(crate) happens: &'static [&'static str],
}

/// Producers of one key and of none, and a relay that does not fail.
pub(crate) const PRODUCERS: World = World {
    name: "producers",
    size: Size {
        orderings: &[0, 1],
        open: 3,
        reads_ahead: true,
        ..Size::SMALL
    },
    states_min: 10_000,
    happens: &[
        claims::LATE,
        claims::ROLLED_BACK,
        claims::RESTED,
        claims::AHEAD,
        claims::BEHIND,
    ],
};

/// Transactions of several messages, and pages that their limit cuts.
pub(crate) const CUT_PAGES: World = World {
    name: "cut pages",
    size: Size {
        orderings: &[0, 1],
        messages: 2,
        page_rows: 1,
        ..Size::SMALL
    },
    states_min: 5_000,
    happens: &[claims::LATE, claims::ROLLED_BACK, claims::RESTED],
};

/// Transactions with ids, to which gaps are left as soon as they stand in two lists.
pub(crate) const LONG_TRANSACTIONS: World = World {
    name: "long transactions",
    size: Size {
        xids: true,
        savepoints: 1,
        limits: Limits {
            gap_ranges_max: 1,
            long_trips: 1,
            left_out_min: 1,
        },
        ..Size::SMALL
    },
    states_min: 10_000,
    happens: &[
        claims::LATE,
        claims::ROLLED_BACK,
        claims::LEFT_OUT,
        claims::TWICE,
    ],
};

/// Two-phase commit.
pub(crate) const PREPARED: World = World {
    name: "prepared transactions",
    size: Size {
        prepares: true,
        ..Size::SMALL
    },
    states_min: 5_000,
    happens: &[claims::LATE, claims::ROLLED_BACK],
};

/// Relays that crash at every point, or give up waiting, and scripts that arrive afterwards.
pub(crate) const RELAY_CRASHES: World = World {
    name: "crashes of the relay",
    size: Size {
        draws: 2,
        relay_crashes: 2,
        late_scripts: 2,
        page_rows: 1,
        reads_ahead: true,
        ..Size::SMALL
    },
    states_min: 10_000,
    happens: &[
        claims::LATE,
        claims::ROLLED_BACK,
        claims::TOO_LATE,
        claims::BEHIND,
    ],
};

/// A Redis that falls back, to any earlier state or to nothing.
pub(crate) const LOST_TAILS: World = World {
    name: "lost tails",
    size: Size {
        draws: 2,
        relay_crashes: 1,
        late_scripts: 1,
        tail_losses: 1,
        page_rows: 1,
        ..Size::SMALL
    },
    states_min: 20_000,
    happens: &[claims::LATE, claims::TOO_LATE, claims::REPUBLISHED],
};

/// A marker that goes missing alone.
pub(crate) const LOST_MARKER: World = World {
    name: "a lost marker",
    size: Size {
        draws: 2,
        relay_crashes: 1,
        evictions: 1,
        ..Size::SMALL
    },
    states_min: 1_000,
    happens: &[claims::LATE, claims::ROLLED_BACK],
};

/// A Postgres that crashes before a commit is flushed.
pub(crate) const POSTGRES_CRASHES: World = World {
    name: "crashes of Postgres",
    size: Size {
        draws: 2,
        postgres_crashes: 1,
        ..Size::SMALL
    },
    states_min: 1_000,
    happens: &[claims::LATE, claims::ROLLED_BACK],
};

/// A standby that lacked the latest transactions is promoted, also while Redis falls back.
pub(crate) const PROMOTIONS: World = World {
    name: "promotions",
    size: Size {
        draws: 2,
        open: 1,
        late_scripts: 1,
        fallbacks: 1,
        tail_losses: 1,
        ..Size::SMALL
    },
    states_min: 10_000,
    happens: &[
        claims::TOO_LATE,
        claims::REPUBLISHED,
        claims::GIVEN_AGAIN,
        claims::RESTED,
    ],
};

/// A snapshot of the storage is put back, which keeps the timeline, also while Redis falls back.
pub(crate) const SNAPSHOTS: World = World {
    name: "snapshots put back",
    size: Size {
        promoted: false,
        ..PROMOTIONS.size
    },
    ..PROMOTIONS
};
