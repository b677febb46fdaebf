//! Postgres: where it is, the leader's session, and all SQL.

mod address;
mod doctor_queries;
mod operator_queries;
mod page_queries;
mod pooler;
mod queries;
mod rights;
mod row;
mod session;
mod target;
mod tls;
mod verify_queries;

pub(crate) use doctor_queries::doctor_sql;
pub(crate) use operator_queries::operator_sql;
pub(crate) use page_queries::page_sql;
pub(crate) use pooler::keeps_backend;
pub(crate) use queries::sql;
pub(crate) use rights::{RELAY_SEQUENCE, RELAY_TABLES, inbox_grants, outbox_grants};
pub(crate) use row::MessageRow;
pub(crate) use session::{HEARTBEAT, Session};
pub use target::PostgresTarget;
pub use tls::{TlsMode, TlsSettings};
pub(crate) use verify_queries::verify_sql;
