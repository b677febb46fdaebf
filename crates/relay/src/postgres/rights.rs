//! What each role needs in its database: `grants` prints it as SQL, and `doctor` asks for it.

use std::fmt::Write as _;

/// What a role may do with one table, view or sequence.
pub(crate) struct Right {
    pub(crate) object: &'static str,
    pub(crate) privileges: &'static [&'static str],
}

const fn right(object: &'static str, privileges: &'static [&'static str]) -> Right {
    Right { object, privileges }
}

/// All columns of a message that are its producer's: not `id`, not `created_at`.
const PRODUCER_COLUMNS: &str =
    "topic, ordering_key, message_key, event_type, payload, payload_binary, content_type, headers";

/// What an INSERT calls, and what other languages call instead of it.
const PRODUCER_FUNCTIONS: &str = "outbox.uuid_v7, outbox.is_string_map, outbox.relay_is_asleep, outbox.publish, outbox.publish_binary";

/// Rights of the relay to tables.
pub(crate) const RELAY_TABLES: &[Right] = &[
    right("outbox.messages", &["SELECT", "DELETE"]),
    right("outbox.message_status", &["SELECT"]),
    right("outbox.checkpoint", &["SELECT", "INSERT", "UPDATE"]),
    right(
        "outbox.checkpoint_gaps",
        &["SELECT", "INSERT", "UPDATE", "DELETE"],
    ),
    right(
        "outbox.blocked_streams",
        &["SELECT", "INSERT", "UPDATE", "DELETE"],
    ),
    right("outbox.milestones", &["SELECT", "INSERT", "DELETE"]),
    right("outbox.purge", &["SELECT", "UPDATE"]),
    right("outbox.topics", &["SELECT", "INSERT", "UPDATE"]),
    right("outbox.pause", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
    right("outbox.redis_losses", &["SELECT", "INSERT", "DELETE"]),
    right("outbox.dead_letters", &["SELECT", "INSERT"]),
    right("outbox.identity", &["SELECT"]),
    right("outbox.schema_version", &["SELECT"]),
];

/// The relay asks which id was given out last.
pub(crate) const RELAY_SEQUENCE: Right = right("outbox.messages_id_seq", &["SELECT"]);

/// Rights of a consumer to tables.
const CONSUMER_TABLES: &[Right] = &[
    right("inbox.applied", &["SELECT", "INSERT", "DELETE"]),
    right("inbox.purged", &["SELECT", "INSERT", "UPDATE"]),
    right("inbox.history", &["SELECT", "INSERT", "UPDATE"]),
    right("inbox.attempts", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
    right(
        "inbox.dead_letters",
        &["SELECT", "INSERT", "UPDATE", "DELETE"],
    ),
    right("inbox.leases", &["SELECT", "INSERT", "UPDATE"]),
    right("inbox.members", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
    right("inbox.schema_version", &["SELECT"]),
];

/// A name as SQL takes it, whatever it contains.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn quoted_list(roles: &[String]) -> String {
    roles
        .iter()
        .map(|role| quoted(role))
        .collect::<Vec<_>>()
        .join(", ")
}

/// SQL for the producer's database: rights of producers, and of relays.
pub(crate) fn outbox_grants(producers: &[String], relays: &[String]) -> String {
    let mut sql = String::from(
        "-- For the producer's database, run by the owner of the schema outbox. It adds rights and takes none away, and may be\n\
         -- repeated. Where CONNECT was taken from PUBLIC, the roles need that as well.\nBEGIN;\n",
    );
    if !producers.is_empty() {
        let to = quoted_list(producers);
        let _ = write!(
            sql,
            "\n-- A producer writes messages. Without id, which would break the relay's cursor, and without created_at. It reads\n\
             -- back the id and, to find a repeated message, the key; no payload of anybody.\n\
             GRANT USAGE ON SCHEMA outbox TO {to};\n\
             GRANT INSERT ({PRODUCER_COLUMNS}) ON outbox.messages TO {to};\n\
             GRANT SELECT (id, message_key) ON outbox.messages TO {to};\n\
             -- What an INSERT calls in defaults, checks and trigger; matters where EXECUTE was taken from PUBLIC.\n\
             GRANT EXECUTE ON FUNCTION {PRODUCER_FUNCTIONS} TO {to};\n"
        );
    }
    if !relays.is_empty() {
        let to = quoted_list(relays);
        let _ = write!(
            sql,
            "\n-- The relay reads messages and purges what is published; it writes and changes none. All relays use the same role:\n\
             -- a standby ends the session of a frozen leader, and a role may do that to itself without a further right.\n\
             -- `migrate` and `adopt` are for the owner of the schema.\n\
             GRANT USAGE ON SCHEMA outbox TO {to};\n"
        );
        write_rights(&mut sql, RELAY_TABLES, &to);
        let _ = write!(
            sql,
            "GRANT {} ON SEQUENCE {} TO {to};\n\
             -- Not needed: with it, `status` and metrics see for how long the transactions of other roles are open, and what they\n\
             -- run. It shows the statements of all databases.\n\
             -- GRANT pg_read_all_stats TO {to};\n",
            RELAY_SEQUENCE.privileges.join(", "),
            RELAY_SEQUENCE.object,
        );
    }
    sql.push_str("\nCOMMIT;\n");
    sql
}

/// SQL for the consumer's database.
pub(crate) fn inbox_grants(consumers: &[String]) -> String {
    let to = quoted_list(consumers);
    let mut sql = format!(
        "-- For the consumer's database, run by the owner of the schema inbox. It adds rights and takes none away, and may be\n\
         -- repeated. What the handler itself reads and writes comes on top.\nBEGIN;\n\n\
         -- A consumer records what it applied, in the transaction of the effect; it never changes such a record.\n\
         GRANT USAGE ON SCHEMA inbox TO {to};\n"
    );
    write_rights(&mut sql, CONSUMER_TABLES, &to);
    let _ = write!(
        sql,
        "-- The contract for other languages; matters where EXECUTE was taken from PUBLIC.\n\
         GRANT EXECUTE ON FUNCTION inbox.claim, inbox.purge TO {to};\n\nCOMMIT;\n"
    );
    sql
}

fn write_rights(sql: &mut String, rights: &[Right], to: &str) {
    for right in rights {
        let privileges = right.privileges.join(", ");
        let _ = writeln!(sql, "GRANT {privileges} ON {} TO {to};", right.object);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_end_the_statement() {
        let sql = outbox_grants(&["a\"; DROP TABLE x; --".to_owned()], &[]);
        assert!(sql.contains("TO \"a\"\"; DROP TABLE x; --\";"), "{sql}");
        assert!(!sql.contains("pg_read_all_stats"), "{sql}");
    }
}
