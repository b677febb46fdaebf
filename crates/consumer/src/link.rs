//! One connection to Redis, made when it is needed and given up when it is no good any more. Each time the address is asked
//! anew where it leads: to the primary that sentinels name, or to the node of a cluster that owns the keys.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use outbox_redis_address::{Limits, RedisAddress, hash_tag};
use redis::{Cmd, RedisError, RedisResult, Script, Value, aio::MultiplexedConnection};

use crate::{
    decision::{Fault, ends_redis_connection},
    trouble::Trouble,
};

/// How often a call is repeated because its keys are with another node: once, or twice while their slot moves.
const REDIRECTIONS_MAX: u32 = 3;

/// A connection that is made anew, its address resolved again, after an error that ends it. Clones share it.
#[derive(Clone)]
pub(crate) struct Link(Arc<Shared>);

struct Shared {
    address: RedisAddress,
    /// Reads a key, if all keys live in one slot of a cluster: the connection then leads to the node that has them.
    probe: Option<Cmd>,
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    connection: Option<MultiplexedConnection>,
    /// Counts the connections, so that what failed on an old one does not end the next.
    generation: u64,
    /// Number by which the server knows the connection, once [`Link::identify`] has asked for it.
    client_id: Option<i64>,
}

impl Link {
    /// `response_timeout` must be longer than any command of this link blocks.
    pub(crate) fn new(
        address: RedisAddress,
        stream_prefix: &str,
        connect_timeout: Duration,
        response_timeout: Duration,
    ) -> Self {
        let probe = hash_tag(stream_prefix).map(|_| {
            let mut probe = redis::cmd("HMGET");
            probe.arg(format!("{stream_prefix}relay:marker"));
            probe.arg("version");
            probe
        });
        Self(Arc::new(Shared {
            address,
            probe,
            limits: Limits {
                connect: connect_timeout,
                response: response_timeout,
            },
            state: Mutex::default(),
        }))
    }

    /// Sends one command. Without a reply in time the connection is given up: it may be half-open.
    pub(crate) async fn query(&self, command: &Cmd) -> Result<Value, Trouble> {
        let mut redirections = 0;
        loop {
            let (mut connection, generation) = self.connected().await?;
            // Not by `query_async`, which moves every value of a reply in search of errors: one within another reply does
            // not occur here.
            let reply = connection.send_packed_command(command).await;
            let reply = reply.and_then(|reply| match reply {
                error @ Value::ServerError(_) => error.extract_error(),
                reply => Ok(reply),
            });
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
        {
            let state = self.state();
            if let Some(connection) = &state.connection {
                return Ok((connection.clone(), state.generation));
            }
        }
        let Shared {
            address,
            probe,
            limits,
            ..
        } = &*self.0;
        let connection = address.connect(probe.as_ref(), *limits).await;
        let connection = connection.map_err(|error| self.explained(error.into()))?;
        let mut state = self.state();
        state.client_id = None;
        state.generation += 1;
        state.connection = Some(connection.clone());
        Ok((connection, state.generation))
    }

    /// Whether another node of the cluster has the keys by now: the next connection leads there.
    fn follows(&self, error: &RedisError, generation: u64) -> bool {
        if self.0.probe.is_none() || error.code() != Some("MOVED") {
            return false;
        }
        if self.state().generation == generation {
            self.close();
        }
        true
    }

    fn noted<T>(&self, reply: RedisResult<T>, generation: u64) -> Result<T, Trouble> {
        reply.map_err(|error| {
            let trouble = self.explained(error.into());
            if ends_redis_connection(trouble.fault) && self.state().generation == generation {
                self.close();
            }
            trouble
        })
    }

    fn explained(&self, mut trouble: Trouble) -> Trouble {
        if trouble.fault == Fault::ManySlots && self.0.probe.is_some() {
            // On its way to another node; what is asked for again finds it there.
            trouble.fault = Fault::OtherRedis;
        } else if trouble.fault == Fault::ManySlots {
            trouble.text = format!(
                "this Redis is a cluster, and the keys are in more than one hash slot: give the relay and all consumers a \
                 stream prefix with a hash tag, such as {{shop}}: ({})",
                trouble.text
            );
        }
        trouble
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
