//! Redis Cluster: all keys of an outbox live in one hash slot.

use outbox_redis_address::hash_tag;

use crate::error::{Error, Result};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_without_a_tag_is_refused_with_one_that_has_it() {
        assert!(check_prefix("{shop}:").is_ok());
        let refusal = check_prefix("shop:").unwrap_err().to_string();
        assert!(refusal.contains("--stream-prefix '{shop}:'"), "{refusal}");
        assert!(refusal.contains("cluster"), "{refusal}");
    }
}
