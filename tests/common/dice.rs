//! Random choices that a seed repeats.

use std::{ops::Range, time::Duration};

/// SplitMix64.
#[derive(Debug, Clone)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Other choices, which depend on the seed and `number` alone: those of one of many runs.
    pub(crate) fn of_run(seed: u64, number: usize) -> Self {
        let mut dice = Self(seed ^ (number as u64).wrapping_mul(0xd134_2543_de82_ef95));
        dice.next();
        dice
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }

    pub(crate) fn millis(&mut self, range: Range<usize>) -> Duration {
        Duration::from_millis((range.start + self.below(range.len())) as u64)
    }
}
