//! The order in which an epoch reads the corpus: a function of seed, epoch and direction alone. Pure.
//!
//! An epoch takes the shards in random order. A shard is cut into blocks of consecutive sentences, which are taken one after
//! the other, and the sentences of a block are shuffled.

use std::{fmt, str::FromStr};

use elmo::{
    spec::SpecError,
    train::{Purpose, Random},
};

/// How the sentences of the corpus are ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// At random.
    Shuffle,
    /// Shards by name, sentences as they are in their shards: for comparison with other programs.
    Bilm,
}

impl Order {
    /// The legal words.
    pub const WORDS: &'static [&'static str] = &["shuffle", "bilm"];
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Bilm { "bilm" } else { "shuffle" })
    }
}

impl FromStr for Order {
    type Err = SpecError;

    fn from_str(word: &str) -> Result<Self, SpecError> {
        match word {
            "shuffle" => Ok(Self::Shuffle),
            "bilm" => Ok(Self::Bilm),
            _ => Err(SpecError::Value { option: "order", value: word.to_owned(), legal: Self::WORDS.to_vec() }),
        }
    }
}

/// The order of one direction.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shuffler {
    pub(super) order: Order,
    pub(super) seed: u64,
    /// 0 is forward.
    pub(super) direction: u8,
}

/// Bits of the number of a block in [`Shuffler::random`].
const BLOCK_BITS: u32 = 25;
/// Largest number of shards: 4 million.
pub(super) const MAX_SHARDS: usize = 1 << 22;

impl Shuffler {
    /// The shards of an epoch, as indices into the list by name.
    pub(super) fn shards(self, epoch: u32, shards: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..shards).collect();
        if self.order == Order::Shuffle {
            self.random(epoch, 0).shuffle(&mut order);
        }
        order
    }

    /// The sentences of a block of a shard.
    pub(super) fn sentences(self, epoch: u32, shard: usize, block: u64, sentences: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..sentences as u32).collect();
        if self.order == Order::Shuffle {
            // The upper bit keeps blocks apart from the order of the shards.
            let number = 1 << 47 | (shard as u64) << BLOCK_BITS | block & ((1 << BLOCK_BITS) - 1);
            self.random(epoch, number).shuffle(&mut order);
        }
        order
    }

    /// Random numbers for `number` of 48 bits.
    fn random(self, epoch: u32, number: u64) -> Random {
        Random::new(self.seed, Purpose::Order(self.direction), epoch, (number >> 32) as u16, number as u32)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const FORWARD: Shuffler = Shuffler { order: Order::Shuffle, seed: 7, direction: 0 };

    #[test]
    fn every_order_is_a_permutation_and_depends_on_all_that_it_is_for() {
        let mut seen = HashSet::new();
        for shuffler in [FORWARD, Shuffler { seed: 8, ..FORWARD }, Shuffler { direction: 1, ..FORWARD }] {
            for epoch in 0..3 {
                let mut shards = shuffler.shards(epoch, 50);
                assert!(seen.insert(shards.iter().map(|&shard| shard as u32).collect::<Vec<_>>()));
                shards.sort_unstable();
                assert!(shards.into_iter().eq(0..50));
                for (shard, block) in [(0, 0), (0, 1), (1, 0), (MAX_SHARDS - 1, 3)] {
                    let mut sentences = shuffler.sentences(epoch, shard, block, 50);
                    assert!(seen.insert(sentences.clone()));
                    sentences.sort_unstable();
                    assert!(sentences.into_iter().eq(0..50));
                }
            }
        }
    }

    #[test]
    fn the_order_of_bilm_is_that_of_the_files() {
        let plain = Shuffler { order: Order::Bilm, ..FORWARD };
        assert!(plain.shards(3, 9).into_iter().eq(0..9));
        assert!(plain.sentences(3, 4, 5, 9).into_iter().eq(0..9));
    }
}
