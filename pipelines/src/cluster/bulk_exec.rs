//! The operators of a bulk job on a cluster: [`ColumnsExec`] runs a [`ColumnEmbedder`] over a column of texts, and
//! [`DescribeExec`] returns the metadata of its output.

use std::{fmt, sync::Arc};

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, FixedSizeListArray, RecordBatch, StringArray, UInt64Array},
        datatypes::{DataType, Field, FieldRef, Schema, SchemaRef, UInt64Type},
    },
    common::{DataFusionError, Result, internal_err},
    execution::{SendableRecordBatchStream, TaskContext},
    physical_expr::{EquivalenceProperties, Partitioning},
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
        execution_plan::{Boundedness, EmissionType},
        stream::RecordBatchStreamAdapter,
    },
};
use elmo::{ColumnEmbedder, ColumnLayout, ColumnStats, EmbedSpec, EmbeddedColumns, RowError};
use elmo_udfs::{
    ModelFailed,
    codec::{ModelHost, SentModel},
};
use futures::{StreamExt, TryStreamExt};

use crate::operator::operator;

/// Batches embedded concurrently in a task.
const CONCURRENT_BATCHES: usize = 4;
/// Number of fields in [`ColumnStats`].
const COUNTS: usize = 7;

/// The model and the settings of a job.
#[derive(Debug, Clone)]
pub(super) struct EmbedTask {
    pub(super) model: SentModel,
    pub(super) spec: EmbedSpec,
    /// The pairs that [`DescribeExec`] returned. Every executor compares them with its own. Empty in `DescribeExec`.
    pub(super) expected: Vec<(String, String)>,
}

impl EmbedTask {
    /// Opens the model in this process.
    ///
    /// # Errors
    /// If the model cannot be opened, or if the metadata of its output differs from `expected`.
    async fn embedder(&self, host: Arc<dyn ModelHost>) -> Result<ColumnEmbedder> {
        let task = self.clone();
        let opened = tokio::task::spawn_blocking(move || {
            let elmo = task.model.open(host.as_ref()).map_err(|e| model_error(e.to_string()))?;
            let embedder = ColumnEmbedder::new(&elmo, task.spec.clone()).map_err(external)?;
            match task.expected.is_empty() || task.expected == metadata(&embedder) {
                true => Ok(embedder),
                false => Err(metadata_mismatch(&task.expected, &metadata(&embedder), &host.name())),
            }
        });
        opened.await.unwrap_or_else(|e| Err(model_error(format!("opening the model failed: {e}"))))
    }

    fn layout(&self) -> Result<ColumnLayout> {
        let card = &self.model.card;
        ColumnLayout::new(&card.options, &card.fingerprint, &self.spec).map_err(external)
    }
}

/// Two executors that would write different metadata or vectors to one output.
fn metadata_mismatch(expected: &[(String, String)], actual: &[(String, String)], host: &str) -> DataFusionError {
    let differs = actual.iter().find(|pair| !expected.contains(pair));
    let (key, value) = differs.cloned().unwrap_or_default();
    let other = expected.iter().find(|(other, _)| *other == key).map_or("", |(_, value)| value);
    model_error(format!(
        "{host} has {key} {value:?} and another executor has {other:?}; start all executors with the same settings"
    ))
}

fn model_error(reason: String) -> DataFusionError {
    DataFusionError::External(Box::new(ModelFailed(reason)))
}

fn external(error: elmo::Error) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}

/// The metadata of outputs, and the kind of device.
fn metadata(embedder: &ColumnEmbedder) -> Vec<(String, String)> {
    let mut pairs = embedder.metadata();
    pairs.push((DEVICE.to_owned(), embedder.device_kind().to_owned()));
    pairs
}

/// Keys of [`DescribeExec`] that are not metadata of outputs.
pub(super) const DEVICE: &str = "device";
pub(super) const TOKENS_AT_ONCE: &str = "tokens at once";

/// The models of the process that an operator is in. [`ModelHost`] with [`fmt::Debug`] as its name.
#[derive(Clone)]
pub(super) struct Host(pub(super) Arc<dyn ModelHost>);

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.name())
    }
}

/// Returns the metadata of the output of a task, one `(key, value)` pair per row.
#[derive(Debug)]
pub(super) struct DescribeExec {
    pub(super) task: EmbedTask,
    host: Host,
    properties: Arc<PlanProperties>,
}

impl DescribeExec {
    pub(super) fn new(task: EmbedTask, host: Host) -> Self {
        let field = |name| Field::new(name, DataType::Utf8, false);
        let schema = Arc::new(Schema::new(vec![field("key"), field("value")]));
        Self { task, host, properties: properties(schema, Partitioning::UnknownPartitioning(1)) }
    }
}

/// Embeds the first column of its input. Returns the columns of [`EmbeddedColumns`] and its counts.
#[derive(Debug)]
pub(super) struct ColumnsExec {
    pub(super) task: EmbedTask,
    input: Arc<dyn ExecutionPlan>,
    host: Host,
    properties: Arc<PlanProperties>,
}

impl ColumnsExec {
    pub(super) fn try_new(task: EmbedTask, input: Arc<dyn ExecutionPlan>, host: Host) -> Result<Self> {
        let mut fields: Vec<FieldRef> = task.layout()?.fields().into_iter().map(Arc::new).collect();
        fields.push(Arc::new(Field::new("tokens_read", DataType::UInt32, false)));
        fields.push(Arc::new(Field::new("counts", counts_type(), false)));
        fields.push(Arc::new(Field::new("error_label", DataType::Utf8, true)));
        let schema = Arc::new(Schema::new(fields));
        let properties = properties(schema, input.output_partitioning().clone());
        Ok(Self { task, input, host, properties })
    }
}

fn counts_type() -> DataType {
    DataType::FixedSizeList(counts_item(), COUNTS as i32)
}

fn counts_item() -> FieldRef {
    Arc::new(Field::new_list_field(DataType::UInt64, false))
}

fn properties(schema: SchemaRef, partitions: Partitioning) -> Arc<PlanProperties> {
    let equivalence = EquivalenceProperties::new(schema);
    Arc::new(PlanProperties::new(equivalence, partitions, EmissionType::Incremental, Boundedness::Bounded))
}

/// Encodes embedded columns as a batch. The counts are in the first row and zero in all others, so that slicing and
/// concatenating batches keeps their sum.
fn to_batch(schema: SchemaRef, embedded: EmbeddedColumns) -> Result<RecordBatch> {
    let rows = embedded.vectors.len();
    let mut counts = vec![0; COUNTS * rows];
    let ColumnStats { rows: _, nulls, empty, sentences, tokens, truncated, errors } = embedded.stats;
    let all = [embedded.stats.rows, nulls, empty, sentences, tokens, truncated, errors];
    counts.iter_mut().zip(all).for_each(|(count, number)| *count = number as u64);
    let counts = Arc::new(UInt64Array::from(counts));
    let counts = FixedSizeListArray::try_new(counts_item(), COUNTS as i32, counts, None)?;
    let EmbeddedColumns { vectors, truncated, error, row_errors, tokens, .. } = embedded;
    let mut labels = vec![None; rows];
    row_errors.iter().for_each(|(row, error)| labels[*row] = Some(error.label()));
    let columns: Vec<ArrayRef> = vec![
        vectors,
        Arc::new(truncated),
        Arc::new(error),
        Arc::new(tokens),
        Arc::new(counts),
        Arc::new(StringArray::from(labels)),
    ];
    Ok(RecordBatch::try_new(schema, columns)?)
}

/// Decodes a result of [`ColumnsExec`].
pub(super) fn from_batch(batch: &RecordBatch) -> EmbeddedColumns {
    let counts = batch.column(4).as_fixed_size_list().values().as_primitive::<UInt64Type>();
    let sum = |at: usize| counts.values().iter().skip(at).step_by(COUNTS).sum::<u64>() as usize;
    let error = batch.column(2).as_string::<i32>();
    let labels = batch.column(5).as_string::<i32>();
    let failed = (0..error.len()).filter(|row| error.is_valid(*row));
    EmbeddedColumns {
        vectors: Arc::clone(batch.column(0)),
        truncated: batch.column(1).as_boolean().clone(),
        error: error.clone(),
        row_errors: failed.map(|row| (row, RowError::reported(labels.value(row), error.value(row)))).collect(),
        tokens: batch.column(3).as_primitive().clone(),
        keep: None,
        stats: ColumnStats {
            rows: sum(0),
            nulls: sum(1),
            empty: sum(2),
            sentences: sum(3),
            tokens: sum(4),
            truncated: sum(5),
            errors: sum(6),
        },
        cost: Default::default(),
    }
}

impl DisplayAs for DescribeExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DescribeExec: {}", self.task.model.name)
    }
}

impl ExecutionPlan for DescribeExec {
    operator!("DescribeExec", inputs: []);

    fn with_new_children(self: Arc<Self>, _: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn execute(&self, _: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (task, host, schema) = (self.task.clone(), Arc::clone(&self.host.0), self.schema());
        let batch_schema = Arc::clone(&schema);
        let rows = async move {
            let embedder = task.embedder(host).await?;
            let mut pairs = metadata(&embedder);
            pairs.push((TOKENS_AT_ONCE.to_owned(), embedder.tokens_at_once().to_string()));
            let (keys, values): (Vec<String>, Vec<String>) = pairs.into_iter().unzip();
            let columns: Vec<ArrayRef> = vec![Arc::new(StringArray::from(keys)), Arc::new(StringArray::from(values))];
            Ok(RecordBatch::try_new(batch_schema, columns)?)
        };
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, futures::stream::once(rows))))
    }
}

impl DisplayAs for ColumnsExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ColumnsExec: {}", self.task.model.name)
    }
}

impl ExecutionPlan for ColumnsExec {
    operator!("ColumnsExec", inputs: [input]);

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Ok([input]) = <[_; 1]>::try_from(children) else { return internal_err!("ColumnsExec has one input") };
        Ok(Arc::new(Self::try_new(self.task.clone(), input, self.host.clone())?))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let input = self.input.execute(partition, context)?;
        let (task, host, schema) = (self.task.clone(), Arc::clone(&self.host.0), self.schema());
        let batch_schema = Arc::clone(&schema);
        let batches = async move {
            let embedder = task.embedder(host).await?;
            let embed = move |batch: Result<RecordBatch>| {
                let (embedder, schema) = (embedder.clone(), Arc::clone(&batch_schema));
                async move {
                    let pending = embedder.submit_async(batch?.column(0)).await.map_err(external)?;
                    to_batch(schema, pending.await.map_err(external)?)
                }
            };
            Ok::<_, DataFusionError>(input.map(embed).buffered(CONCURRENT_BATCHES))
        };
        let batches = futures::stream::once(batches).try_flatten();
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
    }
}
