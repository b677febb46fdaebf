//! Which member of a group gets which stream: a pure function that each member computes for itself.

use std::collections::{BTreeMap, BTreeSet};

/// The members of a group that are alive, each with the streams that it could have.
pub(crate) type Members = BTreeMap<String, Vec<String>>;

/// Gives each stream to one member, so that nobody has more than one above the fair share and as few streams as
/// possible move. `owners` says who has a stream now.
///
/// All members compute it from the same rows and come to the same answer; while they see different rows, the
/// leases decide.
pub(crate) fn spread(
    members: &Members,
    owners: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let streams: BTreeSet<&str> = members.values().flatten().map(String::as_str).collect();
    let could_have = |member: &str, stream: &str| {
        let theirs = members.get(member);
        theirs.is_some_and(|theirs| theirs.iter().any(|s| s == stream))
    };
    let quotas = quotas(members, owners, streams.len());
    let mut load: BTreeMap<&str, usize> = members.keys().map(|m| (m.as_str(), 0)).collect();
    let mut given = BTreeMap::new();
    for stream in &streams {
        let Some(owner) = owners.get(*stream) else {
            continue;
        };
        let Some(theirs) = load.get_mut(owner.as_str()) else {
            continue;
        };
        if *theirs < quotas[owner.as_str()] && could_have(owner, stream) {
            *theirs += 1;
            given.insert((*stream).to_owned(), owner.clone());
        }
    }
    for stream in &streams {
        if given.contains_key(*stream) {
            continue;
        }
        let least = load
            .iter_mut()
            .filter(|(member, _)| could_have(member, stream))
            .min_by_key(|(member, load)| (**load, **member));
        if let Some((member, load)) = least {
            *load += 1;
            given.insert((*stream).to_owned(), (*member).to_owned());
        }
    }
    given
}

/// How many streams each member may keep. What does not divide evenly stays with those who have most.
fn quotas<'a>(
    members: &'a Members,
    owners: &BTreeMap<String, String>,
    streams: usize,
) -> BTreeMap<&'a str, usize> {
    let held = |member: &str| owners.values().filter(|owner| *owner == member).count();
    let mut names: Vec<&str> = members.keys().map(String::as_str).collect();
    names.sort_by_key(|name| std::cmp::Reverse(held(name)));
    let (share, rest) = match names.len() {
        0 => (0, 0),
        members => (streams / members, streams % members),
    };
    let quota = |(rank, name)| (name, share + usize::from(rank < rest));
    names.into_iter().enumerate().map(quota).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streams(count: usize) -> Vec<String> {
        (0..count).map(|n| format!("s:{n:02}")).collect()
    }

    fn members(names: &[&str], count: usize) -> Members {
        names
            .iter()
            .map(|name| ((*name).to_owned(), streams(count)))
            .collect()
    }

    fn loads(given: &BTreeMap<String, String>) -> BTreeMap<&str, usize> {
        let mut loads = BTreeMap::new();
        for member in given.values() {
            *loads.entry(member.as_str()).or_default() += 1;
        }
        loads
    }

    fn moved(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> usize {
        before
            .iter()
            .filter(|(stream, owner)| after.get(*stream) != Some(owner))
            .count()
    }

    #[test]
    fn every_stream_has_an_owner_and_the_shares_differ_by_one_at_most() {
        let names = ["a", "b", "c", "d", "e"];
        for count in 1..20 {
            for members_now in 1..=names.len() {
                let given = spread(&members(&names[..members_now], count), &BTreeMap::new());
                assert_eq!(given.len(), count);
                let loads = loads(&given);
                let most = loads.values().max().unwrap();
                let least = if loads.len() < members_now {
                    &0
                } else {
                    loads.values().min().unwrap()
                };
                assert!(
                    most - least <= 1,
                    "{count} streams, {members_now} members: {loads:?}"
                );
            }
        }
    }

    #[test]
    fn a_spread_that_is_fair_stays() {
        let members = members(&["a", "b", "c"], 16);
        let first = spread(&members, &BTreeMap::new());
        assert_eq!(spread(&members, &first), first);
    }

    #[test]
    fn only_the_share_of_the_one_who_joins_or_leaves_moves() {
        let two = spread(&members(&["a", "b"], 16), &BTreeMap::new());
        let three = spread(&members(&["a", "b", "c"], 16), &two);
        assert_eq!(moved(&two, &three), 5);
        let again = spread(&members(&["a", "b"], 16), &three);
        assert_eq!(moved(&three, &again), 5);
        assert_eq!(loads(&again), BTreeMap::from([("a", 8), ("b", 8)]));
    }

    #[test]
    fn nobody_gets_a_stream_that_it_could_not_have_and_none_is_left_over() {
        let members = Members::from([
            ("a".to_owned(), vec!["orders".to_owned()]),
            (
                "b".to_owned(),
                vec!["refunds".to_owned(), "orders".to_owned(), "x".to_owned()],
            ),
        ]);
        let owners = BTreeMap::from([("orders".to_owned(), "b".to_owned())]);
        let given = spread(&members, &owners);
        assert_eq!(given.len(), 3);
        assert_eq!(given["refunds"], "b");
        assert_eq!(given["x"], "b");
        assert_eq!(spread(&members, &given), given);
    }

    #[test]
    fn without_members_nothing_is_given() {
        assert!(spread(&Members::new(), &BTreeMap::new()).is_empty());
    }
}
