//! Connections, and a fresh database for each test.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use tokio_postgres::{Client, Config, NoTls};

use super::Postgres;
use crate::Error;

/// `template0` has no connections that could be in the way, and the cluster's own encoding and locale.
const CREATE_DATABASE: &str = "CREATE DATABASE {name} TEMPLATE template0";

impl Postgres {
    /// Connects as the superuser over TCP without TLS. The connection is driven by a task of the current
    /// runtime and closes when the client is dropped.
    ///
    /// # Errors
    ///
    /// The server is down, or refuses.
    pub async fn connect(&self, database: &str) -> Result<Client, Error> {
        self.connect_with(&self.tcp(), database).await
    }

    /// The same by its Unix socket, as [`socket_url`](Self::socket_url) does.
    ///
    /// # Errors
    ///
    /// The server is down, or refuses.
    pub async fn connect_by_socket(&self, database: &str) -> Result<Client, Error> {
        self.connect_with(&self.private(), database).await
    }

    /// Makes an empty database, and returns its name: no other database of any server of this process has it.
    ///
    /// # Errors
    ///
    /// The server is down, or refuses.
    pub async fn fresh_database(&self) -> Result<String, Error> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let name = format!("fresh_{}", NEXT.fetch_add(1, Ordering::Relaxed));
        self.admin(&CREATE_DATABASE.replace("{name}", &name))
            .await?;
        Ok(name)
    }

    /// A fresh database with the producer's schema: every file of `migrations/outbox`, in the order of
    /// names.
    ///
    /// # Errors
    ///
    /// The server is down, or a migration fails; the message names the file.
    pub async fn fresh_outbox(&self) -> Result<String, Error> {
        let database = self.fresh_database().await?;
        self.migrate(&database, "outbox").await?;
        Ok(database)
    }

    /// A fresh database with the consumer's schema: every file of `migrations/inbox`, in the order of names.
    ///
    /// # Errors
    ///
    /// The server is down, or a migration fails; the message names the file.
    pub async fn fresh_inbox(&self) -> Result<String, Error> {
        let database = self.fresh_database().await?;
        self.migrate(&database, "inbox").await?;
        Ok(database)
    }

    /// Applies one of the two sets of migrations, `outbox` or `inbox`, to an existing database.
    ///
    /// # Errors
    ///
    /// The server is down, or a migration fails; the message names the file.
    pub async fn migrate(&self, database: &str, set: &str) -> Result<(), Error> {
        // Read when it runs, so that a new file needs no line here.
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../migrations")
            .join(set);
        let client = self.connect_with(&self.private(), database).await?;
        for path in sql_files(&dir)? {
            let sql = fs::read_to_string(&path)
                .map_err(|e| Error::io(format!("read {}", path.display()), e))?;
            client
                .batch_execute(&sql)
                .await
                .map_err(|e| self.error(format!("apply {}", path.display()), e))?;
        }
        Ok(())
    }

    fn tcp(&self) -> Config {
        let mut config = Config::new();
        config.host("127.0.0.1").port(self.port()).user("postgres");
        config
    }

    /// The way that is open whatever `pg_hba.conf` says about TCP.
    pub(super) fn private(&self) -> Config {
        let Some(socket_dir) = self.socket_dir() else {
            return self.tcp();
        };
        let mut config = Config::new();
        config
            .host_path(socket_dir)
            .port(self.port())
            .user("postgres");
        config
    }

    pub(super) async fn connect_with(
        &self,
        config: &Config,
        database: &str,
    ) -> Result<Client, Error> {
        let (client, connection) = config
            .clone()
            .dbname(database)
            .application_name("outbox-testkit")
            .connect(NoTls)
            .await
            .map_err(|e| {
                self.error(
                    format!("connect to the database {database} on port {}", self.port()),
                    e,
                )
            })?;
        // The client sees every error of the connection in its own calls.
        tokio::spawn(connection);
        Ok(client)
    }

    /// Runs one statement as the superuser, whatever `pg_hba.conf` says about TCP.
    pub(super) async fn admin(&self, sql: &str) -> Result<(), Error> {
        let client = self.connect_with(&self.private(), "postgres").await?;
        client
            .batch_execute(sql)
            .await
            .map_err(|e| self.error(format!("run {sql}"), e))
    }

    /// The single value that a query returns.
    pub(super) async fn admin_value<T>(&self, sql: &str) -> Result<T, Error>
    where
        T: for<'a> tokio_postgres::types::FromSql<'a>,
    {
        let client = self.connect_with(&self.private(), "postgres").await?;
        let row = client.query_one(sql, &[]).await;
        row.and_then(|row| row.try_get(0))
            .map_err(|e| self.error(format!("run {sql}"), e))
    }

    pub(super) fn error(&self, what: String, source: tokio_postgres::Error) -> Error {
        Error::postgres(what, source, self.server.log_tail())
    }
}

fn sql_files(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let unreadable = |e| Error::io(format!("list {}", dir.display()), e);
    let mut files = Vec::new();
    for entry in dir.read_dir().map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == "sql") {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(Error::misuse(format!("no .sql file in {}", dir.display())));
    }
    Ok(files)
}
