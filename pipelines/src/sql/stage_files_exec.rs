//! [`StageFilesExec`] runs the sink of a COPY on a worker. It stages the files without publishing them; its rows are [`Record`]s.

use std::{
    fmt::{self, Debug},
    path::PathBuf,
    sync::Arc,
};

use datafusion::{
    common::{DataFusionError, Result, internal_err, runtime::SpawnedTask},
    execution::{SendableRecordBatchStream, TaskContext},
    physical_expr::EquivalenceProperties,
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, Partitioning, PlanProperties,
        stream::RecordBatchStreamAdapter,
    },
};
use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::UnboundedReceiver;

use super::{
    atomic_write::write_to,
    commit::StagedFiles,
    run::written_rows,
    unnamed::{Record, Unnamed, UnnamedFiles},
};
use crate::{operator::operator, stores::Stores};

type Plan = Arc<dyn ExecutionPlan>;

/// The output of a statement. An extension of the session that plans it.
#[derive(Debug)]
pub(crate) struct Writes {
    pub(crate) settings: SinkSettings,
    pub(crate) stores: Stores,
}

/// Settings of a statement's output that its sink does not have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SinkSettings {
    /// The files of the folder are called `.tsv`.
    pub(super) has_tabs: bool,
    /// Hive partition columns.
    pub(super) partition_columns: Vec<String>,
    /// Tells attempts to write the same files apart.
    pub(super) attempt: u32,
    /// The local target folder, and whether it did not exist before.
    pub(super) folder: Option<(PathBuf, bool)>,
}

/// Resources of the worker.
#[derive(Debug, Clone)]
pub(crate) struct OnWorker {
    pub(crate) stores: Stores,
    pub(crate) tasks: Arc<dyn Tasks>,
}

/// Counts the running tasks of a worker.
pub(crate) trait Tasks: Debug + Send + Sync {
    /// Starts a task, which runs until the result is dropped. The worker does not exit before.
    fn begin(&self) -> Box<dyn Send + Sync>;
}

/// See the module.
#[derive(Debug)]
pub(crate) struct StageFilesExec {
    /// A [`DataSinkExec`](datafusion::datasource::sink::DataSinkExec).
    sink: Plan,
    settings: SinkSettings,
    /// Whether the stream ends after the last record, for EXPLAIN ANALYZE. Otherwise it stays open until the client drops it, and the
    /// worker then deletes unpublished files.
    ends: bool,
    worker: Option<OnWorker>,
    properties: Arc<PlanProperties>,
}

impl StageFilesExec {
    pub(crate) fn new(sink: Plan, settings: SinkSettings, ends: bool, worker: Option<OnWorker>) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(Record::schema()),
            Partitioning::UnknownPartitioning(1),
            sink.pipeline_behavior(),
            sink.boundedness(),
        );
        Self { sink, settings, ends, worker, properties: Arc::new(properties) }
    }

    /// The operator for another attempt.
    pub(crate) fn attempt(&self, attempt: u32) -> Self {
        let settings = SinkSettings { attempt, ..self.settings.clone() };
        Self::new(Arc::clone(&self.sink), settings, self.ends, self.worker.clone())
    }

    pub(crate) fn settings(&self) -> (&SinkSettings, bool) {
        (&self.settings, self.ends)
    }
}

impl DisplayAs for StageFilesExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StageFilesExec")
    }
}

impl ExecutionPlan for StageFilesExec {
    operator!("StageFilesExec", inputs: [sink]);

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Plan>) -> Result<Plan> {
        let Ok([sink]) = <[_; 1]>::try_from(children) else { return internal_err!("StageFilesExec has one sink") };
        Ok(Arc::new(Self::new(sink, self.settings.clone(), self.ends, self.worker.clone())))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let Some(worker) = self.worker.clone() else { return internal_err!("files are staged on workers") };
        let SinkSettings { has_tabs, partition_columns, attempt, folder } = &self.settings;
        let (unnamed, records) = Unnamed::new(&worker.stores, *attempt);
        let files = Arc::new(StagedFiles::unnamed(unnamed, *has_tabs, partition_columns.len()));
        let write = write_to(&files, Arc::clone(&self.sink), partition_columns, None)?.execute(partition, context)?;
        drop(files);
        let written = write.map_ok(|batch| written_rows(&batch)).try_fold(0, async |all, rows| Ok(all + rows));
        let under_way = Some(worker.tasks.begin());
        let (files, folder, stores) = (UnnamedFiles::default(), folder.clone(), worker.stores);
        let task = Task { records: Some(records), files, folder, stores, under_way };
        let records = records_of(task, SpawnedTask::spawn(written), self.ends);
        let batches = records.map(|record| record?.to_batch());
        Ok(Box::pin(RecordBatchStreamAdapter::new(Record::schema(), batches)))
    }
}

/// Dropping a task deletes its files that the client has not published.
struct Task {
    /// `None` once the channel is closed.
    records: Option<UnboundedReceiver<Record>>,
    files: UnnamedFiles,
    folder: Option<(PathBuf, bool)>,
    stores: Stores,
    /// Keeps the worker running until the files are deleted.
    under_way: Option<Box<dyn Send + Sync>>,
}

/// The records of a task, the last one after `work` has ended.
fn records_of(task: Task, work: SpawnedTask<Result<u64>>, ends: bool) -> impl stream::Stream<Item = Result<Record>> {
    let next = move |(mut task, work): (Task, Option<SpawnedTask<Result<u64>>>)| async move {
        if let Some(records) = &mut task.records {
            if let Some(record) = records.recv().await {
                task.files.add(&record);
                return Some((Ok(record), (task, work)));
            }
            // The channel is closed: all writers are dropped.
            task.records = None;
        }
        let Some(work) = work else {
            if ends {
                // From now on, only the client can delete them.
                drop(std::mem::take(&mut task.files));
                return None;
            }
            return std::future::pending().await;
        };
        let written = work.await.unwrap_or_else(|error| Err(DataFusionError::ExecutionJoin(Box::new(error))));
        Some((written.map(|rows| Record::Done { rows }), (task, None)))
    };
    stream::unfold((task, Some(work)), next).fuse()
}

impl Drop for Task {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (records, mut files) = (self.records.take(), std::mem::take(&mut self.files));
        let (folder, stores, under_way) = (self.folder.take(), self.stores.clone(), self.under_way.take());
        runtime.spawn(async move {
            if let Some(mut records) = records {
                // Cancelled writers end on other threads, and may still create files.
                while let Some(record) = records.recv().await {
                    files.add(&record);
                }
            }
            files.discard(&stores, folder.as_ref()).await;
            drop(under_way);
        });
    }
}
