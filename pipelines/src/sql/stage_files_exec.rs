//! [`StageFilesExec`] runs the sink of a COPY on a worker. Its files get no names; its rows are what it says of them.

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

/// What the sink of a statement does not know of its files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SinkSettings {
    /// The files of the folder are called `.tsv`.
    pub(super) has_tabs: bool,
    /// Hive partition columns.
    pub(super) partition_columns: Vec<String>,
    /// Tells attempts to write the same files apart.
    pub(super) attempt: u32,
    /// The local folder of the files, and whether it is new.
    pub(super) folder: Option<(PathBuf, bool)>,
}

/// What a worker adds.
#[derive(Debug, Clone)]
pub(crate) struct OnWorker {
    pub(crate) stores: Stores,
    pub(crate) tasks: Arc<dyn Tasks>,
}

/// Knows what a worker does.
pub(crate) trait Tasks: Debug + Send + Sync {
    /// As long as the result is kept, the worker does not end.
    fn begin(&self) -> Box<dyn Send + Sync>;
}

/// See the module.
#[derive(Debug)]
pub(crate) struct StageFilesExec {
    /// A [`DataSinkExec`](datafusion::datasource::sink::DataSinkExec).
    sink: Plan,
    settings: SinkSettings,
    /// Whether the task ends with its last record, and not when nobody reads it any more: then the worker cannot delete the
    /// files of a client that dies.
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
        let said = said(task, SpawnedTask::spawn(written), self.ends);
        let batches = said.map(|record| record?.to_batch());
        Ok(Box::pin(RecordBatchStreamAdapter::new(Record::schema(), batches)))
    }
}

/// A task whose files are deleted when it is dropped, as far as the client has not given them their names.
struct Task {
    /// `None` when nothing can write any more, or others wait for that.
    records: Option<UnboundedReceiver<Record>>,
    files: UnnamedFiles,
    folder: Option<(PathBuf, bool)>,
    stores: Stores,
    /// The worker does not end before the files are deleted.
    under_way: Option<Box<dyn Send + Sync>>,
}

/// What a task says. The files are complete when the work has ended.
fn said(task: Task, work: SpawnedTask<Result<u64>>, ends: bool) -> impl stream::Stream<Item = Result<Record>> {
    let next = move |(mut task, work): (Task, Option<SpawnedTask<Result<u64>>>)| async move {
        if let Some(records) = &mut task.records {
            if let Some(record) = records.recv().await {
                task.files.add(&record);
                return Some((Ok(record), (task, work)));
            }
            // The work cannot write any more: it has ended, or is about to.
            task.records = None;
        }
        let Some(work) = work else {
            if ends {
                // The client publishes or deletes them.
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
                // Writers that are cancelled end on other threads.
                while let Some(record) = records.recv().await {
                    files.add(&record);
                }
            }
            files.discard(&stores, folder.as_ref()).await;
            drop(under_way);
        });
    }
}
