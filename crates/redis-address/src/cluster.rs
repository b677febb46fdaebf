//! Redis Cluster: all keys of an outbox live in one hash slot, so one node is needed, the one that owns it. Every other
//! node names that one in its refusal (MOVED), and is asked anew for each connection.

use std::collections::HashMap;

use redis::{Cmd, RedisError, Value, aio::MultiplexedConnection};

use crate::{Error, Limits, RedisAddress, place::Place};

/// The owner of a slot is one step away, or two while the slot moves.
const REDIRECTIONS_MAX: u32 = 5;

/// What decides the slot of all keys that begin with this prefix: the text in its first braces. None when each key
/// may have a slot of its own.
#[must_use]
pub fn hash_tag(prefix: &str) -> Option<&str> {
    let (_, behind) = prefix.split_once('{')?;
    let (tag, _) = behind.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// Opens a connection to this server, or to the node of its cluster that owns the key of the probe.
pub(crate) async fn connect(
    address: &RedisAddress,
    server: &Place,
    probe: Option<&Cmd>,
    limits: Limits,
) -> Result<MultiplexedConnection, Error> {
    let mut connection = address.open_at(server, None, limits).await?;
    if let Some(probe) = probe {
        return follow(address, server, connection, probe, limits).await;
    }
    match hello(&mut connection, server).await {
        Ok(said) if said.mode == "cluster" => Err(Error::ManySlots(server.to_string())),
        // What does not know HELLO is no node of a cluster.
        Err(Error::Redis { source, .. }) if !source.is_io_error() => Ok(connection),
        Ok(_) => Ok(connection),
        Err(error) => Err(error),
    }
}

/// The same by one of several servers, which must be a node of a cluster: of servers that know nothing of each other, one
/// would be written to today and another one tomorrow.
pub(crate) async fn connect_by_node(
    address: &RedisAddress,
    node: &Place,
    probe: Option<&Cmd>,
    limits: Limits,
) -> Result<MultiplexedConnection, Error> {
    let mut connection = address.open_at(node, None, limits).await?;
    if hello(&mut connection, node).await?.mode != "cluster" {
        return Err(Error::NoCluster(node.to_string()));
    }
    match probe {
        Some(probe) => follow(address, node, connection, probe, limits).await,
        None => Err(Error::ManySlots(node.to_string())),
    }
}

/// Goes on to the node that has the key of the probe.
async fn follow(
    address: &RedisAddress,
    server: &Place,
    mut connection: MultiplexedConnection,
    probe: &Cmd,
    limits: Limits,
) -> Result<MultiplexedConnection, Error> {
    let mut asked = server.clone();
    for _ in 0..REDIRECTIONS_MAX {
        let error = match probe.query_async::<Value>(&mut connection).await {
            Ok(_) => break,
            Err(error) if error.is_io_error() => {
                let error = Error::Redis {
                    doing: "connect",
                    source: error,
                };
                return Err(error.met_at(&asked));
            }
            Err(error) => error,
        };
        // What else is refused here is refused again to the first call, which says what it was about.
        let Some(owner) = owner(&asked, &error) else {
            break;
        };
        connection = address.open_at(&owner, None, limits).await?;
        asked = owner;
    }
    Ok(connection)
}

/// The node that MOVED names.
fn owner(asked: &Place, error: &RedisError) -> Option<Place> {
    if error.code() != Some("MOVED") {
        return None;
    }
    let (owner, _) = error.redirect_node()?;
    let (host, port) = owner.rsplit_once(':')?;
    // A node that does not know how it is reached names its port alone.
    let host = match host {
        "" | "?" => &asked.host,
        host => host,
    };
    Some(Place {
        host: host.to_owned(),
        port: port.parse().ok()?,
    })
}

/// What a server says of itself.
pub(crate) struct Hello {
    /// `master` or `replica`.
    pub(crate) role: String,
    /// `standalone` or `cluster`.
    pub(crate) mode: String,
}

/// Asks by HELLO, which every user may call.
pub(crate) async fn hello(
    connection: &mut MultiplexedConnection,
    server: &Place,
) -> Result<Hello, Error> {
    let mut said: HashMap<String, Value> = redis::cmd("HELLO")
        .query_async(connection)
        .await
        .map_err(|source| Error::Redis {
            doing: "ask what kind of server it is",
            source,
        })
        .map_err(|error| error.met_at(server))?;
    let mut text = |name| {
        let value = said.remove(name).unwrap_or(Value::Nil);
        redis::from_redis_value::<Option<String>>(value)
            .ok()
            .flatten()
            .unwrap_or_default()
    };
    Ok(Hello {
        role: text("role"),
        mode: text("mode"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_braces_with_something_in_them_are_the_tag() {
        for (prefix, tag) in [
            ("{shop}:", Some("shop")),
            ("a{b}c{d}:", Some("b")),
            ("outbox:", None),
            ("{}:", None),
            ("{}{a}:", None),
            ("{open:", None),
            ("}{a}:", Some("a")),
        ] {
            assert_eq!(hash_tag(prefix), tag, "{prefix}");
        }
    }
}
