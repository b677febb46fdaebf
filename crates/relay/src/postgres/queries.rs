//! The SQL of the daemon besides reading pages, by name.

/// Schema versions of `outbox` that this relay works with.
pub(crate) const OLDEST_SCHEMA: i32 = 1;
/// The newest of them.
pub(crate) const NEWEST_SCHEMA: i32 = 1;

pub(crate) mod sql {
    // Advisory locks have two halves: 1869968482, which is `outb` in ASCII, and 1 for the leader, 2 for a
    // leader that sleeps (the insert trigger probes it), 3 and 4 for migrations, 5 for standbys that reach Redis,
    // 6 for the purge.

    /// Settings of the relay's sessions. `$LIMIT` is replaced by the statement limit in milliseconds.
    ///
    /// The planner's choices are fixed: the statements are prepared while the table may be empty, and
    /// a plan made for an empty table would cost dearly at ten million rows.
    pub(crate) const SESSION: &str = "
        SET TIME ZONE 'UTC';
        SET search_path = pg_catalog;
        SET client_min_messages = warning;
        SET default_transaction_isolation = 'read committed';
        SET default_transaction_read_only = off;
        SET synchronous_commit = on;
        SET statement_timeout = $LIMIT;
        SET lock_timeout = $LIMIT;
        SET idle_in_transaction_session_timeout = '10s';
        SET idle_session_timeout = '10s';
        SET plan_cache_mode = force_generic_plan;
        SET enable_seqscan = off;
        SET enable_bitmapscan = off;
        SET enable_hashjoin = off;
        SET enable_mergejoin = off;
        SET enable_material = off;
        SET jit = off";

    /// To see whether a session keeps its backend; `pooler.rs` says how.
    pub(crate) const BACKEND: &str = "SELECT pg_backend_pid()";
    pub(crate) const HOLD_BACKEND: &str = "BEGIN; SELECT pg_backend_pid()";
    pub(crate) const LET_GO: &str = "ROLLBACK";

    /// Whether the schema is ours, and how new it is.
    pub(crate) const SCHEMA: &str = "
        SELECT to_regnamespace('outbox') IS NOT NULL, to_regclass('outbox.schema_version') IS NOT NULL,
               current_setting('server_version_num')::integer, pg_is_in_recovery(), current_setting('server_encoding')";

    pub(crate) const SCHEMA_VERSION: &str = "SELECT max(version) FROM outbox.schema_version";

    /// What the identity column draws ids from.
    pub(crate) const SEQUENCE: &str = "
        SELECT seqincrement, seqcache, seqcycle FROM pg_sequence
        WHERE seqrelid = pg_get_serial_sequence('outbox.messages', 'id')::regclass";

    pub(crate) const TRY_LEAD: &str = "SELECT pg_try_advisory_lock(1869968482, 1)";
    pub(crate) const LIE_DOWN: &str = "SELECT pg_try_advisory_lock(1869968482, 2)";
    pub(crate) const GET_UP: &str = "SELECT pg_advisory_unlock(1869968482, 2)";
    pub(crate) const READY: &str = "SELECT pg_try_advisory_lock_shared(1869968482, 5)";
    pub(crate) const NOT_READY: &str = "SELECT pg_advisory_unlock_shared(1869968482, 5)";
    pub(crate) const LISTEN: &str = "LISTEN outbox";
    pub(crate) const HEARTBEAT: &str = "SELECT 1";

    /// Whether another session stands by that reaches Redis.
    pub(crate) const READY_STANDBY: &str = "
        SELECT EXISTS (SELECT FROM pg_locks
            WHERE locktype = 'advisory' AND classid = 1869968482 AND objid = 5 AND objsubid = 2 AND granted
              AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
              AND pid <> pg_backend_pid())";

    /// The leader's session, and for how many seconds it has shown no progress. A session that is
    /// busy inside Postgres makes progress; one that waits for its client makes none.
    pub(crate) const LEADER: &str = "
        SELECT a.pid, a.application_name,
               CASE WHEN a.state = 'active' AND a.wait_event_type IS DISTINCT FROM 'Client' THEN 0
                    ELSE extract(epoch FROM clock_timestamp() - a.state_change)::float8 END
        FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
        WHERE l.locktype = 'advisory' AND l.classid = 1869968482 AND l.objid = 1 AND l.objsubid = 2 AND l.granted
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())";

    pub(crate) const END_SESSION: &str = "SELECT pg_terminate_backend($1)";

    /// What the start table needs to know; $1: the marker's `high`.
    ///
    /// The timeline is taken from the name of the current log file: the control file lags behind after
    /// a promotion.
    pub(crate) const FACTS: &str = "
        SELECT (SELECT outbox_id FROM outbox.identity), (SELECT adopted_from FROM outbox.identity),
               (SELECT system_identifier FROM pg_control_system()),
               ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint,
               (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM outbox.messages_id_seq),
               (SELECT message_key FROM outbox.messages WHERE id = $1),
               (SELECT purged_to FROM outbox.purge)";

    /// Whether the past is still the same; $1: the cursor's `high`.
    pub(crate) const STILL_SAME: &str = "
        SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint,
               (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM outbox.messages_id_seq),
               (SELECT message_key FROM outbox.messages WHERE id = $1)";

    /// The nearest row at or below $1.
    pub(crate) const ANCHOR: &str = "
        SELECT id, message_key FROM outbox.messages WHERE id <= $1 ORDER BY id DESC LIMIT 1";

    /// The latest rows at or below $1 that are no dead letters.
    pub(crate) const LATEST: &str = "
        SELECT id, topic, ordering_key, message_key FROM outbox.messages AS m
        WHERE id <= $1 AND NOT EXISTS (SELECT FROM outbox.dead_letters AS d WHERE d.id = m.id)
        ORDER BY id DESC LIMIT 200";

    pub(crate) const CHECKPOINT: &str = "
        SELECT system_id, timeline, branch, epoch, page, high, high_key, redis_ms FROM outbox.checkpoint";
    pub(crate) const CHECKPOINT_GAPS: &str = "SELECT lo, hi FROM outbox.checkpoint_gaps";
    pub(crate) const BLOCKED: &str = "
        SELECT b.stream, b.topic, b.high, b.reason,
               ARRAY(SELECT lower(g) FROM unnest(b.gaps) AS g), ARRAY(SELECT upper(g) - 1 FROM unnest(b.gaps) AS g)
        FROM outbox.blocked_streams AS b";

    pub(crate) const LAYOUTS: &str = "
        SELECT topic, partitions, earlier FROM outbox.topics WHERE partitions <> 1 OR earlier <> '{}'";
    /// Where the streams fell back to an earlier count, the later one is wanted again.
    pub(crate) const PUT_LAYOUT: &str = "
        INSERT INTO outbox.topics (topic, partitions, earlier) VALUES ($1, $2, $3)
        ON CONFLICT (topic) DO UPDATE SET (partitions, earlier, wanted, at_once) =
            (excluded.partitions, excluded.earlier, nullif(coalesce(topics.wanted, topics.partitions), excluded.partitions),
             topics.at_once AND topics.wanted IS NOT NULL)
        WHERE (topics.partitions, topics.earlier) IS DISTINCT FROM (excluded.partitions, excluded.earlier)";

    /// Topics whose number of partitions is to change.
    pub(crate) const WANTED_LAYOUTS: &str = "
        SELECT topic, wanted, at_once FROM outbox.topics WHERE wanted IS NOT NULL";
    pub(crate) const WANT_NO_LONGER: &str =
        "UPDATE outbox.topics SET wanted = NULL WHERE topic = $1 AND wanted = $2";
    pub(crate) const WANT_LAYOUT: &str = "
        INSERT INTO outbox.topics (topic, wanted, at_once) VALUES ($1, $2, $3)
        ON CONFLICT (topic) DO UPDATE SET (wanted, at_once) = (excluded.wanted, excluded.at_once)
        RETURNING partitions";
    pub(crate) const TOPICS: &str =
        "SELECT topic, partitions, wanted FROM outbox.topics ORDER BY topic";

    /// The checkpoint of a new leader, or of a changed list of blocked streams: written whole.
    pub(crate) const CHECKPOINT_WHOLE: &str = "
        INSERT INTO outbox.checkpoint
            (system_id, timeline, branch, epoch, page, high, high_key, redis_ms, updated_at)
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8, clock_timestamp())
        ON CONFLICT (singleton) DO UPDATE SET
            (system_id, timeline, branch, epoch, page, high, high_key, redis_ms, updated_at) =
            (excluded.system_id, excluded.timeline, excluded.branch, excluded.epoch, excluded.page,
             excluded.high, excluded.high_key, excluded.redis_ms, excluded.updated_at)
        WHERE checkpoint.epoch <= excluded.epoch";
    /// Milestones above a cursor that fell back say when those ids were published the last time.
    pub(crate) const DROP_MILESTONES: &str = "DELETE FROM outbox.milestones WHERE high > $1";
    pub(crate) const DROP_GAPS: &str = "DELETE FROM outbox.checkpoint_gaps";
    pub(crate) const PUT_GAPS: &str = "
        INSERT INTO outbox.checkpoint_gaps (lo, hi) SELECT * FROM unnest($1::bigint[], $2::bigint[])";
    pub(crate) const DROP_BLOCKED: &str =
        "DELETE FROM outbox.blocked_streams WHERE stream <> ALL ($1::text[])";
    pub(crate) const PUT_BLOCKED: &str = "
        INSERT INTO outbox.blocked_streams (stream, topic, high, gaps, reason)
        SELECT $1, $2, $3, coalesce(range_agg(int8range(lo, hi, '[]')), '{}'), $4
        FROM unnest($5::bigint[], $6::bigint[]) AS g(lo, hi)
        ON CONFLICT (stream) DO UPDATE SET (high, gaps, reason) = (excluded.high, excluded.gaps, excluded.reason)";

    /// The checkpoint of a running leader, with the gaps as changes: $6 gone, $7 and $8 new or changed.
    pub(crate) const CHECKPOINT_STEP: &str = "
        WITH gone AS (DELETE FROM outbox.checkpoint_gaps WHERE lo = ANY ($6::bigint[])),
             put AS (INSERT INTO outbox.checkpoint_gaps (lo, hi) SELECT * FROM unnest($7::bigint[], $8::bigint[])
                     ON CONFLICT (lo) DO UPDATE SET hi = excluded.hi)
        UPDATE outbox.checkpoint
        SET page = $2, high = $3, high_key = $4, redis_ms = $5, updated_at = clock_timestamp()
        WHERE epoch = $1";

    /// What was published by now, unless that was recorded within the last $2 seconds.
    pub(crate) const MILESTONE: &str = "
        INSERT INTO outbox.milestones (high) SELECT $1::bigint
        WHERE NOT EXISTS (SELECT FROM outbox.milestones
                          WHERE published_at > clock_timestamp() - make_interval(secs => $2::float8))
        ON CONFLICT DO NOTHING";

    /// What was published before the retention began; $1: the retention in seconds.
    pub(crate) const PURGE_FLOOR: &str = "
        SELECT max(high) FROM outbox.milestones WHERE published_at < now() - make_interval(secs => $1::float8)";
    pub(crate) const FORGET_MILESTONES: &str = "DELETE FROM outbox.milestones WHERE high < $1";

    /// One batch of the purge: rows above $1 up to $2, at most $3, with the record of its reach. Returns
    /// how many went and the last id looked at. One range of the primary key: by a list of ids it took three times
    /// as long.
    pub(crate) const PURGE: &str = "
        WITH batch AS (SELECT max(id) AS last FROM (SELECT id FROM outbox.messages WHERE id > $1 AND id <= $2
                                                    ORDER BY id LIMIT $3::bigint) AS ids),
             gone AS (DELETE FROM outbox.messages WHERE id > $1 AND id <= (SELECT last FROM batch) RETURNING 1),
             reach AS (UPDATE outbox.purge SET purged_to = greatest(purged_to, last) FROM batch
                       WHERE last IS NOT NULL)
        SELECT (SELECT count(*) FROM gone), last FROM batch";
    pub(crate) const PURGED_TO: &str = "SELECT purged_to FROM outbox.purge";
    /// Marks the purge's session, which may be silent between two orders. Its commits stay synchronous: they flush
    /// the log for the reader, which waits for that.
    pub(crate) const BE_JANITOR: &str = "
        SET idle_session_timeout = 0;
        SELECT pg_advisory_lock_shared(1869968482, 6)";

    /// For a session that may be silent between two looks.
    pub(crate) const BE_SILENT: &str = "SET idle_session_timeout = 0";

    /// Sets a message aside that Redis refuses; whole, since the purge may take the row.
    pub(crate) const DEAD_LETTER: &str = "
        INSERT INTO outbox.dead_letters (id, topic, ordering_key, message_key, event_type, payload, payload_binary,
                                         content_type, headers, created_at, reason)
        SELECT id, topic, ordering_key, message_key, event_type, payload, payload_binary, content_type, headers,
               created_at, $2
        FROM outbox.messages WHERE id = $1
        ON CONFLICT (id) DO NOTHING";

    /// Writers that have held the table for longest. A prepared transaction is found by the lock on its own
    /// transaction id: depending on the version it goes by its backend's `virtualtransaction` or by its own.
    pub(crate) const HOLDERS: &str = "
        SELECT l.virtualtransaction, l.pid, coalesce(a.application_name, ''),
               coalesce(extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8, 0),
               coalesce(left(a.query, 200), ''), p.gid
        FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a USING (pid)
        LEFT JOIN LATERAL (
            SELECT x.gid, x.prepared FROM pg_locks AS own JOIN pg_prepared_xacts AS x ON x.transaction = own.transactionid
            WHERE l.pid IS NULL AND own.pid IS NULL AND own.virtualtransaction = l.virtualtransaction
              AND own.locktype = 'transactionid' LIMIT 1) AS p ON true
        WHERE l.locktype = 'relation' AND l.relation = 'outbox.messages'::regclass
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND l.mode = 'RowExclusiveLock' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
        ORDER BY coalesce(a.xact_start, p.prepared) NULLS FIRST LIMIT 5";

    pub(crate) const STANDBYS: &str = "
        SELECT count(DISTINCT pid) FROM pg_locks
        WHERE locktype = 'advisory' AND classid = 1869968482 AND objid = 5 AND objsubid = 2 AND granted
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

    /// Messages that the checkpoint has not passed, $1 at the most, and the age of the oldest in seconds.
    pub(crate) const BACKLOG: &str = "
        SELECT count(*), extract(epoch FROM clock_timestamp() - min(created_at))::float8
        FROM (SELECT created_at FROM (
                  SELECT m.created_at FROM outbox.checkpoint_gaps AS g
                  CROSS JOIN LATERAL (SELECT i.created_at FROM outbox.messages AS i
                                      WHERE i.id BETWEEN g.lo AND g.hi ORDER BY i.id LIMIT $1::bigint) AS m
                  UNION ALL
                  (SELECT created_at FROM outbox.messages
                   WHERE id > coalesce((SELECT high FROM outbox.checkpoint), 0) ORDER BY id LIMIT $1::bigint)) AS every
              LIMIT $1::bigint) AS counted";

    pub(crate) const DEAD_LETTERS: &str = "SELECT count(*) FROM outbox.dead_letters";

    pub(crate) const ADOPT: &str = "
        UPDATE outbox.identity
        SET adopted_from = ARRAY(SELECT DISTINCT unnest(adopted_from || $1::bigint[]) ORDER BY 1)";

    // The consumer's database: what `dead-letters` needs of the schema `inbox`. Filters that are NULL let all pass.

    pub(crate) const DEAD_LETTERS_SESSION: &str = "
        SET TIME ZONE 'UTC';
        SET search_path = pg_catalog;
        SET client_min_messages = warning;
        SET synchronous_commit = on;
        SET statement_timeout = '60s'";

    pub(crate) const INBOX_EXISTS: &str = "SELECT to_regclass('inbox.dead_letters') IS NOT NULL";

    /// $6: rows of every state; $7: how many at the most.
    pub(crate) const LIST_LETTERS: &str = "
        SELECT id, to_char(set_aside_at, 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"') AS set_aside_at, state, consumer_group, topic,
               event_type, message_key, attempts, reason
        FROM inbox.dead_letters
        WHERE ($1::text IS NULL OR consumer_group = $1) AND ($2::text IS NULL OR topic = $2)
          AND ($3::text IS NULL OR event_type = $3)
          AND ($4::float8 IS NULL OR set_aside_at < now() - make_interval(secs => $4))
          AND ($5::text IS NULL OR position(lower($5) IN lower(reason)) > 0)
          AND ($6::boolean OR state = 'dead')
        ORDER BY id LIMIT $7";

    pub(crate) const SHOW_LETTERS: &str = "
        SELECT id, id::text AS number, state, consumer_group, topic, stream, entry_id, message_id::text, message_key,
               ordering_key, event_type, content_type, headers::text, payload, attempts::text, reason,
               to_char(created_at, 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS created_at,
               to_char(set_aside_at, 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS set_aside_at
        FROM inbox.dead_letters WHERE id = ANY ($1) ORDER BY id";

    /// Marks dead letters for the members of their group; $6: these ids, or NULL. Also counts those that are no messages.
    pub(crate) const RETRY_LETTERS: &str = "
        WITH chosen AS (
            SELECT id, message_key FROM inbox.dead_letters
            WHERE ($1::text IS NULL OR consumer_group = $1) AND ($2::text IS NULL OR topic = $2)
          AND ($3::text IS NULL OR event_type = $3)
          AND ($4::float8 IS NULL OR set_aside_at < now() - make_interval(secs => $4))
          AND ($5::text IS NULL OR position(lower($5) IN lower(reason)) > 0)
              AND ($6::bigint[] IS NULL OR id = ANY ($6)) AND state = 'dead'
            FOR UPDATE),
        marked AS (
            UPDATE inbox.dead_letters AS d SET state = 'retry', tries = 0, not_before = '-infinity'
            FROM chosen WHERE d.id = chosen.id AND chosen.message_key IS NOT NULL
            RETURNING d.id)
        SELECT (SELECT count(*) FROM marked), (SELECT count(*) FROM chosen WHERE message_key IS NULL)";

    /// Deletes dead letters, and records their keys as applied: a message that was given up is not run when it comes
    /// again. One that is named by its id may be of any state.
    pub(crate) const DISCARD_LETTERS: &str = "
        WITH gone AS (
            DELETE FROM inbox.dead_letters
            WHERE ($1::text IS NULL OR consumer_group = $1) AND ($2::text IS NULL OR topic = $2)
          AND ($3::text IS NULL OR event_type = $3)
          AND ($4::float8 IS NULL OR set_aside_at < now() - make_interval(secs => $4))
          AND ($5::text IS NULL OR position(lower($5) IN lower(reason)) > 0)
              AND ($6::bigint[] IS NULL AND state = 'dead' OR id = ANY ($6))
            RETURNING consumer_group, topic, message_key),
        done AS (
            INSERT INTO inbox.applied (consumer_group, topic, message_key)
            SELECT DISTINCT consumer_group, topic, message_key FROM gone WHERE message_key IS NOT NULL
            ON CONFLICT DO NOTHING)
        SELECT count(*) FROM gone";
}
