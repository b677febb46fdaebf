//! A message as the read statement returns it, without a copy of its bytes.

use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, PgLsn, Type};

/// A row of `page_sql::page`. Columns by position, in the order of that statement.
#[derive(Debug)]
pub(crate) struct MessageRow {
    row: Row,
    /// Asked for more often than everything else.
    id: i64,
}

/// A value as it came over the wire. For text and json (not jsonb) these are the bytes that were written.
struct Verbatim<'a>(&'a [u8]);

impl<'a> FromSql<'a> for Verbatim<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Verbatim(raw))
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::JSON | Type::BYTEA | Type::TEXT)
    }
}

/// A timestamp as Postgres sends it: microseconds since 2000.
struct Micros(i64);

impl<'a> FromSql<'a> for Micros {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Micros(i64::from_be_bytes(raw.try_into()?)))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}

impl From<Row> for MessageRow {
    fn from(row: Row) -> Self {
        MessageRow {
            id: row.get(1),
            row,
        }
    }
}

impl MessageRow {
    /// Whether the row was found inside a gap (`R`), and not above `high` (`Q`).
    pub(crate) fn late(&self) -> bool {
        self.row.get(0)
    }

    pub(crate) fn id(&self) -> i64 {
        self.id
    }

    pub(crate) fn topic(&self) -> &str {
        self.row.get(2)
    }

    pub(crate) fn ordering_key(&self) -> Option<&str> {
        self.row.get(3)
    }

    pub(crate) fn message_key(&self) -> &str {
        self.row.get(4)
    }

    pub(crate) fn event_type(&self) -> Option<&str> {
        self.row.get(5)
    }

    /// Microseconds since 1970, UTC. Postgres counts them from 2000.
    pub(crate) fn created_at_us(&self) -> i64 {
        self.row.get::<_, Micros>(6).0 + 946_684_800_000_000
    }

    pub(crate) fn content_type(&self) -> Option<&str> {
        self.row.get(7)
    }

    pub(crate) fn headers(&self) -> Option<&[u8]> {
        self.row.get::<_, Option<Verbatim<'_>>>(8).map(|v| v.0)
    }

    pub(crate) fn payload(&self) -> &[u8] {
        let json: Option<Verbatim<'_>> = self.row.get(9);
        let binary: Option<Verbatim<'_>> = self.row.get(10);
        json.or(binary).map_or(&[], |v| v.0)
    }

    /// What the row counts against the page's byte limit.
    pub(crate) fn bytes(&self) -> i64 {
        i64::from(self.row.get::<_, i32>(11))
    }

    /// That of this row and of those before it in the same part of the page.
    pub(crate) fn running_bytes(&self) -> i64 {
        self.row.get(12)
    }

    /// Up to where the log has to be flushed before the page may be published; none where it is.
    pub(crate) fn unflushed(&self) -> Option<PgLsn> {
        self.row.get(13)
    }

    /// The snapshot of the statement, where it was asked for.
    pub(crate) fn snapshot(&self) -> Option<&str> {
        self.row.try_get(14).ok()
    }
}
