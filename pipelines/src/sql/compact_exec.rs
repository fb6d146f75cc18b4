//! [`CompactExec`] makes batches of a scan small beside the memory limit, so that operators that spill can hold some.
//!
//! The number of rows of a batch is chosen before their sizes are known. And batches of a Parquet reader share the buffers
//! of string views, which memory pools count in full for each of them.

use std::{fmt, sync::Arc};

use arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions, UInt64Array},
    compute::take,
    datatypes::DataType,
    error::ArrowError,
};
use datafusion::{
    common::{
        Result, internal_err,
        tree_node::{Transformed, TreeNode},
        utils::memory::get_record_batch_memory_size,
    },
    datasource::source::DataSourceExec,
    execution::{SendableRecordBatchStream, TaskContext},
    physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties, stream::RecordBatchStreamAdapter},
};
use futures::StreamExt;

use super::lines::LinesExec;
use crate::operator::operator;

type Plan = Arc<dyn ExecutionPlan>;

/// Puts a [`CompactExec`] above every scan of a plan. `bytes` are the most that a batch should have.
///
/// # Errors
/// As [`TreeNode::transform_up`].
pub(super) fn compact_scans(plan: Plan, bytes: usize) -> Result<Plan> {
    let compact = plan.transform_up(|node| match node.is::<DataSourceExec>() || node.is::<LinesExec>() {
        true => Ok(Transformed::yes(Arc::new(CompactExec::new(node, bytes)) as _)),
        false => Ok(Transformed::no(node)),
    });
    compact.map(|compact| compact.data)
}

/// See the module.
#[derive(Debug)]
struct CompactExec {
    input: Plan,
    bytes: usize,
    properties: Arc<PlanProperties>,
}

impl CompactExec {
    fn new(input: Plan, bytes: usize) -> Self {
        let properties = Arc::clone(input.properties());
        Self { input, bytes, properties }
    }
}

impl DisplayAs for CompactExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompactExec: bytes={}", self.bytes)
    }
}

impl ExecutionPlan for CompactExec {
    operator!("CompactExec", inputs: [input]);

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Plan>) -> Result<Plan> {
        let Ok([input]) = <[_; 1]>::try_from(children) else { return internal_err!("CompactExec has one input") };
        Ok(Arc::new(Self::new(input, self.bytes)))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let bytes = self.bytes;
        let batches = self.input.execute(partition, context)?.flat_map(move |batch| {
            let pieces: Vec<Result<RecordBatch>> = match batch.and_then(|batch| Ok(Pieces::of(batch, bytes)?)) {
                Ok(pieces) => pieces.map(|piece| Ok(piece?)).collect(),
                Err(error) => vec![Err(error)],
            };
            futures::stream::iter(pieces)
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), batches)))
    }
}

/// The rows of a batch in pieces of about `bytes`, which do not share buffers.
struct Pieces {
    batch: RecordBatch,
    rows: usize,
    next: usize,
}

impl Pieces {
    fn of(batch: RecordBatch, bytes: usize) -> Result<Self, ArrowError> {
        let (mut rows, mut batch) = (batch.num_rows(), batch);
        if get_record_batch_memory_size(&batch) > bytes {
            batch = with_columns(&batch, |column| Ok(without_unused(column)))?;
            let pieces = get_record_batch_memory_size(&batch).div_ceil(bytes.max(1));
            rows = rows.div_ceil(pieces.max(1));
        }
        Ok(Self { batch, rows, next: 0 })
    }
}

impl Iterator for Pieces {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (from, all) = (self.next, self.batch.num_rows());
        if from > 0 && from >= all {
            return None;
        }
        // An empty batch is passed on once.
        self.next = (from + self.rows).max(1);
        if self.rows >= all {
            return Some(Ok(self.batch.clone()));
        }
        let rows = UInt64Array::from_iter_values(from as u64..self.next.min(all) as u64);
        Some(with_columns(&self.batch, |column| Ok(without_unused(&take(column, &rows, None)?))))
    }
}

/// The column without the parts of shared buffers that it does not use.
fn without_unused(column: &ArrayRef) -> ArrayRef {
    match column.data_type() {
        DataType::Utf8View => Arc::new(column.as_string_view().gc()),
        DataType::BinaryView => Arc::new(column.as_binary_view().gc()),
        _ => Arc::clone(column),
    }
}

fn with_columns(
    batch: &RecordBatch,
    change: impl Fn(&ArrayRef) -> Result<ArrayRef, ArrowError>,
) -> Result<RecordBatch, ArrowError> {
    let columns: Vec<ArrayRef> = batch.columns().iter().map(change).collect::<Result<_, _>>()?;
    let rows = columns.first().map_or(batch.num_rows(), Array::len);
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(batch.schema(), columns, &options)
}

#[cfg(test)]
mod tests {
    use arrow::{
        array::{Int64Array, StringArray, StringViewArray},
        compute::concat_batches,
    };

    use super::*;

    fn pieces(batch: &RecordBatch, bytes: usize) -> Vec<RecordBatch> {
        Pieces::of(batch.clone(), bytes).unwrap().map(Result::unwrap).collect()
    }

    #[test]
    fn pieces_have_all_rows_in_order_and_few_bytes() {
        let id: ArrayRef = Arc::new(Int64Array::from_iter_values(0..1000));
        let text: ArrayRef = Arc::new((0..1000).map(|i| Some("x".repeat(i % 100))).collect::<StringArray>());
        let view: ArrayRef =
            Arc::new((0..1000).map(|i| (i % 7 > 0).then(|| "y".repeat(i % 90))).collect::<StringViewArray>());
        let batch =
            RecordBatch::try_from_iter_with_nullable([("id", id, false), ("text", text, true), ("view", view, true)]);
        let batch = batch.unwrap();
        for bytes in [1, 1000, 10_000, 1 << 20] {
            let pieces = pieces(&batch, bytes);
            assert_eq!(concat_batches(&batch.schema(), &pieces).unwrap(), batch, "{bytes}");
            // Buffers are rounded up.
            let largest = pieces.iter().map(get_record_batch_memory_size).max().unwrap();
            assert!(largest <= 2 * bytes.max(1000), "{bytes}: {largest}");
            assert_eq!(pieces.len() == 1, bytes == 1 << 20, "{bytes}");
        }
        let none = batch.slice(0, 0);
        assert_eq!(pieces(&none, 10), [none]);
    }

    /// A slice of ten rows holds all bytes of its views until it is compacted.
    #[test]
    fn views_leave_the_buffers_that_they_do_not_use() {
        let view: ArrayRef = Arc::new((0..1000).map(|_| Some("y".repeat(1000))).collect::<StringViewArray>());
        let batch = RecordBatch::try_from_iter_with_nullable([("view", view, true)]).unwrap().slice(10, 10);
        assert!(get_record_batch_memory_size(&batch) > 900_000);
        let pieces = pieces(&batch, 100_000);
        assert_eq!(pieces, [batch]);
        assert!(get_record_batch_memory_size(&pieces[0]) < 50_000);
    }
}
