//! Files are written whole or not at all: they come into place when the operator that writes has succeeded. See
//! [`super::staged`].

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

use super::staged::{Commits, Staged};

/// The plan, with every operator that writes between two that see to it that all of it comes into place or nothing.
/// `folders` are the columns that rows are put into folders by.
///
/// # Errors
/// As DataFusion, when it takes a plan apart.
pub(super) fn or_nothing(
    plan: Arc<dyn ExecutionPlan>,
    folders: &[String],
    commits: &Arc<Commits>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let guarded = plan.transform_up(|node| {
        let Some(sink) = node.downcast_ref::<DataSinkExec>() else { return Ok(Transformed::no(node)) };
        let staged = Arc::new(Staged::new(commits));
        let below = Guard::around(Arc::clone(sink.input()), Side::Below(folders.into()), &staged);
        let sink = replace_children_if_necessary(node, vec![below])?;
        Ok(Transformed::yes(Guard::around(sink, Side::Above, &staged)))
    });
    guarded.map(|guarded| guarded.data)
}

/// What a writer said, once its files are in place.
async fn ended(staged: &Arc<Staged>, said: Batch) -> Batch {
    let ended = match said {
        Ok(batch) => staged.commit().await.map(|()| batch),
        Err(error) => Err(staged.error().unwrap_or(error)),
    };
    if ended.is_err() {
        staged.give_up().await;
    }
    ended
}

/// The columns by which what a statement writes is put into folders.
pub(super) fn folders(statement: &LogicalPlan) -> Vec<String> {
    match statement {
        LogicalPlan::Copy(copy) => copy.partition_by.clone(),
        LogicalPlan::Dml(insert) => {
            let table = source_as_provider(&insert.target).ok();
            let table = table.as_ref().and_then(|table| (table.as_ref() as &dyn std::any::Any).downcast_ref());
            let columns = table.map(|table: &ListingTable| table.options().table_partition_cols.iter());
            columns.into_iter().flatten().map(|(name, _)| name.clone()).collect()
        }
        LogicalPlan::Analyze(analyze) => folders(&analyze.input),
        _ => Vec::new(),
    }
}

#[derive(Debug, Clone)]
enum Side {
    /// Keeps what goes wrong with the rows. NULL in one of these columns is an error.
    Below(Arc<[String]>),
    /// Puts files into place.
    Above,
}

#[derive(Debug)]
struct Guard {
    input: Arc<dyn ExecutionPlan>,
    side: Side,
    staged: Arc<Staged>,
}

impl Guard {
    fn around(input: Arc<dyn ExecutionPlan>, side: Side, staged: &Arc<Staged>) -> Arc<dyn ExecutionPlan> {
        Arc::new(Self { input, side, staged: Arc::clone(staged) })
    }
}

impl DisplayAs for Guard {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self.side, Side::Above) { "GuardExec: Above" } else { "GuardExec: Below" })
    }
}

impl ExecutionPlan for Guard {
    fn name(&self) -> &'static str {
        "GuardExec"
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
        let Some(input) = children.pop() else { return internal_err!("a guard of nothing") };
        Ok(Self::around(input, self.side.clone(), &self.staged))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (staged, schema) = (Arc::clone(&self.staged), self.schema());
        Ok(match &self.side {
            Side::Below(folders) => {
                let (rows, folders) = (self.input.execute(partition, context)?, Arc::clone(folders));
                let rows = caught(rows).map(move |batch| {
                    batch.and_then(|batch| with_folder(batch, &folders)).map_err(|error| {
                        staged.failed(error);
                        exec_datafusion_err!("the rows to write failed")
                    })
                });
                Box::pin(RecordBatchStreamAdapter::new(schema, rows))
            }
            Side::Above => {
                let writer = caught(self.input.execute(partition, staged.context(&context))?);
                let ended = writer.then(move |said| {
                    let staged = Arc::clone(&staged);
                    async move { ended(&staged, said).await }
                });
                Box::pin(RecordBatchStreamAdapter::new(schema, ended))
            }
        })
    }
}

type Batch = Result<RecordBatch>;

/// A batch all of whose rows have a folder. DataFusion 55 puts those with NULL into the folder of other rows.
fn with_folder(batch: RecordBatch, folders: &[String]) -> Batch {
    let has_null = |name: &&String| batch.column_by_name(name).is_some_and(|column| column.logical_null_count() > 0);
    match folders.iter().find(has_null) {
        Some(name) => exec_err!(
            "PARTITIONED BY {name}: a row has NULL there, for which there is no folder; write coalesce({name}, …)"
        ),
        None => Ok(batch),
    }
}

/// The batches of a stream; that it panicked is an error.
fn caught(stream: SendableRecordBatchStream) -> impl Stream<Item = Batch> {
    let panicked = |_| Err(exec_datafusion_err!("computing or writing the rows panicked"));
    AssertUnwindSafe(stream).catch_unwind().map(move |next| next.unwrap_or_else(panicked))
}
