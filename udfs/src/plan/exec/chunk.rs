//! A chunk: consecutive rows that are embedded together by one task.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use datafusion::{
    arrow::{
        array::{
            Array, ArrayRef, BooleanArray, FixedSizeListArray, Float32Array, RecordBatch, StructArray, UInt32Array,
            new_null_array,
        },
        buffer::NullBuffer,
        compute::interleave,
        datatypes::{DataType, FieldRef, SchemaRef},
    },
    common::{Result, runtime::SpawnedTask},
};

use super::size::{array_bytes, value_bytes};

/// A chunk whose texts are being embedded. Dropping it cancels the task.
pub(super) struct RunningChunk {
    /// The input rows, in one batch or several.
    pub(super) rows: Vec<RecordBatch>,
    pub(super) task: SpawnedTask<Result<Vec<ChunkColumn>>>,
    /// Bytes of the memory reservation.
    pub(super) reserved: usize,
}

/// One result column of a chunk. Rows may share values, so each row has a location: the index of an array, and a row of
/// it.
pub(super) struct ChunkColumn {
    /// The first array holds the values that this chunk computed. The others hold values of other chunks.
    pub(super) arrays: Vec<ArrayRef>,
    pub(super) locations: Vec<(usize, usize)>,
}

impl ChunkColumn {
    /// Bytes of the values. Of the arrays of other chunks, which belong to the cache, each value in use counts once.
    pub(super) fn bytes(&self) -> usize {
        let own = self.arrays.first().map_or(0, array_bytes);
        let others: HashMap<(usize, usize), usize> =
            self.locations.iter().enumerate().filter(|(_, at)| at.0 > 0).map(|(row, at)| (*at, row)).collect();
        own + others.into_values().map(|row| self.row_bytes(row)).sum::<usize>()
    }

    fn row_bytes(&self, row: usize) -> usize {
        let (array, index) = self.locations[row];
        value_bytes(&self.arrays[array], index)
    }
}

/// A chunk whose results are complete and are being returned batch by batch.
pub(super) struct CompletedChunk {
    /// Input rows that have not been returned.
    rows: VecDeque<RecordBatch>,
    columns: Vec<ChunkColumn>,
    /// Number of rows that have been returned.
    returned: usize,
    /// Bytes of the memory reservation.
    pub(super) reserved: usize,
}

impl CompletedChunk {
    pub(super) fn new(rows: Vec<RecordBatch>, columns: Vec<ChunkColumn>, reserved: usize) -> Self {
        Self { rows: rows.into(), columns, returned: 0, reserved }
    }

    /// Whether all rows have been returned.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The next batch of at most `max_rows` rows, whose vectors have at most `max_bytes`, or `None` after the last.
    pub(super) fn next_batch(
        &mut self,
        schema: &SchemaRef,
        max_rows: usize,
        max_bytes: usize,
    ) -> Result<Option<RecordBatch>> {
        let Some(rows) = self.rows.pop_front() else { return Ok(None) };
        let (first, n) = (self.returned, self.batch_rows(rows.num_rows().min(max_rows), max_bytes));
        if n < rows.num_rows() {
            self.rows.push_front(rows.slice(n, rows.num_rows() - n));
        }
        let mut columns = rows.slice(0, n).columns().to_vec();
        for column in &self.columns {
            let arrays: Vec<&dyn Array> = column.arrays.iter().map(AsRef::as_ref).collect();
            columns.push(interleave(&arrays, &column.locations[first..first + n])?);
        }
        self.returned += n;
        Ok(Some(RecordBatch::try_new(Arc::clone(schema), columns)?))
    }

    /// Rows of the next batch: as many as have at most `max_bytes`, but at least one.
    fn batch_rows(&self, available: usize, max_bytes: usize) -> usize {
        let mut bytes = 0;
        let fits = |row: &usize| {
            bytes += self.columns.iter().map(|column| column.row_bytes(*row)).sum::<usize>();
            bytes <= max_bytes
        };
        let rows = (self.returned..self.returned + available).take_while(fits).count();
        rows.max(1)
    }
}

/// An array with one NULL. Arrow's `new_null_array` also has NULLs inside the vector, which the field does not allow
/// and casts reject.
pub(super) fn null_value(data_type: &DataType) -> Result<ArrayRef> {
    let validity = || Some(NullBuffer::new_null(1));
    Ok(match data_type {
        DataType::FixedSizeList(item, width) if item.data_type() == &DataType::Float32 => {
            let zeros = Arc::new(Float32Array::from(vec![0.0; *width as usize]));
            Arc::new(FixedSizeListArray::try_new(Arc::clone(item), *width, zeros, validity())?)
        }
        DataType::Struct(fields) => {
            // A query may read a member without its struct, so nullable members are NULL too.
            let member = |field: &FieldRef| match field.is_nullable() && field.data_type().is_primitive() {
                true => Ok(new_null_array(field.data_type(), 1)),
                false => null_value(field.data_type()),
            };
            let columns = fields.iter().map(member).collect::<Result<_>>()?;
            Arc::new(StructArray::try_new(fields.clone(), columns, validity())?)
        }
        // Non-nullable members of a struct.
        DataType::Boolean => Arc::new(BooleanArray::from(vec![false])),
        DataType::UInt32 => Arc::new(UInt32Array::from(vec![0])),
        other => new_null_array(other, 1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::arrow::datatypes::Field;

    /// By hand: two vectors of four numbers are 32 bytes, however many rows share them.
    #[test]
    fn a_shared_value_counts_once() {
        let item = Arc::new(Field::new("item", DataType::Float32, false));
        let vectors = |rows: usize| -> ArrayRef {
            let numbers = Arc::new(Float32Array::from(vec![0.0; 4 * rows]));
            Arc::new(FixedSizeListArray::new(Arc::clone(&item), 4, numbers, None))
        };
        let own = vectors(0);
        let column =
            |locations: Vec<(usize, usize)>| ChunkColumn { arrays: vec![Arc::clone(&own), vectors(9)], locations };
        let shared = (0..1000).map(|row| (1, row % 2)).collect();
        assert_eq!(column(shared).bytes() - column(Vec::new()).bytes(), 32);
    }
}
