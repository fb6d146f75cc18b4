//! The physical operator: adds one column per embedding call, and embeds chunks of rows while it reads the next ones.

mod call;
mod chunk;
mod concat;
mod memory;
mod metrics;
mod size;
mod stream;
mod worker;

use std::{collections::HashSet, fmt, sync::Arc};

use datafusion::{
    arrow::datatypes::{Schema, SchemaRef},
    common::{ColumnStatistics, Result, Statistics, internal_err, stats::Precision, tree_node::TreeNodeRecursion},
    config::ConfigOptions,
    execution::{SendableRecordBatchStream, TaskContext, memory_pool::MemoryConsumer},
    physical_expr::{EquivalenceProperties, PhysicalExpr},
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
        execution_plan::CardinalityEffect,
        filter_pushdown::{ChildPushdownResult, FilterDescription, FilterPushdownPhase, FilterPushdownPropagation},
        metrics::MetricsSet,
        statistics::{ChildStats, StatisticsArgs},
        stream::RecordBatchStreamAdapter,
    },
};
use elmo::{EmbedSpec, spec::Level};

pub(crate) use self::call::BoundCall;
use self::{
    memory::PartitionMemory,
    metrics::{EmbedMetrics, OperatorMetrics},
    size::{ChunkLimits, chunk_text_bytes},
    stream::EmbedStream,
    worker::ChunkWorker,
};
use super::config::ElmoConfig;
use crate::memory::at_most;

/// The name of the operator in physical plans.
pub const EXEC_NAME: &str = "EmbedExec";

/// The cache of vectors takes at most this part of a memory limit. Operators that spill do so earlier for what it takes.
const CACHE_PART: usize = 8;

/// Adds one column per call to the columns of its input. Preserves the order of rows.
#[derive(Debug, Clone)]
pub struct EmbedExec {
    input: Arc<dyn ExecutionPlan>,
    calls: Arc<Vec<BoundCall>>,
    stops_early: bool,
    properties: Arc<PlanProperties>,
    metrics: OperatorMetrics,
}

impl EmbedExec {
    /// Maximum bytes of text per chunk, given the size of the token vectors. `None` when no call returns token vectors.
    pub fn bounded_text(&self) -> Option<usize> {
        let per_token = self.calls.iter().filter(|call| call.call.options.spec.level == Level::Token);
        per_token.map(|call| chunk_text_bytes(call, ChunkLimits::default().vector_bytes)).min()
    }

    /// The calls whose columns the operator adds.
    #[cfg(feature = "codec")]
    pub(crate) fn calls(&self) -> &[BoundCall] {
        &self.calls
    }

    /// Whether an operator above may stop before the last row. If so, rows are not embedded ahead of demand.
    #[cfg(feature = "codec")]
    pub(crate) fn stops_early(&self) -> bool {
        self.stops_early
    }

    pub(crate) fn try_new(input: Arc<dyn ExecutionPlan>, calls: Vec<BoundCall>, stops_early: bool) -> Result<Self> {
        let input_schema = input.schema();
        let fields = input_schema.fields().iter().chain(calls.iter().map(|call| &call.field)).map(Arc::clone);
        let schema = Schema::new_with_metadata(fields.collect::<Vec<_>>(), input_schema.metadata().clone());
        let properties = Arc::new(properties(&input, Arc::new(schema))?);
        let (calls, metrics) = (Arc::new(calls), OperatorMetrics::default());
        Ok(Self { input, calls, stops_early, properties, metrics })
    }
}

/// The properties of the input: the added columns change neither order nor partitioning.
fn properties(input: &Arc<dyn ExecutionPlan>, schema: SchemaRef) -> Result<PlanProperties> {
    let of_input = input.equivalence_properties();
    let mut equivalence = EquivalenceProperties::new_with_orderings(schema, of_input.oeq_class().iter().cloned());
    equivalence.add_equivalence_group(of_input.eq_group().clone())?;
    let (partitions, emission) = (input.output_partitioning().clone(), input.pipeline_behavior());
    Ok(PlanProperties::new(equivalence, partitions, emission, input.boundedness()))
}

/// What a model may record, unless it is what models without a record have.
fn recorded(call: &BoundCall) -> String {
    let (spec, default) = (&call.call.options.spec, EmbedSpec::default());
    match (spec.tokenizer, spec.sentences, spec.state) == (default.tokenizer, default.sentences, default.state) {
        true => String::new(),
        false => format!(" [tokenizer={}, sentences={}, state={}]", spec.tokenizer, spec.sentences, spec.state),
    }
}

impl DisplayAs for EmbedExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calls: Vec<String> = self
            .calls
            .iter()
            .map(|call| format!("{}{} as {}", call.display, recorded(call), call.field.name()))
            .collect();
        write!(f, "EmbedExec: {}", calls.join(", "))?;
        if self.stops_early { f.write_str(", stops early") } else { Ok(()) }
    }
}

impl ExecutionPlan for EmbedExec {
    fn name(&self) -> &'static str {
        EXEC_NAME
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    /// One partition keeps all devices busy, so repartitioning the input has no benefit.
    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        for call in self.calls.iter() {
            if f(&call.text)? == TreeNodeRecursion::Stop {
                return Ok(TreeNodeRecursion::Stop);
            }
        }
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Ok([input]) = <[_; 1]>::try_from(children) else { return internal_err!("EmbedExec has one input") };
        Ok(Arc::new(Self::try_new(input, self.calls.to_vec(), self.stops_early)?))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let pool = context.memory_pool();
        let cache_mb = ElmoConfig::from_options(context.session_config().options()).cache_mb;
        let worker = ChunkWorker {
            calls: Arc::clone(&self.calls),
            cache_bytes: at_most(cache_mb.saturating_mul(1 << 20), CACHE_PART, pool.as_ref()),
            cache_memory: Arc::new(MemoryConsumer::new("cache of vectors").register(pool)),
            metrics: EmbedMetrics::new(&self.metrics, partition),
            partition,
        };
        let caches = self.calls.iter().map(|call| Arc::clone(&call.models.caches().vectors)).collect();
        let memory = PartitionMemory::new(partition, pool, caches);
        let input = self.input.execute(partition, Arc::clone(&context))?;
        let stream = EmbedStream::new(input, self.schema(), worker, self.stops_early, &context, memory);
        let batches = futures::stream::try_unfold(stream, |mut stream| async move {
            Ok(stream.next().await?.map(|batch| (batch, stream)))
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), batches)))
    }

    fn child_stats_requests(&self, partition: Option<usize>) -> Vec<ChildStats> {
        vec![ChildStats::At(partition)]
    }

    /// The number of rows is that of the input.
    fn statistics_from_inputs(&self, inputs: &[Arc<Statistics>], _: &StatisticsArgs) -> Result<Arc<Statistics>> {
        let mut statistics = inputs
            .first()
            .map_or_else(|| Statistics::new_unknown(&self.input.schema()), |input| input.as_ref().clone());
        statistics.column_statistics.resize(self.schema().fields().len(), ColumnStatistics::new_unknown());
        statistics.total_byte_size = Precision::Absent;
        Ok(Arc::new(statistics))
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        CardinalityEffect::Equal
    }

    /// Passes filters on to the input, including the dynamic filters of joins and sorts above: fewer rows are embedded.
    fn gather_filters_for_pushdown(
        &self,
        _: FilterPushdownPhase,
        parent_filters: Vec<Arc<dyn PhysicalExpr>>,
        _: &ConfigOptions,
    ) -> Result<FilterDescription> {
        // DataFusion finds the columns of the input by name, so names must be unique.
        let schema = self.input.schema();
        let names: HashSet<&String> = schema.fields().iter().map(|field| field.name()).collect();
        match names.len() == schema.fields().len() {
            true => FilterDescription::from_children(parent_filters, &self.children()),
            false => Ok(FilterDescription::all_unsupported(&parent_filters, &self.children())),
        }
    }

    fn handle_child_pushdown_result(
        &self,
        _: FilterPushdownPhase,
        child_pushdown_result: ChildPushdownResult,
        _: &ConfigOptions,
    ) -> Result<FilterPushdownPropagation<Arc<dyn ExecutionPlan>>> {
        Ok(FilterPushdownPropagation::if_all(child_pushdown_result))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.snapshot())
    }

    fn supports_limit_pushdown(&self) -> bool {
        true
    }
}
