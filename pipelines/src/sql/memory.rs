//! Settings of a session whose memory is limited: small batches of wide rows, and small buffers.
//!
//! DataFusion counts what its operators collect, but neither the batches between them nor the copies they make while they
//! spill. A batch has 8,192 rows, which is little for numbers, and gigabytes for the token vectors of texts.

use std::num::NonZeroUsize;

use datafusion::{
    arrow::datatypes::DataType,
    common::{Result, tree_node::TreeNodeRecursion},
    logical_expr::LogicalPlan,
    prelude::SessionConfig,
};

/// A batch takes at most this part of the limit. A query has some ten batches at a time in its operators and between
/// them, and row formats of vectors take more than the vectors.
const BATCH_PART: usize = 64;
/// Minimum rows of a batch.
const MIN_ROWS: usize = 16;
/// Assumed length of lists: the tokens of a sentence.
const LIST_ITEMS: usize = 32;
/// Assumed bytes of a string.
const STRING_BYTES: usize = 64;
/// A sort holds back at most this part of the limit for merging.
const MERGE_PART: usize = 16;
/// Parts of uploads to S3 have at least 5 MiB.
const MIN_PART_BYTES: usize = 5 << 20;

/// Reduces the buffers of sorts and writers to the memory limit.
pub(super) fn limit_buffers(mut config: SessionConfig, limit: NonZeroUsize) -> SessionConfig {
    let execution = &mut config.options_mut().execution;
    execution.sort_spill_reservation_bytes = execution.sort_spill_reservation_bytes.min(limit.get() / MERGE_PART);
    execution.objectstore_writer_buffer_size =
        execution.objectstore_writer_buffer_size.min((limit.get() / BATCH_PART).max(MIN_PART_BYTES));
    config
}

/// Rows per batch, such that a batch of the widest rows of a plan is small beside the memory limit; at most `rows`.
pub(super) fn batch_rows(plan: &LogicalPlan, rows: usize, limit: NonZeroUsize) -> Result<usize> {
    let mut widest = 1;
    plan.apply_with_subqueries(|node| {
        let width = node.schema().fields().iter().map(|field| value_bytes(field.data_type())).sum();
        widest = widest.max(width);
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(rows.min((limit.get() / BATCH_PART / widest).max(MIN_ROWS)))
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
    use std::sync::Arc;

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
        batch_rows(frame.logical_plan(), 8192, NonZeroUsize::new(limit).unwrap()).unwrap()
    }

    /// By hand, for 64 MiB, of which a batch takes 1 MiB: 1 MiB / (8 + 4 * 1024) = 255; with tokens
    /// 1 MiB / (8 + 32 * (64 + 4 * 1024)) = 7, which is less than the minimum.
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
