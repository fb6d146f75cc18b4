//! [`ClusterExec`] runs a subplan on the cluster.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use datafusion::{
    common::{DataFusionError, Result, internal_err},
    execution::{SendableRecordBatchStream, TaskContext},
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

use super::{client::Cluster, distributable::Plan, results::Results};
use crate::{operator::operator, sql::CLUSTER_EXEC};

/// The job of a plan. The first partition that is executed starts it; all partitions await it.
type SharedJob = Shared<BoxFuture<'static, Result<Arc<Results>, Arc<DataFusionError>>>>;

/// Runs a plan on a cluster, with the partitioning and the order of the plan.
pub(super) struct ClusterExec {
    plan: Plan,
    cluster: Cluster,
    properties: Arc<PlanProperties>,
    job: Mutex<Option<SharedJob>>,
    metrics: ExecutionPlanMetricsSet,
}

impl ClusterExec {
    pub(super) fn new(plan: Plan, properties: Arc<PlanProperties>, cluster: Cluster) -> Self {
        Self { plan, cluster, properties, job: Mutex::default(), metrics: ExecutionPlanMetricsSet::new() }
    }

    /// Starts the job, or returns the one that was started.
    fn job(&self, context: &TaskContext) -> SharedJob {
        let mut job = self.job.lock().unwrap_or_else(PoisonError::into_inner);
        let start = || {
            let (plan, cluster, config) =
                (Arc::clone(&self.plan), self.cluster.clone(), context.session_config().clone());
            let results = async move { cluster.results(plan, &config).await.map(Arc::new).map_err(Arc::new) };
            results.boxed().shared()
        };
        job.get_or_insert_with(start).clone()
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
    operator!(CLUSTER_EXEC, inputs: [plan]);

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Ok([plan]) = <[_; 1]>::try_from(children) else { return internal_err!("ClusterExec has one plan") };
        Ok(Arc::new(Self::new(plan, Arc::clone(&self.properties), self.cluster.clone())))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (job, schema) = (self.job(&context), self.schema());
        let metrics = BaselineMetrics::new(&self.metrics, partition);
        let rows = async move {
            let results = job.await.map_err(|error| DataFusionError::from(&error))?;
            let rows = results.partition(partition).await?;
            // Holds the job until the last partition is read: dropping it would cancel the job.
            Ok::<_, DataFusionError>(rows.inspect(move |batch| {
                let _job = &results;
                if let Ok(batch) = batch {
                    metrics.record_output(batch.num_rows());
                }
            }))
        };
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, futures::stream::once(rows).try_flatten())))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}
