//! Random numbers that are functions of what they are for.
//!
//! libtorch gives no access to the state of its generators, so a run that depends on them cannot be resumed exactly. Here
//! every number is the output of Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
//! 1, 2, 3", SC 2011) for a counter of (purpose, step, rank, row). There is no state to save, and no thread has to wait
//! for another one.
//!
//! ```text
//! key      seed, 64 bits
//! counter  block of four numbers | row | step | purpose (16 bits) and rank (16 bits)
//! ```

use crate::model::DropoutNumbers;

/// Bits of the fraction of a float64 number.
const FRACTION_BITS: u32 = 53;

/// What random numbers are for. Streams of different purposes have no numbers in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Initial values; the row is the number of the tensor.
    InitialValues,
    /// Negatives of the sampled softmax for a direction (0 is forward).
    Negatives(u8),
    /// Dropout after a layer (0 is the token layer) in a direction; the row is that of the window.
    Dropout {
        /// The layer.
        layer: u8,
        /// 0 is forward.
        direction: u8,
    },
    /// The order of shards, blocks and sentences, for a direction; the step is the epoch.
    Order(u8),
    /// A part of the fit of a scalar mix; the step is the epoch or that of the fit.
    Mix(u8),
}

impl Purpose {
    /// The upper byte is the kind, the lower one says which of them.
    fn code(self) -> u32 {
        match self {
            Self::InitialValues => 0x0100,
            Self::Negatives(direction) => 0x0200 | u32::from(direction),
            // At most 64 layers (`options.rs`), so that 2 * layer + 1 fits into a byte.
            Self::Dropout { layer, direction } => 0x0300 | (2 * u32::from(layer) + u32::from(direction)) & 0xff,
            Self::Order(direction) => 0x0400 | u32::from(direction),
            Self::Mix(part) => 0x0500 | u32::from(part),
        }
    }
}

/// A sequence of random numbers: at most 2^34 of 32 bits.
#[derive(Debug, Clone)]
pub struct Random {
    key: [u32; 2],
    counter: [u32; 4],
    block: [u32; 4],
    /// Numbers of `block` that were used.
    used: usize,
}

impl Random {
    /// The sequence of a purpose. Sequences with any difference in the arguments are independent.
    pub fn new(seed: u64, purpose: Purpose, step: u32, rank: u16, row: u32) -> Self {
        let counter = [0, row, step, purpose.code() << 16 | u32::from(rank)];
        Self { key: [seed as u32, (seed >> 32) as u32], counter, block: [0; 4], used: 4 }
    }

    /// The sequence from a block on; a block has four numbers of 32 bits.
    pub(super) fn after_blocks(mut self, blocks: usize) -> Self {
        self.counter[0] = blocks as u32;
        self.used = 4;
        self
    }

    /// The next 32 bits.
    pub fn bits(&mut self) -> u32 {
        if self.used == 4 {
            self.block = philox(self.counter, self.key);
            self.counter[0] = self.counter[0].wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.block[self.used - 1]
    }

    /// The next 64 bits.
    fn wide_bits(&mut self) -> u64 {
        u64::from(self.bits()) << 32 | u64::from(self.bits())
    }

    /// Uniform in `0.0..1.0`: a multiple of 2^-53.
    pub fn uniform(&mut self) -> f64 {
        (self.wide_bits() >> (64 - FRACTION_BITS)) as f64 / (1_u64 << FRACTION_BITS) as f64
    }

    /// Normal with mean 0 and standard deviation 1 (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt(); // 1 - u is never 0
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Uniform in `0..n`; 0 when `n` is 0. No number is likelier than another one (Lemire, "Fast random integer
    /// generation in an interval", 2019).
    pub fn below(&mut self, n: u64) -> u64 {
        let threshold = n.wrapping_neg().checked_rem(n).unwrap_or(0);
        loop {
            let product = u128::from(self.wide_bits()) * u128::from(n);
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
        }
    }

    /// Puts items into random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }

    /// Sets each value to `kept` or, with probability `rate`, to 0. Probabilities are multiples of 2^-32.
    pub(crate) fn drop_values<T: Copy + Default>(&mut self, rate: f64, kept: T, values: &mut [T]) {
        let threshold = threshold(rate);
        let (whole, rest) = values.as_chunks_mut::<4>();
        let choose = |bits: u32| if u64::from(bits) < threshold { T::default() } else { kept };
        self.used = 4;
        for values in whole {
            let block = philox(self.counter, self.key);
            self.counter[0] = self.counter[0].wrapping_add(1);
            *values = block.map(choose);
        }
        rest.iter_mut().for_each(|value| *value = choose(self.bits()));
    }
}

/// The numbers by which [`Random::drop_values`] chooses after a layer, for both directions and every row of the windows of a step.
pub(super) fn dropout_numbers(seed: u64, step: u32, layer: u8, rate: f64) -> DropoutNumbers {
    let of = |direction| Random::new(seed, Purpose::Dropout { layer, direction }, step, 0, 0);
    let [_, _, step, purpose] = of(0).counter;
    DropoutNumbers { key: of(0).key, step, purposes: [purpose, of(1).counter[3]], below: threshold(rate) }
}

/// A value is dropped where its 32 bits are below this.
fn threshold(rate: f64) -> u64 {
    (rate * 4_294_967_296.0).round() as u64
}

/// Philox 4x32 with ten rounds.
#[inline]
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        }
        let [a, b, c, d] = counter;
        let (first, second) = (u64::from(a) * 0xD251_1F53, u64::from(c) * 0xCD9E_8D57);
        counter = [(second >> 32) as u32 ^ b ^ key[0], second as u32, (first >> 32) as u32 ^ d ^ key[1], first as u32];
    }
    counter
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// The known answers of Random123, file `kat_vectors`.
    #[test]
    fn philox_has_the_published_answers() {
        let ones = u32::MAX;
        for (counter, key, answer) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox(counter, key), answer);
        }
    }

    #[test]
    fn sequences_of_different_arguments_differ() {
        let dropout = |layer, direction| Purpose::Dropout { layer, direction };
        let mut all = HashSet::new();
        let sequences = [
            Random::new(1, Purpose::InitialValues, 0, 0, 0),
            Random::new(1 << 32, Purpose::InitialValues, 0, 0, 0),
            Random::new(1, Purpose::InitialValues, 1, 0, 0),
            Random::new(1, Purpose::InitialValues, 0, 1, 0),
            Random::new(1, Purpose::InitialValues, 0, 0, 1),
            Random::new(1, Purpose::Negatives(0), 0, 0, 0),
            Random::new(1, Purpose::Negatives(1), 0, 0, 0),
            Random::new(1, Purpose::Order(1), 0, 0, 0),
            Random::new(1, dropout(0, 0), 0, 0, 0),
            Random::new(1, dropout(0, 1), 0, 0, 0),
            Random::new(1, dropout(1, 0), 0, 0, 0),
            Random::new(1, dropout(64, 1), 0, 0, 0),
        ];
        for mut random in sequences {
            for _ in 0..8 {
                assert!(all.insert((random.bits(), random.bits())));
            }
        }
    }

    /// Expected: moments of the distributions; bounds are five standard errors of the mean of 100,000 numbers.
    #[test]
    fn moments() {
        let n = 100_000;
        let mut random = Random::new(7, Purpose::Order(0), 3, 0, 5);
        let mut mean =
            |f: &mut dyn FnMut(&mut Random) -> f64| (0..n).map(|_| f(&mut random)).sum::<f64>() / f64::from(n);
        let bound = |variance: f64| 5.0 * (variance / f64::from(n)).sqrt();
        assert!((mean(&mut |r| r.uniform()) - 0.5).abs() < bound(1.0 / 12.0));
        assert!((mean(&mut |r| r.uniform().powi(2)) - 1.0 / 3.0).abs() < bound(4.0 / 45.0));
        assert!(mean(&mut |r| r.normal()).abs() < bound(1.0));
        assert!((mean(&mut |r| r.normal().powi(2)) - 1.0).abs() < bound(2.0));
        assert!((mean(&mut |r| r.normal().powi(4)) - 3.0).abs() < bound(96.0));
        assert!((mean(&mut |r| r.below(3) as f64) - 1.0).abs() < bound(2.0 / 3.0));
    }

    /// Expected: the binomial distribution, five standard deviations. The numbers do not depend on how they are asked for.
    #[test]
    fn dropped_values() {
        let new = || Random::new(7, Purpose::Dropout { layer: 1, direction: 0 }, 3, 0, 5);
        let mut values = vec![9.0_f32; 100_001];
        new().drop_values(0.1, 1.25, &mut values);
        let dropped = values.iter().filter(|&&v| v == 0.0).count() as f64;
        assert!((dropped - 10_000.1).abs() < 5.0 * (100_001.0_f64 * 0.1 * 0.9).sqrt(), "{dropped}");
        assert!(values.iter().all(|&v| v == 0.0 || v == 1.25));
        let mut single = new();
        let by_one = |value: &f32| (*value == 0.0) == (u64::from(single.bits()) < 429_496_730);
        assert!(values.iter().all(by_one));
        let mut values = [1_u8; 16];
        new().drop_values(0.0, 1, &mut values);
        assert_eq!(values, [1; 16]);
    }

    #[test]
    fn a_shuffle_is_a_permutation_and_all_are_alike() {
        let mut random = Random::new(7, Purpose::Order(0), 0, 0, 0);
        let mut counts = [0_u32; 6];
        for _ in 0..6000 {
            let mut items = [0, 1, 2];
            random.shuffle(&mut items);
            let all = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
            counts[all.iter().position(|p| *p == items).unwrap()] += 1;
        }
        // Each about 1000; five standard deviations of the binomial distribution are 144.
        assert!(counts.iter().all(|&n| n.abs_diff(1000) < 144), "{counts:?}");
    }
}
