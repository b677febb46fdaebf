//! Redis Cluster: nodes that have the hash slots among them.

use std::time::Duration;

use super::{Redis, RedisBuilder};
use crate::{Error, eventually};

/// Hash slots of every cluster.
const SLOTS: u16 = 16_384;

/// Nodes hear of each other within a second or two.
const FORMING_DEADLINE: Duration = Duration::from_secs(60);

/// A cluster whose nodes have the slots in equal parts, in their order, without replicas.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<Redis>,
}

impl RedisCluster {
    /// Starts as many nodes; returns when all of them serve.
    ///
    /// # Errors
    ///
    /// A node does not start, or they do not come together.
    pub async fn start(nodes: u16) -> Result<Self, Error> {
        let builder = Redis::builder().arg("--cluster-enabled", "yes");
        Self::start_with(builder, nodes).await
    }

    async fn start_with(builder: RedisBuilder, count: u16) -> Result<Self, Error> {
        let mut cluster = Self { nodes: Vec::new() };
        for node in 0..count {
            let (first, end) = (SLOTS / count * node, SLOTS / count * (node + 1));
            let last = if node + 1 == count {
                SLOTS - 1
            } else {
                end - 1
            };
            let redis = builder.clone().start().await?;
            let mut slots = ::redis::cmd("CLUSTER");
            slots.arg("ADDSLOTSRANGE").arg(first).arg(last);
            redis
                .query::<()>(&mut redis.connect().await?, slots)
                .await?;
            cluster.nodes.push(redis);
        }
        let (first, others) = cluster.nodes.split_first().expect("a cluster has nodes");
        for other in others {
            let mut meet = ::redis::cmd("CLUSTER");
            meet.arg("MEET").arg("127.0.0.1").arg(first.port());
            other.query::<()>(&mut other.connect().await?, meet).await?;
        }
        eventually(FORMING_DEADLINE, "the cluster to serve", || async {
            for node in &cluster.nodes {
                let info = node.cluster_info().await.map_err(|e| e.to_string())?;
                let known = format!("cluster_known_nodes:{count}\r\n");
                if !info.contains("cluster_state:ok") || !info.contains(&known) {
                    return Err(info);
                }
            }
            Ok(())
        })
        .await?;
        Ok(cluster)
    }

    /// The nodes, in the order of their slots.
    #[must_use]
    pub fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    /// An address that names each of these servers, which are nodes of one cluster or, in a mistake, of none.
    #[must_use]
    pub fn url_of(servers: &[&Redis]) -> String {
        let places: Vec<String> = servers
            .iter()
            .map(|server| format!("127.0.0.1:{}", server.port()))
            .collect();
        format!("redis://{}", places.join(","))
    }

    /// From here on the nodes serve their own slots when other nodes are down.
    ///
    /// # Errors
    ///
    /// A node is down.
    pub async fn serve_what_is_left(&self) -> Result<(), Error> {
        for node in &self.nodes {
            let mut set = ::redis::cmd("CONFIG");
            set.arg(&["SET", "cluster-require-full-coverage", "no"]);
            node.query::<()>(&mut node.connect().await?, set).await?;
        }
        Ok(())
    }

    /// The node that owns the slot of a key, and the others.
    ///
    /// # Errors
    ///
    /// A node is down.
    pub async fn owner(&self, key: &str) -> Result<(&Redis, Vec<&Redis>), Error> {
        let slot = self.slot(key).await?;
        let mut owner = None;
        let mut others = Vec::new();
        for node in &self.nodes {
            let mut count = ::redis::cmd("CLUSTER");
            count.arg("SLOTS");
            let ranges: Vec<(u16, u16, Vec<::redis::Value>)> =
                node.query(&mut node.connect().await?, count).await?;
            let port = i64::from(node.port());
            let owns = ranges.iter().any(|(first, last, place)| {
                (*first..=*last).contains(&slot) && place.contains(&::redis::Value::Int(port))
            });
            if owns && owner.is_none() {
                owner = Some(node);
            } else {
                others.push(node);
            }
        }
        let owner = owner.ok_or_else(|| Error::misuse(format!("no node owns slot {slot}")))?;
        Ok((owner, others))
    }

    /// Moves the slot of a key with all its keys to another node, one key after the other, as `redis-cli` does.
    ///
    /// # Errors
    ///
    /// A node is down, or refuses.
    pub async fn move_slot(&self, key: &str, to: &Redis) -> Result<(), Error> {
        let slot = self.slot(key).await?;
        let (from, _) = self.owner(key).await?;
        let (from_id, to_id) = (from.node_id().await?, to.node_id().await?);
        let mut source = from.connect().await?;
        let mut target = to.connect().await?;
        let set = |how: &str, id: &str| {
            let mut set = ::redis::cmd("CLUSTER");
            set.arg("SETSLOT").arg(slot).arg(how).arg(id);
            set
        };
        to.query::<()>(&mut target, set("IMPORTING", &from_id))
            .await?;
        from.query::<()>(&mut source, set("MIGRATING", &to_id))
            .await?;
        loop {
            let mut keys = ::redis::cmd("CLUSTER");
            keys.arg("GETKEYSINSLOT").arg(slot).arg(1);
            let keys: Vec<String> = from.query(&mut source, keys).await?;
            let [key] = keys.as_slice() else { break };
            let mut migrate = ::redis::cmd("MIGRATE");
            migrate
                .arg("127.0.0.1")
                .arg(to.port())
                .arg(key)
                .arg(0)
                .arg(10_000);
            from.query::<()>(&mut source, migrate).await?;
        }
        to.query::<()>(&mut target, set("NODE", &to_id)).await?;
        from.query::<()>(&mut source, set("NODE", &to_id)).await
    }

    async fn slot(&self, key: &str) -> Result<u16, Error> {
        let first = self.nodes.first().expect("a cluster has nodes");
        let mut slot = ::redis::cmd("CLUSTER");
        slot.arg("KEYSLOT").arg(key);
        first.query(&mut first.connect().await?, slot).await
    }
}

impl Redis {
    async fn cluster_info(&self) -> Result<String, Error> {
        let mut info = ::redis::cmd("CLUSTER");
        info.arg("INFO");
        self.query(&mut self.connect().await?, info).await
    }

    async fn node_id(&self) -> Result<String, Error> {
        let mut id = ::redis::cmd("CLUSTER");
        id.arg("MYID");
        self.query(&mut self.connect().await?, id).await
    }
}
