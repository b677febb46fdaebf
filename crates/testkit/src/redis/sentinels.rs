//! Redis Sentinel: processes that watch a server and its replicas, and promote one of them when it is gone.

use std::{
    fs,
    time::{Duration, Instant},
};

use ::redis::{Client, aio::MultiplexedConnection};

use super::{LISTENING, Redis};
use crate::{
    Error, binaries, eventually, identity::Identity, ports::Port, supervised::Supervised,
    wait::POLL_INTERVAL,
};

/// Sentinels hear of each other over the server that they watch, every two seconds.
const MEETING_DEADLINE: Duration = Duration::from_secs(60);

/// A primary that says nothing for this long is taken for dead. On a busy machine a shorter time would see failovers
/// that no test asked for.
const DOWN_AFTER_MS: u32 = 3_000;

/// The name under which the primary is watched.
const NAME: &str = "shop";

/// Sentinels that watch one server. Dropped, they are killed.
#[derive(Debug)]
pub struct Sentinels {
    sentinels: Vec<(Supervised, Port)>,
    password: Option<String>,
}

impl Sentinels {
    /// Starts three that watch this server, two of which must agree that it is gone; returns when they know each other and
    /// as many replicas.
    ///
    /// # Errors
    ///
    /// One of them does not start, or they do not find each other.
    pub async fn watch(primary: &Redis, replicas: usize) -> Result<Self, Error> {
        let mut sentinels = Vec::new();
        for _ in 0..3 {
            let (server, port) = (
                Supervised::new("sentinel", Identity::Ourselves)?,
                Port::reserve()?,
            );
            let mut config = format!(
                "port {}\nbind 127.0.0.1\nprotected-mode no\n\
                 sentinel monitor {NAME} 127.0.0.1 {} 2\n\
                 sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}\n\
                 sentinel failover-timeout {NAME} 10000\n",
                port.number(),
                primary.port()
            );
            if let Some(password) = &primary.options.password {
                config.push_str(&format!("sentinel auth-pass {NAME} {password}\n"));
            }
            let file = server.dir().join("sentinel.conf");
            fs::write(&file, config)
                .map_err(|e| Error::io(format!("write {}", file.display()), e))?;
            server.spawn(
                &binaries::redis_server()?,
                &[file.into(), "--sentinel".into()],
            )?;
            sentinels.push((server, port));
        }
        let sentinels = Self {
            sentinels,
            password: primary.options.password.clone(),
        };
        for (server, port) in &sentinels.sentinels {
            listening(server, port.number()).await?;
        }
        let known = format!(
            "status=ok,address=127.0.0.1:{},slaves={replicas},sentinels=3",
            primary.port()
        );
        eventually(MEETING_DEADLINE, "the sentinels to meet", || async {
            for (_, port) in &sentinels.sentinels {
                let info = info(port.number()).await.map_err(|e| e.to_string())?;
                if !info.contains(&known) {
                    return Err(info);
                }
            }
            Ok(())
        })
        .await?;
        Ok(sentinels)
    }

    /// `redis+sentinel://…` with all of them, for database 0 of the primary.
    #[must_use]
    pub fn url(&self) -> String {
        let places: Vec<String> = self
            .ports()
            .iter()
            .map(|port| format!("127.0.0.1:{port}"))
            .collect();
        let password = self.password.as_ref();
        let password = password.map_or(String::new(), |password| format!(":{password}@"));
        format!("redis+sentinel://{password}{}/{NAME}/0", places.join(","))
    }

    /// The ports of the sentinels.
    #[must_use]
    pub fn ports(&self) -> Vec<u16> {
        self.sentinels
            .iter()
            .map(|(_, port)| port.number())
            .collect()
    }

    /// The name under which they watch the primary.
    #[must_use]
    pub fn name(&self) -> &str {
        NAME
    }

    /// Kills (SIGKILL) one of them.
    pub fn kill9(&self, sentinel: usize) {
        self.sentinels[sentinel].0.kill9();
    }

    /// Waits until all that still run name this server as the primary.
    ///
    /// # Errors
    ///
    /// They do not after a minute.
    pub async fn agree_on(&self, primary: &Redis) -> Result<(), Error> {
        let address = format!("address=127.0.0.1:{},", primary.port());
        eventually(MEETING_DEADLINE, "the failover", || async {
            for (server, port) in &self.sentinels {
                if !server.is_running() {
                    continue;
                }
                let info = info(port.number()).await.map_err(|e| e.to_string())?;
                if !info.contains(&address) {
                    return Err(info);
                }
            }
            Ok(())
        })
        .await
    }
}

async fn listening(server: &Supervised, port: u16) -> Result<(), Error> {
    let started = Instant::now();
    while !server.log_from(0).contains("Sentinel ID is") && !server.log_from(0).contains(LISTENING)
    {
        if !server.is_running() || started.elapsed() > MEETING_DEADLINE {
            return Err(Error::server(
                format!("the sentinel on port {port} did not start"),
                server.log_tail(),
            ));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

async fn info(port: u16) -> ::redis::RedisResult<String> {
    let client = Client::open(format!("redis://127.0.0.1:{port}"))?;
    let mut connection: MultiplexedConnection = client.get_multiplexed_async_connection().await?;
    ::redis::cmd("INFO")
        .arg("sentinel")
        .query_async(&mut connection)
        .await
}
