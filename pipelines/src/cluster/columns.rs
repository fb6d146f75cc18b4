//! What a bulk job asks of executors: the columns of [`elmo::ColumnEmbedder`], counts included, and what it says of its
//! outputs.

use std::{fmt, sync::Arc};

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, FixedSizeListArray, RecordBatch, StringArray, UInt64Array},
        datatypes::{DataType, Field, FieldRef, Schema, SchemaRef, UInt64Type},
    },
    common::{DataFusionError, Result, internal_err, tree_node::TreeNodeRecursion},
    execution::{SendableRecordBatchStream, TaskContext},
    physical_expr::{EquivalenceProperties, Partitioning, PhysicalExpr},
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

/// Batches under way at once in a task.
const AHEAD: usize = 4;
/// Numbers in [`ColumnStats`].
const COUNTS: usize = 7;

/// A model and settings, and what executors said of them.
#[derive(Debug, Clone)]
pub(super) struct Work {
    pub(super) model: SentModel,
    pub(super) spec: EmbedSpec,
    /// What outputs say of what made them, as [`Describe`] told: each executor compares.
    pub(super) expected: Vec<(String, String)>,
}

impl Work {
    /// An embedder of this process.
    async fn embedder(&self, host: Arc<dyn ModelHost>) -> Result<ColumnEmbedder> {
        let work = self.clone();
        let opened = tokio::task::spawn_blocking(move || {
            let elmo = work.model.open(host.as_ref()).map_err(|e| model_failed(e.to_string()))?;
            let embedder = ColumnEmbedder::new(&elmo, work.spec.clone()).map_err(external)?;
            match work.expected.is_empty() || work.expected == described(&embedder) {
                true => Ok(embedder),
                false => Err(other(&work.expected, &described(&embedder), &host.name())),
            }
        });
        opened.await.unwrap_or_else(|e| Err(model_failed(format!("the model was not opened: {e}"))))
    }

    fn layout(&self) -> Result<ColumnLayout> {
        let card = &self.model.card;
        ColumnLayout::new(&card.options, &card.fingerprint, &self.spec).map_err(external)
    }
}

/// Why executors must not work on one output together.
fn other(expected: &[(String, String)], here: &[(String, String)], host: &str) -> DataFusionError {
    let differs = here.iter().find(|pair| !expected.contains(pair));
    let (key, value) = differs.cloned().unwrap_or_default();
    let theirs = expected.iter().find(|(there, _)| *there == key).map_or("", |(_, value)| value);
    model_failed(format!("{host} has {key} {value:?}, and another executor {theirs:?}: start all of them alike"))
}

fn model_failed(reason: String) -> DataFusionError {
    DataFusionError::External(Box::new(ModelFailed(reason)))
}

fn external(error: elmo::Error) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}

/// What an output says of what made it, and the kind of device that did.
fn described(embedder: &ColumnEmbedder) -> Vec<(String, String)> {
    let mut pairs = embedder.metadata();
    pairs.push((DEVICE.to_owned(), embedder.device_kind().to_owned()));
    pairs
}

/// Pairs of [`Describe`] that are not for outputs.
pub(super) const DEVICE: &str = "device";
pub(super) const TOKENS_AT_ONCE: &str = "tokens at once";

/// Where an operator runs: nowhere, in the process that only sends it.
#[derive(Clone)]
pub(super) struct Place(pub(super) Arc<dyn ModelHost>);

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.name())
    }
}

/// One row per pair that an executor says of a model and settings.
#[derive(Debug)]
pub(super) struct Describe {
    pub(super) work: Work,
    place: Place,
    properties: Arc<PlanProperties>,
}

impl Describe {
    pub(super) fn new(work: Work, place: Place) -> Self {
        let field = |name| Field::new(name, DataType::Utf8, false);
        let schema = Arc::new(Schema::new(vec![field("key"), field("value")]));
        Self { work, place, properties: properties(schema, Partitioning::UnknownPartitioning(1)) }
    }
}

/// Embeds the only column of its input.
#[derive(Debug)]
pub(super) struct Columns {
    pub(super) work: Work,
    input: Arc<dyn ExecutionPlan>,
    place: Place,
    properties: Arc<PlanProperties>,
}

impl Columns {
    pub(super) fn try_new(work: Work, input: Arc<dyn ExecutionPlan>, place: Place) -> Result<Self> {
        let mut fields: Vec<FieldRef> = work.layout()?.fields().into_iter().map(Arc::new).collect();
        fields.push(Arc::new(Field::new("tokens_read", DataType::UInt32, false)));
        fields.push(Arc::new(Field::new("counts", counts_type(), false)));
        fields.push(Arc::new(Field::new("error_label", DataType::Utf8, true)));
        let schema = Arc::new(Schema::new(fields));
        let properties = properties(schema, input.output_partitioning().clone());
        Ok(Self { work, input, place, properties })
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

/// The columns of a batch. Its counts stand in its first row, so that what is cut and put together anew adds up.
fn to_batch(schema: SchemaRef, done: EmbeddedColumns) -> Result<RecordBatch> {
    let rows = done.vectors.len();
    let mut counts = vec![0; COUNTS * rows];
    let ColumnStats { rows: _, nulls, empty, sentences, tokens, truncated, errors } = done.stats;
    let all = [done.stats.rows, nulls, empty, sentences, tokens, truncated, errors];
    counts.iter_mut().zip(all).for_each(|(count, number)| *count = number as u64);
    let counts = Arc::new(UInt64Array::from(counts));
    let counts = FixedSizeListArray::try_new(counts_item(), COUNTS as i32, counts, None)?;
    let mut labels = vec![None; rows];
    done.row_errors.iter().for_each(|(row, error)| labels[*row] = Some(error.label()));
    let columns: Vec<ArrayRef> = vec![
        done.vectors,
        Arc::new(done.truncated),
        Arc::new(done.error),
        Arc::new(done.tokens),
        Arc::new(counts),
        Arc::new(StringArray::from(labels)),
    ];
    Ok(RecordBatch::try_new(schema, columns)?)
}

/// What [`Columns`] made of a column.
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

impl DisplayAs for Describe {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DescribeExec: {}", self.work.model.name)
    }
}

impl ExecutionPlan for Describe {
    fn name(&self) -> &'static str {
        "DescribeExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, _: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn execute(&self, _: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (work, host, schema) = (self.work.clone(), Arc::clone(&self.place.0), self.schema());
        let there = Arc::clone(&schema);
        let rows = async move {
            let embedder = work.embedder(host).await?;
            let mut pairs = described(&embedder);
            pairs.push((TOKENS_AT_ONCE.to_owned(), embedder.tokens_at_once().to_string()));
            let (keys, values): (Vec<String>, Vec<String>) = pairs.into_iter().unzip();
            let columns: Vec<ArrayRef> = vec![Arc::new(StringArray::from(keys)), Arc::new(StringArray::from(values))];
            Ok(RecordBatch::try_new(there, columns)?)
        };
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, futures::stream::once(rows))))
    }
}

impl DisplayAs for Columns {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ColumnsExec: {}", self.work.model.name)
    }
}

impl ExecutionPlan for Columns {
    fn name(&self) -> &'static str {
        "ColumnsExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Ok([input]) = <[_; 1]>::try_from(children) else { return internal_err!("ColumnsExec has one input") };
        Ok(Arc::new(Self::try_new(self.work.clone(), input, self.place.clone())?))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let input = self.input.execute(partition, context)?;
        let (work, host, schema) = (self.work.clone(), Arc::clone(&self.place.0), self.schema());
        let there = Arc::clone(&schema);
        let batches = async move {
            let embedder = work.embedder(host).await?;
            let embed = move |batch: Result<RecordBatch>| {
                let (embedder, schema) = (embedder.clone(), Arc::clone(&there));
                async move {
                    let pending = embedder.submit_async(batch?.column(0)).await.map_err(external)?;
                    to_batch(schema, pending.await.map_err(external)?)
                }
            };
            Ok::<_, DataFusionError>(input.map(embed).buffered(AHEAD))
        };
        let batches = futures::stream::once(batches).try_flatten();
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
    }
}
