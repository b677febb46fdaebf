//! `outbox-relay grants`: the rights that each party needs and no more, for Postgres as SQL, for Redis as rules of an ACL.

use clap::Args;

use crate::error::{Error, Result};
use crate::{postgres, publisher};

/// Longest name of a role that Postgres keeps whole.
const NAME_BYTES_MAX: usize = 63;

/// Whose rights are printed.
#[derive(Args, Clone, Debug)]
pub struct GrantsFlags {
    /// Role of a service that writes messages; may be given several times
    #[arg(long = "producer", value_name = "ROLE")]
    pub producers: Vec<String>,

    /// Role of the relay, the same for all relays; with --redis its Redis user
    #[arg(long = "relay", value_name = "ROLE")]
    pub relays: Vec<String>,

    /// Role of a consumer in its own database; with --redis its Redis user; may be given several times
    #[arg(long = "consumer", value_name = "ROLE")]
    pub consumers: Vec<String>,

    /// Print the ACL of Redis users of these names instead, for redis-cli; a password is set apart from it
    #[arg(long)]
    pub redis: bool,

    /// With --redis: the consumers are those of `RedisInbox`, which keep their inbox in Redis
    #[arg(long, requires = "redis")]
    pub redis_inbox: bool,
}

/// What to run: SQL for `psql`, or lines for `redis-cli`. Asks no server.
///
/// # Errors
///
/// [`Error::Config`] when no role is named, or one cannot be a name.
pub fn grants(flags: &GrantsFlags, prefix: &str) -> Result<String> {
    let named = [
        ("--producer", &flags.producers),
        ("--relay", &flags.relays),
        ("--consumer", &flags.consumers),
    ];
    if named.iter().all(|(_, roles)| roles.is_empty()) {
        return Err(Error::Config {
            field: "grants",
            problem: "name at least one of --producer, --relay, --consumer".into(),
        });
    }
    for (field, roles) in named {
        for role in roles {
            check_name(field, role, flags.redis)?;
        }
    }
    if flags.redis {
        return redis_lines(flags, prefix);
    }
    let mut parts = Vec::new();
    if !flags.producers.is_empty() || !flags.relays.is_empty() {
        parts.push(postgres::outbox_grants(&flags.producers, &flags.relays));
    }
    if !flags.consumers.is_empty() {
        parts.push(postgres::inbox_grants(&flags.consumers));
    }
    Ok(parts.join("\n").trim_end().to_owned())
}

fn redis_lines(flags: &GrantsFlags, prefix: &str) -> Result<String> {
    if !flags.producers.is_empty() {
        return Err(Error::Config {
            field: "--producer",
            problem: "does not go with --redis: a producer does not talk to Redis".into(),
        });
    }
    let relays = flags
        .relays
        .iter()
        .map(|user| publisher::relay_acl(user, prefix));
    let consumers = flags
        .consumers
        .iter()
        .map(|user| publisher::consumer_acl(user, prefix, flags.redis_inbox));
    Ok(relays.chain(consumers).collect::<Vec<_>>().join("\n"))
}

/// Quoting makes any name safe but for these: `public` stays everybody, however it is quoted.
fn check_name(field: &'static str, name: &str, for_redis: bool) -> Result<()> {
    let bad = |problem: &str| {
        Err(Error::Config {
            field,
            problem: problem.to_owned(),
        })
    };
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return bad("must be 1 to 63 bytes");
    }
    if name.chars().any(char::is_control) || for_redis && name.contains(' ') {
        return bad("must have no control characters, and for Redis no spaces");
    }
    if !for_redis && ["public", "none"].contains(&name) {
        return bad("must be a role; public would give the rights to everybody");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(producer: &str) -> GrantsFlags {
        GrantsFlags {
            producers: vec![producer.to_owned()],
            relays: Vec::new(),
            consumers: Vec::new(),
            redis: false,
            redis_inbox: false,
        }
    }

    #[test]
    fn what_cannot_be_one_role_is_refused() {
        for name in ["", "public", "none", "a\nb", &"x".repeat(64)] {
            let refused = grants(&flags(name), "outbox:");
            assert!(matches!(refused, Err(Error::Config { .. })), "{name:?}");
        }
        assert!(grants(&flags("Public shop"), "outbox:").is_ok());
        let nobody = GrantsFlags {
            producers: Vec::new(),
            ..flags("x")
        };
        assert!(matches!(grants(&nobody, ""), Err(Error::Config { .. })));
        let to_redis = GrantsFlags {
            redis: true,
            ..flags("shop")
        };
        assert!(matches!(grants(&to_redis, ""), Err(Error::Config { .. })));
    }
}
