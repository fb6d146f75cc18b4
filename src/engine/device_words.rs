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
        // One look-up for each word: in a table that does not fit into the caches of a processor, a look-up is slow.
        let mut known: Vec<Option<i64>> = distinct.words.iter().map(|word| self.rows.get(*word).copied()).collect();
        if known.iter().filter(|row| row.is_none()).count() > self.table.room() {
            self.clear(model)?;
            known.fill(None);
        }
        let new = |(word, row): (&&'j str, &Option<i64>)| row.is_none().then_some(*word);
        let computed: Vec<&str> = distinct.words.iter().zip(&known).filter_map(new).collect();
        let mut new_rows = self.table.append(model, &computed)?..;
        self.rows.extend(new_rows.clone().zip(&computed).map(|(row, word)| (Box::from(*word), row)));
        let hits = distinct.uses.iter().zip(&known).filter(|(_, row)| row.is_some()).map(|(uses, _)| uses).sum();
        let rows = known.into_iter().filter_map(|row| row.or_else(|| new_rows.next())).collect();
        Ok(WordTable { vectors: Vec::new(), rows, sentences, hits, computed })
    }

    fn clear(&mut self, model: &BiLm) -> Result<(), DeviceError> {
        self.rows.clear();
        self.table.clear(model)
    }
}
