//! The network before one process: a proxy to each server, so that a fault can hit one process and not the others.

use futures_util::{FutureExt, future::select_all};
use outbox_testkit::{Direction, Hold, Matcher, Postgres, Proxy};

use crate::{
    Result,
    stage::{Actor, Servers},
};

/// The two proxies of one process.
#[derive(Debug)]
pub struct Link {
    /// To the Postgres that the process uses.
    pub postgres: Proxy,
    /// To Redis.
    pub redis: Proxy,
    postgres_url: String,
    redis_url: String,
}

impl Link {
    /// To the shop's database and Redis.
    pub(crate) async fn to_shop(servers: &Servers) -> Result<Self> {
        Self::to_shop_on(&servers.postgres, servers).await
    }

    /// To the shop's database on another server than the shop's, and Redis.
    pub(crate) async fn to_shop_on(server: &Postgres, servers: &Servers) -> Result<Self> {
        let postgres = Proxy::start(server.port()).await?;
        let postgres_url = server.url_via(postgres.port(), &servers.shop);
        Self::with(postgres, postgres_url, servers).await
    }

    /// To the warehouse's database, which is on a server of its own, and Redis.
    pub(crate) async fn to_warehouse(servers: &Servers) -> Result<Self> {
        let server = servers.warehouse_server;
        let postgres = Proxy::start(server.port()).await?;
        let postgres_url = server.url_via(postgres.port(), &servers.warehouse);
        Self::with(postgres, postgres_url, servers).await
    }

    async fn with(postgres: Proxy, postgres_url: String, servers: &Servers) -> Result<Self> {
        let redis = Proxy::start(servers.redis.port()).await?;
        let redis_url = servers.redis.url_via(redis.port());
        Ok(Self {
            postgres,
            redis,
            postgres_url,
            redis_url,
        })
    }

    /// The address of Postgres through the proxy.
    #[must_use]
    pub fn postgres_url(&self) -> &str {
        &self.postgres_url
    }

    /// The address of Redis through the proxy.
    #[must_use]
    pub fn redis_url(&self) -> &str {
        &self.redis_url
    }
}

/// Which network of a process is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Net {
    Postgres,
    Redis,
}

/// What a process is at when a fault hits it.
#[derive(Clone, Debug)]
pub(crate) struct Moment {
    pub(crate) net: Net,
    pub(crate) matcher: Matcher,
    pub(crate) direction: Direction,
}

impl Moment {
    pub(crate) fn new(net: Net, matcher: Matcher, direction: Direction) -> Self {
        Self {
            net,
            matcher,
            direction,
        }
    }

    /// Waits until one of several processes has come to this moment, and keeps it there. Which one, by its index.
    ///
    /// # Errors
    ///
    /// None does in time.
    pub(crate) async fn first_of(&self, actors: &[Actor]) -> Result<(usize, Hold)> {
        let hold = |actor: &Actor| {
            let proxy = match self.net {
                Net::Postgres => &actor.link.postgres,
                Net::Redis => &actor.link.redis,
            };
            proxy.hold(self.matcher.clone(), self.direction)
        };
        let mut holds: Vec<Hold> = actors.iter().map(hold).collect();
        if holds.is_empty() {
            return Err("no process that could be held".into());
        }
        let (reached, index, _) = select_all(holds.iter().map(|hold| hold.reached().boxed())).await;
        reached?;
        // The others go on.
        Ok((index, holds.swap_remove(index)))
    }
}
