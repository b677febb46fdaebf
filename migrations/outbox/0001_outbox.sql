-- Outbox, version 1: the producer's side. Run by `outbox-relay migrate`, or by `psql -f`.
--
-- The file is one DO block, hence one transaction under every client: it is applied whole or not at
-- all, it may run twice, from two places at once, and while producers write.
DO $migration$
BEGIN
    PERFORM pg_advisory_xact_lock(1869968482, 3);  -- one migration of this database at a time

    IF to_regnamespace('outbox') IS NOT NULL THEN
        IF to_regclass('outbox.schema_version') IS NULL THEN
            RAISE EXCEPTION 'schema "outbox" exists but was not made by these migrations'
                USING ERRCODE = 'duplicate_schema',
                      HINT = 'Rename or drop that schema, or use another database.';
        END IF;
        -- The catalog too: it is always current. Where the database's default isolation is REPEATABLE READ
        -- or above, the row of a migration that this one has waited for cannot be seen.
        IF EXISTS (SELECT FROM outbox.schema_version WHERE version >= 1)
           OR to_regclass('outbox.messages') IS NOT NULL THEN
            RETURN;
        END IF;
    ELSE
        CREATE SCHEMA outbox;
        CREATE TABLE outbox.schema_version (
            version    integer PRIMARY KEY,
            applied_at timestamptz NOT NULL DEFAULT now()
        );
    END IF;

    -- Which outbox this is. A dump carries it along, so a clone is told apart by its system id.
    CREATE TABLE outbox.identity (
        singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
        outbox_id uuid NOT NULL DEFAULT gen_random_uuid(),
        adopted_from bigint[] NOT NULL DEFAULT '{}'  -- system ids that `outbox-relay adopt` accepted
    );
    INSERT INTO outbox.identity DEFAULT VALUES;

    -- Time-ordered keys (RFC 9562, version 7): a random UUID (version 4) with the clock in its first
    -- 48 bits and two more bits of the version nibble set.
    CREATE FUNCTION outbox.uuid_v7() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE AS $body$
        SELECT encode(
            set_bit(set_bit(
                overlay(uuid_send(gen_random_uuid())
                        PLACING substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                        FROM 1 FOR 6),
                52, 1), 53, 1),
            'hex')::uuid
    $body$;

    -- What every INSERT calls is PL/pgSQL: it keeps its plan, a function in SQL is planned anew each time
    -- (measured: an INSERT with headers takes 115 us of the server's time with SQL, 63 us so).
    -- An escape that no text can hold (\u0000, a lone surrogate) is an error of json_each.
    CREATE FUNCTION outbox.is_string_map(headers json) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $body$
    BEGIN
        RETURN CASE WHEN json_typeof(headers) <> 'object' THEN false
               ELSE NOT EXISTS (SELECT FROM json_each(headers) AS h WHERE json_typeof(h.value) <> 'string') END;
    END
    $body$;

    -- Insert-only: nothing ever updates a row, and only the relay's purge deletes one.
    -- COLLATE "C" wherever a key is indexed: the order of a language changes with the system's library, and an index in
    -- the old order no longer finds what it holds.
    CREATE TABLE outbox.messages (
        id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        topic          text COLLATE "C" NOT NULL,
        ordering_key   text,
        message_key    text COLLATE "C" NOT NULL DEFAULT outbox.uuid_v7()::text,
        event_type     text,
        payload        json,
        payload_binary bytea,
        content_type   text,
        headers        json,
        created_at     timestamptz NOT NULL DEFAULT now(),
        -- What a page counts against its byte limit; stored, so that no read has to unpack a payload for it.
        bytes          integer NOT NULL GENERATED ALWAYS AS (
            coalesce(octet_length(payload_binary), octet_length(payload::text), 0)
            + coalesce(octet_length(headers::text), 0) + coalesce(octet_length(ordering_key), 0)) STORED,
        CONSTRAINT messages_message_key_unique UNIQUE (message_key),
        CONSTRAINT messages_topic_check CHECK (topic ~ '^[A-Za-z0-9._-]{1,200}$'),
        CONSTRAINT messages_ordering_key_check CHECK (octet_length(ordering_key) BETWEEN 1 AND 16384),
        CONSTRAINT messages_message_key_check CHECK (octet_length(message_key) BETWEEN 1 AND 512),
        CONSTRAINT messages_event_type_check CHECK (octet_length(event_type) BETWEEN 1 AND 200),
        CONSTRAINT messages_one_payload_check CHECK (num_nonnulls(payload, payload_binary) = 1),
        CONSTRAINT messages_payload_size_check CHECK (
            octet_length(payload::text) <= 8388608 AND payload_binary IS NULL
            OR octet_length(payload_binary) <= 8388608 AND payload IS NULL),
        -- Binary needs a content type and JSON has none. A CHECK passes on NULL, hence no bare comparison.
        CONSTRAINT messages_content_type_check CHECK (
            CASE WHEN payload_binary IS NULL THEN content_type IS NULL
                 ELSE content_type IS NOT NULL AND content_type ~ '^[ -~]{1,200}$' END),
        CONSTRAINT messages_headers_check CHECK (
            headers IS NULL OR octet_length(headers::text) <= 65536 AND outbox.is_string_map(headers)),
        CONSTRAINT messages_created_at_check CHECK (
            isfinite(created_at) AND created_at >= '0001-01-01 00:00:00+00' AND created_at < '10000-01-01 00:00:00+00')
    );
    COMMENT ON COLUMN outbox.messages.id IS
        'Position in the log. Never set it by hand: the relay''s cursor relies on the sequence.';

    -- How many partitions (streams) a topic has; a topic without a row has one. `outbox-relay topics set` writes what
    -- is wanted, and the relay changes it once all groups have drained the streams of the count before.
    CREATE TABLE outbox.topics (
        topic      text COLLATE "C" PRIMARY KEY CHECK (topic ~ '^[A-Za-z0-9._-]{1,200}$'),
        partitions integer NOT NULL DEFAULT 1 CHECK (partitions BETWEEN 1 AND 1024),
        earlier    integer[] NOT NULL DEFAULT '{}',  -- counts that were in force before, oldest first
        wanted     integer CHECK (wanted BETWEEN 1 AND 1024),
        at_once    boolean NOT NULL DEFAULT false    -- without waiting for the groups
    );

    -- The relay's cursor, written after the marker in Redis: everything up to `high` is sent, but for
    -- the ids in `checkpoint_gaps` and what `blocked_streams` holds back. No row: nothing was ever sent.
    CREATE TABLE outbox.checkpoint (
        singleton    boolean PRIMARY KEY DEFAULT true CHECK (singleton),
        system_id    bigint NOT NULL,  -- history: the cluster (the bits of an unsigned number),
        timeline     bigint NOT NULL,  --          its timeline,
        branch       uuid NOT NULL,    --          and a new number each time the past turned out changed
        epoch        bigint NOT NULL,
        page         bigint NOT NULL,
        high         bigint NOT NULL,
        high_key     text NOT NULL,    -- message_key of the row at `high`; empty when `high` is 0
        redis_ms     bigint NOT NULL,  -- Redis' clock when that page was published
        updated_at   timestamptz NOT NULL DEFAULT now()
    );
    CREATE TABLE outbox.checkpoint_gaps (
        lo bigint PRIMARY KEY,
        hi bigint NOT NULL CHECK (hi >= lo)
    );

    -- Streams that refuse entries, each with a cursor of its own until it has caught up.
    CREATE TABLE outbox.blocked_streams (
        stream text COLLATE "C" PRIMARY KEY,
        topic  text COLLATE "C" NOT NULL,
        high   bigint NOT NULL,
        gaps   int8multirange NOT NULL,
        reason text NOT NULL,
        since  timestamptz NOT NULL DEFAULT now()
    );

    -- When which position was published, about once a minute: the purge goes by it.
    CREATE TABLE outbox.milestones (
        high         bigint PRIMARY KEY,
        published_at timestamptz NOT NULL DEFAULT now()
    );

    -- Ids up to this one may have been purged.
    CREATE TABLE outbox.purge (
        singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
        purged_to bigint NOT NULL DEFAULT 0
    );
    INSERT INTO outbox.purge DEFAULT VALUES;

    -- A row while publishing is paused (`outbox-relay pause`); it holds for every leader until `resume` deletes it.
    CREATE TABLE outbox.pause (
        singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
        reason    text NOT NULL CHECK (octet_length(reason) <= 1000),
        paused_at timestamptz NOT NULL DEFAULT now(),
        paused_by text NOT NULL DEFAULT session_user
    );

    -- When a relay found that Redis had lost something, the latest thousand: entries (tail), only the marker (marker), or
    -- everything (all). `purged_from` to `purged_to`: lost in Redis, and not in the outbox any more.
    CREATE TABLE outbox.redis_losses (
        id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        found_at        timestamptz NOT NULL DEFAULT now(),
        lost            text NOT NULL CHECK (lost IN ('tail', 'marker', 'all')),
        epoch           bigint NOT NULL,   -- of the leadership that found it
        marker_high     bigint,            -- what Redis counted as published then; none without a marker
        checkpoint_high bigint NOT NULL,   -- what Postgres counted as published then
        purged_from     bigint,
        purged_to       bigint
    );

    -- Messages that Redis refuses for what they are; whole, so that the purge may go on.
    CREATE TABLE outbox.dead_letters (
        id             bigint PRIMARY KEY,
        topic          text COLLATE "C" NOT NULL,
        ordering_key   text,
        message_key    text COLLATE "C" NOT NULL,
        event_type     text,
        payload        json,
        payload_binary bytea,
        content_type   text,
        headers        json,
        created_at     timestamptz NOT NULL,
        reason         text NOT NULL,
        set_aside_at   timestamptz NOT NULL DEFAULT now()
    );

    CREATE VIEW outbox.message_status AS
        SELECT m.id, m.topic, m.message_key, m.ordering_key, m.event_type, m.created_at,
               d.id IS NULL
               AND m.id <= coalesce(c.high, 0)
               AND NOT EXISTS (SELECT FROM outbox.checkpoint_gaps AS g WHERE m.id BETWEEN g.lo AND g.hi)
               -- Of a partitioned topic, one blocked partition shows the topic's later messages as not sent.
               AND NOT EXISTS (SELECT FROM outbox.blocked_streams AS b
                               WHERE b.topic = m.topic AND (m.id > b.high OR m.id <@ b.gaps)) AS sent,
               d.reason AS dead_letter_reason
        FROM outbox.messages AS m
        LEFT JOIN outbox.checkpoint AS c ON true
        LEFT JOIN outbox.dead_letters AS d ON d.id = m.id;

    -- True while the relay sleeps: it then holds this advisory lock exclusively, and the shared try
    -- fails. `SET outbox.notify = 'off'` keeps a transaction from notifying, since one that notified
    -- cannot be prepared (two-phase commit); after SET LOCAL the setting reads '' and not NULL.
    CREATE FUNCTION outbox.relay_is_asleep() RETURNS boolean LANGUAGE plpgsql VOLATILE AS $body$
    BEGIN
        RETURN CASE
            WHEN coalesce(current_setting('outbox.notify', true), '') = 'off' THEN false
            WHEN pg_try_advisory_lock_shared(1869968482, 2) THEN NOT pg_advisory_unlock_shared(1869968482, 2)
            ELSE true END;
    END
    $body$;

    CREATE FUNCTION outbox.wake_relay() RETURNS trigger LANGUAGE plpgsql AS $body$
    BEGIN
        PERFORM pg_notify('outbox', '');
        RETURN NULL;
    END
    $body$;

    CREATE TRIGGER wake_relay AFTER INSERT ON outbox.messages
        FOR EACH STATEMENT WHEN (outbox.relay_is_asleep()) EXECUTE FUNCTION outbox.wake_relay();

    -- The producer for every other language. Both run with the caller's rights.
    CREATE FUNCTION outbox.publish(
        topic text, payload json, ordering_key text DEFAULT NULL, message_key text DEFAULT NULL,
        event_type text DEFAULT NULL, headers json DEFAULT '{}'
    ) RETURNS bigint LANGUAGE sql VOLATILE AS $body$
        INSERT INTO outbox.messages (topic, payload, ordering_key, message_key, event_type, headers)
        VALUES (publish.topic, publish.payload, publish.ordering_key,
                coalesce(publish.message_key, outbox.uuid_v7()::text), publish.event_type,
                CASE WHEN publish.headers::text = '{}' THEN NULL ELSE publish.headers END)
        RETURNING id
    $body$;

    CREATE FUNCTION outbox.publish_binary(
        topic text, payload bytea, content_type text, ordering_key text DEFAULT NULL, message_key text DEFAULT NULL,
        event_type text DEFAULT NULL, headers json DEFAULT '{}'
    ) RETURNS bigint LANGUAGE sql VOLATILE AS $body$
        INSERT INTO outbox.messages (topic, payload_binary, content_type, ordering_key, message_key, event_type, headers)
        VALUES (publish_binary.topic, publish_binary.payload, publish_binary.content_type, publish_binary.ordering_key,
                coalesce(publish_binary.message_key, outbox.uuid_v7()::text), publish_binary.event_type,
                CASE WHEN publish_binary.headers::text = '{}' THEN NULL ELSE publish_binary.headers END)
        RETURNING id
    $body$;

    INSERT INTO outbox.schema_version (version) VALUES (1);
END
$migration$;
