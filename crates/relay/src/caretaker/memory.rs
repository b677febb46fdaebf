//! When to warn of a Redis that fills up, and when to stop publishing into it.

use crate::publisher::Memory;

/// Percent of `maxmemory` from which on a warning is logged.
const WARN_PERCENT: u32 = 70;

/// It is logged again only after memory fell this far below, in percent of `maxmemory`.
const WARN_SLACK: f64 = 5.0;

/// Publishing goes on this far below the ceiling, in percent of `maxmemory`: what is published in one look is less.
const CEILING_SLACK: f64 = 2.0;

/// What changed since the last look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing.
    Same,
    /// Much of the memory is used.
    Filling,
    /// The ceiling is reached.
    Full,
    /// There is room again.
    Room,
}

/// The state between two looks.
#[derive(Debug)]
pub(super) struct Gauge {
    ceiling: Option<u32>,
    is_warned: bool,
    pub(super) is_full: bool,
}

impl Gauge {
    pub(super) fn new(ceiling: Option<u32>) -> Self {
        Gauge {
            ceiling,
            is_warned: false,
            is_full: false,
        }
    }

    /// Looks at the memory.
    pub(super) fn see(&mut self, memory: Memory) -> Turn {
        let percent = memory.ratio() * 100.0;
        if let Some(ceiling) = self.ceiling.map(f64::from) {
            if !self.is_full && memory.max > 0 && percent >= ceiling {
                (self.is_full, self.is_warned) = (true, true);
                return Turn::Full;
            }
            if self.is_full && percent < ceiling - CEILING_SLACK {
                self.is_full = false;
                return Turn::Room;
            }
        }
        if !self.is_warned && percent >= f64::from(WARN_PERCENT) {
            self.is_warned = true;
            return Turn::Filling;
        }
        if percent < f64::from(WARN_PERCENT) - WARN_SLACK {
            self.is_warned = false;
        }
        Turn::Same
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn percent(used: u64) -> Memory {
        Memory { used, max: 100 }
    }

    #[test]
    fn a_redis_that_fills_up_is_told_once_and_publishing_pauses_at_the_ceiling() {
        let mut gauge = Gauge::new(Some(90));
        let looks = [
            (50, Turn::Same),
            (70, Turn::Filling),
            (80, Turn::Same),
            (66, Turn::Same),
            (71, Turn::Same),
            (64, Turn::Same),
            (71, Turn::Filling),
            (90, Turn::Full),
            (95, Turn::Same),
            (89, Turn::Same),
            (87, Turn::Room),
            (89, Turn::Same),
            (91, Turn::Full),
        ];
        for (used, turn) in looks {
            assert_eq!(gauge.see(percent(used)), turn, "at {used} %");
        }
        assert!(gauge.is_full);
    }

    #[test]
    fn without_a_limit_or_a_ceiling_nothing_pauses() {
        let unlimited = Memory { used: 500, max: 0 };
        assert_eq!(Gauge::new(Some(90)).see(unlimited), Turn::Same);
        let mut gauge = Gauge::new(None);
        assert_eq!(gauge.see(percent(99)), Turn::Filling);
        assert!(!gauge.is_full);
    }
}
