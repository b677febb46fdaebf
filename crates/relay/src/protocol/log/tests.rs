//! Which gaps are given up, which rows are taken, and what is asked.

use super::question::is_open;
use super::*;

const LIMITS: Limits = Limits::of_gap_ranges(1_000);

fn log() -> Log {
    Log::new(&Cursor::default(), LIMITS)
}

fn writers(ids: &[&str]) -> Vec<Listed> {
    ids.iter()
        .map(|id| {
            let prepared = id.starts_with('-');
            let xid = id.split_once('#').and_then(|(_, xid)| xid.parse().ok());
            Listed {
                writer: Writer {
                    id: (*id).to_owned(),
                    prepared,
                },
                xid,
            }
        })
        .collect()
}

fn trip(log: &mut Log, open: &[&str], late: &[i64], new: &[i64]) -> Vec<(i64, i64)> {
    log.learn(writers(open), None);
    log.accept(Answer {
        late,
        late_cut: false,
        new,
    })
    .dead
    .iter()
    .collect()
}

#[test]
fn a_gap_stays_while_a_writer_of_its_first_list_is_open() {
    let mut log = log();
    assert_eq!(trip(&mut log, &["3/1"], &[], &[2]), []);
    assert_eq!(trip(&mut log, &["3/1", "4/1"], &[], &[]), []);
    assert_eq!(
        trip(&mut log, &["4/1", "5/1"], &[], &[]),
        [],
        "4/1 was open after the gap was seen"
    );
    assert_eq!(
        trip(&mut log, &["5/1"], &[], &[]),
        [(1, 1)],
        "5/1 came later: it cannot hold id 1"
    );
    assert_eq!(log.gap_ranges(), 0);
}

#[test]
fn a_writer_that_ended_and_began_anew_holds_only_later_gaps() {
    let mut log = log();
    trip(&mut log, &["3/1"], &[], &[2]);
    trip(&mut log, &["3/1", "4/1"], &[], &[]);
    // 3/1 released the lock by rolling back to a savepoint; its id is gone for good.
    assert_eq!(trip(&mut log, &[], &[], &[]), [(1, 1)]);
    trip(&mut log, &["3/1"], &[], &[4]);
    assert_eq!(trip(&mut log, &["3/1"], &[], &[]), []);
}

#[test]
fn a_late_row_splits_its_gap_and_both_parts_remember() {
    let mut log = log();
    trip(&mut log, &["3/1"], &[], &[10]);
    trip(&mut log, &["3/1"], &[5], &[]);
    assert_eq!(log.question().gaps_lo, [1, 6]);
    assert_eq!(log.question().gaps_hi, [4, 9]);
    assert_eq!(trip(&mut log, &["9/9"], &[], &[]), [(1, 4), (6, 9)]);
}

#[test]
fn a_cut_answer_closes_no_gap_and_takes_no_new_row() {
    let mut log = log();
    trip(&mut log, &["3/1"], &[], &[10]);
    log.learn(writers(&[]), None);
    let taken = log.accept(Answer {
        late: &[1, 2],
        late_cut: true,
        new: &[11],
    });
    assert_eq!(taken, Taken::default());
    assert_eq!((log.high(), log.lowest_gap()), (10, Some(3)));
    assert_eq!(trip(&mut log, &[], &[3], &[11]), [(4, 9)]);
    assert_eq!(log.high(), 11);
}

#[test]
fn a_prepared_writer_holds_nothing_drawn_after_it_was_prepared() {
    let mut log = log();
    trip(&mut log, &[], &[], &[2]);
    log.learn(writers(&["-1/77"]), Some(2));
    log.accept(Answer {
        late: &[],
        late_cut: false,
        new: &[4],
    });
    assert_eq!(
        trip(&mut log, &["-1/77"], &[], &[]),
        [(3, 3)],
        "3 was drawn after the prepared writer's last id"
    );
    assert_eq!(log.lowest_gap(), Some(1));
    assert_eq!(trip(&mut log, &[], &[1], &[]), []);
}

#[test]
fn a_writer_that_is_prepared_after_its_gap_was_seen_still_holds_it() {
    let mut log = log();
    trip(&mut log, &["3/1"], &[], &[2]);
    assert_eq!(trip(&mut log, &["3/1"], &[], &[]), []);
    log.learn(writers(&["-1/77"]), Some(2));
    let taken = log.accept(Answer {
        late: &[],
        late_cut: false,
        new: &[],
    });
    assert!(taken.dead.is_empty());
    assert_eq!(trip(&mut log, &["-1/77"], &[], &[]), []);
    assert_eq!(trip(&mut log, &[], &[], &[]), [(1, 1)]);
}

#[test]
fn a_log_with_trips_numbered_anew_takes_the_same() {
    use rand::{Rng, SeedableRng, rngs::StdRng};
    for seed in 0..100 {
        let mut rng = StdRng::seed_from_u64(seed);
        let limits = Limits {
            gap_ranges_max: 5,
            long_trips: 2,
            left_out_min: 1,
        };
        let mut log = Log::new(&Cursor::default(), limits);
        let mut renumbered = log.clone();
        for _ in 0..60 {
            let names = ["3/1#700", "3/2#701", "3/3", "-1/7", "-1/8#702"];
            let mut listed = names.to_vec();
            listed.retain(|_| rng.random_bool(0.7));
            let question = log.short_question();
            let same = renumbered.short_question();
            let xids = |q: &Question| q.left_to.iter().map(|h| h.xid).collect::<Vec<_>>();
            assert_eq!(question.gaps_lo, same.gaps_lo, "seed {seed}");
            assert_eq!(xids(&question), xids(&same), "seed {seed}");
            for log in [&mut log, &mut renumbered] {
                log.learn(writers(&listed), Some(10));
            }
            let trusted = log.may_trust(&question, None);
            assert_eq!(trusted, renumbered.may_trust(&same, None));
            let mut late = log.question().gaps_lo;
            late.retain(|_| rng.random_bool(0.1));
            let new = if question.read_ahead && rng.random_bool(0.5) {
                vec![log.high() + rng.random_range(1..3)]
            } else {
                Vec::new()
            };
            let answer = Answer {
                late: &late,
                late_cut: rng.random_bool(0.1),
                new: &new,
            };
            assert_eq!(log.accept(answer), renumbered.accept(answer), "seed {seed}");
            renumbered = renumbered.renumbered();
            assert_eq!(renumbered, log.renumbered(), "seed {seed}");
        }
        assert!(renumbered.trip < log.trip, "seed {seed}");
    }
}

#[test]
fn too_many_gaps_stop_reading_ahead() {
    let mut log = Log::new(&Cursor::default(), Limits::of_gap_ranges(2));
    trip(&mut log, &["3/1"], &[], &[2, 4]);
    assert!(!log.question().read_ahead);
    trip(&mut log, &["3/1"], &[1], &[]);
    assert!(log.question().read_ahead);
}

/// A trip that finds this many rows, each behind a gap of one id.
fn skip_every_second(log: &mut Log, open: &[&str], rows: i64) {
    let new: Vec<i64> = (1..=rows).map(|n| log.high() + 2 * n).collect();
    trip(log, open, &[], &new);
}

/// A log with many gaps that the transaction 700 holds, and one that 9/9 may fill as well.
fn with_a_long_writer() -> Log {
    let mut log = log();
    for _ in 0..=LIMITS.long_trips {
        skip_every_second(&mut log, &["3/1#700"], 5);
    }
    log
}

#[test]
fn gaps_that_only_a_long_writer_holds_are_left_to_it() {
    let mut log = with_a_long_writer();
    let all = log.question().gaps_lo.len();
    assert!(all > LIMITS.left_out_min);
    let short = log.short_question();
    assert_eq!(short.left_to, [Holder { xid: 700, since: 1 }]);
    assert_eq!(
        short.gaps_lo.len(),
        5,
        "those of the last trip, whose writers are not known yet"
    );

    skip_every_second(&mut log, &["3/1#700", "9/9"], 1);
    trip(&mut log, &["3/1#700", "9/9"], &[], &[]);
    let short = log.short_question();
    assert_eq!(
        (short.left_to.len(), short.gaps_lo.len()),
        (1, 6),
        "what 9/9 may fill is asked for"
    );
    log.learn(writers(&["3/1#700", "9/9"]), None);
    assert!(log.may_trust(&log.short_question(), None));
    assert!(log.may_trust(&log.short_question(), Some("690:710:700,705")));
    assert!(
        log.may_trust(&log.short_question(), Some("690:700:")),
        "it had no id in this snapshot"
    );
    assert!(
        !log.may_trust(&log.short_question(), Some("690:710:705")),
        "it has ended"
    );
    assert!(!log.may_trust(&log.short_question(), Some("690:710:")));
}

#[test]
fn an_answer_without_the_long_writer_in_its_list_does_not_count() {
    let mut log = with_a_long_writer();
    let short = log.short_question();
    log.learn(writers(&["4/4"]), None);
    assert!(!log.may_trust(&short, None));
    let whole = log.question();
    assert_eq!(whole.gaps_lo.len(), log.gap_ranges());
    let taken = log.accept(Answer {
        late: &[],
        late_cut: false,
        new: &[],
    });
    assert_eq!(
        taken.dead.len(),
        usize::try_from(5 * LIMITS.long_trips).unwrap(),
        "all of its gaps, now that R asked for them, but not those that 4/4 may fill"
    );
}

#[test]
fn a_writer_without_a_known_id_is_left_nothing() {
    let mut log = log();
    for _ in 0..=2 * LIMITS.long_trips {
        skip_every_second(&mut log, &["3/1"], 3);
    }
    assert_eq!(log.short_question(), log.question());
}

#[test]
fn snapshots_tell_open_transactions_also_where_ids_wrap() {
    assert!(is_open(7, "5:9:5,7"));
    assert!(!is_open(6, "5:9:5,7"));
    assert!(is_open(9, "5:9:") && is_open(10, "5:9:"));
    assert!(is_open(u32::MAX, "8589934591:8589934593:8589934591"));
    assert!(!is_open(u32::MAX, "8589934592:8589934593:8589934592"));
    assert!(is_open(1, "8589934591:8589934593:8589934591"));
    assert!(!is_open(5, "nonsense"));
}

#[test]
fn after_a_cut_answer_no_gap_is_left_out() {
    let mut log = with_a_long_writer();
    log.learn(writers(&["3/1#700", "9/9#800"]), None);
    let first = log.question().gaps_lo[0];
    log.accept(Answer {
        late: &[first],
        late_cut: true,
        new: &[],
    });
    // 9/9 has ended, but the rest of its rows was behind the cut.
    assert_eq!(log.short_question(), log.question());
    log.learn(writers(&["3/1#700"]), None);
    log.accept(Answer {
        late: &[],
        late_cut: false,
        new: &[],
    });
    assert!(!log.short_question().left_to.is_empty());
}

#[test]
fn a_long_writer_that_stands_in_the_list_under_another_name_is_not_trusted() {
    let mut log = with_a_long_writer();
    let short = log.short_question();
    log.learn(writers(&["3/0#700"]), None);
    assert!(!log.may_trust(&short, None));
}
