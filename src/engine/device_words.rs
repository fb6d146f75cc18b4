//! The words of a GPU: their token vectors stay there, so that a batch uploads indices only.

use std::collections::HashMap;

use super::{
    job::Job,
    word_table::{DistinctWords, WordTable},
};
use crate::model::{BiLm, DeviceError, DeviceTable};

/// The token vectors of the words that a lane has met, on its device.
#[derive(Debug)]
pub(super) struct DeviceWords {
    table: DeviceTable,
    /// The row of each word.
    rows: HashMap<Box<str>, i64>,
    /// Words are kept from batch to batch.
    keeps: bool,
}

impl DeviceWords {
    /// At most `bytes` of vectors; with 0 none is kept for the next batch.
    pub(super) fn new(model: &BiLm, bytes: usize) -> Result<Self, DeviceError> {
        Ok(Self { table: DeviceTable::new(model, bytes)?, rows: HashMap::new(), keeps: bytes > 0 })
    }

    /// The table that the rows of [`words_of`](Self::words_of) are in.
    pub(super) fn table(&self) -> &DeviceTable {
        &self.table
    }

    /// The words of a batch and their rows in the table, after the vectors of new words were computed.
    pub(super) fn words_of<'j>(
        &mut self,
        jobs: &'j [Job],
        boundaries: bool,
        model: &BiLm,
    ) -> Result<WordTable<'j>, DeviceError> {
        if !self.keeps {
            self.clear(model)?;
        }
        let (distinct, sentences) = DistinctWords::of(jobs, boundaries);
        let is_new = |word: &&str| !self.rows.contains_key(*word);
        let mut computed: Vec<&str> = distinct.words.iter().copied().filter(is_new).collect();
        if computed.len() > self.table.room() {
            self.clear(model)?;
            computed = distinct.words.clone();
        }
        let first = self.table.append(model, &computed)?;
        self.rows.extend((first..).zip(&computed).map(|(row, word)| (Box::from(*word), row)));
        let rows = distinct.words.iter().map(|word| self.rows[*word]).collect();
        let hits = distinct.uses_of(|word| self.rows[word] < first);
        Ok(WordTable { vectors: Vec::new(), rows, sentences, hits, computed })
    }

    fn clear(&mut self, model: &BiLm) -> Result<(), DeviceError> {
        self.rows.clear();
        self.table.clear(model)
    }
}
