//! What `doctor` asks Postgres. All of it reads catalogs and statistics, and waits for no lock of a producer.

pub(crate) mod doctor_sql {
    /// Who we are, and which of the rights $1 (objects), $2 (privileges) we lack.
    pub(crate) const RIGHTS: &str = "
        SELECT current_user::text, r.rolsuper,
               pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'),
               has_any_column_privilege('outbox.messages', 'INSERT') OR has_any_column_privilege('outbox.messages', 'UPDATE'),
               ARRAY(SELECT need.privilege || ' on ' || need.object FROM unnest($1::text[], $2::text[]) AS need(object, privilege)
                     WHERE NOT has_table_privilege(need.object, need.privilege))
        FROM pg_roles AS r WHERE r.rolname = current_user";

    /// Settings as a new session of this role has them; our own session has changed some.
    pub(crate) const SETTINGS: &str = "
        SELECT name, reset_val FROM pg_settings WHERE name IN ('server_version', 'synchronous_commit', 'fsync',
            'full_page_writes', 'autovacuum', 'track_counts', 'max_slot_wal_keep_size')";

    /// Who commits without waiting for the disk, by a setting of a role or a database.
    pub(crate) const ASYNCHRONOUS: &str = "
        SELECT coalesce('role ' || r.rolname, 'every role of this database')
        FROM pg_db_role_setting AS s LEFT JOIN pg_roles AS r ON r.oid = s.setrole
        WHERE s.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
          AND 'synchronous_commit=off' = ANY (s.setconfig)
        ORDER BY 1";

    /// The tables of the outbox as autovacuum sees them.
    pub(crate) const TABLES: &str = "
        SELECT c.relname::text, coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0),
               EXISTS (SELECT FROM unnest(c.reloptions) AS o WHERE o ~ '^autovacuum_enabled=(f|n|of|0)')
        FROM pg_class AS c LEFT JOIN pg_stat_user_tables AS s ON s.relid = c.oid
        WHERE c.relnamespace = 'outbox'::regnamespace AND c.relkind = 'r' ORDER BY 1";

    /// Transactions and multixacts since the oldest that are not frozen; both wrap at two billion.
    pub(crate) const WRAPAROUND: &str = "
        SELECT greatest(age(datfrozenxid), mxid_age(datminmxid))::bigint FROM pg_database WHERE datname = current_database()";

    pub(crate) const SIZES: &str =
        "SELECT pg_database_size(current_database()), pg_total_relation_size('outbox.messages')";
    pub(crate) const WAL_SIZE: &str = "SELECT coalesce(sum(size), 0)::bigint FROM pg_ls_waldir()";

    /// The replication slot that keeps the most WAL.
    pub(crate) const SLOT: &str = "
        SELECT slot_name::text, active, pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint
        FROM pg_replication_slots WHERE restart_lsn IS NOT NULL ORDER BY 3 DESC LIMIT 1";

    /// Whether producers can wake the relay, and whether rows arrive by logical replication.
    pub(crate) const WIRING: &str = "
        SELECT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'outbox.messages'::regclass AND tgname = 'wake_relay'
                       AND tgenabled IN ('O', 'A')),
               EXISTS (SELECT FROM pg_subscription_rel WHERE srrelid = 'outbox.messages'::regclass)";

    pub(crate) const LISTEN: &str = "LISTEN outbox_doctor";
    /// Every commit of the database waits while one that notifies commits; so this one does not wait for the disk.
    pub(crate) const NOTIFY: &str =
        "BEGIN; SET LOCAL synchronous_commit = off; NOTIFY outbox_doctor; COMMIT";
    pub(crate) const CLOCK: &str = "SELECT extract(epoch FROM clock_timestamp())::float8";
}
