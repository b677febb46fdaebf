//! The SQL of a trip: who writes, the rows of a page, and whether they are flushed.

pub(crate) mod page_sql {
    /// `L`: the open writers, each with its transaction id once it has one (the lowest that it holds is the
    /// top-level one). A prepared transaction has no pid. The relay's purge deletes, and fills no gap; it is
    /// known by a lock of its session and not by its pid, which another backend may have by now. A backend
    /// whose transaction has ended, and whose locks go in a moment, shows the local id 0: every later snapshot
    /// sees what it committed.
    pub(crate) const WRITERS: &str = "
        SELECT virtualtransaction, pid IS NULL, min(transactionid::text::bigint)
        FROM pg_locks
        WHERE granted
          AND (locktype = 'relation' AND relation = 'outbox.messages'::regclass AND mode = 'RowExclusiveLock'
               AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
               OR locktype = 'transactionid' AND mode = 'ExclusiveLock')
          AND (pid IS NULL OR virtualtransaction NOT LIKE '%/0')
          AND (pid IS NULL OR pid <> ALL (ARRAY(
              SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = 1869968482 AND objid = 6
                AND objsubid = 2 AND granted AND pid IS NOT NULL)))
        GROUP BY virtualtransaction, pid IS NULL
        HAVING bool_or(locktype = 'relation')";

    pub(crate) const LAST_VALUE: &str =
        "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM outbox.messages_id_seq";

    /// `Q`: rows above $1, at most $2 and (but for the first) $3 bytes. A limit stops the walk along the primary key
    /// early.
    const NEW: &str = "
        SELECT false, id, topic, ordering_key, message_key, event_type, created_at, content_type, headers,
               payload, payload_binary, bytes, total, $UNFLUSHED
        FROM (SELECT m.*, sum(m.bytes) OVER (ORDER BY m.id ROWS UNBOUNDED PRECEDING) AS total
              FROM outbox.messages AS m WHERE m.id > $1::bigint
              ORDER BY m.id LIMIT $2::bigint) AS q
        WHERE total - bytes < $3::bigint";

    /// `R`: rows in the gaps from $4 to $5, at most $6 and as many bytes.
    ///
    /// They come in ascending order without a sort: the gaps are walked in the order of the arrays and each by the
    /// primary key. The reader checks that. The running sum needs no order of its own for the same reason.
    const LATE: &str = "
        SELECT true, id, topic, ordering_key, message_key, event_type, created_at, content_type, headers,
               payload, payload_binary, bytes, total, $UNFLUSHED
        FROM (SELECT m.*, sum(m.bytes) OVER (ROWS UNBOUNDED PRECEDING) AS total
              FROM unnest($4::bigint[], $5::bigint[]) AS g(lo, hi)
              CROSS JOIN LATERAL (SELECT * FROM outbox.messages AS i WHERE i.id BETWEEN g.lo AND g.hi
                                  ORDER BY i.id LIMIT $6::bigint) AS m
              LIMIT $6::bigint) AS r
        WHERE total - bytes < $3::bigint";

    /// The insert position of the log, if it was not flushed up to there, or has to reach a standby too. Looked up once
    /// for all rows, on the statement's snapshot or later: what it shows is committed before that position.
    const UNFLUSHED: &str = "(SELECT CASE WHEN flushed < inserted OR current_setting('synchronous_standby_names') <> ''
                            THEN inserted END
                FROM (SELECT pg_current_wal_flush_lsn() AS flushed, pg_current_wal_insert_lsn() AS inserted) AS log)";

    /// `Q` of two rows. For a lone message, Postgres spends more on setting up the running sum than on all else.
    const FIRST: &str = "
        SELECT false, id, topic, ordering_key, message_key, event_type, created_at, content_type, headers,
               payload, payload_binary, bytes, bytes::bigint, $UNFLUSHED
        FROM outbox.messages AS m WHERE m.id > $1::bigint ORDER BY m.id LIMIT 2";

    /// The first two rows of `Q`, for when there are no gaps.
    pub(crate) fn first_two() -> String {
        FIRST.replace("$UNFLUSHED", UNFLUSHED)
    }

    /// `Q` alone, for when there are no gaps.
    pub(crate) fn new_rows() -> String {
        NEW.replace("$UNFLUSHED", UNFLUSHED)
    }

    /// `R` and `Q`, on one snapshot.
    pub(crate) fn page() -> String {
        format!("{LATE} UNION ALL {NEW}").replace("$UNFLUSHED", UNFLUSHED)
    }

    /// The same, and the snapshot that it was read on.
    pub(crate) fn page_with_snapshot() -> String {
        let and_snapshot = format!("{UNFLUSHED}, (SELECT pg_current_snapshot()::text)");
        format!("{LATE} UNION ALL {NEW}").replace("$UNFLUSHED", &and_snapshot)
    }

    /// Rows of one topic ($6) in the ranges $1, $2, as [`page`] returns them; $3: the last id looked at, $4, $5: limits.
    pub(crate) const BLOCKED_PAGE: &str = "
        SELECT false, id, topic, ordering_key, message_key, event_type, created_at, content_type, headers,
               payload, payload_binary, bytes, total
        FROM (SELECT m.*, sum(m.bytes) OVER (ROWS UNBOUNDED PRECEDING) AS total
              FROM unnest($1::bigint[], $2::bigint[]) AS g(lo, hi)
              CROSS JOIN LATERAL (SELECT * FROM outbox.messages AS i
                                  WHERE i.id BETWEEN g.lo AND g.hi AND i.topic = $5::text
                                  ORDER BY i.id LIMIT $3::bigint) AS m
              LIMIT $3::bigint) AS r
        WHERE total - bytes < $4::bigint";

    /// How far the log is flushed, and whether it has to reach standbys too.
    pub(crate) const WAL_FLUSHED: &str = "
        SELECT pg_current_wal_flush_lsn(), current_setting('synchronous_standby_names') <> ''";

    /// A commit that flushes the log and waits for synchronous standbys: it writes one record.
    pub(crate) const FORCE_FLUSH: &str = "SELECT pg_logical_emit_message(true, 'outbox', '')";
}
