//! The SQL of the commands for whoever is on call, and of what the leader keeps for them.

pub(crate) mod operator_sql {
    /// Why publishing is paused, since when, and by whom; no row while it is not.
    pub(crate) const PAUSED: &str = "
        SELECT reason, to_char(paused_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'), paused_by,
               extract(epoch FROM clock_timestamp() - paused_at)::float8
        FROM outbox.pause";

    /// Pauses for a reason ($1), and wakes a leader that sleeps. A pause that holds already keeps its beginning. Says
    /// whether it is a new one.
    pub(crate) const PAUSE: &str = "
        WITH paused AS (
            INSERT INTO outbox.pause (reason) VALUES ($1)
            ON CONFLICT (singleton) DO UPDATE SET reason = excluded.reason
            RETURNING xmax = 0 AS fresh)
        SELECT fresh, pg_notify('outbox', '')::text FROM paused";

    /// Ends a pause, and wakes the leader. Returns the reason that there was, and for how many seconds.
    pub(crate) const RESUME: &str = "
        WITH resumed AS (DELETE FROM outbox.pause RETURNING reason, paused_at)
        SELECT reason, extract(epoch FROM clock_timestamp() - paused_at)::float8, pg_notify('outbox', '')::text
        FROM resumed";

    /// Records what Redis was found to have lost.
    pub(crate) const RECORD_LOSS: &str = "
        INSERT INTO outbox.redis_losses (lost, epoch, marker_high, checkpoint_high, purged_from, purged_to)
        VALUES ($1, $2, $3, $4, $5, $6)";
    /// A Redis that comes and goes must not fill the table.
    pub(crate) const FORGET_LOSSES: &str = "
        DELETE FROM outbox.redis_losses WHERE id <= (SELECT max(id) - 1000 FROM outbox.redis_losses)";
}
