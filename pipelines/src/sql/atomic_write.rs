//! Makes the writes of a plan atomic: the files of a COPY or INSERT become visible when its sink has succeeded, or not
//! at all. See [`super::staging`] and [`super::commit`].

use std::{fmt, panic::AssertUnwindSafe, sync::Arc};

use datafusion::{
    arrow::array::{Array, RecordBatch},
    common::{
        Result, exec_datafusion_err, exec_err, internal_err,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    datasource::{listing::ListingTable, sink::DataSinkExec, source_as_provider},
    execution::{SendableRecordBatchStream, TaskContext},
    logical_expr::LogicalPlan,
    physical_expr::PhysicalExpr,
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties, replace_children_if_necessary,
        stream::RecordBatchStreamAdapter,
    },
};
use futures::{Stream, StreamExt};

use super::{
    commit::{CommitState, StagedFiles},
    output_folder::OutputFolder,
    staging::staging_context,
};

/// Wraps the input and the output of every sink of a plan in an [`AtomicWriteExec`]. `partition_columns` are the hive
/// partition columns of the output, and `folder` is that of a COPY.
///
/// # Errors
/// As [`TreeNode::transform_up`].
pub(super) fn make_writes_atomic(
    plan: Arc<dyn ExecutionPlan>,
    partition_columns: &[String],
    state: &Arc<CommitState>,
    folder: Option<&OutputFolder>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let wrapped = plan.transform_up(|node| {
        let Some(sink) = node.downcast_ref::<DataSinkExec>() else { return Ok(Transformed::no(node)) };
        let files = Arc::new(StagedFiles::new(state, folder.cloned()));
        let columns = partition_columns.into();
        let input = AtomicWriteExec::wrap(Arc::clone(sink.input()), Side::Input(columns), &files);
        let sink = replace_children_if_necessary(node, vec![input])?;
        Ok(Transformed::yes(AtomicWriteExec::wrap(sink, Side::Sink, &files)))
    });
    wrapped.map(|wrapped| wrapped.data)
}

/// Commits after a sink's result, rolls back after its error.
async fn commit_or_rollback(files: &Arc<StagedFiles>, result: BatchResult) -> BatchResult {
    let result = match result {
        Ok(batch) => files.commit().await.map(|()| batch),
        Err(error) => Err(files.take_error().unwrap_or(error)),
    };
    if result.is_err() {
        files.rollback().await;
    }
    result
}

/// The hive partition columns of the files that a statement writes.
pub(super) fn partition_columns(statement: &LogicalPlan) -> Vec<String> {
    match statement {
        LogicalPlan::Copy(copy) => copy.partition_by.clone(),
        LogicalPlan::Dml(insert) => {
            let table = source_as_provider(&insert.target).ok();
            let table = table.as_ref().and_then(|table| (table.as_ref() as &dyn std::any::Any).downcast_ref());
            let columns = table.map(|table: &ListingTable| table.options().table_partition_cols.iter());
            columns.into_iter().flatten().map(|(name, _)| name.clone()).collect()
        }
        LogicalPlan::Analyze(analyze) => partition_columns(&analyze.input),
        _ => Vec::new(),
    }
}

#[derive(Debug, Clone)]
enum Side {
    /// Below the sink: records errors of the input, and rejects NULL in these hive partition columns.
    Input(Arc<[String]>),
    /// Above the sink: runs it with staging stores, then commits or rolls back.
    Sink,
}

#[derive(Debug)]
struct AtomicWriteExec {
    input: Arc<dyn ExecutionPlan>,
    side: Side,
    files: Arc<StagedFiles>,
}

impl AtomicWriteExec {
    fn wrap(input: Arc<dyn ExecutionPlan>, side: Side, files: &Arc<StagedFiles>) -> Arc<dyn ExecutionPlan> {
        Arc::new(Self { input, side, files: Arc::clone(files) })
    }
}

impl DisplayAs for AtomicWriteExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self.side, Side::Sink) { "AtomicWriteExec: sink" } else { "AtomicWriteExec: input" })
    }
}

impl ExecutionPlan for AtomicWriteExec {
    fn name(&self) -> &'static str {
        "AtomicWriteExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.input.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, mut children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Some(input) = children.pop() else { return internal_err!("AtomicWriteExec has one input") };
        Ok(Self::wrap(input, self.side.clone(), &self.files))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (files, schema) = (Arc::clone(&self.files), self.schema());
        Ok(match &self.side {
            Side::Input(columns) => {
                let (rows, columns) = (self.input.execute(partition, context)?, Arc::clone(columns));
                let rows = catch_panics(rows).map(move |batch| {
                    batch.and_then(|batch| reject_null_partitions(batch, &columns)).map_err(|error| {
                        files.record_error(error);
                        exec_datafusion_err!("the input of the sink failed")
                    })
                });
                Box::pin(RecordBatchStreamAdapter::new(schema, rows))
            }
            Side::Sink => {
                let results = catch_panics(self.input.execute(partition, staging_context(&context, &files))?);
                let results = results.then(move |result| {
                    let files = Arc::clone(&files);
                    async move { commit_or_rollback(&files, result).await }
                });
                Box::pin(RecordBatchStreamAdapter::new(schema, results))
            }
        })
    }
}

type BatchResult = Result<RecordBatch>;

/// Rejects rows with NULL in a hive partition column. DataFusion 55 writes them to the folder of another value.
fn reject_null_partitions(batch: RecordBatch, columns: &[String]) -> BatchResult {
    let has_null = |name: &&String| batch.column_by_name(name).is_some_and(|column| column.logical_null_count() > 0);
    match columns.iter().find(has_null) {
        Some(name) => {
            exec_err!("PARTITIONED BY {name}: a row has NULL in this column; write coalesce({name}, …) instead")
        }
        None => Ok(batch),
    }
}

/// Turns panics of a stream into errors.
fn catch_panics(stream: SendableRecordBatchStream) -> impl Stream<Item = BatchResult> {
    let panicked = |_| Err(exec_datafusion_err!("computing or writing the rows panicked"));
    AssertUnwindSafe(stream).catch_unwind().map(move |next| next.unwrap_or_else(panicked))
}
