//! Files are written whole or not at all. DataFusion's writers take an input that fails for one that has ended: they
//! complete the file with the rows that came before, and replace what was there.

use std::{
    fmt,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use datafusion::{
    arrow::array::{Array, RecordBatch},
    common::{
        DataFusionError, Result, exec_datafusion_err, exec_err, internal_err,
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
use futures::{FutureExt, StreamExt, stream::BoxStream};
use tokio::sync::Notify;

use super::refusing::{Failed, with_refusing_stores};

/// How long writers that were stopped have to remove what they began to write.
const TIDYING: Duration = Duration::from_millis(100);

/// The plan, with every operator that writes between two that stop it when its input fails. `folders` are the columns that
/// rows are put into folders by.
///
/// # Errors
/// As DataFusion, when it takes a plan apart.
pub(super) fn or_nothing(plan: Arc<dyn ExecutionPlan>, folders: &[String]) -> Result<Arc<dyn ExecutionPlan>> {
    let guarded = plan.transform_up(|node| {
        let Some(sink) = node.downcast_ref::<DataSinkExec>() else { return Ok(Transformed::no(node)) };
        let failure = Arc::<Failure>::default();
        let below = Guard::around(Arc::clone(sink.input()), Side::Below(folders.into()), &failure);
        let sink = replace_children_if_necessary(node, vec![below])?;
        Ok(Transformed::yes(Guard::around(sink, Side::Above, &failure)))
    });
    guarded.map(|guarded| guarded.data)
}

/// What the input of a writer failed with.
#[derive(Debug, Default)]
struct Failure {
    error: Mutex<Option<DataFusionError>>,
    told: Notify,
    happened: Failed,
}

impl Failure {
    fn tell(&self, error: DataFusionError) {
        self.happened.store(true, Ordering::SeqCst);
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.told.notify_one();
    }

    async fn heard(&self) -> DataFusionError {
        self.told.notified().await;
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        error.unwrap_or_else(|| exec_datafusion_err!("the rows to write failed"))
    }
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
    /// Keeps errors from the writer: it waits for rows, until it is stopped. NULL in one of these columns is an error.
    Below(Arc<[String]>),
    /// Stops the writer.
    Above,
}

#[derive(Debug)]
struct Guard {
    input: Arc<dyn ExecutionPlan>,
    side: Side,
    failure: Arc<Failure>,
}

impl Guard {
    fn around(input: Arc<dyn ExecutionPlan>, side: Side, failure: &Arc<Failure>) -> Arc<dyn ExecutionPlan> {
        Arc::new(Self { input, side, failure: Arc::clone(failure) })
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
        Ok(Self::around(input, self.side.clone(), &self.failure))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let failure = Arc::clone(&self.failure);
        let context = match self.side {
            Side::Above => with_refusing_stores(&context, &failure.happened),
            Side::Below(_) => context,
        };
        let stream = self.input.execute(partition, context)?;
        let schema = self.schema();
        Ok(match &self.side {
            Side::Below(folders) => {
                let folders = Arc::clone(folders);
                let checked = stream.map(move |batch| batch.and_then(|batch| with_folder(batch, &folders)));
                Box::pin(RecordBatchStreamAdapter::new(schema, kept_back(checked.boxed(), failure)))
            }
            Side::Above => Box::pin(RecordBatchStreamAdapter::new(schema, stopped_by(stream, failure))),
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

/// The batches of a stream; after an error, nothing, and no end.
fn kept_back(stream: BoxStream<'static, Batch>, failure: Arc<Failure>) -> impl futures::Stream<Item = Batch> {
    futures::stream::unfold((stream, failure), |(mut stream, failure)| async {
        let next = AssertUnwindSafe(stream.next()).catch_unwind().await;
        match next.unwrap_or_else(|_| Some(Err(exec_datafusion_err!("computing the rows to write panicked")))) {
            Some(Ok(batch)) => Some((Ok(batch), (stream, failure))),
            None => None,
            Some(Err(error)) => {
                failure.tell(error);
                std::future::pending().await
            }
        }
    })
}

/// A writer at work. Given up, by an error or because nobody waits for it any more, it completes no file.
struct Writer {
    stream: Option<SendableRecordBatchStream>,
    failure: Arc<Failure>,
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Before the stream is dropped: what it has written whole by now is not taken back.
        self.failure.happened.store(true, Ordering::SeqCst);
    }
}

/// What a writer says, unless it is to stop.
fn stopped_by(stream: SendableRecordBatchStream, failure: Arc<Failure>) -> impl futures::Stream<Item = Batch> {
    futures::stream::unfold(Writer { stream: Some(stream), failure }, |mut writer| async {
        let stream = writer.stream.as_mut()?;
        tokio::select! {
            biased;
            error = writer.failure.heard() => {
                writer.stream = None;
                // Its tasks end, and other threads remove the files that they had begun.
                tokio::time::sleep(TIDYING).await;
                Some((Err(error), writer))
            }
            batch = stream.next() => batch.map(|batch| (batch, writer)),
        }
    })
}
