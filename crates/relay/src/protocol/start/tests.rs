//! The start table, row by row.

use super::*;
use crate::protocol::ranges::RangeSet;

const OUTBOX: Uuid = Uuid::from_u128(1);
const BRANCH: Uuid = Uuid::from_u128(2);

fn place(epoch: i64, page: i64, high: i64) -> Place {
    let high_key = if high == 0 {
        String::new()
    } else {
        format!("k{high}")
    };
    Place {
        history: History {
            system_id: 7,
            timeline: 1,
            branch: BRANCH,
        },
        epoch,
        page,
        cursor: Cursor {
            high,
            high_key,
            gaps: RangeSet::new(),
        },
        redis_ms: 1_000 + page,
        blocked: BTreeMap::new(),
        layouts: Layouts::new(),
    }
}

fn marker(place: Place) -> MarkerFound {
    MarkerFound::Marker {
        outbox_id: OUTBOX,
        leadership: Uuid::from_u128(3),
        place,
        suspect: None,
    }
}

fn facts(checkpoint: Option<Place>, key_at_marker: Option<i64>) -> Facts {
    Facts {
        outbox_id: OUTBOX,
        system_id: 7,
        timeline: 1,
        last_value: 1_000,
        key_at_marker: key_at_marker.map(|id| format!("k{id}")),
        checkpoint,
        adopted_from: Vec::new(),
        purged_to: 0,
        checkpoint_stands: false,
    }
}

fn decide(found: &MarkerFound, facts: &Facts) -> Plan {
    plan(found, facts, OnRedisLoss::Replay).unwrap()
}

#[test]
fn the_first_start_begins_at_the_beginning() {
    let plan = decide(&MarkerFound::Missing, &facts(None, None));
    assert_eq!(
        (plan.case, plan.cursor.high, plan.epoch),
        (Case::First, 0, 1)
    );
}

#[test]
fn within_one_history_the_marker_is_exact() {
    for checkpoint in [
        None,
        Some(place(3, 4, 50)),
        Some(place(3, 9, 80)),
        Some(place(2, 99, 70)),
    ] {
        let plan = decide(&marker(place(3, 9, 80)), &facts(checkpoint, Some(80)));
        assert_eq!(
            (plan.case, plan.cursor.high, plan.epoch, plan.suspect),
            (Case::Marker, 80, 4, None)
        );
    }
}

#[test]
fn a_marker_behind_the_checkpoint_lost_its_tail() {
    for checkpoint in [place(3, 12, 90), place(5, 1, 80)] {
        let epoch = checkpoint.epoch + 1;
        let plan = decide(&marker(place(3, 9, 80)), &facts(Some(checkpoint), Some(80)));
        assert_eq!(
            (plan.case, plan.cursor.high, plan.epoch, plan.suspect),
            (Case::LostTail, 80, epoch, None)
        );
    }
}

#[test]
fn another_history_goes_on_from_the_lower_cursor_with_the_gaps_united() {
    let mut ahead = place(3, 9, 80);
    ahead.cursor.gaps.insert(10, 12);
    let mut behind = place(3, 4, 50);
    behind.cursor.gaps.insert(12, 14);
    let changes: [&dyn Fn(&mut Facts); 5] = [
        &|f| f.timeline = 2,
        &|f| f.key_at_marker = None,
        &|f| f.key_at_marker = Some("another".into()),
        &|f| f.last_value = 79,
        &|f| f.checkpoint.as_mut().unwrap().history.branch = Uuid::from_u128(9),
    ];
    for change in changes {
        let mut facts = facts(Some(behind.clone()), Some(80));
        change(&mut facts);
        let plan = decide(&marker(ahead.clone()), &facts);
        assert_eq!(
            (plan.case, plan.cursor.high, plan.new_branch),
            (Case::OtherHistory, 50, true)
        );
        assert_eq!(plan.cursor.gaps.iter().collect::<Vec<_>>(), [(10, 14)]);
        assert_eq!(
            plan.suspect,
            Some(Suspect {
                until: 80,
                since_ms: 1_004
            })
        );
    }
}

#[test]
fn a_redis_that_fell_back_behind_a_branch_is_compared_from_the_beginning() {
    // Id 50 was given out again, and published again, on the checkpoint's branch; Redis has lost that.
    let mut checkpoint = place(4, 1, 60);
    checkpoint.history.branch = Uuid::from_u128(9);
    let plan = decide(&marker(place(3, 9, 80)), &facts(Some(checkpoint), Some(80)));
    assert_eq!(
        (plan.case, plan.cursor, plan.suspect),
        (
            Case::OtherHistory,
            Cursor::default(),
            Some(Suspect {
                until: 80,
                since_ms: 0
            })
        )
    );
}

#[test]
fn marker_and_checkpoint_that_cannot_be_of_one_past_are_two_histories() {
    // The checkpoint is of an earlier page and yet further.
    let plan = decide(
        &marker(place(3, 9, 80)),
        &facts(Some(place(3, 4, 90)), Some(80)),
    );
    assert_eq!((plan.case, plan.cursor.high), (Case::OtherHistory, 80));
    let plan = decide(
        &marker(place(3, 9, 80)),
        &facts(Some(place(3, 9, 81)), Some(80)),
    );
    assert_eq!(plan.case, Case::OtherHistory);
}

#[test]
fn a_gap_right_at_the_lower_high_lowers_it_further() {
    let mut other = place(3, 9, 80);
    other.cursor.gaps.insert(49, 50);
    let plan = decide(&marker(other), &facts(Some(place(3, 4, 50)), None));
    assert_eq!((plan.cursor.high, plan.cursor.gaps.len()), (48, 0));
}

#[test]
fn a_missing_marker_is_told_from_a_missing_redis_by_the_stream() {
    let mut facts = facts(Some(place(3, 9, 80)), None);
    facts.checkpoint_stands = true;
    let kept = decide(&MarkerFound::Missing, &facts);
    assert_eq!((kept.case, kept.cursor.high), (Case::LostMarker, 80));
    assert_eq!(
        kept.suspect,
        Some(Suspect {
            until: 1_000,
            since_ms: 1_009
        })
    );

    facts.checkpoint_stands = false;
    let replay = decide(&MarkerFound::Missing, &facts);
    assert_eq!(
        (replay.case, replay.cursor.high, replay.epoch),
        (Case::Replay, 0, 4)
    );
    let resume = plan(&MarkerFound::Missing, &facts, OnRedisLoss::Resume).unwrap();
    assert_eq!(
        (resume.case, resume.cursor.high, resume.suspect),
        (Case::Resume, 80, None)
    );
}

#[test]
fn rows_that_were_purged_are_named() {
    let mut facts = facts(Some(place(3, 9, 80)), None);
    facts.purged_to = 60;
    assert_eq!(decide(&MarkerFound::Missing, &facts).purged, Some((1, 60)));
    facts.key_at_marker = Some("k40".into());
    assert_eq!(
        decide(&marker(place(3, 5, 40)), &facts).purged,
        Some((41, 60))
    );
    facts.key_at_marker = Some("k70".into());
    assert_eq!(decide(&marker(place(3, 8, 70)), &facts).purged, None);
}

#[test]
fn what_only_a_person_can_settle_is_refused() {
    let facts = |change: &dyn Fn(&mut Facts)| {
        let mut facts = facts(Some(place(3, 4, 50)), Some(80));
        change(&mut facts);
        facts
    };
    let refused =
        |found: &MarkerFound, facts: &Facts| plan(found, facts, OnRedisLoss::Replay).unwrap_err();
    let ahead = marker(place(3, 9, 80));
    assert_eq!(
        refused(&ahead, &facts(&|f| f.system_id = 8)),
        Refusal::OtherCluster {
            cursor: 7,
            database: 8
        }
    );
    assert_eq!(
        refused(&MarkerFound::Missing, &facts(&|f| f.system_id = 8)),
        Refusal::OtherCluster {
            cursor: 7,
            database: 8
        }
    );
    let mut later = place(3, 9, 80);
    later.history.timeline = 2;
    assert_eq!(
        refused(&marker(later), &facts(&|_| {})),
        Refusal::OldPrimary {
            marker: 2,
            database: 1
        }
    );
    assert_eq!(
        refused(&ahead, &facts(&|f| f.outbox_id = Uuid::from_u128(5))),
        Refusal::OtherOutbox {
            marker: OUTBOX,
            database: Uuid::from_u128(5)
        }
    );
    assert!(matches!(
        refused(&MarkerFound::Foreign("a list".into()), &facts(&|_| {})),
        Refusal::NotAMarker(_)
    ));

    let adopted = decide(
        &ahead,
        &facts(&|f| (f.system_id, f.adopted_from) = (8, vec![7])),
    );
    assert_eq!(
        (adopted.case, adopted.cursor.high),
        (Case::OtherHistory, 50)
    );
}
