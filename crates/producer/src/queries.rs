//! All SQL of the producer. Schema names are written out: a `search_path` changes nothing here.

/// Locks ordering keys until the transaction ends.
///
/// The inner query is sorted and the outer one runs after the sort, so that every transaction takes its
/// locks in one order: two batches with the same keys cannot deadlock. The hash is the server's, so that
/// SQL of any language takes the same lock.
pub(crate) const LOCK_ORDERING_KEYS: &str = "\
    SELECT pg_advisory_xact_lock($1, o.hash) \
    FROM (SELECT DISTINCT hashtext(k.ordering_key) AS hash \
          FROM unnest($2::text[]) AS k(ordering_key) ORDER BY hash) AS o";

/// One message.
pub(crate) const INSERT_ONE: &str = "\
    INSERT INTO outbox.messages \
        (topic, ordering_key, message_key, event_type, payload, payload_binary, content_type, headers) \
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8) \
    RETURNING id";

/// One message, unless its key is in the outbox.
///
/// The target is named: without one, a clash of ids (set by hand) would pass for a known key.
pub(crate) const INSERT_ONCE: &str = "\
    INSERT INTO outbox.messages \
        (topic, ordering_key, message_key, event_type, payload, payload_binary, content_type, headers) \
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8) \
    ON CONFLICT (message_key) DO NOTHING \
    RETURNING id";

/// Many messages, one array per column: the number of parameters does not grow with the rows.
///
/// The ids are drawn after the sort, hence they rise in the order of the slice.
pub(crate) const INSERT_MANY: &str = "\
    INSERT INTO outbox.messages \
        (topic, ordering_key, message_key, event_type, payload, payload_binary, content_type, headers) \
    SELECT m.topic, m.ordering_key, m.message_key, m.event_type, \
           m.payload, m.payload_binary, m.content_type, m.headers \
    FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::json[], $6::bytea[], $7::text[], $8::json[]) \
        WITH ORDINALITY AS m(topic, ordering_key, message_key, event_type, \
                             payload, payload_binary, content_type, headers, position) \
    ORDER BY m.position \
    RETURNING id";
