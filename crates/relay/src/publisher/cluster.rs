//! Redis Cluster: all keys of an outbox live in one hash slot, so the relay needs the one node that owns it. Every other
//! node names that one in its refusal (MOVED), and is asked anew for each connection.

use redis::aio::MultiplexedConnection;

use super::address::Place;
use crate::error::{Error, Result};

/// The owner of a slot is one step away, or two while the slot moves.
pub(super) const REDIRECTIONS_MAX: u32 = 5;

/// What decides the slot of all keys with this prefix: the text in the first braces. None when each key has its own.
fn hash_tag(prefix: &str) -> Option<&str> {
    let (_, behind) = prefix.split_once('{')?;
    let (tag, _) = behind.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// Refuses a prefix whose keys a cluster would spread over its nodes: no step could be atomic there.
///
/// # Errors
///
/// [`Error::Setup`], which says what to write.
pub(crate) fn check_prefix(prefix: &str) -> Result<()> {
    if hash_tag(prefix).is_some() {
        return Ok(());
    }
    let name = prefix.trim_end_matches(':').replace(['{', '}'], "");
    let name = if name.is_empty() { "outbox" } else { &name };
    Err(Error::Setup {
        problem: format!(
            "this Redis is a cluster, and the prefix {prefix:?} has no hash tag that would keep the keys of the outbox in one slot"
        ),
        remedy: format!("write --stream-prefix '{{{name}}}:', and the same for the consumers"),
    })
}

/// The node that owns the slot of this key, when it is not the one of this connection.
///
/// What else goes wrong here goes wrong again with the first call, which says what it was about.
pub(super) async fn owner_elsewhere(
    connection: &mut MultiplexedConnection,
    asked: &Place,
    key: &str,
) -> Option<Place> {
    // A read that everybody who works with the outbox may do.
    let reply: redis::RedisResult<()> = redis::cmd("HGETALL")
        .arg(key)
        .query_async(connection)
        .await
        .map(|_: redis::Value| ());
    let error = reply.err()?;
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
        let refusal = check_prefix("shop:").unwrap_err().to_string();
        assert!(refusal.contains("--stream-prefix '{shop}:'"), "{refusal}");
        assert!(refusal.contains("cluster"), "{refusal}");
    }
}
