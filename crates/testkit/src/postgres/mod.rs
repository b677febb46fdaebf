//! A real Postgres server on a private port, with everything that can happen to one.

mod builder;
mod databases;
mod faults;
mod snapshot;
mod standby;
mod system_id;
mod template;

use std::{
    ffi::OsString,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use tokio::sync::OnceCell;

pub use self::{builder::PostgresBuilder, faults::Shutdown, standby::StandbyBuilder};
use crate::{Error, ports::Port, sandbox, supervised::Supervised, wait::POLL_INTERVAL};

/// Recovery after a crash in the middle of heavy writes on a slow machine; past this it hangs.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// Part of every server's configuration while it starts, and removed then. Recovery begins with an fsync of each of
/// a thousand files, most of them copied just now: that takes seconds and protects from nothing that a test can
/// do, because the system itself does not crash.
const STARTING: &str = "starting.conf";

/// Longest path of a Unix socket that all systems take (macOS: 104 bytes with the final zero), less the
/// name that Postgres adds.
const SOCKET_DIR_BYTES_MAX: usize = 103 - "/.s.PGSQL.65535".len();

/// A Postgres server of this test process. Dropped, it is killed and its data is removed; the same happens
/// when the test panics or its process is killed.
///
/// All methods take `&self`, so that a test can fault the server while its tasks use it.
#[derive(Debug)]
pub struct Postgres {
    server: Supervised,
    bin_dir: PathBuf,
    port: Mutex<Port>,
    /// Faults are refused on the server that other tests use too.
    shared: bool,
    /// `primary_conninfo` of a standby.
    upstream: Option<String>,
}

impl Postgres {
    /// Starts a server with a system identifier of its own: UTF8, locale C, superuser `postgres`, no
    /// passwords, `fsync` on (only while it starts, files that were copied just now are not synced).
    ///
    /// # Errors
    ///
    /// Postgres is not installed, or did not start; the message ends with its log.
    pub async fn start() -> Result<Self, Error> {
        Self::builder().start().await
    }

    /// The options of a server that is started later.
    pub fn builder() -> PostgresBuilder {
        PostgresBuilder::new()
    }

    /// The server that all tests of this process use, each with a fresh database. It is started by the first
    /// caller and ends with the process. Faults are refused on it: a test that needs one starts its own.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start); the next caller tries again.
    pub async fn shared() -> Result<&'static Self, Error> {
        static SHARED: OnceCell<Postgres> = OnceCell::const_new();
        SHARED
            .get_or_try_init(|| async {
                let mut postgres = Self::builder()
                    // Test binaries run their tests on many threads, each with several pools.
                    .setting("max_connections", "400")
                    .setting("max_prepared_transactions", "20")
                    .start()
                    .await?;
                postgres.shared = true;
                Ok(postgres)
            })
            .await
    }

    fn stopped(server: Supervised, bin_dir: PathBuf, port: Port) -> Self {
        Self {
            server,
            bin_dir,
            port: Mutex::new(port),
            shared: false,
            upstream: None,
        }
    }

    /// The TCP port on 127.0.0.1; it stays the same over stops and restores.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.lock_port().number()
    }

    /// `postgres://…` for a database of this server.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        self.url_via(self.port(), database)
    }

    /// The same through another port, for example that of a [`Proxy`](crate::Proxy).
    #[must_use]
    pub fn url_via(&self, port: u16, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{port}/{database}")
    }

    /// The same by its Unix socket; over TCP where the temporary directory's path is too long for one.
    #[must_use]
    pub fn socket_url(&self, database: &str) -> String {
        let Some(dir) = self.socket_dir() else {
            return self.url(database);
        };
        let host = dir.display().to_string().replace('/', "%2F");
        format!("postgres://postgres@{host}:{}/{database}", self.port())
    }

    /// The data directory.
    #[must_use]
    pub fn data_dir(&self) -> PathBuf {
        self.server.dir().join("data")
    }

    /// The directory with `psql`, `pg_dump` and the other tools of this version.
    #[must_use]
    pub fn bin_dir(&self) -> &Path {
        &self.bin_dir
    }

    /// What the server has logged since the cluster was made.
    #[must_use]
    pub fn log(&self) -> String {
        self.server.log_from(0)
    }

    /// The first start, where the port may turn out to be taken.
    async fn first_start(self) -> Result<Self, Error> {
        for _ in 1..builder::PORT_TRIES_MAX {
            let position = self.server.log_len();
            match self.launch().await {
                Ok(()) => return Ok(self),
                Err(_)
                    if self
                        .server
                        .log_from(position)
                        .contains("Address already in use") =>
                {
                    *self.lock_port() = Port::reserve()?;
                }
                Err(e) => return Err(e),
            }
        }
        self.launch().await?;
        Ok(self)
    }

    /// Starts the server and waits until it takes connections.
    async fn launch(&self) -> Result<(), Error> {
        let port = self.port();
        let data_dir = self.data_dir();
        let mut args: Vec<OsString> = vec!["-D".into(), data_dir.clone().into()];
        let socket_dir = self.socket_dir().map(Path::display);
        for setting in [
            format!("port={port}"),
            "listen_addresses=127.0.0.1".to_owned(),
            format!(
                "unix_socket_directories={}",
                socket_dir.map_or(String::new(), |d| d.to_string())
            ),
        ] {
            args.extend(["-c".into(), setting.into()]);
        }
        let starting = data_dir.join(STARTING);
        self.write_file(&starting, b"fsync = off\n")?;
        self.server.spawn(&self.bin_dir.join("postgres"), &args)?;
        let pid = self
            .server
            .pid()
            .expect("it was started just now")
            .to_string();

        // The lock file says when connections are taken, and whose they are: connecting could reach
        // somebody else's server on that port.
        let started = Instant::now();
        loop {
            let lock = fs::read_to_string(data_dir.join("postmaster.pid")).unwrap_or_default();
            let mut lines = lock.lines();
            if lines.next() == Some(&pid) && lines.nth(6).is_some_and(|s| s.trim() == "ready") {
                break;
            }
            if !self.server.is_running() {
                return Err(Error::server(
                    format!("Postgres on port {port} did not start"),
                    self.server.log_tail(),
                ));
            }
            if started.elapsed() > START_DEADLINE {
                return Err(Error::server(
                    format!(
                        "Postgres on port {port} takes no connections after {START_DEADLINE:?}"
                    ),
                    self.server.log_tail(),
                ));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        fs::remove_file(&starting)
            .map_err(|e| Error::io(format!("remove {}", starting.display()), e))?;
        self.server.signal(Signal::SIGHUP);
        Ok(())
    }

    /// Where the Unix socket is, unless the temporary directory's path is too long for one.
    fn socket_dir(&self) -> Option<&Path> {
        let dir = self.server.dir();
        (dir.as_os_str().len() <= SOCKET_DIR_BYTES_MAX).then_some(dir)
    }

    /// Adds lines to `postgresql.conf`; later lines win.
    fn append_settings(&self, settings: &[(String, String)]) -> Result<(), Error> {
        let path = self.data_dir().join("postgresql.conf");
        let lines: String = settings
            .iter()
            .map(|(name, value)| format!("{name} = '{}'\n", value.replace('\'', "''")))
            .collect();
        File::options()
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(lines.as_bytes()))
            .map_err(|e| Error::io(format!("write {}", path.display()), e))
    }

    /// Writes a file that only the server's account can read.
    fn write_file(&self, path: &Path, content: &[u8]) -> Result<(), Error> {
        fs::write(path, content).map_err(|e| Error::io(format!("write {}", path.display()), e))?;
        sandbox::set_mode(path, 0o600)?;
        self.server.identity().own(path)
    }

    fn lock_port(&self) -> std::sync::MutexGuard<'_, Port> {
        self.port
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
