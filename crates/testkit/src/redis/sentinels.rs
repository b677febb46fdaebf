//! Redis Sentinel: processes that watch a server and its replicas, and promote one of them when it is gone.

use std::{
    fmt::Write as _,
    fs,
    time::{Duration, Instant},
};

use ::redis::{Client, RedisConnectionInfo, aio::MultiplexedConnection};
use ::redis::{ConnectionInfo, IntoConnectionInfo};

use super::{LISTENING, Redis};
use crate::{
    Certificate, Error, binaries, eventually, identity::Identity, ports::Port,
    supervised::Supervised, wait::POLL_INTERVAL,
};

/// Sentinels hear of each other over the server that they watch, every two seconds.
const MEETING_DEADLINE: Duration = Duration::from_secs(60);

/// A primary that says nothing for this long is taken for dead. On a busy machine a shorter time would see failovers
/// that no test asked for.
const DOWN_AFTER_MS: u32 = 3_000;

/// The name under which the primary is watched.
const NAME: &str = "shop";

/// Options of sentinels; made by [`Sentinels::builder`].
#[derive(Clone, Debug, Default)]
#[must_use = "nothing starts before `watch`"]
pub struct SentinelsBuilder {
    login: Option<(String, String)>,
    certificate: Option<Certificate>,
    by_name: bool,
}

impl SentinelsBuilder {
    /// Makes the sentinels demand this login, which is not the one of the server that they watch. Theirs stands in
    /// [`Sentinels::url`] as well.
    pub fn login(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.login = Some((user.into(), password.into()));
        self
    }

    /// The certificate that they show, where that of the server that they watch is not to be theirs as well.
    pub fn certificate(mut self, certificate: Certificate) -> Self {
        self.certificate = Some(certificate);
        self
    }

    /// Makes them watch, and name, `localhost` in the place of 127.0.0.1.
    pub fn by_name(mut self) -> Self {
        self.by_name = true;
        self
    }

    /// Starts three that watch this server, two of which must agree that it is gone; returns when they know each other and
    /// as many replicas. They speak TLS where its replicas are fed with it.
    ///
    /// # Errors
    ///
    /// One of them does not start, or they do not find each other.
    pub async fn watch(self, primary: &Redis, replicas: usize) -> Result<Sentinels, Error> {
        let is_with_tls = primary.options.replication_root.is_some();
        let mut sentinels = Sentinels {
            sentinels: Vec::new(),
            password: primary.options.password.clone(),
            options: self,
        };
        for _ in 0..3 {
            let sentinel = Sentinel {
                server: Supervised::new("sentinel", Identity::Ourselves)?,
                port: Port::reserve()?,
                tls_port: is_with_tls.then(Port::reserve).transpose()?,
            };
            let file = sentinel.server.dir().join("sentinel.conf");
            fs::write(&file, sentinels.config(&sentinel, primary))
                .map_err(|e| Error::io(format!("write {}", file.display()), e))?;
            let args = [file.into(), "--sentinel".into()];
            sentinel.server.spawn(&binaries::redis_server()?, &args)?;
            sentinels.sentinels.push(sentinel);
        }
        for sentinel in &sentinels.sentinels {
            sentinel.listens().await?;
        }
        let known = format!("slaves={replicas},sentinels=3");
        sentinels
            .all_say("the sentinels to meet", |info| {
                names(info, primary) && info.contains("status=ok") && info.contains(&known)
            })
            .await?;
        Ok(sentinels)
    }
}

/// Sentinels that watch one server. Dropped, they are killed.
#[derive(Debug)]
pub struct Sentinels {
    sentinels: Vec<Sentinel>,
    /// Of the server that they watch.
    password: Option<String>,
    options: SentinelsBuilder,
}

#[derive(Debug)]
struct Sentinel {
    server: Supervised,
    /// The kit asks here.
    port: Port,
    /// The others and clients ask here, where there is TLS.
    tls_port: Option<Port>,
}

impl Sentinels {
    /// As [`SentinelsBuilder::watch`], without any options.
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn watch(primary: &Redis, replicas: usize) -> Result<Self, Error> {
        Self::builder().watch(primary, replicas).await
    }

    /// The options of sentinels that are started later.
    pub fn builder() -> SentinelsBuilder {
        SentinelsBuilder::default()
    }

    /// `redis+sentinel://…`, or `rediss+sentinel://…`, with all of them, for database 0 of the primary.
    #[must_use]
    pub fn url(&self) -> String {
        let host = self.options.host();
        let ports = self.ports().into_iter();
        let places: Vec<String> = ports.map(|port| format!("{host}:{port}")).collect();
        let scheme = match self.sentinels[0].tls_port {
            Some(_) => "rediss+sentinel",
            None => "redis+sentinel",
        };
        let password = self.password.as_ref();
        let password = password.map_or(String::new(), |password| format!(":{password}@"));
        let login = self.options.login.as_ref();
        let login = login.map_or(String::new(), |(user, password)| {
            format!("?sentinel_user={user}&sentinel_password={password}")
        });
        format!("{scheme}://{password}{}/{NAME}/0{login}", places.join(","))
    }

    /// The ports of the sentinels, as clients use them.
    #[must_use]
    pub fn ports(&self) -> Vec<u16> {
        self.sentinels.iter().map(Sentinel::client_port).collect()
    }

    /// The name under which they watch the primary.
    #[must_use]
    pub fn name(&self) -> &str {
        NAME
    }

    /// Kills (SIGKILL) one of them.
    pub fn kill9(&self, sentinel: usize) {
        self.sentinels[sentinel].server.kill9();
    }

    /// Waits until all that still run name this server as the primary.
    ///
    /// # Errors
    ///
    /// They do not after a minute.
    pub async fn agree_on(&self, primary: &Redis) -> Result<(), Error> {
        self.all_say("the failover", |info| names(info, primary))
            .await
    }

    /// Waits until of each that still runs this is true of what it tells (INFO).
    async fn all_say(&self, what: &str, holds: impl Fn(&str) -> bool) -> Result<(), Error> {
        eventually(MEETING_DEADLINE, what, || async {
            for sentinel in self.sentinels.iter().filter(|one| one.server.is_running()) {
                let info = self.info(sentinel).await.map_err(|e| e.to_string())?;
                if !holds(&info) {
                    return Err(info);
                }
            }
            Ok(())
        })
        .await
    }

    async fn info(&self, sentinel: &Sentinel) -> ::redis::RedisResult<String> {
        let url = format!("redis://127.0.0.1:{}", sentinel.port.number());
        let mut info: ConnectionInfo = url.into_connection_info()?;
        if let Some((user, password)) = &self.options.login {
            let login = RedisConnectionInfo::default();
            let login = login.set_username(user).set_password(password);
            info = info.set_redis_settings(login);
        }
        let client = Client::open(info)?;
        let mut connection: MultiplexedConnection =
            client.get_multiplexed_async_connection().await?;
        ::redis::cmd("INFO")
            .arg("sentinel")
            .query_async(&mut connection)
            .await
    }

    fn config(&self, sentinel: &Sentinel, primary: &Redis) -> String {
        let (host, port) = (self.options.host(), sentinel.port.number());
        let mut config = format!(
            "port {port}\nbind 127.0.0.1\nprotected-mode no\n\
             sentinel resolve-hostnames yes\n\
             sentinel monitor {NAME} {host} {} 2\n\
             sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}\n\
             sentinel failover-timeout {NAME} 10000\n",
            primary.peer_port()
        );
        let mut lines = |lines: std::fmt::Arguments<'_>| {
            let written = config.write_fmt(lines);
            written.expect("text takes all that is written to it");
        };
        if self.options.by_name {
            lines(format_args!("sentinel announce-hostnames yes\n"));
        }
        if let Some(password) = &self.password {
            lines(format_args!("sentinel auth-pass {NAME} {password}\n"));
        }
        if let Some((user, password)) = &self.options.login {
            // With what they demand they come to each other.
            lines(format_args!(
                "user default off\nuser {user} on ~* &* +@all >{password}\n\
                 sentinel sentinel-user {user}\nsentinel sentinel-pass {password}\n"
            ));
        }
        let of_primary = primary.options.tls.as_ref();
        let certificate = self.options.certificate.as_ref().or(of_primary);
        let root = &primary.options.replication_root;
        if let (Some(port), Some(tls), Some(root)) = (&sentinel.tls_port, certificate, root) {
            lines(format_args!(
                "tls-port {}\ntls-cert-file {}\ntls-key-file {}\ntls-ca-cert-file {}\n\
                 tls-auth-clients no\ntls-replication yes\n",
                port.number(),
                tls.certificate.display(),
                tls.key.display(),
                root.display()
            ));
        }
        config
    }
}

impl SentinelsBuilder {
    fn host(&self) -> &'static str {
        if self.by_name {
            "localhost"
        } else {
            "127.0.0.1"
        }
    }
}

impl Sentinel {
    fn client_port(&self) -> u16 {
        self.tls_port.as_ref().unwrap_or(&self.port).number()
    }

    async fn listens(&self) -> Result<(), Error> {
        let started = Instant::now();
        loop {
            let log = self.server.log_from(0);
            if log.contains("Sentinel ID is") || log.contains(LISTENING) {
                return Ok(());
            }
            if !self.server.is_running() || started.elapsed() > MEETING_DEADLINE {
                return Err(Error::server(
                    format!("the sentinel on port {} did not start", self.port.number()),
                    self.server.log_tail(),
                ));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// Whether a sentinel that tells this takes the server for the primary.
fn names(info: &str, primary: &Redis) -> bool {
    info.contains(&format!(":{},", primary.peer_port()))
}
