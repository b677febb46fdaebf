-- Inbox, version 1: the consumer's side. Run by `outbox-relay migrate --inbox`, or by `psql -f`.
--
-- The file is one DO block, hence one transaction under every client: it is applied whole or not at
-- all, it may run twice, from two places at once, and while consumers work.
DO $migration$
BEGIN
    PERFORM pg_advisory_xact_lock(1869968482, 4);  -- one migration of this database at a time

    IF to_regnamespace('inbox') IS NOT NULL THEN
        IF to_regclass('inbox.schema_version') IS NULL THEN
            RAISE EXCEPTION 'schema "inbox" exists but was not made by these migrations'
                USING ERRCODE = 'duplicate_schema',
                      HINT = 'Rename or drop that schema, or use another database.';
        END IF;
        -- The catalog too: it is always current. Where the database's default isolation is REPEATABLE READ
        -- or above, the row of a migration that this one has waited for cannot be seen.
        IF EXISTS (SELECT FROM inbox.schema_version WHERE version >= 1)
           OR to_regclass('inbox.applied') IS NOT NULL THEN
            RETURN;
        END IF;
    ELSE
        CREATE SCHEMA inbox;
        CREATE TABLE inbox.schema_version (
            version    integer PRIMARY KEY,
            applied_at timestamptz NOT NULL DEFAULT now()
        );
    END IF;

    -- The keys whose effect a group has committed: a row is written in the transaction of the effect.
    --
    -- COLLATE "C" wherever a key is indexed: an index in a language's order finds keys no more when the system's library
    -- changes that order, and then a key could be taken twice. The message key comes first since it differs at once.
    CREATE TABLE inbox.applied (
        consumer_group text COLLATE "C" NOT NULL,
        topic          text COLLATE "C" NOT NULL,
        message_key    text COLLATE "C" NOT NULL,
        applied_at     timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (message_key, topic, consumer_group)
    );

    -- Up to when keys of a group may have been purged: what was published before that may have been applied,
    -- although its key is not there any more. `next_page`: where the walk of the purge through the keys goes on.
    CREATE TABLE inbox.purged (
        consumer_group  text COLLATE "C" PRIMARY KEY,
        applied_through timestamptz NOT NULL DEFAULT '-infinity',
        next_page       bigint NOT NULL DEFAULT 0
    );

    -- Which past of this database a group has seen, to compare with what stands in Redis. A restored database
    -- has an older mark, or another branch. `positions`: up to which entry of each stream all was settled, when
    -- the mark was set.
    CREATE TABLE inbox.history (
        consumer_group text COLLATE "C" PRIMARY KEY,
        branch         uuid NOT NULL,
        mark           bigint NOT NULL,
        redis_ms       bigint NOT NULL,
        positions      jsonb NOT NULL,
        marked_at      timestamptz NOT NULL DEFAULT now()
    );

    -- How often a message has been tried, for those that failed or were redelivered after a crash.
    CREATE TABLE inbox.attempts (
        consumer_group text COLLATE "C" NOT NULL,
        topic          text COLLATE "C" NOT NULL,
        message_key    text COLLATE "C" NOT NULL,
        attempts       integer NOT NULL,
        last_error     text,
        updated_at     timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (consumer_group, topic, message_key)
    );
    CREATE INDEX attempts_by_age ON inbox.attempts (consumer_group, updated_at);

    -- Entries set aside with their reason. A malformed entry has no message key; its stream id names it.
    --
    -- `state`: `dead` waits for a person; `retry` is delivered from here to this group; `waiting` never failed, but
    -- its ordering key is held by an earlier row. `holds`: later messages of the ordering key wait for this row.
    -- `tries` counts within one series of attempts, `attempts` in all; `not_before` is when the next may begin.
    CREATE TABLE inbox.dead_letters (
        id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        consumer_group text COLLATE "C" NOT NULL,
        stream         text COLLATE "C" NOT NULL,
        entry_id       text COLLATE "C" NOT NULL,
        topic          text COLLATE "C" NOT NULL,
        message_id     bigint,
        message_key    text COLLATE "C",
        ordering_key   text,
        event_type     text,
        created_at     timestamptz,
        content_type   text,
        headers        json,
        payload        bytea NOT NULL,
        attempts       integer NOT NULL,
        reason         text NOT NULL,
        set_aside_at   timestamptz NOT NULL DEFAULT now(),
        state          text NOT NULL DEFAULT 'dead' CHECK (state IN ('dead', 'retry', 'waiting')),
        holds          boolean NOT NULL DEFAULT false,
        tries          integer NOT NULL DEFAULT 0,
        not_before     timestamptz NOT NULL DEFAULT '-infinity',
        UNIQUE (consumer_group, stream, entry_id),
        CHECK (state = 'dead' OR message_key IS NOT NULL),
        CHECK (NOT holds OR ordering_key IS NOT NULL)
    );
    -- An ordering key has up to 16 KiB, more than an entry of an index; equal keys have equal hashes.
    CREATE INDEX dead_letters_holding ON inbox.dead_letters (consumer_group, topic, hashtext(ordering_key), id) WHERE holds;
    CREATE INDEX dead_letters_due ON inbox.dead_letters (consumer_group, id) WHERE state <> 'dead';
    CREATE INDEX dead_letters_by_age ON inbox.dead_letters (consumer_group, set_aside_at) WHERE state = 'dead';

    -- The contract for every language: call it first in the transaction of the effects, apply the messages whose
    -- keys it returns, commit, then XACK all of them. Waits for a transaction that is applying the same key.
    CREATE FUNCTION inbox.claim(consumer_group text, topic text, message_keys text[]) RETURNS SETOF text
    LANGUAGE plpgsql VOLATILE STRICT AS $function$
    BEGIN
        -- A commit that is not flushed could be lost after the XACK, and nothing would deliver the message again.
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
        RETURN QUERY
            INSERT INTO inbox.applied AS a (consumer_group, topic, message_key)
            SELECT claim.consumer_group, claim.topic, k.message_key
            FROM pg_catalog.unnest(claim.message_keys) AS k (message_key)
            ORDER BY k.message_key COLLATE "C"  -- two callers with the same keys wait for each other in one order
            ON CONFLICT DO NOTHING
            RETURNING a.message_key;
    END
    $function$;

    -- Deletes keys and attempts of a group that are older than `retention`, `rows_max` of each at the most, and
    -- returns how many it deleted. Does nothing while another session does it. The first call only prepares.
    --
    -- Keys are found by a walk through the table's pages and not by an index on their age, which would cost each message
    -- half as much again as its key. A call looks at 1,000 pages, or at a 1,440th of a large table: called every minute, it
    -- comes around in a day.
    CREATE FUNCTION inbox.purge(consumer_group text, retention interval, rows_max integer) RETURNS bigint
    LANGUAGE plpgsql VOLATILE STRICT SET enable_seqscan = off AS $function$
    #variable_conflict use_column
    DECLARE
        horizon  timestamptz := pg_catalog.now() - retention;
        pages    bigint := pg_catalog.pg_relation_size('inbox.applied') / pg_catalog.current_setting('block_size')::bigint;
        page     bigint;
        page_end bigint;
        old      tid[];
        through  timestamptz;
        keys     bigint := 0;
        counts   bigint := 0;
    BEGIN
        IF NOT pg_catalog.pg_try_advisory_xact_lock(1869968483, pg_catalog.hashtext(purge.consumer_group)) THEN
            RETURN 0;
        END IF;
        -- A consumer that meets an old entry holds the row FOR SHARE until its key is in. So the row is there
        -- some time before anything is deleted, and is changed before.
        INSERT INTO inbox.purged AS p (consumer_group) VALUES (purge.consumer_group) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN 0;
        END IF;
        SELECT CASE WHEN p.next_page < pages THEN p.next_page ELSE 0 END INTO page
        FROM inbox.purged AS p WHERE p.consumer_group = purge.consumer_group;
        page_end := LEAST(page + GREATEST(1000, pages / 1440), pages);
        SELECT pg_catalog.array_agg(a.ctid), pg_catalog.max(a.applied_at) INTO old, through
        FROM (SELECT ctid, applied_at FROM inbox.applied
              WHERE ctid >= pg_catalog.format('(%s,0)', page)::tid AND ctid < pg_catalog.format('(%s,0)', page_end)::tid
                AND consumer_group = purge.consumer_group AND applied_at < horizon
              LIMIT rows_max) AS a;
        keys := coalesce(pg_catalog.cardinality(old), 0);
        IF keys > 0 AND keys = rows_max THEN
            page_end := (old[keys]::text::point)[0];  -- there may be more on the page of the last one
        END IF;
        IF keys > 0 OR page > 0 OR page_end < pages THEN
            UPDATE inbox.purged AS p
            SET applied_through = GREATEST(p.applied_through, through), next_page = page_end
            WHERE p.consumer_group = purge.consumer_group;
            -- The condition once more: somebody else may have deleted a row, and another one be in its place.
            DELETE FROM inbox.applied
            WHERE ctid = ANY (old) AND consumer_group = purge.consumer_group AND applied_at < horizon;
            GET DIAGNOSTICS keys = ROW_COUNT;
        END IF;
        DELETE FROM inbox.attempts WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM inbox.attempts
            WHERE consumer_group = purge.consumer_group AND updated_at < horizon
            ORDER BY updated_at LIMIT rows_max FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS counts = ROW_COUNT;
        RETURN keys + counts;
    END
    $function$;

    -- Which member of a group has a stream. The epoch counts the owners; a batch is applied only by the owner of
    -- the epoch in which it was read. Updated every second by each owner, hence the room in each page.
    CREATE TABLE inbox.leases (
        consumer_group text COLLATE "C" NOT NULL,
        stream         text COLLATE "C" NOT NULL,
        owner          text NOT NULL DEFAULT '',
        epoch          bigint NOT NULL DEFAULT 0,
        expires_at     timestamptz NOT NULL DEFAULT '-infinity',
        PRIMARY KEY (consumer_group, stream)
    ) WITH (fillfactor = 30);

    -- The members of a group that are alive, and the streams that each of them could have.
    CREATE TABLE inbox.members (
        consumer_group text COLLATE "C" NOT NULL,
        member         text COLLATE "C" NOT NULL,
        streams        text[] NOT NULL,
        expires_at     timestamptz NOT NULL,
        PRIMARY KEY (consumer_group, member)
    ) WITH (fillfactor = 30);

    INSERT INTO inbox.schema_version (version) VALUES (1);
END
$migration$;
