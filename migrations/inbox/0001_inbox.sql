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
    CREATE TABLE inbox.applied (
        consumer_group text NOT NULL,
        topic          text NOT NULL,
        message_key    text NOT NULL,
        applied_at     timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (consumer_group, topic, message_key)
    );

    -- How often a message has been tried, for those that failed or were redelivered after a crash.
    CREATE TABLE inbox.attempts (
        consumer_group text NOT NULL,
        topic          text NOT NULL,
        message_key    text NOT NULL,
        attempts       integer NOT NULL,
        last_error     text,
        updated_at     timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (consumer_group, topic, message_key)
    );

    -- Entries set aside with their reason. A malformed entry has no message key; its stream id names it.
    CREATE TABLE inbox.dead_letters (
        id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        consumer_group text NOT NULL,
        stream         text NOT NULL,
        entry_id       text NOT NULL,
        topic          text NOT NULL,
        message_id     bigint,
        message_key    text,
        ordering_key   text,
        event_type     text,
        created_at     timestamptz,
        content_type   text,
        headers        json,
        payload        bytea NOT NULL,
        attempts       integer NOT NULL,
        reason         text NOT NULL,
        set_aside_at   timestamptz NOT NULL DEFAULT now(),
        UNIQUE (consumer_group, stream, entry_id)
    );

    INSERT INTO inbox.schema_version (version) VALUES (1);
END
$migration$;
