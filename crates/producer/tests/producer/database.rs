//! A fresh database on the tests' shared server.

use std::time::Duration;

use outbox_testkit::Postgres;
use tokio_postgres::Client;

pub(crate) use outbox_testkit::eventually;

/// For every wait: far more than a busy machine needs, and an end for a test that hangs.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// The first migration, as it is shipped.
pub(crate) const MIGRATION: &str = include_str!("../../../../migrations/outbox/0001_outbox.sql");

pub(crate) struct Database {
    server: &'static Postgres,
    name: String,
}

impl Database {
    /// With the outbox schema.
    pub(crate) async fn outbox() -> Self {
        let server = Postgres::shared().await.unwrap();
        Self {
            server,
            name: server.fresh_outbox().await.unwrap(),
        }
    }

    /// Without any schema.
    pub(crate) async fn empty() -> Self {
        let server = Postgres::shared().await.unwrap();
        Self {
            server,
            name: server.fresh_database().await.unwrap(),
        }
    }

    pub(crate) async fn client(&self) -> Client {
        self.server.connect(&self.name).await.unwrap()
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn url(&self) -> String {
        self.server.url(&self.name)
    }

    /// The same through another port.
    pub(crate) fn url_via(&self, port: u16) -> String {
        self.server.url_via(port, &self.name)
    }

    /// Committed messages.
    pub(crate) async fn count(&self) -> i64 {
        let count = "SELECT count(*) FROM outbox.messages";
        self.client()
            .await
            .query_one(count, &[])
            .await
            .unwrap()
            .get(0)
    }

    /// Makes a role that may use the schema, and what `grants` gives it. Roles belong to the whole server:
    /// each test has its own.
    pub(crate) async fn role(&self, name: &str, grants: &str) {
        let sql = format!("CREATE ROLE {name}; GRANT USAGE ON SCHEMA outbox TO {name}; {grants}");
        self.client().await.batch_execute(&sql).await.unwrap();
    }

    /// Waits until so many sessions of this database wait for a lock.
    pub(crate) async fn sessions_wait_for_locks(&self, expected: i64) {
        let client = self.client().await;
        let query = "SELECT count(*) FROM pg_stat_activity \
                     WHERE datname = current_database() AND wait_event_type = 'Lock'";
        eventually(DEADLINE, "sessions that wait for a lock", || async {
            let waiting: i64 = client.query_one(query, &[]).await.unwrap().get(0);
            if waiting == expected {
                Ok(())
            } else {
                Err(waiting)
            }
        })
        .await
        .unwrap();
    }
}
