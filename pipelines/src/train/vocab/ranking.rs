//! Which words stay, and their order.

use std::{cmp::Reverse, collections::BinaryHeap};

/// Keeps the most frequent words: by falling count, and by rising bytes among words with one count. The order is total, so
/// the result does not depend on the order in which words come.
#[derive(Debug)]
pub(super) struct Ranking {
    size: usize,
    min_count: u64,
    /// The least frequent word is at the top.
    kept: BinaryHeap<(Reverse<u64>, Box<str>)>,
    /// Words that came, and their occurrences.
    pub(super) types: u64,
    pub(super) tokens: u64,
}

impl Ranking {
    /// Keeps at most `size` words that occur at least `min_count` times.
    pub(super) fn new(size: usize, min_count: u64) -> Self {
        Self { size, min_count, kept: BinaryHeap::new(), types: 0, tokens: 0 }
    }

    /// A word and its count; each word comes once.
    pub(super) fn add(&mut self, word: Box<str>, count: u64) {
        self.types += 1;
        self.tokens += count;
        if count < self.min_count {
            return;
        }
        self.kept.push((Reverse(count), word));
        if self.kept.len() > self.size {
            self.kept.pop();
        }
    }

    /// How many words stay, their occurrences, and those of the least frequent one.
    pub(super) fn summary(&self) -> (usize, u64, u64) {
        let covered = self.kept.iter().map(|(Reverse(count), _)| count).sum();
        let lowest = self.kept.peek().map_or(0, |(Reverse(count), _)| *count);
        (self.kept.len(), covered, lowest)
    }

    /// The words that stay, in order.
    pub(super) fn into_words(self) -> Vec<(Box<str>, u64)> {
        let sorted = self.kept.into_sorted_vec();
        sorted.into_iter().map(|(Reverse(count), word)| (word, count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: by falling count, then by bytes; `é` (0xC3) comes after `z`.
    #[test]
    fn words_are_ordered_by_count_and_bytes() {
        let words = [("b", 2), ("é", 3), ("a", 2), ("z", 3), ("rare", 1)];
        let ranked = |size: usize, min_count: u64| -> Vec<String> {
            let mut ranking = Ranking::new(size, min_count);
            words.iter().for_each(|(word, count)| ranking.add((*word).into(), *count));
            assert_eq!((ranking.types, ranking.tokens), (5, 11));
            ranking.into_words().into_iter().map(|(word, _)| word.into()).collect()
        };
        assert_eq!(ranked(10, 1), ["z", "é", "a", "b", "rare"]);
        assert_eq!(ranked(10, 2), ["z", "é", "a", "b"]);
        assert_eq!(ranked(3, 1), ["z", "é", "a"]);
    }
}
