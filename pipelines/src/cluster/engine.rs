//! The execution engine of executors: Ballista's, with errors in an [`envelope`], readers that name files in errors,
//! and without metrics.

use std::{fmt, io::ErrorKind, sync::Arc};

use async_trait::async_trait;
use ballista_core::{
    JobId,
    error::BallistaError,
    serde::protobuf::{RuntimeStatsReport, ShuffleWritePartition, TaskColumnStats, WindowStateReport},
};
use ballista_executor::execution_engine::{DefaultExecutionEngine, ExecutionEngine, QueryStageExecutor};
use datafusion::{
    arrow::error::ArrowError,
    common::{DataFusionError, Result},
    execution::TaskContext,
    physical_plan::{ExecutionPlan, metrics::MetricsSet},
    prelude::SessionConfig,
};

use super::{envelope, scans};
use crate::{
    error::{Error, Exit},
    source::reason::Reason,
    sql::{SqlError, name_files_in_errors, to_sql_error},
};

/// Wraps Ballista's [`DefaultExecutionEngine`].
pub(super) struct Engine {
    inner: DefaultExecutionEngine,
    /// The executor's name in error messages.
    name: Arc<str>,
}

impl Engine {
    pub(super) fn new(name: &str) -> Self {
        Self { inner: DefaultExecutionEngine::new(), name: name.into() }
    }
}

impl ExecutionEngine for Engine {
    fn create_query_stage_exec(
        &self,
        job_id: JobId,
        stage_id: usize,
        task_id: usize,
        partitions: Vec<usize>,
        plan: Arc<dyn ExecutionPlan>,
        work_dir: &str,
        config: &SessionConfig,
    ) -> Result<Arc<dyn QueryStageExecutor>> {
        let plan = name_files_in_errors(scans::with_compression_of_names(plan)?)?;
        let stage = self.inner.create_query_stage_exec(job_id, stage_id, task_id, partitions, plan, work_dir, config);
        let inner = stage.map_err(|error| to_envelope(error, &self.name))?;
        Ok(Arc::new(StageExecutor { inner, name: Arc::clone(&self.name) }))
    }
}

/// Wraps the executor of one Ballista query stage.
#[derive(Debug)]
struct StageExecutor {
    inner: Arc<dyn QueryStageExecutor>,
    name: Arc<str>,
}

impl fmt::Display for StageExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl QueryStageExecutor for StageExecutor {
    async fn execute_query_stage(
        &self,
        task_id: usize,
        context: Arc<TaskContext>,
    ) -> Result<Vec<ShuffleWritePartition>> {
        self.inner.execute_query_stage(task_id, context).await.map_err(|error| to_envelope(error, &self.name))
    }

    /// Returns no metrics. The scheduler ignores the completion of a task whose operators report other metrics than
    /// those of an earlier task of the stage, and uses metrics for its web page only, which is not served.
    fn collect_plan_metrics(&self) -> Vec<MetricsSet> {
        Vec::new()
    }

    fn collect_runtime_stats_reports(&self) -> Vec<RuntimeStatsReport> {
        self.inner.collect_runtime_stats_reports()
    }

    fn collect_window_state_reports(&self) -> Result<Vec<WindowStateReport>> {
        self.inner.collect_window_state_reports()
    }

    fn collect_column_stats(&self) -> Vec<TaskColumnStats> {
        self.inner.collect_column_stats()
    }
}

/// Puts an error in an envelope. Errors that Ballista handles itself, such as I/O errors, which it retries, stay as
/// they are.
fn to_envelope(error: DataFusionError, executor: &str) -> DataFusionError {
    match to_error(&error, executor) {
        Some(error) => DataFusionError::Execution(envelope::encode(&error)),
        None => error,
    }
}

/// Unwraps Ballista's wrappers and converts the error; `None` for errors that Ballista handles itself.
fn to_error(error: &DataFusionError, executor: &str) -> Option<Error> {
    match error.find_root() {
        DataFusionError::IoError(_) => None,
        DataFusionError::External(inner) => match inner.downcast_ref() {
            Some(BallistaError::DataFusionError(inner)) => to_error(inner, executor),
            Some(BallistaError::ArrowError(inner)) => Some(arrow_error(inner, executor)),
            Some(_) => None,
            None => Some(to_sql_error(error)),
        },
        _ => Some(to_sql_error(error)),
    }
}

/// An error of reading rows, or of writing results to the executor's work directory.
fn arrow_error(error: &ArrowError, executor: &str) -> Error {
    let (message, exit, help) = match error {
        ArrowError::IoError(reason, source) if is_disk_full(source.kind()) => {
            let help = "free disk space in its work directory, or start it with another --work-dir";
            (format!("{executor}: {reason}"), Exit::Storage, Some(help.to_owned()))
        }
        other => (Reason::from(other).to_string(), Exit::Input, None),
    };
    SqlError { message, exit, help }.into()
}

fn is_disk_full(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::ReadOnlyFilesystem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_ballista_handles_are_unchanged() {
        let fetch = || BallistaError::FetchFailed("e".into(), 1, 2, "gone".into());
        let kept = to_envelope(DataFusionError::External(Box::new(fetch())).context("reading"), "here");
        assert!(matches!(kept.find_root(), DataFusionError::External(inner) if inner.is::<BallistaError>()));
        let wrapped = BallistaError::DataFusionError(Box::new(DataFusionError::Plan("no".into())));
        for ours in [DataFusionError::Plan("no".into()), DataFusionError::External(Box::new(wrapped))] {
            assert_eq!(envelope::decode(&to_envelope(ours, "here").to_string()).unwrap().0, "no");
        }
        // A full disk, and a truncated file.
        for (kind, end, at) in [
            (ErrorKind::StorageFull, "the executor: unexpected end of file", Exit::Storage),
            (ErrorKind::UnexpectedEof, "unexpected end of file", Exit::Input),
        ] {
            let error = ArrowError::IoError("unexpected end of file".into(), kind.into());
            let error = DataFusionError::External(Box::new(BallistaError::ArrowError(Box::new(error))));
            let (message, exit, _) = envelope::decode(&to_envelope(error, "the executor").to_string()).unwrap();
            assert!(message.ends_with(end) && exit == at, "{message}");
        }
    }
}
