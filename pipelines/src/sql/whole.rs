//! Files are written whole or not at all. DataFusion's writers take an input that fails for one that has ended: they
//! complete the file with the rows that came before, and replace what was there.

use std::{
    fmt,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use datafusion::{
    common::{
        DataFusionError, Result, exec_datafusion_err, internal_err,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    datasource::sink::DataSinkExec,
    execution::{SendableRecordBatchStream, TaskContext},
    physical_expr::PhysicalExpr,
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties, replace_children_if_necessary,
        stream::RecordBatchStreamAdapter,
    },
};
use futures::{FutureExt, StreamExt};
use tokio::sync::Notify;

/// How long writers that were stopped have to remove what they began to write.
const TIDYING: Duration = Duration::from_millis(100);

/// The plan, with every operator that writes between two that stop it when its input fails.
///
/// # Errors
/// As DataFusion, when it takes a plan apart.
pub(super) fn or_nothing(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let guarded = plan.transform_up(|node| {
        let Some(sink) = node.downcast_ref::<DataSinkExec>() else { return Ok(Transformed::no(node)) };
        let failure = Arc::<Failure>::default();
        let below = Guard::around(Arc::clone(sink.input()), Side::Below, &failure);
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
}

impl Failure {
    fn tell(&self, error: DataFusionError) {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.told.notify_one();
    }

    async fn heard(&self) -> DataFusionError {
        self.told.notified().await;
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        error.unwrap_or_else(|| exec_datafusion_err!("the rows to write failed"))
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Side {
    /// Keeps errors from the writer: it waits for rows, until it is stopped.
    Below,
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
        write!(f, "GuardExec: {:?}", self.side)
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
        Ok(Self::around(input, self.side, &self.failure))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (stream, failure) = (self.input.execute(partition, context)?, Arc::clone(&self.failure));
        let schema = self.schema();
        Ok(match self.side {
            Side::Below => Box::pin(RecordBatchStreamAdapter::new(schema, kept_back(stream, failure))),
            Side::Above => Box::pin(RecordBatchStreamAdapter::new(schema, stopped_by(stream, failure))),
        })
    }
}

type Batch = Result<datafusion::arrow::array::RecordBatch>;

/// The batches of a stream; after an error, nothing, and no end.
fn kept_back(stream: SendableRecordBatchStream, failure: Arc<Failure>) -> impl futures::Stream<Item = Batch> {
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

/// What a writer says, unless it is to stop.
fn stopped_by(stream: SendableRecordBatchStream, failure: Arc<Failure>) -> impl futures::Stream<Item = Batch> {
    futures::stream::unfold((Some(stream), failure), |(stream, failure)| async {
        let mut stream = stream?;
        tokio::select! {
            biased;
            error = failure.heard() => {
                drop(stream);
                // Its tasks end, and other threads remove the files that they had begun.
                tokio::time::sleep(TIDYING).await;
                Some((Err(error), (None, failure)))
            }
            batch = stream.next() => batch.map(|batch| (batch, (Some(stream), failure))),
        }
    })
}
