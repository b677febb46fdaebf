//! One connection to Redis, made when it is needed and given up when it is no good any more.

use std::time::Duration;

use redis::{AsyncConnectionConfig, Client, Cmd, Script, Value, aio::MultiplexedConnection};

use crate::{decision::ends_redis_connection, trouble::Trouble};

/// A connection that is made anew, its address resolved again, after an error that ends it.
pub(crate) struct Link {
    client: Client,
    connect_timeout: Duration,
    response_timeout: Duration,
    connection: Option<MultiplexedConnection>,
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
        Self {
            client,
            connect_timeout,
            response_timeout,
            connection: None,
            client_id: None,
        }
    }

    /// Sends one command. Without a reply in time the connection is given up: it may be half-open.
    pub(crate) async fn query(&mut self, command: &Cmd) -> Result<Value, Trouble> {
        let mut connection = self.connected().await?;
        let reply = command.query_async::<Value>(&mut connection).await;
        self.noted(reply)
    }

    /// Runs a script, and loads it first where the server does not have it.
    pub(crate) async fn run_script(
        &mut self,
        script: &Script,
        key: &str,
        arguments: &[&str],
    ) -> Result<i64, Trouble> {
        let mut connection = self.connected().await?;
        let mut invocation = script.key(key);
        for argument in arguments {
            invocation.arg(*argument);
        }
        let reply = invocation.invoke_async(&mut connection).await;
        self.noted(reply)
    }

    /// Learns the number by which another connection can unblock this one.
    pub(crate) async fn identify(&mut self) -> Result<(), Trouble> {
        if self.client_id.is_none() {
            let reply = self.query(redis::cmd("CLIENT").arg("ID")).await?;
            if let Value::Int(id) = reply {
                self.client_id = Some(id);
            }
        }
        Ok(())
    }

    pub(crate) fn client_id(&self) -> Option<i64> {
        self.client_id
    }

    pub(crate) fn close(&mut self) {
        self.connection = None;
        self.client_id = None;
    }

    async fn connected(&mut self) -> Result<MultiplexedConnection, Trouble> {
        if let Some(connection) = &self.connection {
            return Ok(connection.clone());
        }
        self.client_id = None;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(Some(self.response_timeout));
        let connection = self
            .client
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        self.connection = Some(connection.clone());
        Ok(connection)
    }

    fn noted<T>(&mut self, reply: redis::RedisResult<T>) -> Result<T, Trouble> {
        reply.map_err(|error| {
            let trouble = Trouble::from(error);
            if ends_redis_connection(trouble.fault) {
                self.close();
            }
            trouble
        })
    }
}
