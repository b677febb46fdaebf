//! What is judged of Redis.

use super::*;
use crate::doctor::ask_redis::Member;
use crate::doctor::finding::Level;

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    let owned = pairs
        .iter()
        .map(|(a, b)| ((*a).to_owned(), (*b).to_owned()));
    owned.collect()
}

fn stream(entries: u64, groups: Vec<Group>) -> Stream {
    Stream {
        name: "outbox:orders".into(),
        entries,
        groups,
    }
}

fn group(pending: u64, lag: u64, members: &[(u64, u64)]) -> Group {
    let member = |(pending, idle): &(u64, u64)| Member {
        pending: *pending,
        idle: Duration::from_secs(*idle),
    };
    Group {
        name: "packing".into(),
        pending,
        lag,
        members: members.iter().map(member).collect(),
    }
}

fn worst(streams: Vec<Stream>) -> Level {
    let found = Streams {
        streams,
        is_complete: true,
    };
    let levels = judge_streams(&found)
        .into_iter()
        .map(|finding| finding.level);
    levels.max().unwrap()
}

#[test]
fn versions_policies_and_clusters() {
    let versions = ["6.2.14", "7.0.15", "8.0.0", ""].map(|version| judge_version(version).level);
    assert_eq!(versions, [Level::Error, Level::Ok, Level::Ok, Level::Error]);
    let policies = ["noeviction", "allkeys-lru", ""].map(|policy| judge_policy(policy).level);
    assert_eq!(policies, [Level::Ok, Level::Error, Level::Note]);
    assert_eq!(judge_cluster(false, "outbox:").level, Level::Ok);
    assert_eq!(judge_cluster(true, "{shop}:").level, Level::Ok);
    assert_eq!(judge_cluster(true, "outbox:").level, Level::Error);
}

#[test]
fn memory_is_judged_by_the_limit_that_there_is() {
    let level = |used: &str, limit: &str, machine: &str| {
        let info = map(&[
            ("used_memory", used),
            ("maxmemory", limit),
            ("total_system_memory", machine),
        ]);
        judge_memory(&Info(&info)).level
    };
    assert_eq!(level("69", "100", "1"), Level::Ok);
    assert_eq!(level("70", "100", "1000"), Level::Warning);
    assert_eq!(level("90", "100", "1000"), Level::Error);
    assert_eq!(level("75", "0", "100"), Level::Warning);
    assert_eq!(level("75", "0", "0"), Level::Ok);
}

#[test]
fn what_survives_a_crash() {
    let none: Seen<HashMap<String, String>> = Err("NOPERM".into());
    let saves = |save| Ok(map(&[("save", save)]));
    let level = |pairs: &[(&str, &str)], settings: &Seen<HashMap<String, String>>| {
        judge_persistence(&Info(&map(pairs)), settings).level
    };
    assert_eq!(level(&[("aof_enabled", "1")], &none), Level::Ok);
    assert_eq!(level(&[], &saves("")), Level::Warning);
    assert_eq!(level(&[], &saves("3600 1")), Level::Note);
    assert_eq!(level(&[], &none), Level::Note);
    let failed = [("rdb_last_bgsave_status", "err"), ("aof_enabled", "1")];
    assert_eq!(level(&failed, &none), Level::Error);
}

#[test]
fn replicas_that_are_asked_for_must_be_there() {
    let level = |role: &str, replicas: &str, wanted: &str| {
        let info = map(&[("role", role), ("connected_slaves", replicas)]);
        let settings = Ok(map(&[("min-replicas-to-write", wanted)]));
        judge_replication(&Info(&info), &settings)[0].level
    };
    assert_eq!(level("slave", "0", "0"), Level::Error);
    assert_eq!(level("master", "0", "1"), Level::Error);
    assert_eq!(level("master", "0", "0"), Level::Note);
    assert_eq!(level("master", "1", "0"), Level::Note);
    assert_eq!(level("master", "1", "1"), Level::Ok);
}

#[test]
fn rights_that_are_missing_are_named() {
    assert_eq!(judge_rights(&Rights::Lacks(Vec::new())).level, Level::Ok);
    assert_eq!(judge_rights(&Rights::NoScripts).level, Level::Error);
    let lacks = judge_rights(&Rights::Lacks(vec!["+xadd".into()]));
    assert!(lacks.level == Level::Error && lacks.found.contains("+xadd"));
}

#[test]
fn streams_that_nobody_reads() {
    assert_eq!(worst(vec![]), Level::Ok);
    assert_eq!(worst(vec![stream(1, vec![])]), Level::Note);
    assert_eq!(worst(vec![stream(UNREAD_MAX, vec![])]), Level::Warning);
    assert_eq!(worst(vec![stream(0, vec![])]), Level::Ok);
}

#[test]
fn groups_that_are_left_alone() {
    let level = |group| worst(vec![stream(5, vec![group])]);
    assert_eq!(level(group(0, 0, &[])), Level::Ok);
    assert_eq!(level(group(0, 5, &[])), Level::Warning);
    assert_eq!(level(group(3, 0, &[(3, 61)])), Level::Warning);
    assert_eq!(level(group(3, 0, &[(3, 2)])), Level::Ok);
    assert_eq!(level(group(3, 0, &[(0, 1), (3, 300)])), Level::Ok);
    assert_eq!(level(group(3, 0, &[(0, 1), (3, 1_000)])), Level::Warning);
    let many: Vec<String> = (0..7).map(|n| n.to_string()).collect();
    assert_eq!(named(&many), "0, 1, 2, 3, 4 and 2 more");
}
