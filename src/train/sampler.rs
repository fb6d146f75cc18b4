//! Negatives of the sampled softmax: ids of words by their rank, drawn without repetition.
//!
//! The id of a word is its rank by frequency, and word `k` is drawn with probability
//! `p(k) = ln((k + 2) / (k + 1)) / ln(V + 1)`, an approximation of Zipf's law. Draws are repeated until there are `n`
//! distinct ids; `tries` counts all of them. The expected count of `k` is then `1 - (1 - p(k))^tries`
//! (TensorFlow, `tensorflow/core/kernels/range_sampler.cc`).

use std::collections::HashSet;

use super::random::Random;

/// Distinct negatives that all positions of a direction share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Negatives {
    /// Distinct ids.
    pub ids: Vec<i64>,
    /// Draws that it took.
    pub tries: u64,
}

/// The log-uniform distribution over `0..words`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogUniform {
    words: i64,
    /// `ln(V + 1)`
    range: f64,
}

impl LogUniform {
    /// The distribution over a vocabulary of at least one word.
    pub fn new(words: usize) -> Self {
        let words = words.max(1) as i64;
        Self { words, range: (words as f64 + 1.0).ln() }
    }

    /// `p(id)`
    pub fn probability(&self, id: i64) -> f64 {
        // ln_1p(1 / (k + 1)) = ln((k + 2) / (k + 1)) without cancellation
        (1.0 / (id as f64 + 1.0)).ln_1p() / self.range
    }

    /// One id. In the limit of exact arithmetic, that of the inverse of the cumulative distribution.
    fn draw(&self, random: &mut Random) -> i64 {
        let id = (random.uniform() * self.range).exp() as i64 - 1;
        id.clamp(0, self.words - 1) // rounding may end just outside
    }

    /// `n` distinct ids, or all of them if there are fewer, in the order in which they were drawn first.
    pub fn distinct(&self, n: usize, random: &mut Random) -> Negatives {
        let n = n.min(self.words as usize);
        let (mut seen, mut ids, mut tries) = (HashSet::with_capacity(n), Vec::with_capacity(n), 0);
        while ids.len() < n {
            tries += 1;
            let id = self.draw(random);
            if seen.insert(id) {
                ids.push(id);
            }
        }
        Negatives { ids, tries }
    }

    /// How often `id` is expected among `n` distinct ids that took so many tries.
    pub fn expected_count(&self, id: i64, n: usize, tries: u64) -> f64 {
        let p = self.probability(id);
        if tries == n as u64 { p * n as f64 } else { -(tries as f64 * (-p).ln_1p()).exp_m1() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::random::Purpose;

    fn random(step: u32) -> Random {
        Random::new(5, Purpose::Negatives(0), step, 0, 0)
    }

    /// Pearson's statistic against the exact distribution. Its distribution has 99 degrees of freedom: 148.2 is exceeded
    /// once in a thousand seeds (table of the chi-square distribution), and the seed is fixed.
    #[test]
    fn draws_follow_the_exact_distribution() {
        let sampler = LogUniform::new(100);
        let n = 200_000;
        let mut counts = [0_u32; 100];
        let mut random = random(0);
        (0..n).for_each(|_| counts[sampler.draw(&mut random) as usize] += 1);
        let term = |(id, &count): (usize, &u32)| {
            let expected = f64::from(n) * (((id + 2) as f64 / (id + 1) as f64).ln() / 101.0_f64.ln());
            (f64::from(count) - expected).powi(2) / expected
        };
        let statistic: f64 = counts.iter().enumerate().map(term).sum();
        assert!(statistic < 148.2, "{statistic}");
    }

    #[test]
    fn probabilities_sum_to_one() {
        for words in [1, 7, 1000, 100_000] {
            let sampler = LogUniform::new(words);
            let sum: f64 = (0..words as i64).map(|id| sampler.probability(id)).sum();
            assert!((sum - 1.0).abs() < 1e-11, "{words}: {sum}");
        }
    }

    /// Expected: the mean count over many draws, five standard errors. The formula is exact for a given number of tries
    /// and approximate for the distinct draws, whose number of tries varies; 1 % is added for that.
    #[test]
    fn expected_counts_are_those_of_many_draws() {
        let (sampler, n, rounds) = (LogUniform::new(50), 20, 4000);
        let (mut counts, mut expected) = ([0.0; 50], [0.0; 50]);
        for round in 0..rounds {
            let drawn = sampler.distinct(n, &mut random(round));
            assert_eq!(drawn.ids.iter().collect::<HashSet<_>>().len(), n);
            drawn.ids.iter().for_each(|&id| counts[id as usize] += 1.0);
            for (id, sum) in expected.iter_mut().enumerate() {
                *sum += sampler.expected_count(id as i64, n, drawn.tries);
            }
        }
        for (id, (count, expected)) in counts.iter().zip(expected).enumerate() {
            let error = 5.0 * f64::sqrt(expected * (1.0 - expected / f64::from(rounds))) + 0.01 * expected;
            assert!((count - expected).abs() < error, "{id}: {count}, not {expected}");
        }
    }

    #[test]
    fn all_ids_when_as_many_are_asked_for_as_there_are() {
        let mut drawn = LogUniform::new(30).distinct(99, &mut random(1));
        drawn.ids.sort_unstable();
        assert_eq!(drawn.ids, (0..30).collect::<Vec<_>>());
        assert!(drawn.tries > 30);
    }

    /// By hand: no draw was repeated, so the expectation is that of independent draws.
    #[test]
    fn expected_count_without_repeated_draws() {
        let sampler = LogUniform::new(3);
        assert!((sampler.expected_count(0, 2, 2) - 2.0 * 2.0_f64.ln() / 4.0_f64.ln()).abs() < 1e-15);
        assert!((sampler.expected_count(0, 2, 3) - (1.0 - 0.125)).abs() < 1e-15); // p(0) = 1/2
    }
}
