//! The bounds of a message. Each one has its twin among the CHECK constraints of `outbox.messages`.

/// Longest topic, in characters; only `A`–`Z`, `a`–`z`, `0`–`9`, `.`, `_` and `-` are allowed.
pub const TOPIC_CHARS_MAX: usize = 200;

/// Longest message key, in bytes of UTF-8; the shortest has one.
pub const MESSAGE_KEY_BYTES_MAX: usize = 512;

/// Longest ordering key, in bytes of UTF-8; the shortest has one.
pub const ORDERING_KEY_BYTES_MAX: usize = 16 * 1024;

/// Longest event type, in bytes of UTF-8; the shortest has one.
pub const EVENT_TYPE_BYTES_MAX: usize = 200;

/// Longest content type of a binary payload, in characters of printable ASCII; the shortest has one.
pub const CONTENT_TYPE_CHARS_MAX: usize = 200;

/// Most that all headers may take together, in bytes of the JSON object they are stored as.
pub const HEADERS_BYTES_MAX: usize = 64 * 1024;

/// Largest payload, in bytes.
pub const PAYLOAD_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Most messages that [`write_all`](crate::write_all) puts into one statement.
///
/// It bounds the memory that the server needs for the statement's arrays.
pub const STATEMENT_ROWS_MAX: usize = 10_000;

/// Payload and header bytes at which [`write_all`](crate::write_all) begins another statement.
///
/// Postgres takes at most 1 GiB in one statement, and both sides hold it in memory.
pub const STATEMENT_BYTES_MAX: usize = 16 * 1024 * 1024;
