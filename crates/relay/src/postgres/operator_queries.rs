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

    /// Which outbox this is, and this server's clock.
    pub(crate) const IDENTITY: &str = "
        SELECT outbox_id::text, to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"')
        FROM outbox.identity";

    /// What is not published by a cursor: rows above it ($3) and in the ranges of its gaps ($1, $2), at most $4; their
    /// bytes, and the age of the oldest. And the last id that was given out.
    pub(crate) const NOT_PUBLISHED: &str = "
        SELECT count(*), coalesce(sum(bytes), 0)::bigint,
               extract(epoch FROM clock_timestamp() - min(created_at))::float8,
               (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM outbox.messages_id_seq)
        FROM (SELECT created_at, bytes FROM (
                  SELECT m.created_at, m.bytes FROM unnest($1::bigint[], $2::bigint[]) AS g(lo, hi)
                  CROSS JOIN LATERAL (SELECT i.created_at, i.bytes FROM outbox.messages AS i
                                      WHERE i.id BETWEEN g.lo AND g.hi ORDER BY i.id LIMIT $4::bigint) AS m
                  UNION ALL
                  (SELECT created_at, bytes FROM outbox.messages WHERE id > $3 ORDER BY id LIMIT $4::bigint)) AS every
              LIMIT $4::bigint) AS counted";

    /// How long ago the checkpoint was written, in seconds.
    pub(crate) const CHECKPOINT_AGE: &str = "
        SELECT extract(epoch FROM clock_timestamp() - updated_at)::float8 FROM outbox.checkpoint";

    /// How far the purge has come; the first row that is kept, with its age in seconds; and what was published before the
    /// retention ($1, seconds) began. Below the purge's reach there may be many dead index entries: the search begins there.
    pub(crate) const RETENTION: &str = "
        SELECT p.purged_to, f.id,
               to_char(f.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'),
               extract(epoch FROM clock_timestamp() - f.created_at)::float8,
               (SELECT max(high) FROM outbox.milestones WHERE published_at < now() - make_interval(secs => $1::float8))
        FROM outbox.purge AS p
        LEFT JOIN LATERAL (SELECT id, created_at FROM outbox.messages WHERE id > p.purged_to ORDER BY id LIMIT 1) AS f
            ON true";

    /// The latest losses, and how many there are on record.
    pub(crate) const LOSSES: &str = "
        SELECT to_char(found_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'), lost, epoch, marker_high,
               checkpoint_high, purged_from, purged_to, count(*) OVER ()
        FROM outbox.redis_losses ORDER BY id DESC LIMIT $1::bigint";

    /// A message by its key ($1), as the outbox has it or as a dead letter, and the first record of a time by which it was
    /// published.
    pub(crate) const MESSAGE: &str = "
        SELECT m.id, m.topic, m.ordering_key, m.event_type,
               to_char(m.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'),
               floor(extract(epoch FROM m.created_at) * 1000)::bigint, d.reason,
               to_char(d.set_aside_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'),
               (SELECT floor(extract(epoch FROM min(s.published_at)) * 1000)::bigint FROM outbox.milestones AS s
                WHERE s.high >= m.id)
        FROM (SELECT id, topic, ordering_key, event_type, created_at FROM outbox.messages WHERE message_key = $1
              UNION ALL
              SELECT id, topic, ordering_key, event_type, created_at FROM outbox.dead_letters WHERE message_key = $1) AS m
        LEFT JOIN outbox.dead_letters AS d ON d.id = m.id
        LIMIT 1";

    /// The consumer's database: what a group ($1) made of a message ($2: topic, $3: message key) and of its entry ($4: stream,
    /// $5: entry id; NULL where it is not known, which reads all dead letters of the group).
    pub(crate) const OF_GROUP: &str = "
        SELECT to_char(a.applied_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'),
               t.attempts, t.last_error, d.id, d.state, d.reason,
               to_char(d.set_aside_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'),
               to_char(nullif(p.applied_through, '-infinity') AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'),
               coalesce(extract(epoch FROM p.applied_through) * 1000, '-infinity')::float8
        FROM (VALUES ($1::text, $2::text, $3::text)) AS q(consumer_group, topic, message_key)
        LEFT JOIN inbox.applied AS a USING (consumer_group, topic, message_key)
        LEFT JOIN inbox.attempts AS t USING (consumer_group, topic, message_key)
        LEFT JOIN LATERAL (
            SELECT l.id, l.state, l.reason, l.set_aside_at FROM inbox.dead_letters AS l
            WHERE l.consumer_group = $1::text
              AND CASE WHEN $4::text IS NULL THEN l.topic = $2::text AND l.message_key = $3::text
                       ELSE l.stream = $4::text AND l.entry_id = $5::text END
            LIMIT 1) AS d ON true
        LEFT JOIN inbox.purged AS p ON p.consumer_group = $1::text";

    /// What a replay begins with: which outbox it is, how far it was purged, and for moments ($1, $3: seconds since 1970) or
    /// times ago ($2, $4: seconds) the bounds in seconds since 1970, and an id up to which all messages began before the
    /// first of them: they were published before.
    pub(crate) const REPLAY_BOUNDS: &str = "
        SELECT (SELECT outbox_id FROM outbox.identity), (SELECT purged_to FROM outbox.purge), b.since, b.until,
               coalesce((SELECT max(high) FROM outbox.milestones WHERE published_at <= to_timestamp(b.since)), 0)
        FROM (SELECT coalesce($1::float8, extract(epoch FROM now())::float8 - $2::float8) AS since,
                     coalesce($3::float8, extract(epoch FROM now())::float8 - $4::float8) AS until) AS b";

    pub(crate) const IDS_OF_KEYS: &str = "
        SELECT id FROM outbox.messages WHERE message_key = ANY ($1::text[]) ORDER BY id";

    /// Messages of the ids $1 to $2 that pass the filters, as [`sql::PAGE`](super::sql::PAGE) returns rows; $3, $4: limits of
    /// rows and bytes. Filters that are NULL let all pass. Dead letters were never published.
    pub(crate) const REPLAY_PAGE: &str = "
        SELECT false, id, topic, ordering_key, message_key, event_type, created_at, content_type, headers,
               payload, payload_binary, bytes, total
        FROM (SELECT m.*, sum(m.bytes) OVER (ORDER BY m.id ROWS UNBOUNDED PRECEDING) AS total
              FROM outbox.messages AS m
              WHERE m.id BETWEEN $1::bigint AND $2::bigint
                AND ($5::text[] IS NULL OR m.topic = ANY ($5)) AND ($6::text IS NULL OR m.ordering_key = $6)
                AND ($7::float8 IS NULL OR m.created_at >= to_timestamp($7))
                AND ($8::float8 IS NULL OR m.created_at < to_timestamp($8))
                AND NOT EXISTS (SELECT FROM outbox.dead_letters AS d WHERE d.id = m.id)
              ORDER BY m.id LIMIT $3::bigint) AS q
        WHERE total - bytes < $4::bigint";

    /// The same messages of a range of ids, counted for each topic.
    pub(crate) const REPLAY_COUNTS: &str = "
        SELECT m.topic, count(*), sum(m.bytes)::bigint, min(m.id), max(m.id)
        FROM outbox.messages AS m
        WHERE m.id BETWEEN $1::bigint AND $2::bigint
          AND ($3::text[] IS NULL OR m.topic = ANY ($3)) AND ($4::text IS NULL OR m.ordering_key = $4)
          AND ($5::float8 IS NULL OR m.created_at >= to_timestamp($5))
          AND ($6::float8 IS NULL OR m.created_at < to_timestamp($6))
          AND NOT EXISTS (SELECT FROM outbox.dead_letters AS d WHERE d.id = m.id)
        GROUP BY m.topic";
}
