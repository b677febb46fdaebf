//! The migrations, embedded, and how they are applied.

use std::time::Duration;

use tokio_postgres::Client;

use crate::error::{Error, Result, postgres_fault};
use crate::postgres::PostgresTarget;
use crate::protocol::failure::PostgresFault;

/// A migration waits this long for open writers before it lets the others pass and tries again.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// How often it tries.
const TRIES_MAX: u32 = 30;

/// Who may migrate.
const OWNER: &str =
    "migrate as the owner of the schema, or for a new one as a role with CREATE on the database";

/// Which schema to migrate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schema {
    /// `outbox`, in the producer's database.
    Outbox,
    /// `inbox`, in the consumer's database.
    Inbox,
}

impl Schema {
    /// The name of the schema in Postgres.
    pub fn name(self) -> &'static str {
        match self {
            Schema::Outbox => "outbox",
            Schema::Inbox => "inbox",
        }
    }

    /// The migrations, oldest first; each records its own version, which is its place in this list.
    pub fn migrations(self) -> &'static [&'static str] {
        match self {
            Schema::Outbox => &[include_str!("../../../migrations/outbox/0001_outbox.sql")],
            Schema::Inbox => &[include_str!("../../../migrations/inbox/0001_inbox.sql")],
        }
    }

    fn newest(self) -> i32 {
        i32::try_from(self.migrations().len()).unwrap_or(i32::MAX)
    }
}

/// What a migration found and left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migrated {
    /// The version before; none when there was no schema.
    pub from: Option<i32>,
    /// The version now.
    pub to: i32,
}

/// Brings a schema to the newest version. May run twice, from two places at once, and while producers write.
///
/// # Errors
///
/// A schema of that name that is not ours, or is newer than this binary; or that of the connection.
pub async fn migrate(target: &PostgresTarget, schema: Schema) -> Result<Migrated> {
    let (client, _) = target
        .connect_directly("outbox-relay migrate", Duration::from_secs(10))
        .await?;
    let setup = format!(
        "SET lock_timeout = {}; SET client_min_messages = warning; SET default_transaction_isolation = 'read committed'",
        LOCK_TIMEOUT.as_millis()
    );
    client
        .batch_execute(&setup)
        .await
        .map_err(|source| Error::Postgres {
            doing: "set up the session",
            source,
        })?;
    let from = version(&client, schema)
        .await
        .map_err(|error| error.or_owner(OWNER))?;
    if let Some(version) = from.filter(|version| *version > schema.newest()) {
        return Err(Error::Setup {
            problem: format!(
                "the schema \"{}\" is at version {version} and this binary knows up to {}",
                schema.name(),
                schema.newest()
            ),
            remedy: "upgrade outbox-relay".into(),
        });
    }
    for sql in schema.migrations() {
        apply(&client, schema, sql)
            .await
            .map_err(|error| error.or_owner(OWNER))?;
    }
    let to = version(&client, schema).await?.unwrap_or(0);
    Ok(Migrated { from, to })
}

async fn apply(client: &Client, schema: Schema, sql: &str) -> Result<()> {
    for _ in 1..TRIES_MAX {
        let Err(source) = client.batch_execute(sql).await else {
            return Ok(());
        };
        match postgres_fault(&source) {
            PostgresFault::State("55P03" | "40P01" | "40001") => {
                tracing::info!("waiting for open transactions that wrote messages");
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            PostgresFault::State("42P06") => {
                return Err(Error::Setup {
                    problem: format!(
                        "the schema \"{}\" was not made by these migrations",
                        schema.name()
                    ),
                    remedy: "rename or drop that schema, or use another database".into(),
                });
            }
            _ => {
                return Err(Error::Postgres {
                    doing: "migrate",
                    source,
                });
            }
        }
    }
    client
        .batch_execute(sql)
        .await
        .map_err(|source| Error::Postgres {
            doing: "migrate",
            source,
        })
}

async fn version(client: &Client, schema: Schema) -> Result<Option<i32>> {
    let failed = |source| Error::Postgres {
        doing: "read the schema version",
        source,
    };
    let table = format!("{}.schema_version", schema.name());
    let exists: bool = client
        .query_one("SELECT to_regclass($1) IS NOT NULL", &[&table])
        .await
        .map_err(failed)?
        .get(0);
    if !exists {
        return Ok(None);
    }
    let sql = format!("SELECT max(version) FROM {table}");
    Ok(client.query_one(&sql, &[]).await.map_err(failed)?.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_migration_records_its_own_version() {
        for schema in [Schema::Outbox, Schema::Inbox] {
            for (index, sql) in schema.migrations().iter().enumerate() {
                let record = format!(
                    "INSERT INTO {}.schema_version (version) VALUES ({})",
                    schema.name(),
                    index + 1
                );
                assert!(sql.contains(&record), "{record}");
            }
        }
    }
}
