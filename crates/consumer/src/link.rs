//! One connection to Redis, made when it is needed and given up when it is no good any more. In a cluster it leads to the
//! node that owns the keys: any node names that one.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, RedisError, RedisResult, Script, Value,
    aio::MultiplexedConnection,
};

use crate::{
    decision::{Fault, ends_redis_connection},
    trouble::Trouble,
};

/// The owner of a slot is one step away, or two while the slot moves.
const REDIRECTIONS_MAX: u32 = 3;

/// A connection that is made anew, its address resolved again, after an error that ends it. Clones share it.
#[derive(Clone)]
pub(crate) struct Link(Arc<Shared>);

struct Shared {
    client: Client,
    /// Whether all keys live in one slot of a cluster.
    one_slot: bool,
    connect_timeout: Duration,
    response_timeout: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    connection: Option<MultiplexedConnection>,
    /// Counts the connections, so that what failed on an old one does not end the next.
    generation: u64,
    /// The node of a cluster that owns the keys, when it is not the one that the client names.
    owner: Option<ConnectionAddr>,
    /// Number by which the server knows the connection, once [`Link::identify`] has asked for it.
    client_id: Option<i64>,
}

impl Link {
    /// `response_timeout` must be longer than any command of this link blocks.
    pub(crate) fn new(
        client: Client,
        stream_prefix: &str,
        connect_timeout: Duration,
        response_timeout: Duration,
    ) -> Self {
        Self(Arc::new(Shared {
            client,
            one_slot: has_hash_tag(stream_prefix),
            connect_timeout,
            response_timeout,
            state: Mutex::default(),
        }))
    }

    /// Sends one command. Without a reply in time the connection is given up: it may be half-open.
    pub(crate) async fn query(&self, command: &Cmd) -> Result<Value, Trouble> {
        let mut redirections = 0;
        loop {
            let (mut connection, generation) = self.connected().await?;
            let reply = command.query_async::<Value>(&mut connection).await;
            match &reply {
                // It was not carried out there.
                Err(error)
                    if redirections < REDIRECTIONS_MAX && self.follows(error, generation) =>
                {
                    redirections += 1;
                }
                _ => return self.noted(reply, generation),
            }
        }
    }

    /// Runs a script, and loads it first where the server does not have it.
    pub(crate) async fn run_script(
        &self,
        script: &Script,
        key: &str,
        arguments: &[&str],
    ) -> Result<i64, Trouble> {
        let mut invocation = script.key(key);
        for argument in arguments {
            invocation.arg(*argument);
        }
        let mut redirections = 0;
        loop {
            let (mut connection, generation) = self.connected().await?;
            let reply = invocation.invoke_async(&mut connection).await;
            match &reply {
                Err(error)
                    if redirections < REDIRECTIONS_MAX && self.follows(error, generation) =>
                {
                    redirections += 1;
                }
                _ => return self.noted(reply, generation),
            }
        }
    }

    /// Learns the number by which another connection can unblock this one.
    pub(crate) async fn identify(&self) -> Result<Option<i64>, Trouble> {
        let known = self.state().client_id;
        if known.is_some() {
            return Ok(known);
        }
        let reply = self.query(redis::cmd("CLIENT").arg("ID")).await?;
        if let Value::Int(id) = reply {
            self.state().client_id = Some(id);
            return Ok(Some(id));
        }
        Ok(None)
    }

    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.connection = None;
        state.client_id = None;
    }

    async fn connected(&self) -> Result<(MultiplexedConnection, u64), Trouble> {
        let owner = {
            let state = self.state();
            if let Some(connection) = &state.connection {
                return Ok((connection.clone(), state.generation));
            }
            state.owner.clone()
        };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.0.connect_timeout))
            .set_response_timeout(Some(self.0.response_timeout));
        let client = match owner {
            None => self.0.client.clone(),
            Some(addr) => Client::open(self.0.client.get_connection_info().clone().set_addr(addr))?,
        };
        let connection = client
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .inspect_err(|_| {
                // The slot may have another owner by now; the address that was given knows.
                self.state().owner = None;
            })?;
        let mut state = self.state();
        state.client_id = None;
        state.generation += 1;
        state.connection = Some(connection.clone());
        Ok((connection, state.generation))
    }

    /// Whether the server has named another node as the owner of the keys: the next connection leads there.
    fn follows(&self, error: &RedisError, generation: u64) -> bool {
        if !self.0.one_slot || error.code() != Some("MOVED") {
            return false;
        }
        let mut state = self.state();
        let asked = match &state.owner {
            Some(addr) => addr,
            None => self.0.client.get_connection_info().addr(),
        };
        let Some(owner) = redirected(asked, error) else {
            return false;
        };
        if state.generation == generation {
            state.owner = Some(owner);
            state.connection = None;
            state.client_id = None;
        }
        true
    }

    fn noted<T>(&self, reply: RedisResult<T>, generation: u64) -> Result<T, Trouble> {
        reply.map_err(|error| {
            let mut trouble = Trouble::from(error);
            if trouble.fault == Fault::ManySlots && self.0.one_slot {
                // On its way to another node; what is asked for again finds it there.
                trouble.fault = Fault::OtherRedis;
            } else if trouble.fault == Fault::ManySlots {
                trouble.text = format!(
                    "this Redis is a cluster, and the keys are in more than one hash slot: give the relay and all consumers a \
                     stream prefix with a hash tag, such as {{shop}}: ({})",
                    trouble.text
                );
            }
            if ends_redis_connection(trouble.fault) && self.state().generation == generation {
                self.close();
            }
            trouble
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a prefix keeps all its keys in one slot of a cluster: what stands in the first braces decides the slot.
fn has_hash_tag(prefix: &str) -> bool {
    prefix
        .split_once('{')
        .and_then(|(_, behind)| behind.split_once('}'))
        .is_some_and(|(tag, _)| !tag.is_empty())
}

/// The address in an error of MOVED, with the TLS of the one that was asked.
fn redirected(asked: &ConnectionAddr, error: &RedisError) -> Option<ConnectionAddr> {
    let (owner, _) = error.redirect_node()?;
    let (to, to_port) = owner.rsplit_once(':')?;
    let to_port = to_port.parse().ok()?;
    let mut addr = asked.clone();
    match &mut addr {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            // A node that does not know how it is reached names its port alone.
            if !matches!(to, "" | "?") {
                to.clone_into(host);
            }
            *port = to_port;
        }
        _ => return None,
    }
    Some(addr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_braces_decide_the_slot() {
        for (prefix, tagged) in [
            ("{shop}:", true),
            ("a{b}:", true),
            ("outbox:", false),
            ("{}{a}:", false),
            ("{open:", false),
        ] {
            assert_eq!(has_hash_tag(prefix), tagged, "{prefix}");
        }
    }
}
