//! A part of a plan that runs on the cluster, in a task for each partition or for a few.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use datafusion::{
    common::{DataFusionError, Result, internal_err, tree_node::TreeNodeRecursion},
    execution::{SendableRecordBatchStream, TaskContext},
    physical_expr::PhysicalExpr,
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties,
        metrics::{BaselineMetrics, ExecutionPlanMetricsSet, MetricsSet},
        stream::RecordBatchStreamAdapter,
    },
};
use futures::{
    FutureExt, StreamExt, TryStreamExt,
    future::{BoxFuture, Shared},
};

use super::{
    client::{Cluster, Results},
    travel::Plan,
};
use crate::sql::ELSEWHERE;

/// Who comes first starts the job; all wait for the same.
type Started = Shared<BoxFuture<'static, Result<Arc<Results>, Arc<DataFusionError>>>>;

/// Runs its plan on a cluster. Partitions are those of the plan, with its rows in their order.
pub(super) struct ClusterExec {
    plan: Plan,
    cluster: Cluster,
    properties: Arc<PlanProperties>,
    started: Mutex<Option<Started>>,
    metrics: ExecutionPlanMetricsSet,
}

impl ClusterExec {
    pub(super) fn new(plan: Plan, properties: Arc<PlanProperties>, cluster: Cluster) -> Self {
        Self { plan, cluster, properties, started: Mutex::default(), metrics: ExecutionPlanMetricsSet::new() }
    }

    fn started(&self, context: &TaskContext) -> Started {
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        let start = || {
            let (plan, cluster, config) =
                (Arc::clone(&self.plan), self.cluster.clone(), context.session_config().clone());
            let results = async move { cluster.results(plan, &config).await.map(Arc::new).map_err(Arc::new) };
            results.boxed().shared()
        };
        started.get_or_insert_with(start).clone()
    }
}

impl fmt::Debug for ClusterExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterExec").field("cluster", self.cluster.address()).field("plan", &self.plan).finish()
    }
}

impl DisplayAs for ClusterExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterExec: scheduler={}", self.cluster.address())
    }
}

impl ExecutionPlan for ClusterExec {
    fn name(&self) -> &'static str {
        ELSEWHERE
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.plan]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Ok([plan]) = <[_; 1]>::try_from(children) else { return internal_err!("ClusterExec has one plan") };
        Ok(Arc::new(Self::new(plan, Arc::clone(&self.properties), self.cluster.clone())))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (started, schema) = (self.started(&context), self.schema());
        let counted = BaselineMetrics::new(&self.metrics, partition);
        let rows = async move {
            let results = started.await.map_err(|error| DataFusionError::from(&error))?;
            let rows = results.partition(partition).await?;
            // The job is held until all that read of it are done: dropped before, it is taken back.
            Ok::<_, DataFusionError>(rows.inspect(move |batch| {
                let _held = &results;
                if let Ok(batch) = batch {
                    counted.record_output(batch.num_rows());
                }
            }))
        };
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, futures::stream::once(rows).try_flatten())))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}
