//! [`CompactExec`] makes batches small beside the memory limit, so that operators that spill can hold some.
//!
//! The number of rows of a batch is chosen before their sizes are known. And batches of string views share buffers, which
//! memory pools count in full for each of them: those of a Parquet reader, of a merge of sorted rows, or of a join.

use std::{fmt, sync::Arc};

use arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions, UInt64Array},
    buffer::Buffer,
    compute::take,
    datatypes::DataType,
    error::ArrowError,
};
use datafusion::{
    common::{Result, internal_err, utils::memory::get_record_batch_memory_size},
    datasource::source::DataSourceExec,
    execution::{SendableRecordBatchStream, TaskContext},
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties, replace_children_if_necessary,
        stream::RecordBatchStreamAdapter,
    },
};
use elmo_udfs::plan::EXEC_NAME;
use futures::{StreamExt, TryStreamExt, stream};

use super::{file_errors::STAGE_EXEC, lines::LinesExec};
use crate::operator::operator;

type Plan = Arc<dyn ExecutionPlan>;

/// Operators that count the batches of their input.
const COUNTING: [&str; 8] = [
    "SortExec",
    "SortPreservingMergeExec",
    "RepartitionExec",
    "HashJoinExec",
    "CrossJoinExec",
    "NestedLoopJoinExec",
    "SortMergeJoinExec",
    EXEC_NAME,
];

/// Puts a [`CompactExec`] above every scan of a plan, and below operators that count views. `bytes` are the most that a batch
/// should have. Stages of workers stay as they are: the limit is that of this process.
///
/// # Errors
/// As [`replace_children_if_necessary`].
pub(super) fn compact(plan: Plan, bytes: usize) -> Result<Plan> {
    if plan.name() == STAGE_EXEC {
        return Ok(plan);
    }
    let inputs = plan.children().into_iter().map(|input| compact(Arc::clone(input), bytes));
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    let compact = |input: Plan| Arc::new(CompactExec::new(input, bytes)) as Plan;
    let counts = COUNTING.contains(&plan.name());
    let inputs = inputs.into_iter().map(|input| match counts && has_views(&input) && !input.is::<CompactExec>() {
        true => compact(input),
        false => input,
    });
    let plan = replace_children_if_necessary(plan, inputs.collect())?;
    Ok(if plan.is::<DataSourceExec>() || plan.is::<LinesExec>() { compact(plan) } else { plan })
}

fn has_views(plan: &Plan) -> bool {
    let is_view = |data_type: &DataType| matches!(data_type, DataType::Utf8View | DataType::BinaryView);
    plan.schema().fields().iter().any(|field| is_view(field.data_type()))
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
        // One piece at a time, so that a large batch does not exist twice.
        let pieces = move |batch: Result<RecordBatch>| -> Result<_> {
            Ok(stream::iter(Pieces::of(batch?, bytes)?.map(|piece| Ok(piece?))))
        };
        let batches = self.input.execute(partition, context)?.map(pieces).try_flatten();
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
        if get_record_batch_memory_size(&batch) > bytes || batch.columns().iter().any(is_mostly_unused) {
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

/// Whether a column of views uses less than half of the buffers that it shares. A memory pool counts all of them.
fn is_mostly_unused(column: &ArrayRef) -> bool {
    let (used, buffers) = match column.data_type() {
        DataType::Utf8View => {
            let column = column.as_string_view();
            (column.total_buffer_bytes_used(), column.data_buffers())
        }
        DataType::BinaryView => {
            let column = column.as_binary_view();
            (column.total_buffer_bytes_used(), column.data_buffers())
        }
        _ => return false,
    };
    buffers.iter().map(Buffer::capacity).sum::<usize>() / 2 > used
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
        assert_eq!(pieces, std::slice::from_ref(&batch));
        assert!(get_record_batch_memory_size(&pieces[0]) < 50_000);
        // Also if all of it is little.
        assert!(get_record_batch_memory_size(&self::pieces(&batch, 10 << 20)[0]) < 50_000);
    }
}
