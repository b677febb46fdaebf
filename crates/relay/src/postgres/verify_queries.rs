//! The SQL of `outbox-relay verify`. Every statement is a transaction of its own, and short.

pub(crate) mod verify_sql {
    /// After the settings of every session. While the streams are read, this one is silent.
    pub(crate) const SESSION: &str = "
        SET default_transaction_read_only = on;
        SET idle_session_timeout = 0";

    /// Which outbox this is, how far it was purged, and the first and last ids above that.
    pub(crate) const HELD: &str = "
        SELECT (SELECT outbox_id FROM outbox.identity), p.purged_to,
               (SELECT id FROM outbox.messages WHERE id > p.purged_to ORDER BY id LIMIT 1),
               (SELECT id FROM outbox.messages WHERE id > p.purged_to ORDER BY id DESC LIMIT 1)
        FROM outbox.purge AS p";

    /// What was published before a moment ($1, seconds since 1970) or before so many seconds ($2), and when, in
    /// milliseconds since 1970.
    pub(crate) const PUBLISHED_BEFORE: &str = "
        SELECT high, floor(extract(epoch FROM published_at) * 1000)::bigint
        FROM outbox.milestones
        WHERE published_at < coalesce(to_timestamp($1::float8), now() - make_interval(secs => $2::float8))
        ORDER BY published_at DESC LIMIT 1";

    /// Rows of the ids $1 to $2, at most $3.
    pub(crate) const ROWS: &str = "
        SELECT id, topic, message_key FROM outbox.messages
        WHERE id BETWEEN $1 AND $2 ORDER BY id LIMIT $3::bigint";

    /// What decides about rows without an entry. The transaction's begin is in milliseconds since 1970.
    pub(crate) const DETAILS: &str = "
        SELECT m.id, m.ordering_key, EXISTS (SELECT FROM outbox.dead_letters AS d WHERE d.id = m.id),
               floor(extract(epoch FROM m.created_at) * 1000)::bigint
        FROM outbox.messages AS m WHERE m.id = ANY ($1::bigint[])";

    pub(crate) const ROWS_AGAIN: &str = "
        SELECT id, topic, message_key FROM outbox.messages WHERE id = ANY ($1::bigint[])";

    /// The consumer's database. Keys are looked up one by one, whatever the statistics say of the table.
    pub(crate) const INBOX_SESSION: &str = "
        SET default_transaction_read_only = on;
        SET idle_session_timeout = 0;
        SET plan_cache_mode = force_generic_plan;
        SET enable_seqscan = off;
        SET enable_bitmapscan = off;
        SET enable_hashjoin = off;
        SET enable_mergejoin = off;
        SET jit = off";

    /// Entries of the group $1 whose message it has not applied: their positions in the arrays of topics, message keys,
    /// streams and entry ids, whether they are set aside, and up to when (milliseconds since 1970) applied keys may have
    /// been purged. One snapshot: a dead letter that is retried or discarded is gone in the commit that applies it.
    pub(crate) const NOT_APPLIED: &str = "
        SELECT e.n, EXISTS (SELECT FROM inbox.dead_letters AS d
                            WHERE d.consumer_group = $1::text AND d.stream = e.stream AND d.entry_id = e.entry_id),
               coalesce((SELECT extract(epoch FROM p.applied_through) * 1000
                         FROM inbox.purged AS p WHERE p.consumer_group = $1::text), '-infinity')::float8
        FROM unnest($2::text[], $3::text[], $4::text[], $5::text[])
             WITH ORDINALITY AS e(topic, message_key, stream, entry_id, n)
        WHERE NOT EXISTS (SELECT FROM inbox.applied AS a
                          WHERE a.consumer_group = $1::text AND a.topic = e.topic AND a.message_key = e.message_key)";
}
