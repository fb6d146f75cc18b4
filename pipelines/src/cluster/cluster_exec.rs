//! [`ClusterExec`] runs a part of a query on the workers. It has one partition.

use std::{
    fmt,
    sync::{
        Arc, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use arrow::array::RecordBatch;
use datafusion::{
    common::{
        DataFusionError, Result, internal_err,
        tree_node::{Transformed, TreeNode},
    },
    execution::{SendableRecordBatchStream, TaskContext},
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties,
        metrics::{BaselineMetrics, ExecutionPlanMetricsSet, MetricsSet},
        stream::RecordBatchStreamAdapter,
    },
};
use datafusion_distributed::{
    DistributedExec, DistributedExt, DistributedMetricsFormat, NetworkBoundaryExt, RouteTasksEvent,
    RouteTasksEventResponse, Stage, rewrite_distributed_plan_with_metrics,
};
use futures::{
    StreamExt, TryStreamExt,
    stream::{self, BoxStream},
};
use url::Url;
use uuid::Uuid;

use super::{
    error::ClusterError,
    live::QueryId,
    members::Member,
    peers::{Peers, name_of},
    rows_exec::RowsExec,
    stage_exec::StageExec,
    watch::{Used, Watch, Watching},
};
use crate::{
    error::Error,
    operator::{copied, operator},
    sql::CLUSTER_EXEC,
};

type Plan = Arc<dyn ExecutionPlan>;

/// How long EXPLAIN ANALYZE waits for the metrics of workers, after all rows.
const METRICS_TIMEOUT: Duration = Duration::from_secs(10);

/// The worker that gets the next stage of one task, so that single tasks spread over the workers.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// See the module.
pub(super) struct ClusterExec {
    /// An operator that gathers the rows of the stages below it.
    plan: Plan,
    members: Arc<[Member]>,
    /// For EXPLAIN ANALYZE: the plan after it was executed, with the metrics of all workers.
    executed: Option<Executed>,
    /// Asks the workers how it goes on, if the query shall.
    watch: Option<Watch>,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

/// Empty until the plan is executed, or if its metrics did not come.
type Executed = Arc<OnceLock<Plan>>;

impl ClusterExec {
    /// With `analyse`, the plan is shown with the metrics of the workers after it was executed.
    pub(super) fn new(plan: Plan, members: Arc<[Member]>, analyse: bool) -> Self {
        let properties = Arc::clone(plan.properties());
        let executed = analyse.then(Executed::default);
        Self { plan, members, executed, watch: None, properties, metrics: ExecutionPlanMetricsSet::new() }
    }

    /// The operator, which takes a worker for lost that has not answered for a minute. `counted`: it has metrics of what the workers
    /// have embedded.
    pub(super) fn watched(mut self, peers: &Arc<Peers>, counted: bool) -> Self {
        self.watch = Some(Watch::new(peers, counted.then_some(&self.metrics)));
        self
    }

    /// The operator that gathers the rows of the stages.
    pub(super) fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(super) fn members(&self) -> &Arc<[Member]> {
        &self.members
    }

    /// The rows of another plan on some of the workers, which is shown as this one. It is not begun again.
    pub(super) fn once(&self, plan: Plan, members: Arc<[Member]>, context: &TaskContext) -> Result<Rows> {
        self.attempts(0).begin(plan, members, context)
    }

    fn attempts(&self, partition: usize) -> Attempts {
        Attempts { executed: self.executed.clone(), watch: self.watch.clone(), partition }
    }

    fn shown(&self) -> &Plan {
        self.executed.as_deref().and_then(OnceLock::get).unwrap_or(&self.plan)
    }
}

impl fmt::Debug for ClusterExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterExec").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl DisplayAs for ClusterExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterExec: workers={}", self.members.len())
    }
}

impl ExecutionPlan for ClusterExec {
    operator!(CLUSTER_EXEC, input: shown());

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Plan>) -> Result<Plan> {
        let Ok([plan]) = <[_; 1]>::try_from(children) else { return internal_err!("ClusterExec has one plan") };
        let new = Self::new(plan, Arc::clone(&self.members), self.executed.is_some());
        Ok(Arc::new(Self { watch: self.watch.clone(), metrics: self.metrics.clone(), ..new }))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let metrics = BaselineMetrics::new(&self.metrics, partition);
        let rows = self.attempts(partition).run(Arc::clone(&self.plan), Arc::clone(&self.members), context);
        let rows = stream::once(rows).try_flatten();
        let rows = rows.inspect_ok(move |batch| metrics.record_output(batch.num_rows()));
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), rows)))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}

/// Rows of stages.
pub(super) type Rows = BoxStream<'static, Result<RecordBatch>>;

/// Executions of a part of a query.
struct Attempts {
    executed: Option<Executed>,
    watch: Option<Watch>,
    partition: usize,
}

impl Attempts {
    /// The rows of the stages. If a worker is lost before the first row, the others run the query from the beginning.
    async fn run(self, plan: Plan, mut members: Arc<[Member]>, context: Arc<TaskContext>) -> Result<Rows> {
        loop {
            let mut rows = self.begin(Arc::clone(&plan), Arc::clone(&members), &context)?;
            let first = rows.next().await;
            let lost = first.as_ref().and_then(|first| lost_worker(first.as_ref().err()?));
            match lost.and_then(|lost| without(&members, &lost)) {
                Some(left) => {
                    tracing::warn!("a worker was lost; the others begin the query again");
                    members = left;
                }
                None => return Ok(stream::iter(first).chain(rows).boxed()),
            }
        }
    }

    /// The rows of the stages on these workers.
    fn begin(&self, plan: Plan, members: Arc<[Member]>, context: &TaskContext) -> Result<Rows> {
        let query = Uuid::new_v4();
        let stages = DistributedExec::new(stamped(plan, query, &members)?);
        let stages = Arc::new(stages.with_metrics_collection(self.executed.is_some()));
        let watching = self.watch.as_ref().map(|watch| watch.begin(id(query)));
        let routed = watching.as_ref().map(Watching::workers);
        let mut rows = stages.execute(self.partition, with_routes(context, members, routed))?.boxed();
        if let Some(watching) = watching {
            rows = watching.over(rows);
        }
        Ok(match self.executed.clone() {
            Some(executed) => rows.chain(stream::once(metrics(stages, executed)).filter_map(async |()| None)).boxed(),
            None => rows,
        })
    }
}

/// Waits for the metrics of the workers.
async fn metrics(stages: Arc<DistributedExec>, executed: Executed) {
    let rewritten = rewrite_distributed_plan_with_metrics(stages, DistributedMetricsFormat::Aggregated);
    match tokio::time::timeout(METRICS_TIMEOUT, rewritten).await {
        Ok(Ok(plan)) => {
            if let Some(plan) = plan.children().first() {
                let _ = executed.set(Arc::clone(plan));
            }
        }
        Ok(Err(reason)) => tracing::warn!(%reason, "the metrics of the workers cannot be read"),
        Err(_) => tracing::warn!("the metrics of the workers did not come"),
    }
}

/// The address of the worker that an error says was lost.
pub(super) fn lost_worker(error: &DataFusionError) -> Option<String> {
    let DataFusionError::External(inner) = error.find_root() else { return None };
    match inner.downcast_ref::<Error>().and_then(Error::module) {
        Some(ClusterError::Lost { worker, .. }) => Some(worker.clone()),
        _ => None,
    }
}

/// The workers without the one at an address. `None` if it is not one of several.
pub(super) fn without(members: &[Member], lost: &str) -> Option<Arc<[Member]>> {
    let left: Arc<[Member]> = members.iter().filter(|member| name_of(&member.url) != lost).cloned().collect();
    (!left.is_empty() && left.len() < members.len()).then_some(left)
}

/// The number by which workers know an execution.
fn id(query: Uuid) -> QueryId {
    query.as_u64_pair().1
}

/// The plan with the ids and the workers of one execution. Two executions with the same ids would get each other's tasks.
fn stamped(plan: Plan, query: Uuid, members: &Arc<[Member]>) -> Result<Plan> {
    let mut number = 0;
    let stamped = plan.transform_up(|node| {
        if let Some(stage) = node.downcast_ref::<StageExec>() {
            return Ok(Transformed::yes(Arc::new(stage.of_query(id(query))) as Plan));
        }
        if let Some(rows) = node.downcast_ref::<RowsExec>() {
            return Ok(Transformed::yes(Arc::new(rows.on(members)?) as Plan));
        }
        let Some(boundary) = node.as_network_boundary() else { return Ok(Transformed::no(node)) };
        let Stage::Local(mut stage) = boundary.input_stage().clone() else {
            return internal_err!("a stage has been sent before its plan was executed");
        };
        number += 1;
        (stage.query_id, stage.num) = (query, number);
        let boundary: Plan = boundary.with_input_stage(Stage::Local(stage))?;
        Ok(Transformed::yes(boundary))
    });
    stamped.map(|stamped| stamped.data)
}

/// A copy of a task context that knows the workers of the query. Adds those that get a task to `used`.
fn with_routes(context: &TaskContext, members: Arc<[Member]>, used: Option<Used>) -> Arc<TaskContext> {
    let mut config = context.session_config().clone();
    config.set_distributed_route_tasks_handler(move |event: RouteTasksEvent<'_>| {
        let routed = routed(&members, event.task_count);
        if let Some(used) = &used {
            used.lock().unwrap_or_else(PoisonError::into_inner).extend(routed.iter().cloned());
        }
        Some(Ok(RouteTasksEventResponse::new(routed)))
    });
    copied(context, config, context.runtime_env())
}

/// A worker for each task. Stages of fewer tasks than workers take turns.
fn routed(members: &[Member], tasks: usize) -> Vec<Url> {
    let first = if tasks < members.len() { NEXT.fetch_add(tasks, Ordering::Relaxed) } else { 0 };
    (0..tasks).filter_map(|task| members.get((first + task) % members.len())).map(|member| member.url.clone()).collect()
}
