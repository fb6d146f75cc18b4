//! The embedding stage of a bulk job on a cluster. Reading, writing, the manifest and resuming stay in the client.

use std::{num::NonZeroUsize, sync::Arc};

use arrow::{
    array::{Array, ArrayRef, BooleanArray, RecordBatch},
    compute::concat_batches,
    datatypes::{Field, Schema},
};
use async_trait::async_trait;
use datafusion::{
    common::DataFusionError, datasource::memory::MemorySourceConfig, execution::SendableRecordBatchStream,
    physical_plan::ExecutionPlan, prelude::SessionConfig,
};
use elmo::{
    ColumnLayout, EmbedSpec, EmbeddedColumns, ModelOptions,
    spec::{OnError, StateMode},
};
use elmo_udfs::codec::{NoModels, SentModel};
use futures::TryStreamExt;

use super::{
    bulk_exec::{ColumnsExec, DEVICE, DescribeExec, EmbedTask, Host, TOKENS_AT_ONCE, from_batch},
    client::Cluster,
    session_config,
};
use crate::{
    error::{Error, Result},
    models::LazyModel,
    sql::sql_error,
    stage::{Pending, Stage},
};

/// Tasks per submitted column.
const TASKS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(3);

/// A [`Stage`] that embeds columns on a cluster.
#[derive(Debug)]
pub struct ClusterStage {
    cluster: Cluster,
    config: SessionConfig,
    task: EmbedTask,
    /// The requested settings. Executors run with [`OnError::Null`]; [`apply_on_error`] does the rest.
    spec: EmbedSpec,
    fields: Vec<Field>,
    metadata: Vec<(String, String)>,
    device: String,
    tokens_at_once: usize,
}

impl ClusterStage {
    /// Creates a stage with the settings `spec` for the options of the model. Runs a query on the cluster for the metadata of the output.
    ///
    /// # Errors
    /// [`Error::Usage`] in state `carry`, which needs all rows in one process; [`elmo::Error`] for settings that the
    /// model does not support; [`crate::sql::SqlError`] if the cluster does not answer or an executor cannot open the
    /// model.
    pub(crate) async fn new(
        cluster: Cluster,
        model: &LazyModel,
        state: StateMode,
        spec: impl FnOnce(&ModelOptions) -> Result<EmbedSpec>,
    ) -> Result<Arc<Self>> {
        if state == StateMode::Carry {
            let help = "leave out --cluster, or use --state zero or --state warm";
            return Err(Error::usage("--state carry needs all rows in one process", help));
        }
        let described = tokio::task::block_in_place(|| SentModel::of(&model.spec.name(), model));
        let mut model = described.map_err(sql_error)?;
        // Vectors do not depend on the LM head, and executors may have another one, or none.
        model.card.lm_head = None;
        let spec = spec(&model.card.options)?;
        let layout = ColumnLayout::new(&model.card.options, &model.card.fingerprint, &spec)?;
        let task_spec = EmbedSpec { on_error: OnError::Null, ..spec.clone() };
        let mut task = EmbedTask { model, spec: task_spec, expected: Vec::new() };
        let config = session_config();
        let rows = cluster.run(Arc::new(DescribeExec::new(task.clone(), client_host())), &config);
        let mut pairs = pairs(rows).await.map_err(sql_error)?;
        let tokens_at_once = remove(&mut pairs, TOKENS_AT_ONCE);
        task.expected.clone_from(&pairs);
        let device = remove(&mut pairs, DEVICE);
        Ok(Arc::new(Self {
            cluster,
            config,
            task,
            spec,
            fields: layout.fields(),
            metadata: pairs,
            device,
            tokens_at_once: tokens_at_once.parse::<usize>().unwrap_or(8192).saturating_mul(TASKS.get()),
        }))
    }

    /// The plan for one column, with its rows as in-memory partitions.
    fn plan(&self, texts: &ArrayRef) -> Result<Arc<dyn ExecutionPlan>, DataFusionError> {
        let schema = Arc::new(Schema::new(vec![Field::new("text", texts.data_type().clone(), true)]));
        let rows = texts.len().div_ceil(TASKS.get()).max(1);
        let partition = |start: usize| {
            let texts = texts.slice(start, rows.min(texts.len() - start));
            RecordBatch::try_new(Arc::clone(&schema), vec![texts]).map(|batch| vec![batch])
        };
        let partitions: Vec<_> = (0..texts.len()).step_by(rows).map(partition).collect::<Result<_, _>>()?;
        let input = MemorySourceConfig::try_new_exec(&partitions, schema, None)?;
        Ok(Arc::new(ColumnsExec::try_new(self.task.clone(), input, client_host())?))
    }
}

/// The client opens no models.
fn client_host() -> Host {
    Host(Arc::new(NoModels("the client")))
}

/// Collects the rows of [`DescribeExec`].
async fn pairs(rows: SendableRecordBatchStream) -> Result<Vec<(String, String)>, DataFusionError> {
    use arrow::array::AsArray;
    let batches: Vec<RecordBatch> = rows.try_collect().await?;
    let of_batch = |batch: &RecordBatch| {
        let (keys, values) = (batch.column(0).as_string::<i32>().clone(), batch.column(1).as_string::<i32>().clone());
        (0..batch.num_rows()).map(move |row| (keys.value(row).to_owned(), values.value(row).to_owned()))
    };
    Ok(batches.iter().flat_map(of_batch).collect())
}

/// Removes a pair; returns its value, or the empty string.
fn remove(pairs: &mut Vec<(String, String)>, key: &str) -> String {
    let index = pairs.iter().position(|(other, _)| other == key);
    index.map(|index| pairs.remove(index).1).unwrap_or_default()
}

#[async_trait]
impl Stage for ClusterStage {
    fn spec(&self) -> &EmbedSpec {
        &self.spec
    }

    fn fields(&self) -> Vec<Field> {
        self.fields.clone()
    }

    fn metadata(&self) -> Vec<(String, String)> {
        self.metadata.clone()
    }

    async fn submit(&self, texts: &ArrayRef) -> elmo::Result<Pending> {
        let plan = self.plan(texts).map_err(remote_error)?;
        let (schema, rows, on_error) = (plan.schema(), texts.len(), self.spec.on_error);
        let stream = self.cluster.run(plan, &self.config);
        // A separate task: the stream submits the query when it is polled, and callers await results later.
        let embedded = tokio::spawn(async move {
            let batches: Vec<RecordBatch> = stream.try_collect().await.map_err(remote_error)?;
            let batch = concat_batches(&schema, &batches)?;
            if batch.num_rows() != rows {
                let message = format!("the cluster returned {} rows for {rows}", batch.num_rows());
                return Err(elmo::Error::Remote(message.into()));
            }
            apply_on_error(from_batch(&batch), on_error)
        });
        Ok(Box::pin(AbortOnDrop(embedded)))
    }

    fn device(&self) -> String {
        self.device.clone()
    }

    fn tokens_at_once(&self) -> usize {
        self.tokens_at_once
    }
}

/// Applies the requested error mode to columns that were computed with [`OnError::Null`].
fn apply_on_error(mut columns: EmbeddedColumns, on_error: OnError) -> elmo::Result<EmbeddedColumns> {
    match (columns.row_errors.first().cloned(), on_error) {
        (Some((row, reason)), OnError::Fail) => Err(elmo::Error::Row { row, reason }),
        (Some(_), OnError::Skip) => {
            columns.keep =
                Some((0..columns.error.len()).map(|row| Some(columns.error.is_null(row))).collect::<BooleanArray>());
            Ok(columns)
        }
        _ => Ok(columns),
    }
}

fn remote_error(error: DataFusionError) -> elmo::Error {
    match error {
        DataFusionError::External(error) => elmo::Error::Remote(error),
        error => elmo::Error::Remote(error.into()),
    }
}

/// Aborts the task, and so cancels the query, when it is dropped.
struct AbortOnDrop(tokio::task::JoinHandle<elmo::Result<EmbeddedColumns>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Future for AbortOnDrop {
    type Output = elmo::Result<EmbeddedColumns>;

    fn poll(mut self: std::pin::Pin<&mut Self>, context: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        // The task panicked, or the runtime is shutting down.
        std::pin::Pin::new(&mut self.0).poll(context).map(|done| done.unwrap_or(Err(elmo::Error::Closed)))
    }
}
