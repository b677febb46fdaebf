//! Gives way to the backend that has just answered.
//!
//! Its answer wakes the relay in front of it on the same processor, before it could lie down again. Whoever the relay wakes
//! next then goes to another, idle processor, which takes longer to rouse than all the relay does with a lone message. So
//! the relay lets the backend lie down first: a few microseconds, after which Redis runs in its place.

use std::time::{Duration, Instant};

/// What a turn given away may cost. It costs more where somebody else had been waiting for the processor.
const COST_MAX: Duration = Duration::from_micros(100);

/// Turns that are kept after one that was too dear: at first, and where that happens again and again.
const KEPT: (u32, u32) = (16, 1_024);

/// Whether to give way, by what it cost before.
#[derive(Debug)]
pub(super) struct Courtesy {
    /// Turns to keep from now on.
    keep: u32,
    /// Turns to keep after the next one that is too dear.
    keep_then: u32,
}

impl Courtesy {
    pub(super) fn new() -> Self {
        Courtesy {
            keep: 0,
            keep_then: KEPT.0,
        }
    }

    /// Lets others run on this processor first, unless that has cost too much of late.
    pub(super) fn give_way(&mut self) {
        if !self.is_due() {
            return;
        }
        let begun = Instant::now();
        std::thread::yield_now();
        self.learn(begun.elapsed());
    }

    fn is_due(&mut self) -> bool {
        let due = self.keep == 0;
        self.keep = self.keep.saturating_sub(1);
        due
    }

    fn learn(&mut self, cost: Duration) {
        if cost <= COST_MAX {
            self.keep_then = KEPT.0;
        } else {
            self.keep = self.keep_then;
            self.keep_then = KEPT.1.min(2 * self.keep_then);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Turns kept until one is given away again.
    fn kept(courtesy: &mut Courtesy) -> usize {
        std::iter::from_fn(|| (!courtesy.is_due()).then_some(())).count()
    }

    #[test]
    fn turns_that_are_cheap_are_all_given_away() {
        let mut courtesy = Courtesy::new();
        for _ in 0..100 {
            assert_eq!(kept(&mut courtesy), 0);
            courtesy.learn(COST_MAX);
        }
    }

    #[test]
    fn on_a_busy_processor_ever_fewer_are() {
        let mut courtesy = Courtesy::new();
        let dear = COST_MAX + Duration::from_nanos(1);
        let mut waits = Vec::new();
        for _ in 0..9 {
            waits.push(kept(&mut courtesy));
            courtesy.learn(dear);
        }
        assert_eq!(waits, [0, 16, 32, 64, 128, 256, 512, 1_024, 1_024]);
    }

    #[test]
    fn a_cheap_one_makes_up_for_the_dear_ones() {
        let mut courtesy = Courtesy::new();
        for _ in 0..5 {
            kept(&mut courtesy);
            courtesy.learn(Duration::from_secs(1));
        }
        kept(&mut courtesy);
        courtesy.learn(Duration::ZERO);
        assert_eq!(kept(&mut courtesy), 0);
        courtesy.learn(Duration::from_secs(1));
        assert_eq!(kept(&mut courtesy), 16);
    }
}
