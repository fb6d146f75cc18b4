//! Runs tasks as Ballista does, and lets errors keep their words.
//!
//! What Ballista tells a client of an error is how Rust would print it for a programmer, in several layers. So what is to
//! be said travels inside of it in letters that no layer changes, with whose fault it is and what to do next.

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
use url::form_urlencoded;

use super::scans;
use crate::{
    error::{Error, Exit},
    redact::redact,
    source::reason::without_data,
    sql::{SqlError, judged, naming_files},
};

/// Begins and ends what is carried.
const MARKS: (&str, &str) = ("elmo-error(", ")elmo-error");

/// Ballista's own engine underneath, with a connection per part of a result: its pool of connections is not public.
pub(super) struct Engine {
    inner: DefaultExecutionEngine,
    /// What the executor calls itself.
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
        let plan = naming_files(scans::restored(plan)?)?;
        let stage = self.inner.create_query_stage_exec(job_id, stage_id, task_id, partitions, plan, work_dir, config);
        let inner = stage.map_err(|error| carried(error, &self.name))?;
        Ok(Arc::new(Stage { inner, name: Arc::clone(&self.name) }))
    }
}

#[derive(Debug)]
struct Stage {
    inner: Arc<dyn QueryStageExecutor>,
    name: Arc<str>,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl QueryStageExecutor for Stage {
    async fn execute_query_stage(
        &self,
        task_id: usize,
        context: Arc<TaskContext>,
    ) -> Result<Vec<ShuffleWritePartition>> {
        self.inner.execute_query_stage(task_id, context).await.map_err(|error| carried(error, &self.name))
    }

    /// None. The scheduler only adds them up for a page that nobody serves, and where the operators of a stage's tasks
    /// differ it drops the news that a task is done.
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

/// An error in letters that travel. Those that Ballista acts upon stay as they are: a disk is tried again.
fn carried(error: DataFusionError, here: &str) -> DataFusionError {
    match said(&error, here) {
        Some(said) => DataFusionError::Execution(written(&said)),
        None => error,
    }
}

fn cannot_write(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::ReadOnlyFilesystem)
}

/// The error within what Ballista put around it; `None` for those that it acts upon.
fn said(error: &DataFusionError, here: &str) -> Option<Error> {
    match error.find_root() {
        DataFusionError::IoError(_) => None,
        DataFusionError::External(inner) => match inner.downcast_ref() {
            Some(BallistaError::DataFusionError(inner)) => said(inner, here),
            Some(BallistaError::ArrowError(inner)) => Some(match inner.as_ref() {
                // What it writes are results: on a disk of which machine?
                ArrowError::IoError(reason, error) if cannot_write(error.kind()) => SqlError {
                    message: format!("{here}: {reason}"),
                    exit: Exit::Storage,
                    help: Some("make room where it keeps results, or give it another --work-dir".to_owned()),
                }
                .into(),
                other => {
                    SqlError { message: without_data(&other.to_string()).to_owned(), exit: Exit::Input, help: None }
                        .into()
                }
            }),
            Some(_) => None,
            None => Some(judged(error)),
        },
        _ => Some(judged(error)),
    }
}

fn written(error: &Error) -> String {
    let fields = form_urlencoded::Serializer::new(String::new())
        .append_pair("exit", &(error.exit() as u8).to_string())
        .append_pair("message", &redact(&error.to_string()))
        .append_pair("help", &error.help().unwrap_or_default())
        .finish();
    format!("{}{fields}{}", MARKS.0, MARKS.1)
}

/// What an executor said, out of what Ballista made of it.
pub(super) fn read(said: &str) -> Option<(String, Exit, Option<String>)> {
    let fields = said.split_once(MARKS.0)?.1.split_once(MARKS.1)?.0;
    let (mut message, mut exit, mut help) = (None, Exit::Failed, None);
    for (key, value) in form_urlencoded::parse(fields.as_bytes()) {
        match key.as_ref() {
            "message" => message = Some(value.into_owned()),
            "help" if !value.is_empty() => help = Some(value.into_owned()),
            "exit" => exit = Exit::from_code(&value).unwrap_or(exit),
            _ => {}
        }
    }
    message.map(|message| (message, exit, help))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_comes_through_all_layers() {
        let words = "row 3 of \"a\\b\": it’s 100 % (no)elmo; give\n--on-error";
        let error = SqlError { message: words.into(), exit: Exit::Model, help: Some("a=b&c".into()) }.into();
        let layers = format!("Job failed: {:?}", BallistaError::General(format!("{:?}", written(&error))));
        assert_eq!(read(&layers), Some((words.to_owned(), Exit::Model, Some("a=b&c".to_owned()))));
        assert_eq!(read("Job failed due to stage 1"), None);
    }

    #[test]
    fn what_ballista_acts_upon_stays() {
        let fetch = || BallistaError::FetchFailed("e".into(), 1, 2, "gone".into());
        let kept = carried(DataFusionError::External(Box::new(fetch())).context("reading"), "here");
        assert!(matches!(kept.find_root(), DataFusionError::External(inner) if inner.is::<BallistaError>()));
        let wrapped = BallistaError::DataFusionError(Box::new(DataFusionError::Plan("no".into())));
        for ours in [DataFusionError::Plan("no".into()), DataFusionError::External(Box::new(wrapped))] {
            assert_eq!(read(&carried(ours, "here").to_string()).unwrap().0, "no");
        }
        // A disk that results do not fit on, and a file that ends too early.
        for (kind, said, at) in [
            (ErrorKind::StorageFull, "the executor: torn", Exit::Storage),
            (ErrorKind::UnexpectedEof, "torn", Exit::Input),
        ] {
            let torn = ArrowError::IoError("torn".into(), kind.into());
            let torn = DataFusionError::External(Box::new(BallistaError::ArrowError(Box::new(torn))));
            let (message, exit, _) = read(&carried(torn, "the executor").to_string()).unwrap();
            assert!(message.ends_with(said) && exit == at, "{message}");
        }
    }
}
