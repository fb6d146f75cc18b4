//! Splits rows into the units that are encoded together.
//!
//! Page boundaries depend on how many rows the encoder is given at once. If those were the chunks that a job embeds at
//! once, the bytes of a file would depend on the memory flags. So units depend on the rows alone.

use std::mem;

use arrow::array::{ArrayRef, RecordBatch};

use crate::source::row_bytes;

const UNIT_ROWS: usize = 4096;
const UNIT_BYTES: u64 = 4 << 20;

/// Rows that are encoded together, as slices of the batches in which they arrived, and their size.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(super) rows: Vec<RecordBatch>,
    pub(crate) bytes: u64,
}

impl Unit {
    /// The parts of a column; `None` when there is no column with this index.
    pub(super) fn column(&self, index: usize) -> Option<Vec<ArrayRef>> {
        self.rows.iter().map(|rows| rows.columns().get(index).cloned()).collect()
    }
}

/// Collects rows until a unit is full.
#[derive(Debug, Default)]
pub(super) struct Units {
    open: Vec<RecordBatch>,
    rows: usize,
    bytes: u64,
    /// Bytes of the rows of full units that `open` keeps in memory: it has slices of their batch.
    kept: u64,
}

impl Units {
    /// Adds rows; returns the units that are full.
    pub(super) fn push(&mut self, batch: &RecordBatch) -> Vec<Unit> {
        let mut sizes = vec![0; batch.num_rows()];
        batch.columns().iter().for_each(|column| row_bytes(column, &mut sizes));
        let all: u64 = sizes.iter().sum();
        let mut full = Vec::new();
        let mut start = 0;
        for (row, size) in sizes.into_iter().enumerate() {
            self.rows += 1;
            self.bytes += size;
            if self.rows == UNIT_ROWS || self.bytes >= UNIT_BYTES {
                self.open.push(batch.slice(start, row + 1 - start));
                start = row + 1;
                full.extend(self.close());
            }
        }
        if start < batch.num_rows() {
            self.open.push(batch.slice(start, batch.num_rows() - start));
            self.kept += if start > 0 { all - self.bytes } else { 0 };
        }
        full
    }

    /// Bytes of the current unit.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of other units that the current one keeps in memory.
    pub(super) fn kept(&self) -> u64 {
        self.kept
    }

    /// Ends the current unit, if it has rows.
    pub(super) fn close(&mut self) -> Option<Unit> {
        (self.rows, self.kept) = (0, 0);
        let (rows, bytes) = (mem::take(&mut self.open), mem::take(&mut self.bytes));
        (!rows.is_empty()).then_some(Unit { rows, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::{ArrayRef, StringArray};
    use proptest::prelude::*;
    use std::sync::Arc;

    fn batch(lengths: &[usize]) -> RecordBatch {
        let texts = StringArray::from_iter_values(lengths.iter().map(|n| "x".repeat(*n)));
        RecordBatch::try_from_iter([("text", Arc::new(texts) as ArrayRef)]).unwrap()
    }

    fn cut(rows: &RecordBatch, arrivals: &[usize]) -> Vec<(usize, u64)> {
        let mut units = Units::default();
        let (mut out, mut start) = (Vec::new(), 0);
        for arrival in arrivals {
            let len = (*arrival).min(rows.num_rows() - start);
            out.extend(units.push(&rows.slice(start, len)));
            start += len;
        }
        out.extend(units.push(&rows.slice(start, rows.num_rows() - start)));
        out.extend(units.close());
        let rows = |unit: &Unit| unit.rows.iter().map(RecordBatch::num_rows).sum();
        out.iter().map(|unit| (rows(unit), unit.bytes)).collect()
    }

    /// By hand: the first two rows fill a unit of four mebibytes, and are in memory for as long as the third one.
    #[test]
    fn the_last_rows_of_a_batch_keep_all_of_it() {
        let mut units = Units::default();
        assert_eq!(units.push(&batch(&[3 << 20, 2 << 20, 1000])).len(), 1);
        assert_eq!((units.bytes(), units.kept()), (1000, 5 << 20));
        assert_eq!(units.push(&batch(&[7])).len(), 0);
        assert_eq!((units.bytes(), units.kept()), (1007, 5 << 20));
        assert!(units.close().is_some());
        assert_eq!((units.bytes(), units.kept()), (0, 0));
    }

    proptest! {
        #[test]
        fn units_do_not_depend_on_how_rows_arrive(
            lengths in prop::collection::vec(prop_oneof![9 => 0_usize..100, 1 => 100_000_usize..2_000_000], 0..60),
            arrivals in prop::collection::vec(0_usize..20, 0..10),
        ) {
            let rows = batch(&lengths);
            let units = cut(&rows, &arrivals);
            prop_assert_eq!(&units, &cut(&rows, &[]));
            prop_assert_eq!(units.iter().map(|u| u.0).sum::<usize>(), lengths.len());
            prop_assert_eq!(units.iter().map(|u| u.1).sum::<u64>(), lengths.iter().sum::<usize>() as u64);
        }
    }

    #[test]
    fn many_small_rows() {
        let rows = batch(&vec![1; 10_000]);
        assert_eq!(cut(&rows, &[]), [(4096, 4096), (4096, 4096), (1808, 1808)]);
    }
}
