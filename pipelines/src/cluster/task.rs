//! What a bulk job asks a worker for: to open its model, and to compute columns or parts with it.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, BooleanArray, RecordBatch, StringArray},
    datatypes::{DataType, Field, Schema},
    ipc::{reader::StreamReader, writer::StreamWriter},
};
use datafusion::common::DataFusionError;
use elmo::{ColumnEmbedder, ColumnStats, EmbedSpec, EmbeddedColumns, RowError, spec::OnError};
use elmo_udfs::{
    ModelFailed,
    codec::{ModelHost, SentModel, spec_from_bytes, spec_to_bytes},
};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    sql::to_sql_error,
    stage::{EmbedStage, Stage},
};

/// A model and the settings of a job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct EmbedTask {
    model: Vec<u8>,
    spec: Vec<u8>,
    /// What the first worker that was asked has [described](Description). The output of all must be the same.
    expected: Option<Description>,
}

/// What a worker says of the columns that it computes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Description {
    /// Metadata pairs of the output.
    pub(super) metadata: Vec<(String, String)>,
    /// The kind of its devices.
    pub(super) device: String,
    /// Tokens that its devices take at once.
    pub(super) tokens_at_once: usize,
}

impl EmbedTask {
    pub(super) fn new(model: &SentModel, spec: &EmbedSpec) -> Self {
        Self { model: model.to_bytes(), spec: spec_to_bytes(spec), expected: None }
    }

    /// The task for all other workers.
    pub(super) fn expecting(self, expected: Description) -> Self {
        Self { expected: Some(expected), ..self }
    }

    /// Opens the model in this process.
    ///
    /// # Errors
    /// If it cannot be opened, or the output would differ from what is expected.
    pub(super) async fn open(&self, host: Arc<dyn ModelHost>) -> Result<ColumnEmbedder> {
        let task = self.clone();
        let opened = tokio::task::spawn_blocking(move || task.open_here(host.as_ref()));
        opened.await.unwrap_or_else(|e| Err(Error::Failed(format!("opening the model failed: {e}"))))
    }

    fn open_here(&self, host: &dyn ModelHost) -> Result<ColumnEmbedder> {
        let model = SentModel::from_bytes(&self.model).map_err(|e| to_sql_error(&e))?;
        let spec = spec_from_bytes(&self.spec).map_err(|e| to_sql_error(&e))?;
        let elmo = model
            .open(host)
            .map_err(|e| to_sql_error(&DataFusionError::External(Box::new(ModelFailed(e.to_string())))))?;
        let embedder = ColumnEmbedder::new(&elmo, spec)?;
        match &self.expected {
            Some(expected) => expected.check(&Description::of(&embedder), &host.name()).map(|()| embedder),
            None => Ok(embedder),
        }
    }

    /// Opens the model in this process, for a job.
    ///
    /// # Errors
    /// As [`EmbedTask::open`].
    pub(super) async fn stage(&self, host: Arc<dyn ModelHost>) -> Result<Arc<dyn Stage>> {
        let embedder = self.open(host).await?;
        let width = embedder.width();
        Ok(EmbedStage::new(embedder, width))
    }
}

impl Description {
    pub(super) fn of(embedder: &ColumnEmbedder) -> Self {
        let device = embedder.device_kind().to_owned();
        Self { metadata: embedder.metadata(), device, tokens_at_once: embedder.tokens_at_once() }
    }

    /// # Errors
    /// If two workers would write different metadata or vectors to one output.
    fn check(&self, actual: &Self, host: &str) -> Result<()> {
        let mut differs = actual.metadata.iter().filter(|pair| !self.metadata.contains(pair));
        let (key, value) = match differs.next() {
            Some((key, value)) => (key.as_str(), value.as_str()),
            None if self.device != actual.device => ("device", actual.device.as_str()),
            None => return Ok(()),
        };
        let other = self.metadata.iter().find(|(name, _)| name == key).map_or(self.device.as_str(), |(_, value)| value);
        Err(Error::usage(
            format!("{host} has {key} {value:?} and another worker has {other:?}"),
            "start all workers with the same settings and the same kind of device",
        ))
    }
}

/// Columns that are computed, as an Arrow IPC stream.
///
/// # Errors
/// [`elmo::Error`] if they cannot be encoded.
pub(super) fn columns_to_bytes(embedded: EmbeddedColumns) -> Result<(ColumnStats, Vec<u8>)> {
    let EmbeddedColumns { vectors, truncated, error, row_errors, tokens, stats, .. } = embedded;
    let mut labels = vec![None; vectors.len()];
    row_errors.iter().for_each(|(row, error)| labels[*row] = Some(error.label()));
    let columns: [(&str, ArrayRef); 5] = [
        ("vectors", vectors),
        ("truncated", Arc::new(truncated)),
        ("error", Arc::new(error)),
        ("tokens", Arc::new(tokens)),
        ("label", Arc::new(StringArray::from(labels))),
    ];
    let field = |(name, column): &(&str, ArrayRef)| Field::new(*name, column.data_type().clone(), true);
    let schema = Arc::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()));
    let columns = columns.into_iter().map(|(_, column)| column).collect();
    let batch = RecordBatch::try_new(schema, columns).map_err(elmo::Error::from)?;
    Ok((stats, batch_to_bytes(&batch)?))
}

/// The columns of [`columns_to_bytes`].
///
/// # Errors
/// [`Error::Failed`] if the bytes are those of another version.
pub(super) fn columns_from_bytes(stats: ColumnStats, bytes: &[u8]) -> Result<EmbeddedColumns> {
    let batch = batch_from_bytes(bytes)?;
    let is_known = batch.num_columns() == 5
        && [DataType::Boolean, DataType::Utf8, DataType::UInt32, DataType::Utf8]
            .iter()
            .zip(&batch.columns()[1..])
            .all(|(expected, column)| column.data_type() == expected);
    if !is_known {
        return Err(invalid(&"it has other columns"));
    }
    let (error, labels) = (batch.column(2).as_string::<i32>(), batch.column(4).as_string::<i32>());
    let failed = (0..error.len()).filter(|row| error.is_valid(*row));
    Ok(EmbeddedColumns {
        vectors: Arc::clone(batch.column(0)),
        truncated: batch.column(1).as_boolean().clone(),
        error: error.clone(),
        row_errors: failed.map(|row| (row, RowError::reported(labels.value(row), error.value(row)))).collect(),
        tokens: batch.column(3).as_primitive().clone(),
        keep: None,
        stats,
        cost: Default::default(),
    })
}

/// A column of texts as an Arrow IPC stream.
///
/// # Errors
/// [`elmo::Error`] if it cannot be encoded.
pub(super) fn texts_to_bytes(texts: &ArrayRef) -> Result<Vec<u8>> {
    let schema = Arc::new(Schema::new(vec![Field::new("text", texts.data_type().clone(), true)]));
    batch_to_bytes(&RecordBatch::try_new(schema, vec![Arc::clone(texts)]).map_err(elmo::Error::from)?)
}

/// The column of [`texts_to_bytes`].
///
/// # Errors
/// [`Error::Failed`] if the bytes are those of another version.
pub(super) fn texts_from_bytes(bytes: &[u8]) -> Result<ArrayRef> {
    batch_from_bytes(bytes)?.columns().first().cloned().ok_or_else(|| invalid(&"it has no column"))
}

fn batch_to_bytes(batch: &RecordBatch) -> Result<Vec<u8>> {
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).map_err(elmo::Error::from)?;
    writer.write(batch).map_err(elmo::Error::from)?;
    Ok(writer.into_inner().map_err(elmo::Error::from)?)
}

fn batch_from_bytes(bytes: &[u8]) -> Result<RecordBatch> {
    let mut reader = StreamReader::try_new(bytes, None).map_err(|e| invalid(&e))?;
    reader.next().ok_or_else(|| invalid(&"it has no rows"))?.map_err(|e| invalid(&e))
}

fn invalid(reason: &dyn std::fmt::Display) -> Error {
    Error::Failed(format!("a message of another process is invalid: {reason}; run the same version of elmo everywhere"))
}

/// Applies the requested error mode to columns that were computed with [`OnError::Null`].
///
/// # Errors
/// [`elmo::Error::Row`] for the first row that failed, with [`OnError::Fail`].
pub(super) fn apply_on_error(mut columns: EmbeddedColumns, on_error: OnError) -> elmo::Result<EmbeddedColumns> {
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
