//! The protocol of the relay, checked in every state that small worlds reach.
//!
//! The functions of `outbox_relay::protocol` run here as they are: the log and what it asks, takes and buries, the
//! cursor and its steps, the start table, suspect rows, the names of streams. The servers around them are modelled
//! (`postgres.rs`, `redis.rs`), and so is the order in which the relay does things (`relay.rs`). A search goes through
//! all orders in which everybody's steps can happen (`model.rs`) and looks in every state at the claims (`claims.rs`).
//!
//! # What can happen
//!
//! - Transactions take the table's lock, an xid before or with the first message, ids; they commit, roll back to a
//!   savepoint or whole, are prepared; in any order, and late. Those of one ordering key exclude each other.
//! - Between `L` and the statement of a trip, between reading and publishing, between a page's script and the
//!   checkpoint, and within a take-over, everybody else may act.
//! - The relay crashes or gives up at any point; its script then arrives later, or never.
//! - Redis goes back to any earlier state, marker and streams together, or to nothing; or the marker alone is gone.
//! - Postgres crashes with commits that were not flushed; or goes back to any earlier state, with the ids given out
//!   again, as a promoted standby or as a snapshot put back.
//!
//! # Bounds
//!
//! Two or three ids, two or three transactions at once, one or two faults of a kind; `worlds.rs` has the numbers. Within
//! them nothing is left out and nothing is drawn at random. "Any earlier state" is one copy, taken at any moment.
//!
//! # What is not modelled
//!
//! - Clocks: tails of streams are compared whole, and nothing waits. Blocked streams, dead letters, changes of
//!   partitions, the purge, limits of bytes, `--on-redis-loss resume`, and the refusals of the start table.
//! - A commit becomes visible and leaves `L` in one step. In a server it leaves `L` a moment later, which only holds
//!   gaps for longer.
//! - A marker that is deleted while Redis loses its tail as well, or while a script of an earlier take-over is under
//!   way: the streams that stand then vouch for entries that are gone, or the late script finds no marker to differ from.
//!
//! # Wrong variants
//!
//! Each test in `a_wrong_variant` does one thing wrong (`wrong.rs`) in a world that holds otherwise, and expects the
//! claim that breaks. The searches are breadth-first, so the ways that they print are among the shortest.

#![allow(
    clippy::print_stdout,
    reason = "a search says how far it went, and a counterexample which way"
)]

mod claims;
mod model;
mod postgres;
mod redis;
mod relay;
mod size;
mod worlds;
mod wrong;

use std::collections::BTreeSet;
use std::time::Instant;

use stateright::{Checker, Expectation, HasDiscoveries, Model};

use crate::model::Outbox;
use crate::worlds::World;
use crate::wrong::Wrong;

/// Threads of one search; several tests run at once.
const THREADS: usize = 2;

/// Searches a world to its end, and checks that all claims hold and that what should happen does.
fn holds(world: World) {
    let begun = Instant::now();
    let size = world.size;
    let wrong = Wrong::Nothing;
    let builder = Outbox { size, wrong }.checker().threads(THREADS);
    let builder = builder.finish_when(HasDiscoveries::AnyFailures);
    let checker = builder.spawn_bfs().join();
    let states = checker.unique_state_count();
    println!(
        "{}: {states} states, {} steps, at most {} deep, {:.1?}",
        world.name,
        checker.state_count(),
        checker.max_depth(),
        begun.elapsed()
    );
    let found = checker.discoveries();
    for property in checker.model().properties() {
        if property.expectation != Expectation::Always {
            continue;
        }
        if let Some(path) = found.get(property.name) {
            let (name, end) = (property.name, path.last_state());
            let steps = path.clone().into_actions();
            panic!("not {name:?} in {} after {steps:?}\n{end:#?}", world.name);
        }
    }
    for event in world.happens {
        assert!(found.contains_key(event), "{event:?} never happens");
    }
    assert!(states >= world.states_min, "only {states} states");
}

/// Searches a world for a way to break the claim, with one thing done wrong.
fn breaks(wrong: Wrong, world: World, claim: &'static str) {
    let size = world.size;
    let builder = Outbox { size, wrong }.checker();
    let builder = builder.finish_when(HasDiscoveries::AnyOf(BTreeSet::from([claim])));
    let checker = builder.spawn_bfs().join();
    let path = checker.discovery(claim);
    let steps = path
        .unwrap_or_else(|| panic!("{wrong:?} breaks nothing: {claim}"))
        .into_actions();
    println!(
        "{wrong:?}: not {claim:?} after {} steps: {steps:?}",
        steps.len()
    );
}

mod all_claims_hold_with {
    use super::{holds, worlds};

    #[test]
    fn producers_that_commit_late_or_roll_back() {
        holds(worlds::PRODUCERS);
    }

    #[test]
    fn pages_that_a_limit_cuts() {
        holds(worlds::CUT_PAGES);
    }

    #[test]
    fn gaps_that_are_left_to_long_transactions() {
        holds(worlds::LONG_TRANSACTIONS);
    }

    #[test]
    fn prepared_transactions() {
        holds(worlds::PREPARED);
    }

    #[test]
    fn crashes_of_the_relay_and_scripts_that_arrive_late() {
        holds(worlds::RELAY_CRASHES);
    }

    #[test]
    fn a_redis_that_loses_its_tail() {
        holds(worlds::LOST_TAILS);
    }

    #[test]
    fn a_marker_that_goes_missing() {
        holds(worlds::LOST_MARKER);
    }

    #[test]
    fn a_postgres_that_loses_what_was_not_flushed() {
        holds(worlds::POSTGRES_CRASHES);
    }

    #[test]
    fn a_standby_that_is_promoted_while_redis_falls_back() {
        holds(worlds::PROMOTIONS);
    }

    #[test]
    fn a_snapshot_that_is_put_back_while_redis_falls_back() {
        holds(worlds::SNAPSHOTS);
    }
}

mod a_wrong_variant {
    use super::claims::{DOUBLED, NO_PHANTOM, NOTHING_LOST, ORDER};
    use super::wrong::Wrong;
    use super::{breaks, worlds};

    #[test]
    fn without_epochs_doubles() {
        breaks(Wrong::NoEpoch, worlds::RELAY_CRASHES, DOUBLED);
    }

    #[test]
    fn without_page_numbers_loses() {
        breaks(Wrong::NoPageNumber, worlds::LOST_TAILS, NOTHING_LOST);
    }

    #[test]
    fn without_the_check_of_the_history_loses() {
        breaks(Wrong::NoHistoryCheck, worlds::PROMOTIONS, NOTHING_LOST);
    }

    #[test]
    fn that_closes_gaps_by_the_snapshot_loses() {
        let world = worlds::LONG_TRANSACTIONS;
        breaks(Wrong::GapsBySnapshot, world, NOTHING_LOST);
    }

    #[test]
    fn with_two_snapshots_breaks_the_order() {
        breaks(Wrong::TwoSnapshots, worlds::PRODUCERS, ORDER);
    }

    #[test]
    fn that_takes_a_cut_answer_as_complete_loses() {
        breaks(Wrong::CutAsComplete, worlds::CUT_PAGES, NOTHING_LOST);
    }

    #[test]
    fn without_the_durability_barrier_publishes_what_was_never_committed() {
        breaks(Wrong::NoBarrier, worlds::POSTGRES_CRASHES, NO_PHANTOM);
    }
}
