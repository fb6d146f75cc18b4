//! Random text of the benchmarks: 50,000 words, whose frequencies follow Zipf's law.

#![allow(dead_code)] // each benchmark uses a part

use std::{collections::HashMap, sync::Arc};

use arrow::array::{ArrayRef, StringArray};

/// Words of the text.
const WORDS: u64 = 50_000;

/// Sentences of random words.
pub(crate) struct Text {
    state: u64,
}

impl Text {
    pub(crate) fn new() -> Self {
        Self { state: 1 }
    }

    /// Uniform in `0.0..1.0`, by SplitMix64.
    fn next(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Rank of a word whose frequency is in inverse proportion to its rank.
    fn rank(&mut self) -> u64 {
        (WORDS as f64).powf(self.next()) as u64
    }

    /// A sentence of so many words.
    pub(crate) fn sentence(&mut self, words: usize) -> String {
        (0..words).map(|_| word(self.rank())).collect::<Vec<_>>().join(" ")
    }

    /// Different words, and sentences of so many of them as indices.
    pub(crate) fn numbered(&mut self, sentences: usize, words: usize) -> (Vec<String>, Vec<Vec<i64>>) {
        let mut numbers = HashMap::new();
        let mut number = |rank: u64| {
            let next = numbers.len() as i64;
            *numbers.entry(rank).or_insert(next)
        };
        let sentences = (0..sentences).map(|_| (0..words).map(|_| number(self.rank())).collect()).collect();
        let mut ranks: Vec<(i64, u64)> = numbers.into_iter().map(|(rank, number)| (number, rank)).collect();
        ranks.sort_unstable();
        (ranks.into_iter().map(|(_, rank)| word(rank)).collect(), sentences)
    }

    /// Sentences of 1 to 60 words, on average 16, of at least so many bytes in all.
    pub(crate) fn take(&mut self, bytes: usize) -> ArrayRef {
        let (mut sentences, mut total) = (Vec::new(), 0);
        while total < bytes {
            let words = (1.0 - 16.0 * (1.0 - self.next()).ln()).min(60.0) as usize;
            let sentence = self.sentence(words.max(1));
            total += sentence.len() + 1;
            sentences.push(sentence);
        }
        Arc::new(StringArray::from(sentences))
    }
}

fn word(rank: u64) -> String {
    format!("w{rank:x}")
}
