//! Settings of a session whose memory is limited: small batches of wide rows, and small buffers.
//!
//! DataFusion counts what its operators collect, but neither the batches between them nor the copies they make while they
//! spill. A batch has 8,192 rows, which is little for numbers, and gigabytes for the token vectors of texts.

use std::{num::NonZeroUsize, sync::Arc};

use datafusion::{
    arrow::datatypes::DataType,
    common::{
        Result,
        tree_node::{TreeNode, TreeNodeRecursion},
    },
    logical_expr::LogicalPlan,
    physical_plan::{
        ExecutionPlan,
        statistics::{StatisticsArgs, StatisticsContext},
    },
    prelude::SessionConfig,
};

/// A batch takes at most this part of the limit of a partition. A query has some ten batches at a time in its operators
/// and between them, and row formats of vectors take more than the vectors.
const BATCH_PART: usize = 64;
/// A partition has at least this part of the limit, so that its share suffices for the batches of its operators.
const PARTITION_BYTES: usize = 16 << 20;
/// Minimum rows of a batch.
const MIN_ROWS: usize = 16;
/// Assumed length of lists: the tokens of a sentence.
const LIST_ITEMS: usize = 32;
/// Assumed bytes of a string.
const STRING_BYTES: usize = 256;
/// A sort holds back at most this part of the limit of a partition for merging.
const MERGE_PART: usize = 32;
/// Parts of uploads to S3 have at least 5 MiB.
const MIN_PART_BYTES: usize = 5 << 20;

/// Reduces partitions, and the buffers of sorts and writers, to the memory limit.
pub(super) fn limit_buffers(config: SessionConfig, limit: NonZeroUsize) -> SessionConfig {
    let partitions = config.target_partitions().min((limit.get() / PARTITION_BYTES).max(1));
    let mut config = config.with_target_partitions(partitions);
    let execution = &mut config.options_mut().execution;
    // A sort would put small batches together instead of merging them, and then count the buffers of views once for each
    // batch of its output.
    execution.sort_in_place_threshold_bytes = 0;
    // What shares the buffers of views, such as the output of a merge, is counted with all of them.
    execution.parquet.schema_force_view_types = false;
    execution.objectstore_writer_buffer_size =
        execution.objectstore_writer_buffer_size.min((limit.get() / BATCH_PART).max(MIN_PART_BYTES));
    config
}

/// Reduces what the sorts of a query hold back for merging, as each partition has a sort.
pub(super) fn limit_merges(mut config: SessionConfig, limit: NonZeroUsize) -> SessionConfig {
    let bytes = limit.get() / config.target_partitions().max(1) / MERGE_PART;
    let held_back = &mut config.options_mut().execution.sort_spill_reservation_bytes;
    *held_back = bytes.min(*held_back);
    config
}

/// The most bytes that a batch should have.
pub(super) fn batch_bytes(limit: NonZeroUsize, partitions: usize) -> usize {
    limit.get() / partitions.max(1) / BATCH_PART
}

/// Rows per batch, such that a batch of the widest rows of a plan is small beside the memory limit of one of the
/// partitions; at most `rows`.
pub(super) fn batch_rows(plan: &LogicalPlan, rows: usize, limit: NonZeroUsize, partitions: usize) -> Result<usize> {
    let mut widest = 1;
    plan.apply_with_subqueries(|node| {
        let width = node.schema().fields().iter().map(|field| value_bytes(field.data_type())).sum();
        widest = widest.max(width);
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(rows.min((batch_bytes(limit, partitions) / widest).max(MIN_ROWS)))
}

/// As [`batch_rows`], from the sizes that files state: those of Parquet know the bytes of their columns.
pub(super) fn measured_rows(
    plan: &Arc<dyn ExecutionPlan>,
    rows: usize,
    limit: NonZeroUsize,
    partitions: usize,
) -> Result<usize> {
    let mut widest = 1;
    plan.apply(|node| {
        if node.children().is_empty() {
            let found = StatisticsContext::new().compute(node.as_ref(), &StatisticsArgs::new())?;
            let bytes = found.column_statistics.iter().filter_map(|column| column.byte_size.get_value()).sum::<usize>();
            widest = widest.max(found.num_rows.get_value().map_or(0, |rows| bytes / (*rows).max(1)));
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(rows.min((batch_bytes(limit, partitions) / widest).max(MIN_ROWS)))
}

/// Estimated bytes of a value.
fn value_bytes(data_type: &DataType) -> usize {
    match data_type {
        DataType::FixedSizeList(item, length) => *length as usize * value_bytes(item.data_type()),
        DataType::List(item) | DataType::LargeList(item) => LIST_ITEMS * value_bytes(item.data_type()),
        DataType::Struct(fields) => fields.iter().map(|field| value_bytes(field.data_type())).sum(),
        other => other.primitive_width().unwrap_or(STRING_BYTES),
    }
}

#[cfg(test)]
mod tests {
    use datafusion::{
        arrow::datatypes::{Field, Schema},
        datasource::empty::EmptyTable,
        prelude::SessionContext,
    };

    use super::*;

    async fn rows(data_type: DataType, limit: usize) -> usize {
        let schema = Schema::new(vec![Field::new("id", DataType::Int64, false), Field::new("v", data_type, true)]);
        let context = SessionContext::new();
        context.register_table("t", Arc::new(EmptyTable::new(Arc::new(schema)))).unwrap();
        // The widest rows are those of the subquery.
        let frame = context.sql("SELECT id FROM t WHERE EXISTS (SELECT v FROM t u WHERE t.id = u.id)").await.unwrap();
        batch_rows(frame.logical_plan(), 8192, NonZeroUsize::new(limit).unwrap(), 1).unwrap()
    }

    /// By hand, for 64 MiB, of which a batch takes 1 MiB: 1 MiB / (8 + 4 * 1024) = 255; with tokens
    /// 1 MiB / (8 + 32 * (256 + 4 * 1024)) = 7, which is less than the minimum.
    #[tokio::test]
    async fn wide_rows_have_small_batches() {
        let vector = DataType::new_fixed_size_list(DataType::Float32, 1024, false);
        assert_eq!(rows(DataType::Int32, 64 << 20).await, 8192);
        assert_eq!(rows(vector.clone(), 64 << 20).await, 255);
        assert_eq!(rows(vector.clone(), 1 << 40).await, 8192);
        let token =
            DataType::Struct(vec![Field::new("token", DataType::Utf8, false), Field::new("v", vector, false)].into());
        assert_eq!(rows(DataType::new_list(token, true), 64 << 20).await, MIN_ROWS);
    }
}
