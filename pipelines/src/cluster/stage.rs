//! The step of a bulk job that adds the embedding columns, done by a cluster. The job itself stays where it is: it reads,
//! writes, keeps the manifest and resumes as ever.

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
    ColumnLayout, EmbedSpec, EmbeddedColumns,
    spec::{OnError, StateMode},
};
use elmo_udfs::codec::{NoModels, SentModel};
use futures::TryStreamExt;

use super::{
    client::Cluster,
    columns::{Columns, DEVICE, Describe, Place, TOKENS_AT_ONCE, Work, from_batch},
    session_config,
};
use crate::{
    error::{Error, Result},
    models::LazyModel,
    sql::sql_error,
    stage::{Pending, Stage},
};

/// Parts of a window, each a task.
const PARTS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(3);

/// Embeds columns on a cluster.
#[derive(Debug)]
pub struct ClusterStage {
    cluster: Cluster,
    config: SessionConfig,
    work: Work,
    /// As asked for: executors keep every row, and say why one has no vector.
    spec: EmbedSpec,
    fields: Vec<Field>,
    metadata: Vec<(String, String)>,
    device: String,
    tokens_at_once: usize,
}

impl ClusterStage {
    /// Asks an executor what it makes of the model and the settings.
    ///
    /// # Errors
    /// [`Error::Usage`] in state `carry`, which needs all rows in one process; [`Error::Elmo`] for settings that the model
    /// cannot do; [`Error::Sql`] when the cluster does not answer, or an executor cannot open the model.
    pub(crate) async fn new(cluster: Cluster, model: &LazyModel, spec: EmbedSpec) -> Result<Arc<Self>> {
        if spec.state == StateMode::Carry {
            let help = "leave out --cluster, or use --state zero or warm";
            return Err(Error::usage("state carry needs all rows in one process, in their order", help));
        }
        let described = tokio::task::block_in_place(|| SentModel::of(&model.spec.name(), model));
        let mut model = described.map_err(sql_error)?;
        // Vectors need none: that of an executor may be another, or missing.
        model.card.lm_head = None;
        let layout = ColumnLayout::new(&model.card.options, &model.card.fingerprint, &spec)?;
        let kept = EmbedSpec { on_error: OnError::Null, ..spec.clone() };
        let mut work = Work { model, spec: kept, expected: Vec::new() };
        let config = session_config();
        let said = cluster.run(Arc::new(Describe::new(work.clone(), nowhere())), &config);
        let mut pairs = pairs(said).await.map_err(sql_error)?;
        let at_once = take(&mut pairs, TOKENS_AT_ONCE);
        work.expected.clone_from(&pairs);
        let device = take(&mut pairs, DEVICE);
        Ok(Arc::new(Self {
            cluster,
            config,
            work,
            spec,
            fields: layout.fields(),
            metadata: pairs,
            device,
            tokens_at_once: at_once.parse::<usize>().unwrap_or(8192).saturating_mul(PARTS.get()),
        }))
    }

    /// The plan for one column: its rows travel along, in parts.
    fn plan(&self, texts: &ArrayRef) -> Result<Arc<dyn ExecutionPlan>, DataFusionError> {
        let schema = Arc::new(Schema::new(vec![Field::new("text", texts.data_type().clone(), true)]));
        let rows = texts.len().div_ceil(PARTS.get()).max(1);
        let part = |start: usize| {
            let part = texts.slice(start, rows.min(texts.len() - start));
            RecordBatch::try_new(Arc::clone(&schema), vec![part]).map(|batch| vec![batch])
        };
        let parts: Vec<_> = (0..texts.len()).step_by(rows).map(part).collect::<Result<_, _>>()?;
        let input = MemorySourceConfig::try_new_exec(&parts, schema, None)?;
        Ok(Arc::new(Columns::try_new(self.work.clone(), input, nowhere())?))
    }
}

/// This process embeds nothing.
fn nowhere() -> Place {
    Place(Arc::new(NoModels("the client")))
}

async fn pairs(rows: SendableRecordBatchStream) -> Result<Vec<(String, String)>, DataFusionError> {
    use arrow::array::AsArray;
    let batches: Vec<RecordBatch> = rows.try_collect().await?;
    let of_batch = |batch: &RecordBatch| {
        let (keys, values) = (batch.column(0).as_string::<i32>().clone(), batch.column(1).as_string::<i32>().clone());
        (0..batch.num_rows()).map(move |row| (keys.value(row).to_owned(), values.value(row).to_owned()))
    };
    Ok(batches.iter().flat_map(of_batch).collect())
}

/// Takes the value of a key out.
fn take(pairs: &mut Vec<(String, String)>, key: &str) -> String {
    let place = pairs.iter().position(|(there, _)| there == key);
    place.map(|place| pairs.remove(place).1).unwrap_or_default()
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
        let plan = self.plan(texts).map_err(elsewhere)?;
        let (schema, rows, on_error) = (plan.schema(), texts.len(), self.spec.on_error);
        let stream = self.cluster.run(plan, &self.config);
        // A task of its own, or nothing would be sent before somebody waits.
        let done = tokio::spawn(async move {
            let batches: Vec<RecordBatch> = stream.try_collect().await.map_err(elsewhere)?;
            let whole = concat_batches(&schema, &batches)?;
            if whole.num_rows() != rows {
                let words = format!("the cluster gave {} rows for {rows}", whole.num_rows());
                return Err(elmo::Error::Elsewhere(words.into()));
            }
            judged(from_batch(&whole), on_error)
        });
        Ok(Box::pin(AbortOnDrop(done)))
    }

    fn device(&self) -> String {
        self.device.clone()
    }

    fn tokens_at_once(&self) -> usize {
        self.tokens_at_once
    }
}

/// Rows with an error, as the job wants them.
fn judged(mut done: EmbeddedColumns, on_error: OnError) -> elmo::Result<EmbeddedColumns> {
    match (done.row_errors.first().cloned(), on_error) {
        (Some((row, reason)), OnError::Fail) => Err(elmo::Error::Row { row, reason }),
        (Some(_), OnError::Skip) => {
            done.keep = Some((0..done.error.len()).map(|row| Some(done.error.is_null(row))).collect::<BooleanArray>());
            Ok(done)
        }
        _ => Ok(done),
    }
}

fn elsewhere(error: DataFusionError) -> elmo::Error {
    match error {
        DataFusionError::External(error) => elmo::Error::Elsewhere(error),
        error => elmo::Error::Elsewhere(error.into()),
    }
}

/// A window that nobody waits for is taken back.
struct AbortOnDrop(tokio::task::JoinHandle<elmo::Result<EmbeddedColumns>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Future for AbortOnDrop {
    type Output = elmo::Result<EmbeddedColumns>;

    fn poll(mut self: std::pin::Pin<&mut Self>, context: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        // It dies only with the runtime, or of a defect that was reported where it happened.
        std::pin::Pin::new(&mut self.0).poll(context).map(|done| done.unwrap_or(Err(elmo::Error::Closed)))
    }
}
