//! Consecutive rows of a shard become blocks of sentences. Pure.
//!
//! A block ends after the row in which it has enough sentences or bytes. So it begins with a row, and where it begins
//! depends on the rows alone, not on how they were cut into batches.

use std::sync::Arc;

use arrow::array::ArrayRef;
use elmo::{RowError, columns::for_each_sentence, train::SentenceList};

use super::{Reading, Words};

/// Bytes of text that end a block, whatever the number of its sentences.
const BLOCK_BYTES: usize = 64 << 20;

/// Sentences that are shuffled together.
#[derive(Debug)]
pub(super) struct Block {
    /// Row of the shard with which it begins.
    pub(super) row: u64,
    pub(super) sentences: SentenceList,
    bytes: usize,
}

impl Block {
    fn new(row: u64, words: &Words) -> Self {
        Self { row, sentences: SentenceList::new(Arc::clone(words.list())), bytes: 0 }
    }

    /// 1 where a block of so many sentences ends.
    pub(super) fn fullness(&self, sentences: usize) -> f64 {
        (self.sentences.len() as f64 / sentences as f64).max(self.bytes as f64 / BLOCK_BYTES as f64)
    }
}

/// Collects the blocks of one shard.
#[derive(Debug)]
pub(super) struct Blocks<'c> {
    reading: Reading,
    words: &'c Words,
    open: Block,
}

impl<'c> Blocks<'c> {
    pub(super) fn new(reading: Reading, words: &'c Words) -> Self {
        Self { reading, words, open: Block::new(0, words) }
    }

    /// Adds rows that begin at `start`; calls `full` with every block that is complete. Returns the rows that are no text.
    ///
    /// # Errors
    /// [`elmo::Error::Column`] when the column holds no text.
    pub(super) fn add(
        &mut self,
        start: u64,
        column: &ArrayRef,
        mut full: impl FnMut(Block),
    ) -> elmo::Result<Vec<(usize, RowError)>> {
        let Reading { tokenizer, sentences, block_sentences } = self.reading;
        let mut last = None;
        for_each_sentence(column, tokenizer, sentences, |row, tokens| {
            let is_full = self.open.sentences.len() >= block_sentences || self.open.bytes >= BLOCK_BYTES;
            if last != Some(row) && is_full {
                let next = Block::new(start + row as u64, self.words);
                full(std::mem::replace(&mut self.open, next));
            }
            last = Some(row);
            for token in tokens.iter() {
                match self.words.id(token) {
                    Some(id) => self.open.sentences.push_word(id),
                    None => self.open.sentences.push_other(token, self.words.unknown()),
                }
                self.open.bytes += token.len();
            }
            self.open.sentences.end();
        })
    }

    /// The last block of the shard, if there are sentences left.
    pub(super) fn finish(self) -> Option<Block> {
        Some(self.open).filter(|block| !block.sentences.is_empty())
    }

    /// Continues with a block that begins at `row`.
    pub(super) fn starting_at(mut self, row: u64) -> Self {
        self.open.row = row;
        self
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Array, StringArray};
    use elmo::spec::{SentenceMode, TokenizerKind};

    use super::*;

    /// Rows and sizes of the blocks of a column that comes in slices of `size` rows.
    fn blocks(column: &ArrayRef, size: usize, from: usize) -> Vec<(u64, usize)> {
        let words = Words::of_list(["<S>", "</S>", "<UNK>", "a"].map(str::to_owned).to_vec());
        let reading =
            Reading { tokenizer: TokenizerKind::Whitespace, sentences: SentenceMode::Split, block_sentences: 3 };
        let mut blocks = Blocks::new(reading, &words).starting_at(from as u64);
        let mut found = Vec::new();
        for start in (from..column.len()).step_by(size) {
            let slice = column.slice(start, size.min(column.len() - start));
            blocks.add(start as u64, &slice, |block| found.push((block.row, block.sentences.len()))).unwrap();
        }
        found.extend(blocks.finish().map(|block| (block.row, block.sentences.len())));
        found
    }

    /// By hand: three rows of one sentence; then a row of two, an empty one and a row of two, as a block ends with a row;
    /// then the rest. Slices do not matter, and reading can begin at the first row of any block.
    #[test]
    fn blocks_begin_with_rows_and_do_not_depend_on_slices() {
        let rows = ["a", "a", "a", "It is. It was.", " ", "It is. It was.", "a", "a"];
        let column: ArrayRef = Arc::new(StringArray::from(rows.to_vec()));
        let expected = [(0, 3), (3, 4), (6, 2)];
        for size in 1..=8 {
            assert_eq!(blocks(&column, size, 0), expected, "{size}");
            assert_eq!(blocks(&column, size, 3), expected[1..], "{size}");
        }
    }
}
