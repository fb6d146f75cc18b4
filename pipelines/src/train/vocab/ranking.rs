//! Which words stay, and their order, in bounded memory.
//!
//! Words come with their counts. As many as there is memory for are sorted and written to a temporary file as a *run*; at the end
//! all runs are merged. Of a run, only the words that can stay are written.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    fs::File,
    io::{self, BufReader, BufWriter, Seek},
    path::PathBuf,
};

use super::counter::{ENTRY_BYTES, read_entry, write_entry};

/// The order of a vocabulary: by falling count, and by rising bytes among words with one count. It is total, so the result does
/// not depend on the order in which words come.
type Ranked = (Reverse<u64>, Box<str>);

/// Keeps the most frequent words.
#[derive(Debug)]
pub(super) struct Ranking {
    size: usize,
    min_count: u64,
    /// Bytes of words in memory.
    limit: usize,
    folder: PathBuf,
    held: Vec<Ranked>,
    bytes: usize,
    runs: Vec<File>,
    /// Words that came, and their occurrences.
    pub(super) types: u64,
    pub(super) tokens: u64,
}

/// The words that stay.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Kept {
    pub(super) words: usize,
    /// Their occurrences.
    pub(super) tokens: u64,
    /// Occurrences of the last one.
    pub(super) lowest: u64,
}

impl Ranking {
    /// Keeps at most `size` words that occur at least `min_count` times, in about `limit` bytes of memory; other words are in
    /// temporary files in `folder`.
    pub(super) fn new(size: usize, min_count: u64, limit: usize, folder: PathBuf) -> Self {
        let (held, runs) = (Vec::new(), Vec::new());
        Self { size, min_count, limit, folder, held, bytes: 0, runs, types: 0, tokens: 0 }
    }

    /// A word and its count; each word comes once.
    ///
    /// # Errors
    /// The disk's.
    pub(super) fn add(&mut self, word: Box<str>, count: u64) -> io::Result<()> {
        self.types += 1;
        self.tokens += count;
        if count < self.min_count {
            return Ok(());
        }
        self.bytes += ENTRY_BYTES + word.len();
        self.held.push((Reverse(count), word));
        if self.bytes > self.limit { self.spill() } else { Ok(()) }
    }

    fn spill(&mut self) -> io::Result<()> {
        let mut out = BufWriter::new(tempfile::tempfile_in(&self.folder)?);
        for (Reverse(count), word) in self.take_sorted() {
            write_entry(&mut out, &word, count)?;
        }
        let mut file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.rewind()?;
        self.runs.push(file);
        Ok(())
    }

    /// The words in memory that may stay, in order.
    fn take_sorted(&mut self) -> Vec<Ranked> {
        self.bytes = 0;
        let mut sorted = std::mem::take(&mut self.held);
        sorted.sort_unstable();
        sorted.truncate(self.size);
        sorted
    }

    /// Calls `each` with the words that stay, in order.
    ///
    /// # Errors
    /// The disk's, and those of `each`.
    pub(super) fn finish(mut self, mut each: impl FnMut(&str, u64) -> io::Result<()>) -> io::Result<Kept> {
        let mut held = self.take_sorted().into_iter();
        let mut runs: Vec<_> = self.runs.into_iter().map(BufReader::new).collect();
        let last = runs.len();
        // The words in memory are the last run.
        let mut next = |run: usize| -> io::Result<Option<Ranked>> {
            match runs.get_mut(run) {
                Some(file) => Ok(read_entry(file)?.map(|(word, count)| (Reverse(count), word))),
                None => Ok(held.next()),
            }
        };
        let mut heads = BinaryHeap::new();
        let mut kept = Kept::default();
        for run in 0..=last {
            heads.extend(next(run)?.map(|word| Reverse((word, run))));
        }
        while kept.words < self.size
            && let Some(Reverse(((Reverse(count), word), run))) = heads.pop()
        {
            each(&word, count)?;
            kept = Kept { words: kept.words + 1, tokens: kept.tokens + count, lowest: count };
            heads.extend(next(run)?.map(|word| Reverse((word, run))));
        }
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranked(words: &[(String, u64)], size: usize, min_count: u64, limit: usize) -> (Vec<(String, u64)>, Kept) {
        let mut ranking = Ranking::new(size, min_count, limit, std::env::temp_dir());
        words.iter().for_each(|(word, count)| ranking.add(word.as_str().into(), *count).unwrap());
        assert_eq!((ranking.types, ranking.tokens), (words.len() as u64, words.iter().map(|word| word.1).sum()));
        let mut found = Vec::new();
        let kept = ranking.finish(|word, count| {
            found.push((word.to_owned(), count));
            Ok(())
        });
        (found, kept.unwrap())
    }

    /// By hand: by falling count, then by bytes; `é` (0xC3) comes after `z`.
    #[test]
    fn words_are_ordered_by_count_and_bytes() {
        let words = [("b", 2), ("é", 3), ("a", 2), ("z", 3), ("rare", 1)].map(|(word, count)| (word.to_owned(), count));
        for limit in [0, 2 * ENTRY_BYTES, 1 << 20] {
            let order = |size: usize, min_count: u64| -> Vec<String> {
                ranked(&words, size, min_count, limit).0.into_iter().map(|(word, _)| word).collect()
            };
            assert_eq!(order(10, 1), ["z", "é", "a", "b", "rare"]);
            assert_eq!(order(10, 2), ["z", "é", "a", "b"]);
            assert_eq!(order(3, 1), ["z", "é", "a"]);
            assert_eq!(ranked(&words, 3, 1, limit).1, Kept { words: 3, tokens: 8, lowest: 2 });
            assert_eq!(ranked(&words, 0, 1, limit).1, Kept::default());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// With any number of runs, the result is that of a sort of all words.
        #[test]
        fn the_order_is_that_of_a_plain_sort(
            counts in prop::collection::btree_map("[ab\u{e9}\u{1F600}]{1,4}", 1u64..5, 0..200),
            size in prop::sample::select(vec![0usize, 1, 7, 50, usize::MAX]),
            min_count in 1u64..4,
            limit in prop::sample::select(vec![0usize, 300, 3000, 1 << 20]),
        ) {
            let words: Vec<(String, u64)> = counts.into_iter().collect();
            let mut expected: Vec<_> = words.iter().filter(|word| word.1 >= min_count).cloned().collect();
            expected.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.as_bytes().cmp(b.0.as_bytes())));
            expected.truncate(size);
            prop_assert_eq!(ranked(&words, size, min_count, limit).0, expected);
        }
    }
}
