//! Streaming replicas: they lag, and are promoted without what they had not received.

use std::{
    fs,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tokio_postgres::types::PgLsn;

use super::Postgres;
use crate::{
    Error, eventually,
    ports::Port,
    supervised::{Supervised, run_tool},
};

/// A streaming connection is made within a fraction of a second; promotion and catching up write to disk.
const REPLICATION_DEADLINE: Duration = Duration::from_secs(30);

const RECEIVERS: &str = "SELECT count(*) FROM pg_stat_wal_receiver WHERE status = 'streaming'";
const SYNC_STATE: &str = "SELECT sync_state FROM pg_stat_replication WHERE application_name = $1";
const WRITTEN_LSN: &str = "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
    ELSE pg_current_wal_lsn() END";
const REPLAYED_LSN: &str = "SELECT pg_last_wal_replay_lsn()";
const RELOAD: &str = "SELECT pg_reload_conf()";

/// Options of a standby; made by [`Postgres::standby_builder`].
#[derive(Debug)]
#[must_use = "nothing starts before `start`"]
pub struct StandbyBuilder<'a> {
    primary: &'a Postgres,
    name: String,
    port: u16,
    synchronous: bool,
    settings: Vec<(String, String)>,
}

impl StandbyBuilder<'_> {
    /// The `application_name` of the standby, which `synchronous_standby_names` on the primary refers to.
    /// Default: a name that no other standby of this process has.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Makes every commit on the primary wait for this standby, by `synchronous_standby_names`.
    pub fn synchronous(mut self) -> Self {
        self.synchronous = true;
        self
    }

    /// Streams through another port, for example that of a [`Proxy`](crate::Proxy) to the primary.
    pub fn via(mut self, port: u16) -> Self {
        self.port = port;
        self
    }

    /// A line of the standby's `postgresql.conf`, in addition to those of the primary.
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Copies the primary and starts the standby; returns when it streams and takes read-only sessions.
    ///
    /// # Errors
    ///
    /// The primary is down, or the standby does not start or does not stream.
    pub async fn start(self) -> Result<Postgres, Error> {
        let primary = self.primary;
        let server = Supervised::new("standby", primary.server.identity().clone())?;
        let data_dir = server.dir().join("data");
        let host = primary
            .socket_dir()
            .map_or("127.0.0.1".into(), |dir| dir.display().to_string());
        let port = primary.port().to_string();
        let mut args: Vec<&std::ffi::OsStr> = vec!["-D".as_ref(), data_dir.as_os_str()];
        let connection = ["-h", &host, "-p", &port, "-U", "postgres"];
        let options = ["--checkpoint=fast", "--wal-method=stream", "--no-sync"];
        args.extend(
            connection
                .iter()
                .chain(&options)
                .map(AsRef::<std::ffi::OsStr>::as_ref),
        );
        run_tool(
            server.identity(),
            &primary.bin_dir.join("pg_basebackup"),
            args,
        )
        .await?;

        let mut standby = Postgres::stopped(server, primary.bin_dir.clone(), Port::reserve()?);
        let upstream = format!(
            "host=127.0.0.1 port={} user=postgres application_name={}",
            self.port, self.name
        );
        let mut settings = vec![
            ("primary_conninfo".to_owned(), upstream.clone()),
            // Waiting for more WAL, or for a primary that is back, takes this long instead of 5 s.
            ("wal_retrieve_retry_interval".to_owned(), "100ms".to_owned()),
            // Promoted, it would wait for itself.
            ("synchronous_standby_names".to_owned(), String::new()),
        ];
        settings.extend(self.settings);
        standby.forget_altered_settings()?;
        standby.append_settings(&settings)?;
        standby.write_file(&data_dir.join("standby.signal"), b"")?;
        standby.upstream = Some(upstream);
        let standby = standby.first_start().await?;
        standby.receives(true).await?;
        if self.synchronous {
            primary.set_synchronous(&self.name).await?;
        }
        Ok(standby)
    }
}

impl Postgres {
    /// Makes an asynchronous streaming replica of this server; returns when it streams.
    ///
    /// # Errors
    ///
    /// This server is down, or the standby does not start or does not stream.
    pub async fn standby(&self) -> Result<Postgres, Error> {
        self.standby_builder().start().await
    }

    /// The options of a streaming replica of this server.
    pub fn standby_builder(&self) -> StandbyBuilder<'_> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        StandbyBuilder {
            primary: self,
            name: format!("standby_{}", NEXT.fetch_add(1, Ordering::Relaxed)),
            port: self.port(),
            synchronous: false,
            settings: Vec::new(),
        }
    }

    /// Cuts a standby off from its primary: it lives and answers, but receives no more WAL. Returns when the
    /// stream has ended.
    ///
    /// # Errors
    ///
    /// This is no standby, or the stream does not end.
    pub async fn stop_receiving(&self) -> Result<(), Error> {
        self.upstream()?;
        self.set_upstream("").await?;
        self.receives(false).await
    }

    /// Ends [`stop_receiving`](Self::stop_receiving); returns when the standby streams again.
    ///
    /// # Errors
    ///
    /// This is no standby, or it does not reach its primary.
    pub async fn receive_again(&self) -> Result<(), Error> {
        self.set_upstream(self.upstream()?).await?;
        self.receives(true).await
    }

    /// Waits until this standby has replayed everything that `primary` has written by now.
    ///
    /// # Errors
    ///
    /// It has not after 30 s.
    pub async fn caught_up_with(&self, primary: &Postgres) -> Result<(), Error> {
        let written: PgLsn = primary.admin_value(WRITTEN_LSN).await?;
        eventually(REPLICATION_DEADLINE, "the standby to catch up", || async {
            let replayed: Option<PgLsn> = self
                .admin_value(REPLAYED_LSN)
                .await
                .map_err(|e| e.to_string())?;
            match replayed {
                Some(replayed) if replayed >= written => Ok(()),
                other => Err(format!("{other:?} of {written}")),
            }
        })
        .await
    }

    /// Makes a standby the primary of a new timeline, whether or not it had received everything; returns when
    /// it takes writes. The old primary is left as it is.
    ///
    /// # Errors
    ///
    /// This is no standby, or the promotion takes more than 30 s.
    pub async fn promote(&self) -> Result<(), Error> {
        self.upstream()?;
        let seconds = REPLICATION_DEADLINE.as_secs();
        let promoted: bool = self
            .admin_value(&format!("SELECT pg_promote(true, {seconds})"))
            .await?;
        if promoted {
            return Ok(());
        }
        Err(Error::server(
            format!(
                "the standby on port {} was not promoted in {seconds} s",
                self.port()
            ),
            self.server.log_tail(),
        ))
    }

    fn upstream(&self) -> Result<&str, Error> {
        self.upstream.as_deref().ok_or_else(|| {
            Error::misuse(format!(
                "the Postgres server on port {} is no standby",
                self.port()
            ))
        })
    }

    async fn set_upstream(&self, conninfo: &str) -> Result<(), Error> {
        self.admin(&format!("ALTER SYSTEM SET primary_conninfo = '{conninfo}'"))
            .await?;
        self.admin(RELOAD).await
    }

    async fn set_synchronous(&self, name: &str) -> Result<(), Error> {
        self.admin(&format!(
            "ALTER SYSTEM SET synchronous_standby_names = '\"{name}\"'"
        ))
        .await?;
        self.admin(RELOAD).await?;
        let client = self.connect_with(&self.private(), "postgres").await?;
        eventually(
            REPLICATION_DEADLINE,
            "the standby to be synchronous",
            || async {
                let row = client
                    .query_opt(SYNC_STATE, &[&name])
                    .await
                    .map_err(|e| e.to_string())?;
                match row.map(|row| row.get::<_, String>(0)).as_deref() {
                    Some("sync") => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            },
        )
        .await
    }

    async fn receives(&self, expected: bool) -> Result<(), Error> {
        let what = if expected {
            "the standby to stream"
        } else {
            "the stream to end"
        };
        eventually(REPLICATION_DEADLINE, what, || async {
            let receivers: i64 = self
                .admin_value(RECEIVERS)
                .await
                .map_err(|e| e.to_string())?;
            if (receivers > 0) == expected {
                Ok(())
            } else {
                Err(format!("{receivers} streams"))
            }
        })
        .await
    }

    /// Drops what `ALTER SYSTEM` had set on the primary for its own standbys.
    fn forget_altered_settings(&self) -> Result<(), Error> {
        let path = self.data_dir().join("postgresql.auto.conf");
        let text = fs::read_to_string(&path)
            .map_err(|e| Error::io(format!("read {}", path.display()), e))?;
        let kept: Vec<&str> = text
            .lines()
            .filter(|line| !line.starts_with("synchronous_standby_names"))
            .filter(|line| !line.starts_with("primary_conninfo"))
            .collect();
        self.write_file(&path, format!("{}\n", kept.join("\n")).as_bytes())
    }
}
