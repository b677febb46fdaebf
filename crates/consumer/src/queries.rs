//! Every SQL statement and Lua script of this crate.

/// With `off`, a crash of Postgres after the XACK would lose an effect that nothing delivers again.
pub(crate) const DURABLE: &str = "SET LOCAL synchronous_commit = on";

/// Says how many keys were taken, and which unless it is all of them. Sorted, so that two members that hold the same
/// entries wait for each other in one order.
macro_rules! take_keys {
    ($on_conflict:literal) => {
        concat!(
            r#"
    WITH taken AS (
        INSERT INTO inbox.applied (consumer_group, topic, message_key)
        SELECT $1::text, $2::text, k.message_key FROM unnest($3::text[]) AS k (message_key)
        ORDER BY k.message_key COLLATE "C" "#,
            $on_conflict,
            "
        RETURNING message_key)
    SELECT count(*), CASE WHEN count(*) < cardinality($3) THEN array_agg(message_key) END,
           pg_current_xact_id()::text, pg_backend_pid() FROM taken"
        )
    };
}

/// Takes the keys that this transaction applies; a key that stands twice is taken once. The transaction's id comes along
/// for [`STILL_OURS`], and the session's number for [`IS_AT_WORK`].
pub(crate) const TAKE_KEYS: &str = take_keys!("ON CONFLICT DO NOTHING");

/// The same where all keys are new, for half of the time: ON CONFLICT looks each key up, inserts it on trial and
/// confirms it. A key that is known, or stands twice, fails it.
pub(crate) const TAKE_NEW_KEYS: &str = take_keys!("");

/// Fails in a transaction that Postgres has already given up: COMMIT would roll it back and report
/// success. Returns another id, or none, when the handler has ended the transaction itself.
pub(crate) const STILL_OURS: &str = "SELECT coalesce(pg_current_xact_id_if_assigned()::text, '')";

/// Whether an entry was applied, or set aside, before its member could acknowledge it.
pub(crate) const IS_SETTLED: &str = "
    SELECT EXISTS (SELECT FROM inbox.applied
                   WHERE consumer_group = $1 AND topic = $2 AND message_key = $3)
        OR EXISTS (SELECT FROM inbox.dead_letters
                   WHERE consumer_group = $1 AND stream = $4 AND entry_id = $5)";

pub(crate) const IS_APPLIED: &str = "
    SELECT EXISTS (SELECT FROM inbox.applied
                   WHERE consumer_group = $1 AND topic = $2 AND message_key = $3)";

/// Up to when keys may have been purged; none as long as nothing was. Locked, since the purge changes the row
/// before it deletes keys. NULL stands for minus infinity, which the client has no value for.
pub(crate) const PURGED_THROUGH: &str = "
    SELECT CASE WHEN isfinite(applied_through) THEN applied_through END FROM inbox.purged
    WHERE consumer_group = $1 FOR SHARE";

/// Ordering keys that an unresolved dead letter holds. By their hashes, which the index has.
pub(crate) const HELD_KEYS: &str = "
    SELECT DISTINCT ordering_key FROM inbox.dead_letters
    WHERE consumer_group = $1 AND topic = $2 AND holds AND ordering_key = ANY ($3::text[])
      AND hashtext(ordering_key) = ANY (ARRAY(SELECT hashtext(k) FROM unnest($3::text[]) AS k))";

/// Counts one attempt; at the end of the type's range the count stays where it is.
pub(crate) const COUNT_ATTEMPT: &str = "
    INSERT INTO inbox.attempts AS a (consumer_group, topic, message_key, attempts, last_error)
    VALUES ($1, $2, $3, 1, $4)
    ON CONFLICT (consumer_group, topic, message_key) DO UPDATE
    SET attempts = least(a.attempts, 2147483646) + 1,
        last_error = coalesce(excluded.last_error, a.last_error),
        updated_at = now()
    RETURNING attempts, last_error";

/// The reason of an attempt that was counted before it ran.
pub(crate) const NOTE_ERROR: &str = "
    UPDATE inbox.attempts SET last_error = $4, updated_at = now()
    WHERE consumer_group = $1 AND topic = $2 AND message_key = $3";

pub(crate) const FORGET_ATTEMPTS: &str = "
    DELETE FROM inbox.attempts WHERE consumer_group = $1 AND topic = $2 AND message_key = ANY ($3::text[])";

/// Repeating it changes nothing: the entry may come again before it is acknowledged. `headers` goes
/// in as text, so that the document is stored as it was written.
pub(crate) const SET_ASIDE: &str = "
    INSERT INTO inbox.dead_letters
        (consumer_group, stream, entry_id, topic, message_id, message_key, ordering_key, event_type,
         created_at, content_type, headers, payload, attempts, reason, state, holds)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11::text::json, $12, $13, $14, $15, $16)
    ON CONFLICT (consumer_group, stream, entry_id) DO NOTHING";

/// Whether a look by [`TAKE_DUE`] is worth its transaction.
pub(crate) const MAY_BE_DUE: &str = "
    SELECT EXISTS (SELECT FROM inbox.dead_letters
                   WHERE consumer_group = $1 AND topic = ANY ($2::text[]) AND state <> 'dead' AND not_before <= now())";

/// The next dead letter to be delivered from the table: one that a person wants retried, or one that waited and is now
/// the first of its ordering key. Its attempt is counted, and it is nobody else's turn within the claim time ($3, in
/// seconds). A row that is being delivered is locked, and skipped.
pub(crate) const TAKE_DUE: &str = "
    WITH due AS MATERIALIZED (
        SELECT d.id FROM inbox.dead_letters AS d
        WHERE d.consumer_group = $1 AND d.topic = ANY ($2::text[]) AND d.state <> 'dead' AND d.not_before <= now()
          AND NOT (d.holds AND EXISTS (
              SELECT FROM inbox.dead_letters AS e
              WHERE e.consumer_group = d.consumer_group AND e.topic = d.topic
                AND hashtext(e.ordering_key) = hashtext(d.ordering_key) AND e.ordering_key = d.ordering_key
                AND e.holds AND e.id < d.id))
        ORDER BY d.id LIMIT 1 FOR UPDATE OF d SKIP LOCKED)
    UPDATE inbox.dead_letters AS d
    SET tries = least(d.tries, 2147483646) + 1, attempts = least(d.attempts, 2147483646) + 1,
        not_before = now() + make_interval(secs => $3)
    FROM due WHERE d.id = due.id
    RETURNING d.id, d.stream, d.entry_id, d.topic, d.message_id, d.message_key, d.ordering_key, d.event_type,
              d.created_at, d.content_type, d.headers::text AS headers, d.payload, d.attempts, d.reason, d.tries";

/// Nothing if the row was discarded, or taken again after the claim time.
pub(crate) const LOCK_DUE: &str =
    "SELECT FROM inbox.dead_letters WHERE id = $1 AND tries = $2 AND state <> 'dead' FOR UPDATE";

pub(crate) const REMOVE_LETTER: &str = "DELETE FROM inbox.dead_letters WHERE id = $1";

/// After a failed attempt: the next one not before $3 seconds. $5 is 1 where an outage is to blame, and takes the count
/// back.
pub(crate) const PUT_BACK: &str = "
    UPDATE inbox.dead_letters
    SET tries = tries - $5::integer, attempts = attempts - $5::integer, reason = $4,
        not_before = now() + make_interval(secs => $3)
    WHERE id = $1 AND tries = $2 AND state <> 'dead'";

/// After the last attempt. $4 is 1 where the attempt that was counted was not made.
pub(crate) const DECLARE_DEAD: &str = "
    UPDATE inbox.dead_letters
    SET state = 'dead', tries = 0, attempts = attempts - $4::integer, reason = $3, set_aside_at = now()
    WHERE id = $1 AND tries = $2 AND state <> 'dead'";

/// One member at a time compares the histories of a group; the transaction's end gives it back.
pub(crate) const HISTORY_LOCK: &str =
    "SELECT pg_try_advisory_xact_lock(1869968484, hashtext($1::text))";

/// What this database says of its past. The timeline as the file name of the WAL has it: the control file lags after a
/// promotion.
pub(crate) const HISTORY: &str = "
    SELECT (SELECT system_identifier FROM pg_control_system()) AS system_id,
           ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint AS timeline,
           h.branch, h.mark, h.redis_ms, h.positions
    FROM (SELECT) AS this LEFT JOIN inbox.history AS h ON h.consumer_group = $1";

pub(crate) const SET_MARK: &str = "
    INSERT INTO inbox.history (consumer_group, branch, mark, redis_ms, positions)
    VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT (consumer_group) DO UPDATE
    SET branch = excluded.branch, mark = excluded.mark, redis_ms = excluded.redis_ms,
        positions = excluded.positions, marked_at = now()";

pub(crate) const PURGE: &str = "SELECT inbox.purge($1, make_interval(secs => $2), $3)";

/// A dead letter that is deleted is done with: its key goes into the inbox, so that it is not run when it comes again.
pub(crate) const PURGE_LETTERS: &str = "
    WITH gone AS (
        DELETE FROM inbox.dead_letters WHERE id = ANY (ARRAY(
            SELECT id FROM inbox.dead_letters
            WHERE consumer_group = $1 AND state = 'dead' AND set_aside_at < now() - make_interval(secs => $2)
            ORDER BY set_aside_at LIMIT $3 FOR UPDATE SKIP LOCKED))
        RETURNING consumer_group, topic, message_key),
    done AS (
        INSERT INTO inbox.applied (consumer_group, topic, message_key)
        SELECT DISTINCT consumer_group, topic, message_key FROM gone WHERE message_key IS NOT NULL
        ON CONFLICT DO NOTHING)
    SELECT count(*) FROM gone";

/// Dead letters are not in the inbox: the key was taken only to wait for whoever holds it.
pub(crate) const RELEASE_KEY: &str =
    "DELETE FROM inbox.applied WHERE consumer_group = $1 AND topic = $2 AND message_key = $3";

pub(crate) const SCHEMA_EXISTS: &str =
    "SELECT current_setting('server_encoding'), to_regclass('inbox.schema_version') IS NOT NULL";

pub(crate) const SCHEMA_VERSION: &str =
    "SELECT coalesce(max(version), 0) FROM inbox.schema_version";

/// The last step of a member that stops. It deletes its name if nothing is pending for it, in one
/// step with the look, since deleting a name deletes its pending entries. What it still holds becomes
/// claimable at once instead of after the claim time.
pub(crate) const LEAVE_GROUP: &str = include_str!("leave_group.lua");

/// First in each transaction of an owner: it is refused if the stream has another owner or epoch, and as long as
/// it is open nobody can take the stream. KEY SHARE, so that the keeper can renew the lease meanwhile: taking it
/// needs the stronger lock of [`TAKE_LEASES`].
pub(crate) const HOLD_LEASE: &str = "
    SELECT FROM inbox.leases WHERE consumer_group = $1 AND stream = $2 AND owner = $3 AND epoch = $4 FOR KEY SHARE";

/// A member says that it is alive, and which streams it could have. All times are the database's.
pub(crate) const REPORT_MEMBER: &str = "
    INSERT INTO inbox.members (consumer_group, member, streams, expires_at)
    VALUES ($1, $2, $3, clock_timestamp() + $4 * interval '1 millisecond')
    ON CONFLICT (consumer_group, member) DO UPDATE
    SET streams = excluded.streams, expires_at = excluded.expires_at";

pub(crate) const FORGET_MEMBERS: &str = "
    DELETE FROM inbox.members WHERE consumer_group = $1 AND expires_at < clock_timestamp() - interval '1 hour'";

/// Also a lease that has expired is renewed, if nobody took it: then nothing has happened in between.
pub(crate) const RENEW_LEASES: &str = "
    UPDATE inbox.leases AS l SET expires_at = clock_timestamp() + $5 * interval '1 millisecond'
    FROM unnest($3::text[], $4::bigint[]) AS held (stream, epoch)
    WHERE l.consumer_group = $1 AND l.owner = $2 AND l.stream = held.stream AND l.epoch = held.epoch
    RETURNING l.stream";

pub(crate) const LIVE_MEMBERS: &str = "SELECT member, streams FROM inbox.members WHERE consumer_group = $1 AND expires_at > clock_timestamp()";

pub(crate) const LEASES: &str = "
    SELECT stream, owner, expires_at > clock_timestamp() FROM inbox.leases WHERE consumer_group = $1";

pub(crate) const MAKE_LEASES: &str = "
    INSERT INTO inbox.leases (consumer_group, stream) SELECT $1::text, unnest($2::text[]) ON CONFLICT DO NOTHING";

/// Takes leases that have run out. FOR UPDATE, and not just the UPDATE, because it conflicts with KEY SHARE: the
/// last transaction of the old owner ends first. Leases that it still holds that way are left for the next time.
pub(crate) const TAKE_LEASES: &str = "
    WITH free AS (
        SELECT stream FROM inbox.leases
        WHERE consumer_group = $1 AND stream = ANY ($3::text[]) AND expires_at <= clock_timestamp()
        FOR UPDATE SKIP LOCKED)
    UPDATE inbox.leases AS l
    SET owner = $2, epoch = l.epoch + 1, expires_at = clock_timestamp() + $4 * interval '1 millisecond'
    FROM free WHERE l.consumer_group = $1 AND l.stream = free.stream
    RETURNING l.stream, l.epoch";

/// At the start of a member, also of what an earlier process of the same name had: a name is used by one only.
pub(crate) const RELEASE_ALL_LEASES: &str =
    "UPDATE inbox.leases SET expires_at = '-infinity' WHERE consumer_group = $1 AND owner = $2";

pub(crate) const RELEASE_LEASE: &str = "
    UPDATE inbox.leases SET expires_at = '-infinity'
    WHERE consumer_group = $1 AND owner = $2 AND stream = $3 AND epoch = $4";

pub(crate) const DELETE_MEMBER: &str =
    "DELETE FROM inbox.members WHERE consumer_group = $1 AND member = $2";

/// What the server knows of a session: whether it works on a statement. Waiting for its client is no work. No row:
/// the session is gone.
pub(crate) const IS_AT_WORK: &str = "
    SELECT state = 'active' AND wait_event_type IS DISTINCT FROM 'Client' FROM pg_stat_activity WHERE pid = $1";

/// Whether a group has settled a stream, up to an entry.
pub(crate) const DRAINED: &str = include_str!("drained.lua");

/// The heartbeat of entries in hand: nobody claims them while their member is alive.
pub(crate) const KEEP_FRESH: &str = include_str!("keep_fresh.lua");

/// Members that died leave their names behind.
pub(crate) const FORGET_SILENT_MEMBERS: &str = include_str!("forget_members.lua");

/// For the keeper, whose rows nobody misses after a crash.
pub(crate) const NOT_FLUSHED: &str = "SET LOCAL synchronous_commit = off";
