//! One connection to Redis, made when it is needed and given up when it is no good any more.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, RedisResult, Script, Value, aio::MultiplexedConnection,
};

use crate::{decision::ends_redis_connection, trouble::Trouble};

/// A connection that is made anew, its address resolved again, after an error that ends it. Clones share it.
#[derive(Clone)]
pub(crate) struct Link(Arc<Shared>);

struct Shared {
    client: Client,
    connect_timeout: Duration,
    response_timeout: Duration,
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
        client: Client,
        connect_timeout: Duration,
        response_timeout: Duration,
    ) -> Self {
        Self(Arc::new(Shared {
            client,
            connect_timeout,
            response_timeout,
            state: Mutex::default(),
        }))
    }

    /// Sends one command. Without a reply in time the connection is given up: it may be half-open.
    pub(crate) async fn query(&self, command: &Cmd) -> Result<Value, Trouble> {
        let (mut connection, generation) = self.connected().await?;
        let reply = command.query_async::<Value>(&mut connection).await;
        self.noted(reply, generation)
    }

    /// Runs a script, and loads it first where the server does not have it.
    pub(crate) async fn run_script(
        &self,
        script: &Script,
        key: &str,
        arguments: &[&str],
    ) -> Result<i64, Trouble> {
        let (mut connection, generation) = self.connected().await?;
        let mut invocation = script.key(key);
        for argument in arguments {
            invocation.arg(*argument);
        }
        let reply = invocation.invoke_async(&mut connection).await;
        self.noted(reply, generation)
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
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.0.connect_timeout))
            .set_response_timeout(Some(self.0.response_timeout));
        let connection = self
            .0
            .client
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        let mut state = self.state();
        state.client_id = None;
        state.generation += 1;
        state.connection = Some(connection.clone());
        Ok((connection, state.generation))
    }

    fn noted<T>(&self, reply: RedisResult<T>, generation: u64) -> Result<T, Trouble> {
        reply.map_err(|error| {
            let trouble = Trouble::from(error);
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
