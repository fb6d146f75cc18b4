//! [`PublishExec`] runs the sinks of a COPY on workers and collects the files that they have staged. Its parent commits them; see
//! [`StagedFiles`].

use std::{fmt, sync::Arc};

use arrow::{
    array::{RecordBatch, UInt64Array},
    datatypes::{DataType, Field, Schema, SchemaRef},
};
use datafusion::{
    common::{
        Result, exec_err, internal_err,
        tree_node::{Transformed, TreeNode},
    },
    execution::{SendableRecordBatchStream, TaskContext},
    physical_expr::EquivalenceProperties,
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, Partitioning, PlanProperties,
        stream::RecordBatchStreamAdapter,
    },
};
use futures::{StreamExt, stream};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::cluster_exec::{ClusterExec, Rows, lost_worker, without};
use crate::{
    operator::operator,
    sql::{PUBLISH_EXEC, Publishing, Record, StageFilesExec, StagedFiles, UnnamedFiles},
    stores::Stores,
};

type Plan = Arc<dyn ExecutionPlan>;

/// See the module.
#[derive(Debug)]
pub(super) struct PublishExec {
    /// A [`ClusterExec`] whose rows are the [`Record`]s of the sinks.
    input: Plan,
    /// Number of sinks.
    tasks: usize,
    stores: Stores,
    /// For EXPLAIN ANALYZE.
    analyse: bool,
    properties: Arc<PlanProperties>,
}

impl PublishExec {
    pub(super) fn new(input: Plan, tasks: usize, stores: Stores, analyse: bool) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(count_schema()),
            Partitioning::UnknownPartitioning(1),
            input.pipeline_behavior(),
            input.boundedness(),
        );
        Self { input, tasks, stores, analyse, properties: Arc::new(properties) }
    }
}

/// The result of a COPY: the number of rows.
fn count_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("count", DataType::UInt64, false)]))
}

impl DisplayAs for PublishExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PublishExec")
    }
}

impl ExecutionPlan for PublishExec {
    operator!(PUBLISH_EXEC, inputs: [input]);

    fn with_new_children(self: Arc<Self>, children: Vec<Plan>) -> Result<Plan> {
        let Ok([input]) = <[_; 1]>::try_from(children) else { return internal_err!("PublishExec has one input") };
        Ok(Arc::new(Self::new(input, self.tasks, self.stores.clone(), self.analyse)))
    }

    fn execute(&self, _: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let files = context.session_config().get_extension::<Publishing>().and_then(|files| files.0.upgrade());
        let Some(files) = files else {
            return internal_err!("PublishExec needs an AtomicWriteExec above it");
        };
        let (input, stores) = (Arc::clone(&self.input), self.stores.clone());
        let collected = Collecting { input, tasks: self.tasks, stores, analyse: self.analyse };
        let counted = async move {
            let rows = collected.collect(&files, &context).await?;
            Ok(RecordBatch::try_new(count_schema(), vec![Arc::new(UInt64Array::from(vec![rows]))])?)
        };
        Ok(Box::pin(RecordBatchStreamAdapter::new(count_schema(), stream::once(counted))))
    }
}

struct Collecting {
    input: Plan,
    tasks: usize,
    stores: Stores,
    analyse: bool,
}

impl Collecting {
    /// Returns the number of rows written. If a worker is lost, restarts on the others: nothing is published yet.
    async fn collect(&self, files: &Arc<StagedFiles>, context: &TaskContext) -> Result<u64> {
        let Some(cluster) = self.input.downcast_ref::<ClusterExec>() else {
            return internal_err!("{} does not run on workers", self.input.name());
        };
        let mut members = Arc::clone(cluster.members());
        loop {
            let number = Uuid::new_v4().as_fields().0;
            let records = cluster.once(numbered(cluster.plan(), number)?, Arc::clone(&members), context)?;
            let collected = self.attempt(files, records).await;
            let Some(lost) = collected.as_ref().err().and_then(lost_worker) else { return collected };
            // The worker may have created files whose records did not arrive.
            files.sweep(number).await;
            match without(&members, &lost) {
                Some(others) => members = others,
                None => return collected,
            }
            tracing::warn!("a worker was lost while it wrote; the others begin again");
        }
    }

    async fn attempt(&self, files: &Arc<StagedFiles>, mut records: Rows) -> Result<u64> {
        let mut written = Written { files: UnnamedFiles::default(), stores: self.stores.clone(), to: files };
        let (mut rows, mut missing) = (0, self.tasks);
        while missing > 0 {
            let Some(batch) = records.next().await else {
                return exec_err!("a worker ended without reporting its files");
            };
            for record in Record::of_batch(&batch?)? {
                files.note(&self.stores, &record);
                written.files.add(&record);
                if let Record::Done { rows: of_task } = record {
                    (rows, missing) = (rows + of_task, missing - 1);
                }
            }
        }
        if self.analyse {
            // Metrics arrive when the tasks end.
            while records.next().await.transpose()?.is_some() {}
        }
        let (kept, published) = oneshot::channel::<()>();
        files.adopt(&self.stores, &mut written.files, kept)?;
        tokio::spawn(async move {
            // Workers delete unpublished files when the stream is dropped. The sender is dropped after the commit.
            let _ = published.await;
            drop(records);
        });
        Ok(rows)
    }
}

/// The plan with the number of an attempt.
fn numbered(plan: &Plan, attempt: u32) -> Result<Plan> {
    let numbered = Arc::clone(plan).transform_up(|node| {
        Ok(match node.downcast_ref::<StageFilesExec>() {
            Some(files) => Transformed::yes(Arc::new(files.attempt(attempt)) as Plan),
            None => Transformed::no(node),
        })
    });
    numbered.map(|numbered| numbered.data)
}

/// Files staged by workers; dropping this deletes them.
struct Written<'f> {
    files: UnnamedFiles,
    stores: Stores,
    to: &'f StagedFiles,
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        self.to.discard(&self.stores, std::mem::take(&mut self.files));
    }
}
