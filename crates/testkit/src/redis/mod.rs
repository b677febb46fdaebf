//! A real Redis server on a private port, with everything that can happen to one.

mod cluster;
mod faults;
mod replica;
mod sentinels;
mod snapshot;

use std::{
    ffi::OsString,
    fs,
    path::PathBuf,
    sync::Mutex,
    time::{Duration, Instant},
};

pub use self::{
    cluster::RedisCluster,
    sentinels::{Sentinels, SentinelsBuilder},
    snapshot::Keys,
};

use ::redis::{AsyncConnectionConfig, Client, aio::MultiplexedConnection};

use crate::{
    Certificate, Error, binaries, identity::Identity, ports::Port, supervised::Supervised,
    wait::POLL_INTERVAL,
};

/// Loading a large file with `--key-load-delay` takes seconds; past this it hangs.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// How long the kit's connections wait. The client's own half second is short on a busy machine, and no test is
/// about it.
const ANSWER_DEADLINE: Duration = Duration::from_secs(30);

/// Starts are tried on another port when somebody outside the kit took this one.
const PORT_TRIES_MAX: u32 = 5;

/// What the log says once the server listens, before it has loaded its data.
const LISTENING: &str = "Server initialized";
/// What the log says once the data is loaded.
const LOADED: &str = "Ready to accept connections";

/// When an append-only file reaches the disk (`appendfsync`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fsync {
    /// Once a second.
    EverySecond,
    /// Before each reply.
    Always,
}

/// What a Redis server keeps over its own end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// Nothing: it comes back empty.
    None,
    /// An append-only file.
    Aof(Fsync),
    /// A dump: written by [`Redis::save`] and by [`Redis::stop`], never by itself.
    Rdb,
}

/// Options of a Redis server; made by [`Redis::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing starts before `start`"]
pub struct RedisBuilder {
    persistence: Persistence,
    args: Vec<String>,
    password: Option<String>,
    tls: Option<Certificate>,
    client_root: Option<PathBuf>,
    replication_root: Option<PathBuf>,
}

impl RedisBuilder {
    /// What the server keeps over its own end. Default: nothing.
    pub fn persistence(mut self, persistence: Persistence) -> Self {
        self.persistence = persistence;
        self
    }

    /// One option of the command line with its value, as `arg("--maxmemory", "1mb")`. It goes behind the
    /// kit's own, and wins.
    pub fn arg(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.args.extend([name.into(), value.into()]);
        self
    }

    /// Makes the server demand a password from the default user; [`Redis::url`] then contains it.
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Opens a second port for connections with TLS, [`Redis::tls_port`]. The kit's own connections use the first.
    pub fn tls(mut self, certificate: Certificate) -> Self {
        self.tls = Some(certificate);
        self
    }

    /// Makes the server demand a certificate of each client on the port with TLS, of the authority with this file
    /// ([`Authority::root`](crate::Authority::root)).
    pub fn client_authority(mut self, root: PathBuf) -> Self {
        self.client_root = Some(root);
        self
    }

    /// On the port with TLS replicas are fed, too, and sentinels watch that one. The servers trust each other's certificates
    /// by the authority with this file ([`Authority::root`](crate::Authority::root)).
    pub fn tls_replication(mut self, root: PathBuf) -> Self {
        self.replication_root = Some(root);
        self
    }

    /// Starts the server; returns when it takes connections.
    ///
    /// # Errors
    ///
    /// Redis is not installed, or did not start; the message ends with its log.
    pub async fn start(self) -> Result<Redis, Error> {
        let redis = Redis {
            server: Supervised::new("redis", Identity::Ourselves)?,
            program: binaries::redis_server()?,
            port: Mutex::new(Port::reserve()?),
            tls_port: self.tls.is_some().then(Port::reserve).transpose()?,
            options: self,
            upstream: Mutex::new(None),
        };
        fs::create_dir(redis.data_dir())
            .map_err(|e| Error::io(format!("create {}", redis.data_dir().display()), e))?;
        for _ in 1..PORT_TRIES_MAX {
            let position = redis.server.log_len();
            match redis.launch(LOADED).await {
                Ok(()) => return Ok(redis),
                Err(_)
                    if redis
                        .server
                        .log_from(position)
                        .contains("Address already in use") =>
                {
                    *redis.lock_port() = Port::reserve()?;
                }
                Err(e) => return Err(e),
            }
        }
        redis.launch(LOADED).await?;
        Ok(redis)
    }
}

/// A Redis server of this test process. Dropped, it is killed and its data is removed; the same happens when
/// the test panics or its process is killed.
///
/// All methods take `&self`, so that a test can fault the server while its tasks use it.
#[derive(Debug)]
pub struct Redis {
    server: Supervised,
    program: PathBuf,
    port: Mutex<Port>,
    tls_port: Option<Port>,
    options: RedisBuilder,
    /// The port of the master, where this is a replica; kept over restarts.
    upstream: Mutex<Option<u16>>,
}

impl Redis {
    /// Starts a server that keeps nothing on disk.
    ///
    /// # Errors
    ///
    /// Redis is not installed, or did not start; the message ends with its log.
    pub async fn start() -> Result<Self, Error> {
        Self::builder().start().await
    }

    /// The options of a server that is started later.
    pub fn builder() -> RedisBuilder {
        RedisBuilder {
            persistence: Persistence::None,
            args: Vec::new(),
            password: None,
            tls: None,
            client_root: None,
            replication_root: None,
        }
    }

    /// The TCP port on 127.0.0.1; it stays the same over stops and restores. The cluster bus, when
    /// `--cluster-enabled yes` is given, is 10,000 higher.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.lock_port().number()
    }

    /// The port for connections with TLS, where [`RedisBuilder::tls`] asked for one.
    #[must_use]
    pub fn tls_port(&self) -> Option<u16> {
        self.tls_port.as_ref().map(Port::number)
    }

    /// The port that replicas and sentinels know.
    fn peer_port(&self) -> u16 {
        match self.options.replication_root {
            Some(_) => self.tls_port().unwrap_or_else(|| self.port()),
            None => self.port(),
        }
    }

    /// `redis://…` of database 0.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_via(self.port())
    }

    /// The same through another port, for example that of a [`Proxy`](crate::Proxy).
    #[must_use]
    pub fn url_via(&self, port: u16) -> String {
        let password = self
            .options
            .password
            .as_ref()
            .map_or(String::new(), |p| format!(":{p}@"));
        format!("redis://{password}127.0.0.1:{port}/0")
    }

    /// Where the server keeps its files.
    #[must_use]
    pub fn data_dir(&self) -> PathBuf {
        self.server.dir().join("data")
    }

    /// What the server has logged since its first start.
    #[must_use]
    pub fn log(&self) -> String {
        self.server.log_from(0)
    }

    /// Connects without TLS; answers are waited for up to 30 s. The connection ends with the current runtime or when all its clones are dropped.
    ///
    /// # Errors
    ///
    /// The server is down, or refuses.
    pub async fn connect(&self) -> Result<MultiplexedConnection, Error> {
        let what = || format!("connect to Redis on port {}", self.port());
        let client = Client::open(self.url()).map_err(|e| self.error(what(), e))?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(ANSWER_DEADLINE))
            .set_response_timeout(Some(ANSWER_DEADLINE));
        client
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .map_err(|e| self.error(what(), e))
    }

    /// Starts the server and waits until its log says `until`.
    async fn launch(&self, until: &str) -> Result<(), Error> {
        let port = self.port();
        let position = self.server.log_len();
        self.server.spawn(&self.program, &self.command_line())?;
        // The log and not the port: that could be somebody else's, and with TLS it would need certificates.
        let started = Instant::now();
        while !self.server.log_from(position).contains(until) {
            if !self.server.is_running() {
                return Err(Error::server(
                    format!("Redis on port {port} did not start"),
                    self.server.log_tail(),
                ));
            }
            if started.elapsed() > START_DEADLINE {
                return Err(Error::server(
                    format!("Redis on port {port} is not up after {START_DEADLINE:?}"),
                    self.server.log_tail(),
                ));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    fn command_line(&self) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec!["--dir".into(), self.data_dir().into()];
        let port = self.port().to_string();
        // Replicas are fed at once, instead of waiting five seconds for more of them.
        for arg in [
            "--port",
            &port,
            "--bind",
            "127.0.0.1",
            "--repl-diskless-sync-delay",
            "0",
        ] {
            args.push(arg.into());
        }
        let persistence: &[&str] = match self.options.persistence {
            Persistence::None => &["--save", "", "--appendonly", "no"],
            // A save point that is never reached by itself, but makes a stop write the dump.
            Persistence::Rdb => &["--save", "31536000 1", "--appendonly", "no"],
            Persistence::Aof(Fsync::EverySecond) => &[
                "--save",
                "",
                "--appendonly",
                "yes",
                "--appendfsync",
                "everysec",
            ],
            Persistence::Aof(Fsync::Always) => &[
                "--save",
                "",
                "--appendonly",
                "yes",
                "--appendfsync",
                "always",
            ],
        };
        args.extend(persistence.iter().map(Into::into));
        if let Some(password) = &self.options.password {
            args.extend(["--requirepass".into(), password.into()]);
        }
        if let Some(master) = *self.lock_upstream() {
            let master = master.to_string();
            args.extend(["--replicaof", "127.0.0.1", &master].map(Into::into));
        }
        if let (Some(port), Some(tls)) = (&self.tls_port, &self.options.tls) {
            args.extend(["--tls-port".into(), port.number().to_string().into()]);
            args.extend(["--tls-cert-file".into(), tls.certificate.clone().into()]);
            args.extend(["--tls-key-file".into(), tls.key.clone().into()]);
            let (of_clients, of_peers) =
                (&self.options.client_root, &self.options.replication_root);
            let root = of_clients.as_ref().or(of_peers.as_ref());
            let root = root.unwrap_or(&tls.certificate).clone();
            args.extend(["--tls-ca-cert-file".into(), root.into()]);
            let yes_or_no = |yes: bool| OsString::from(if yes { "yes" } else { "no" });
            args.extend(["--tls-auth-clients".into(), yes_or_no(of_clients.is_some())]);
            args.extend(["--tls-replication".into(), yes_or_no(of_peers.is_some())]);
        }
        args.extend(self.options.args.iter().map(Into::into));
        args
    }

    fn error(&self, what: String, source: ::redis::RedisError) -> Error {
        Error::redis(what, source, self.server.log_tail())
    }

    fn lock_upstream(&self) -> std::sync::MutexGuard<'_, Option<u16>> {
        self.upstream
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn lock_port(&self) -> std::sync::MutexGuard<'_, Port> {
        self.port
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
