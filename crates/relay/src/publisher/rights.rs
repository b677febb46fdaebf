//! What the relay and the consumers do in Redis: `grants` prints it as rules of an ACL, and `doctor` asks whether the
//! relay's user may do it.

/// The keys that a command is used on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    /// The command takes none.
    None,
    /// Everything below the prefix: streams, and what scripts are given.
    All,
    /// The relay's own: marker and gaps.
    Relay,
    /// A consumer group's own: its history and, of a `RedisInbox`, its keys.
    Group,
}

/// One command, as a rule of an ACL names it, and what comes behind its key when it is tried out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command {
    pub(crate) rule: &'static str,
    pub(crate) keys: Keys,
    /// Arguments before and behind the key.
    around: (&'static [&'static str], &'static [&'static str]),
}

const fn command(rule: &'static str, keys: Keys) -> Command {
    Command {
        rule,
        keys,
        around: (&[], &[]),
    }
}

const fn with(
    rule: &'static str,
    keys: Keys,
    before: &'static [&'static str],
    behind: &'static [&'static str],
) -> Command {
    Command {
        rule,
        keys,
        around: (before, behind),
    }
}

/// What the relay calls, also inside its scripts, and what its commands look at: streams, groups and memory.
pub(crate) const RELAY_COMMANDS: &[Command] = &[
    command("ping", Keys::None),
    command("info", Keys::None),
    command("time", Keys::None),
    command("multi", Keys::None),
    command("exec", Keys::None),
    with("script|load", Keys::None, &["return 1"], &[]),
    with("evalsha", Keys::All, &["0", "1"], &[]),
    with("eval", Keys::All, &["return 1", "1"], &[]),
    command("type", Keys::All),
    with("xadd", Keys::All, &[], &["*", "field", "value"]),
    with("xdel", Keys::All, &[], &["0-0"]),
    with("xtrim", Keys::All, &[], &["MINID", "~", "0-1"]),
    command("xlen", Keys::All),
    with("xrange", Keys::All, &[], &["-", "+"]),
    with("xrevrange", Keys::All, &[], &["+", "-"]),
    command("xinfo|groups", Keys::All),
    with("xinfo|consumers", Keys::All, &[], &["group"]),
    with("xpending", Keys::All, &[], &["group"]),
    command("memory|usage", Keys::All),
    with("scan", Keys::None, &["0"], &[]),
    command("hgetall", Keys::Relay),
    with("hget", Keys::Relay, &[], &["field"]),
    with("hmget", Keys::Relay, &[], &["field"]),
    with("hset", Keys::Relay, &[], &["field", "value"]),
    with("hdel", Keys::Relay, &[], &["field"]),
    command("del", Keys::Relay),
    // The progress of a replay is forgotten after some time.
    with("expire", Keys::Relay, &[], &["1"]),
];

/// What a consumer calls, also inside its scripts. Only the group's own keys can be written, beside what reading a
/// stream changes in it.
const CONSUMER: &[Command] = &[
    command("ping", Keys::None),
    command("time", Keys::None),
    command("client|id", Keys::None),
    command("client|unblock", Keys::None),
    command("script|load", Keys::None),
    command("evalsha", Keys::All),
    command("type", Keys::All),
    command("xreadgroup", Keys::All),
    command("xack", Keys::All),
    command("xautoclaim", Keys::All),
    command("xclaim", Keys::All),
    command("xpending", Keys::All),
    command("xinfo|groups", Keys::All),
    command("xinfo|consumers", Keys::All),
    command("xrange", Keys::All),
    command("xrevrange", Keys::All),
    command("xlen", Keys::All),
    command("xgroup|create", Keys::All),
    command("xgroup|setid", Keys::All),
    command("xgroup|delconsumer", Keys::All),
    command("hmget", Keys::Relay),
    command("hmget", Keys::Group),
    command("hset", Keys::Group),
];

/// What a `RedisInbox` calls in addition.
const REDIS_INBOX: &[Command] = &[
    command("eval", Keys::All),
    command("hget", Keys::Relay),
    command("get", Keys::Group),
    command("set", Keys::Group),
    command("del", Keys::Group),
    command("incr", Keys::Group),
    command("pexpire", Keys::Group),
    command("xadd", Keys::Group),
];

impl Command {
    /// A call of this command that only shows whether it is allowed.
    pub(crate) fn sample(&self, prefix: &str) -> Vec<String> {
        let key = match self.keys {
            Keys::None => None,
            Keys::All => Some(format!("{prefix}topic")),
            Keys::Relay => Some(format!("{prefix}relay:marker")),
            Keys::Group => Some(format!("{prefix}group:g:history")),
        };
        let (before, behind) = self.around;
        let words = self.rule.split('|').chain(before.iter().copied());
        words
            .map(str::to_owned)
            .chain(key)
            .chain(behind.iter().map(|&word| word.to_owned()))
            .collect()
    }
}

/// The ACL of a relay's user.
pub(crate) fn relay_acl(user: &str, prefix: &str) -> String {
    let own = pattern(prefix, "relay:*");
    acl(
        user,
        prefix,
        RELAY_COMMANDS,
        &[(Keys::Relay, format!("~{own}"))],
    )
}

/// The ACL of a consumer's user. A group must be readable by every member, so groups are not kept apart.
pub(crate) fn consumer_acl(user: &str, prefix: &str, redis_inbox: bool) -> String {
    let mut commands = CONSUMER.to_vec();
    if redis_inbox {
        commands.extend(REDIS_INBOX);
    }
    let relay = format!("%R~{}", pattern(prefix, "relay:marker"));
    let group = format!("~{}", pattern(prefix, "group:*"));
    acl(
        user,
        prefix,
        &commands,
        &[(Keys::Relay, relay), (Keys::Group, group)],
    )
}

/// One line for `redis-cli`. The commands on the keys of each part are a selector of their own, so that none of them is
/// allowed on a stream.
fn acl(user: &str, prefix: &str, commands: &[Command], parts: &[(Keys, String)]) -> String {
    let rules = |keys: &[Keys]| {
        commands
            .iter()
            .filter(|command| keys.contains(&command.keys))
            .map(|command| format!("+{}", command.rule))
            .collect::<Vec<_>>()
    };
    let mut words: Vec<String> = ["ACL", "SETUSER", user, "on"].map(str::to_owned).into();
    words.extend(["resetkeys", "resetchannels", "clearselectors", "-@all"].map(str::to_owned));
    words.push(format!("~{}", pattern(prefix, "*")));
    words.extend(rules(&[Keys::None, Keys::All]));
    for (keys, allowed) in parts {
        words.push(format!("({allowed} {})", rules(&[*keys]).join(" ")));
    }
    words
        .iter()
        .map(|word| quoted(word))
        .collect::<Vec<_>>()
        .join(" ")
}

/// A pattern that means the prefix as it stands.
fn pattern(prefix: &str, rest: &str) -> String {
    let mut pattern = String::new();
    for c in prefix.chars() {
        if "*?[]\\".contains(c) {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern + rest
}

/// A word as `redis-cli` takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_+~%@*:.|{}".contains(c);
    if word.chars().all(plain) {
        return word.to_owned();
    }
    format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_consumer_writes_nothing_but_its_group_s_keys() {
        let line = consumer_acl("packing", "{shop}:", false);
        assert!(
            line.starts_with("ACL SETUSER packing on resetkeys "),
            "{line}"
        );
        assert!(line.contains(" ~{shop}:* +ping "), "{line}");
        assert!(
            line.contains("\"(%R~{shop}:relay:marker +hmget)\""),
            "{line}"
        );
        assert!(
            line.ends_with("\"(~{shop}:group:* +hmget +hset)\""),
            "{line}"
        );
        assert!(!line.contains("xadd"), "{line}");
        assert!(consumer_acl("p", "", true).contains("+xadd"));
    }

    #[test]
    fn what_means_something_in_a_pattern_or_a_line_is_escaped() {
        let line = relay_acl("re lay", "a*\"\\:");
        assert!(line.starts_with("ACL SETUSER \"re lay\" on "), "{line}");
        assert!(line.contains(r#" "~a\\*\"\\\\:*" "#), "{line}");
    }

    #[test]
    fn a_sample_has_the_key_in_its_place() {
        let sample = |rule: &str| {
            let command = RELAY_COMMANDS
                .iter()
                .find(|command| command.rule == rule)
                .unwrap();
            command.sample("p:").join(" ")
        };
        assert_eq!(sample("xadd"), "xadd p:topic * field value");
        assert_eq!(sample("evalsha"), "evalsha 0 1 p:topic");
        assert_eq!(sample("xinfo|groups"), "xinfo groups p:topic");
        assert_eq!(sample("del"), "del p:relay:marker");
    }
}
