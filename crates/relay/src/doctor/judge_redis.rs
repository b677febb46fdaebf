//! What the facts of Redis and its streams mean. Pure: no server is asked here.

use std::collections::HashMap;
use std::time::Duration;

use super::ask_redis::{Group, RedisFacts, Rights, Stream, Streams};
use super::finding::{Check, Finding, Seen, size};
use super::judge_postgres::judge_clock;
use crate::error::Error;
use crate::publisher::check_prefix;

/// Share of `maxmemory` from which one has to act, and from which it is nearly too late.
const MEMORY_WARNING: f64 = 0.7;
const MEMORY_ERROR: f64 = 0.9;

/// Entries of a stream that nobody reads, before they count as growth.
const UNREAD_MAX: u64 = 10_000;

/// A member that is silent for longer is not there any more: it asks again every few seconds.
const SILENT: Duration = Duration::from_secs(60);

/// A live group has taken over what dead members hold after this time, by the default of `claim_after` and with room.
const UNCLAIMED: Duration = Duration::from_secs(15 * 60);

/// Streams and groups that a finding names.
const NAMED_MAX: usize = 5;

const fn check(name: &'static str) -> Check {
    Check {
        area: "redis",
        name,
    }
}

const fn of_streams(name: &'static str) -> Check {
    Check {
        area: "streams",
        name,
    }
}

/// All findings of a Redis and its streams.
pub(super) fn judge(facts: &RedisFacts) -> Vec<Finding> {
    let mut findings = match &facts.info {
        Ok(info) => judge_info(&Info(info), facts),
        Err(why) => vec![check("info").error(
            format!("INFO is refused: {why}"),
            "the relay reads it at its start and refuses to work without",
            "outbox-relay grants --redis prints the rights",
        )],
    };
    findings.push(match &facts.rights {
        Ok(rights) => judge_rights(rights),
        Err(why) => check("rights").unseen(why),
    });
    findings.push(match &facts.clock {
        Ok(clock) => judge_clock(check("clock"), *clock),
        Err(why) => check("clock").unseen(why),
    });
    match &facts.streams {
        Ok(streams) => findings.extend(judge_streams(streams)),
        Err(why) => findings.push(of_streams("streams").unseen(why)),
    }
    findings
}

/// What INFO says.
struct Info<'a>(&'a HashMap<String, String>);

impl Info<'_> {
    fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name).parse().ok()
    }

    fn is_on(&self, name: &str) -> bool {
        self.text(name) == "1"
    }
}

fn judge_info(info: &Info<'_>, facts: &RedisFacts) -> Vec<Finding> {
    let settings = &facts.settings;
    let mut findings = vec![
        judge_version(info.text("redis_version")),
        judge_cluster(info.is_on("cluster_enabled"), &facts.prefix),
        judge_policy(info.text("maxmemory_policy")),
        judge_memory(info),
        judge_persistence(info, settings),
    ];
    findings.extend(judge_replication(info, settings));
    findings
}

fn judge_version(version: &str) -> Finding {
    let major = version
        .split('.')
        .next()
        .and_then(|major| major.parse::<u32>().ok());
    match major {
        Some(7..) => check("version").ok(format!("Redis {version}")),
        _ => check("version").error(
            format!("Redis {version:?}"),
            "a relay refuses to start: it needs scripts that are refused as a whole",
            "use Redis 7.0 or later, or Valkey",
        ),
    }
}

fn judge_cluster(cluster: bool, prefix: &str) -> Finding {
    if !cluster {
        return check("cluster").ok("no cluster: all keys are on this server");
    }
    match check_prefix(prefix) {
        Ok(()) => check("cluster").ok("a cluster, and all keys of this prefix are in one slot"),
        Err(Error::Setup { problem, remedy }) => {
            check("cluster").error(problem, "a relay refuses to start", remedy)
        }
        Err(other) => check("cluster").unseen(&other.one_line()),
    }
}

fn judge_policy(policy: &str) -> Finding {
    match policy {
        "noeviction" => check("maxmemory-policy").ok(policy),
        "" => check("maxmemory-policy").unseen("INFO does not tell it"),
        other => check("maxmemory-policy").error(
            other,
            "when memory is full, Redis drops whole streams without an error; a relay refuses to start",
            "set maxmemory-policy noeviction",
        ),
    }
}

fn judge_memory(info: &Info<'_>) -> Finding {
    let check = check("memory");
    let used = info.number("used_memory").unwrap_or(0);
    let (limit, name) = match info.number("maxmemory") {
        Some(limit) if limit > 0 => (limit, "maxmemory"),
        _ => (
            info.number("total_system_memory").unwrap_or(0),
            "the machine's memory; maxmemory is not set",
        ),
    };
    if limit == 0 {
        return check.ok(format!("{} in use", size(used)));
    }
    let share = used as f64 / limit as f64;
    let found = format!(
        "{} in use, {:.0} % of {} ({name})",
        size(used),
        share * 100.0,
        size(limit)
    );
    let means = "at the limit Redis takes no entries, and messages wait in the outbox; without a limit the system kills it";
    let remedy = "more memory, or shorter streams: see which are long in outbox-relay status";
    if share >= MEMORY_ERROR {
        check.error(found, means, remedy)
    } else if share >= MEMORY_WARNING {
        check.warning(found, means, remedy)
    } else {
        check.ok(found)
    }
}

fn judge_persistence(info: &Info<'_>, settings: &Seen<HashMap<String, String>>) -> Finding {
    let check = check("persistence");
    let setting = |name: &str| {
        let settings = settings.as_ref().ok()?;
        settings.get(name).map(String::as_str)
    };
    for (name, what) in [
        ("rdb_last_bgsave_status", "the last snapshot"),
        (
            "aof_last_write_status",
            "the last write to the append-only file",
        ),
    ] {
        if info.text(name) == "err" {
            return check.error(
                format!("{what} failed"),
                "Redis refuses every write (MISCONF) or forgets them at its next start",
                "see its log; a full disk is the usual cause",
            );
        }
    }
    if info.is_on("aof_enabled") {
        let fsync = setting("appendfsync").unwrap_or("not to be seen");
        return check.ok(format!("append-only file, appendfsync {fsync}"));
    }
    let means = "what it forgets at a crash goes out again from the outbox, as far as the retention reaches, and the inbox \
                 absorbs repeats; what groups had acknowledged is forgotten with it";
    match setting("save") {
        Some("") => check.warning(
            "neither snapshots nor an append-only file: it comes back empty",
            means,
            "set appendonly yes",
        ),
        Some(save) => check.note(
            format!("snapshots only ({save})"),
            means,
            "set appendonly yes",
        ),
        None => check.note(
            "no append-only file; whether there are snapshots cannot be seen",
            means,
            "set appendonly yes",
        ),
    }
}

fn judge_replication(info: &Info<'_>, settings: &Seen<HashMap<String, String>>) -> Vec<Finding> {
    let check = check("replication");
    if info.text("role") == "slave" {
        return vec![check.error(
            "this is a replica",
            "it takes no entries; the relay waits until it is promoted",
            "point --redis-url at the primary",
        )];
    }
    let replicas = info.number("connected_slaves").unwrap_or(0);
    let wanted = settings
        .as_ref()
        .ok()
        .and_then(|settings| settings.get("min-replicas-to-write"))
        .and_then(|wanted| wanted.parse::<u64>().ok());
    let found = match wanted {
        Some(wanted) => format!("{replicas} replicas, min-replicas-to-write {wanted}"),
        None => format!("{replicas} replicas, min-replicas-to-write not to be seen"),
    };
    vec![match wanted {
        Some(wanted) if replicas < wanted => check.error(
            found,
            "Redis refuses every entry (NOREPLICAS); messages wait in the outbox",
            "bring the replicas back, or lower min-replicas-to-write",
        ),
        Some(0) if replicas > 0 => check.note(
            found,
            "a primary that is cut off goes on taking entries which a failover forgets; they go out again afterwards",
            "min-replicas-to-write 1 keeps that window short",
        ),
        _ if replicas == 0 => check.note(
            found,
            "there is nothing to fail over to: messages wait in the outbox until it is back",
            "",
        ),
        _ => check.ok(found),
    }]
}

fn judge_rights(rights: &Rights) -> Finding {
    let remedy = "outbox-relay grants --redis --relay USER prints what it needs and no more";
    match rights {
        Rights::NoScripts => check("rights").error(
            "this user may not run scripts (+evalsha +script|load)",
            "the relay publishes by a script, so that a page is there as a whole or not at all",
            remedy,
        ),
        Rights::Lacks(rules) if rules.is_empty() => {
            check("rights").ok("this user may call what the relay calls")
        }
        Rights::Lacks(rules) => check("rights").error(
            format!("this user lacks {}", rules.join(" ")),
            "the relay stops, or holds a stream back, where it needs them",
            remedy,
        ),
    }
}

fn judge_streams(found: &Streams) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !found.is_complete {
        findings.push(of_streams("streams").note(
            format!(
                "looked at {} streams; there was no time for more",
                found.streams.len()
            ),
            "nothing is known of the others",
            "outbox-relay status --topic looks at one topic",
        ));
    }
    findings.push(judge_unread(&found.streams));
    let groups = || {
        let streams = found.streams.iter();
        streams.flat_map(|stream| stream.groups.iter().map(move |group| (stream, group)))
    };
    let deserted = groups().filter(|(_, group)| is_deserted(group));
    let deserted: Vec<String> = deserted
        .map(|(stream, group)| shown(stream, group))
        .collect();
    let unclaimed = groups().filter(|(_, group)| !is_deserted(group) && has_unclaimed(group));
    let unclaimed: Vec<String> = unclaimed
        .map(|(stream, group)| shown(stream, group))
        .collect();
    if !deserted.is_empty() {
        findings.push(of_streams("groups").warning(
            named(&deserted),
            "no member has asked for entries for a minute, so nothing is applied; trimming spares what the group has not \
             acknowledged",
            "start its consumers; XGROUP DESTROY if the group is given up",
        ));
    }
    if !unclaimed.is_empty() {
        findings.push(of_streams("groups").warning(
            named(&unclaimed),
            "members that are gone hold entries, and those that are there do not take them over",
            "is claim_after longer than 15 minutes, or does their handler hang?",
        ));
    }
    if deserted.is_empty() && unclaimed.is_empty() {
        findings
            .push(of_streams("groups").ok(format!("{} groups, none left alone", groups().count())));
    }
    findings
}

fn judge_unread(streams: &[Stream]) -> Finding {
    let check = of_streams("unread streams");
    let unread = streams
        .iter()
        .filter(|stream| stream.groups.is_empty() && stream.entries > 0);
    let (long, short): (Vec<_>, Vec<_>) = unread.partition(|stream| stream.entries >= UNREAD_MAX);
    let list = |streams: &[&Stream]| {
        let names: Vec<String> = streams
            .iter()
            .map(|stream| format!("{} ({} entries)", stream.name, stream.entries))
            .collect();
        named(&names)
    };
    let means = "no group reads them; trimming spares a stream without a group, so they grow until memory is full";
    let remedy = "start their consumers, or stop writing the topic; XTRIM or DEL what nobody wants";
    if !long.is_empty() {
        check.warning(list(&long), means, remedy)
    } else if !short.is_empty() {
        check.note(list(&short), means, remedy)
    } else {
        check.ok(format!("none of {} streams", streams.len()))
    }
}

/// Whether there is something to do and nobody does it.
fn is_deserted(group: &Group) -> bool {
    (group.pending > 0 || group.lag > 0) && group.members.iter().all(|member| member.idle > SILENT)
}

fn has_unclaimed(group: &Group) -> bool {
    let left = |member: &&super::ask_redis::Member| member.pending > 0 && member.idle > UNCLAIMED;
    group.members.iter().any(|member| left(&member))
}

fn shown(stream: &Stream, group: &Group) -> String {
    format!(
        "{} on {} (pending {}, not delivered {})",
        group.name, stream.name, group.pending, group.lag
    )
}

/// The first few, and how many more there are.
fn named(all: &[String]) -> String {
    let first = all
        .iter()
        .take(NAMED_MAX)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    match all.len().checked_sub(NAMED_MAX) {
        None | Some(0) => first,
        Some(more) => format!("{first} and {more} more"),
    }
}

#[cfg(test)]
mod tests;
