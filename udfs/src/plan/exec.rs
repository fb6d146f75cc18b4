//! `EmbedExec`: embeds windows of rows while the next ones are read.
//!
//! ```text
//! input -> window of rows -> texts, equal ones once -> engine, shared by all partitions and queries -> columns, in pieces
//! ```
//!
//! A window is a task of its own, so that it goes on while nobody asks for rows; dropping the stream ends it, and the
//! engine skips what still waits.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::Arc,
};

use datafusion::{
    arrow::{
        array::{
            Array, ArrayRef, AsArray, BooleanArray, FixedSizeListArray, Float32Array, RecordBatch, StructArray,
            UInt32Array, UInt64Array, new_empty_array, new_null_array,
        },
        buffer::NullBuffer,
        compute::{interleave, take},
        datatypes::{DataType, FieldRef, Schema, SchemaRef},
    },
    common::{
        ColumnStatistics, DataFusionError, Result, Statistics, exec_datafusion_err, internal_err,
        resources_datafusion_err, runtime::SpawnedTask, stats::Precision, tree_node::TreeNodeRecursion,
    },
    config::ConfigOptions,
    execution::{
        SendableRecordBatchStream, TaskContext,
        memory_pool::{MemoryConsumer, MemoryReservation},
    },
    physical_expr::{EquivalenceProperties, PhysicalExpr},
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
        execution_plan::CardinalityEffect,
        filter_pushdown::{ChildPushdownResult, FilterDescription, FilterPushdownPhase, FilterPushdownPropagation},
        metrics::{
            BaselineMetrics, Count, ExecutionPlanMetricsSet, MetricBuilder, MetricsSet, RatioMetrics, RecordOutput,
            Time,
        },
        statistics::{ChildStats, StatisticsArgs},
        stream::RecordBatchStreamAdapter,
    },
};
use elmo::{ColumnEmbedder, EmbeddedColumns, RowError, spec::Level};
use futures::{FutureExt, StreamExt, future::try_join_all};

use super::{
    config::ElmoConfig,
    memo::{Flight, Lookup, Memo},
    parts::{join, join_rows},
};
use crate::{Models, text_function::Call};

/// Windows under way at once, where nobody above stops early.
const WINDOWS: usize = 4;
/// Bytes of text of a window: devices are busy with it for some batches.
const WINDOW_TEXT_BYTES: usize = 256 << 10;
/// Bytes of token vectors of a window.
const WINDOW_VECTOR_BYTES: usize = 48 << 20;
/// Fewest rows of a window.
const WINDOW_ROWS: usize = 64;
/// Bytes of a batch that is handed on.
const BATCH_BYTES: usize = 32 << 20;
/// Bytes of English text per token, with the space.
const BYTES_PER_TOKEN: usize = 5;

/// A call, bound to the columns of an input.
#[derive(Debug, Clone)]
pub(crate) struct BoundCall {
    pub(crate) models: Models,
    pub(crate) call: Call,
    /// Name of the function and its options, for people and for the codec.
    pub(crate) shown: String,
    pub(crate) text: Arc<dyn PhysicalExpr>,
    pub(crate) field: FieldRef,
}

/// Adds the columns of some calls to its input's. Rows keep their order.
#[derive(Debug, Clone)]
pub struct EmbedExec {
    input: Arc<dyn ExecutionPlan>,
    calls: Arc<Vec<BoundCall>>,
    stops_early: bool,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

impl EmbedExec {
    /// Bytes of text that have no more vectors than a window may hold; `None` where a text has but one.
    pub fn bounded_text(&self) -> Option<usize> {
        let per_token = self.calls.iter().filter(|call| call.call.options.spec.level == Level::Token);
        per_token.map(BoundCall::window_bytes).min()
    }

    /// The calls, and whether somebody above may stop before the last row.
    #[cfg(feature = "codec")]
    pub(crate) fn parts(&self) -> (&[BoundCall], bool) {
        (&self.calls, self.stops_early)
    }

    pub(crate) fn try_new(input: Arc<dyn ExecutionPlan>, calls: Vec<BoundCall>, stops_early: bool) -> Result<Self> {
        let there = input.schema();
        let fields = there.fields().iter().chain(calls.iter().map(|call| &call.field)).map(Arc::clone);
        let schema = Schema::new_with_metadata(fields.collect::<Vec<_>>(), there.metadata().clone());
        let properties = Arc::new(properties(&input, Arc::new(schema))?);
        let metrics = ExecutionPlanMetricsSet::new();
        Ok(Self { input, calls: Arc::new(calls), stops_early, properties, metrics })
    }
}

/// Those of the input: the columns that are added change neither order nor partitions.
fn properties(input: &Arc<dyn ExecutionPlan>, schema: SchemaRef) -> Result<PlanProperties> {
    let known = input.equivalence_properties();
    let mut equivalence = EquivalenceProperties::new_with_orderings(schema, known.oeq_class().iter().cloned());
    equivalence.add_equivalence_group(known.eq_group().clone())?;
    let (partitions, emission) = (input.output_partitioning().clone(), input.pipeline_behavior());
    Ok(PlanProperties::new(equivalence, partitions, emission, input.boundedness()))
}

impl DisplayAs for EmbedExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calls: Vec<String> =
            self.calls.iter().map(|call| format!("{} as {}", call.shown, call.field.name())).collect();
        write!(f, "EmbedExec: {}", calls.join(", "))?;
        if self.stops_early { f.write_str(", stops early") } else { Ok(()) }
    }
}

impl ExecutionPlan for EmbedExec {
    fn name(&self) -> &'static str {
        super::EXEC_NAME
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    /// One partition keeps all devices busy.
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
        let run = Run::new(self, partition, &context)?;
        let rows =
            futures::stream::try_unfold(run, |mut run| async move { Ok(run.next().await?.map(|batch| (batch, run))) });
        Ok(Box::pin(RecordBatchStreamAdapter::new(Arc::clone(self.properties.eq_properties.schema()), rows)))
    }

    fn child_stats_requests(&self, partition: Option<usize>) -> Vec<ChildStats> {
        vec![ChildStats::At(partition)]
    }

    /// As many rows as the input has.
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

    /// What a join or a sort above learns while it runs is of use below: fewer rows to embed.
    fn gather_filters_for_pushdown(
        &self,
        _: FilterPushdownPhase,
        parent_filters: Vec<Arc<dyn PhysicalExpr>>,
        _: &ConfigOptions,
    ) -> Result<FilterDescription> {
        // The input's columns are looked up by their names.
        let schema = self.input.schema();
        let names: std::collections::HashSet<&String> = schema.fields().iter().map(|field| field.name()).collect();
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
        Some(self.metrics.clone_inner())
    }

    fn supports_limit_pushdown(&self) -> bool {
        true
    }
}

/// What EXPLAIN ANALYZE shows.
#[derive(Debug, Clone)]
struct Counters {
    baseline: BaselineMetrics,
    rows_embedded: Count,
    tokens: Count,
    cache_hits: Count,
    dedup_hits: Count,
    padding: RatioMetrics,
    queue_time: Time,
    device_time: Time,
}

impl Counters {
    fn new(metrics: &ExecutionPlanMetricsSet, partition: usize) -> Self {
        let count = |name: &'static str| MetricBuilder::new(metrics).counter(name, partition);
        Self {
            baseline: BaselineMetrics::new(metrics, partition),
            rows_embedded: count("rows_embedded"),
            tokens: count("tokens"),
            cache_hits: count("cache_hits"),
            dedup_hits: count("dedup_hits"),
            padding: MetricBuilder::new(metrics).ratio_metrics("padding_ratio", partition),
            queue_time: MetricBuilder::new(metrics).subset_time("queue_time", partition),
            device_time: MetricBuilder::new(metrics).subset_time("device_time", partition),
        }
    }

    fn add(&self, done: &EmbeddedColumns) {
        let (stats, cost) = (&done.stats, &done.cost);
        self.rows_embedded.add(stats.rows - stats.nulls - stats.empty);
        self.tokens.add(stats.tokens);
        // Shares of batches: whole numbers only in sum.
        let whole = |number: f64| number.round().max(0.0) as usize;
        self.padding.add_part(whole(cost.padded_tokens - cost.tokens));
        self.padding.add_total(whole(cost.padded_tokens));
        self.queue_time.add_duration(std::time::Duration::from_secs_f64(cost.queue_seconds.max(0.0)));
        self.device_time.add_duration(std::time::Duration::from_secs_f64(cost.device_seconds.max(0.0)));
    }
}

/// One partition at work.
struct Run {
    input: SendableRecordBatchStream,
    schema: SchemaRef,
    work: Work,
    /// Under way, the oldest first.
    windows: VecDeque<Window>,
    /// Rows of the window that is not full yet.
    open: Vec<(RecordBatch, Vec<ArrayRef>)>,
    /// What is being handed on.
    ready: Option<Ready>,
    /// The input has ended.
    ended: bool,
    /// There is no memory for another window until one is handed on.
    waits: bool,
    depth: usize,
    batch_rows: usize,
    window_rows: usize,
    /// Rows that were read, for messages.
    read: usize,
    reservation: MemoryReservation,
}

/// What a window needs besides its rows.
#[derive(Clone)]
struct Work {
    calls: Arc<Vec<BoundCall>>,
    cache_bytes: usize,
    counters: Counters,
    partition: usize,
}

struct Window {
    rows: Vec<RecordBatch>,
    task: SpawnedTask<Result<Vec<Pieces>>>,
    reserved: usize,
}

/// Values of a column, by row: an array, and a row in it.
struct Pieces {
    arrays: Vec<ArrayRef>,
    places: Vec<(usize, usize)>,
}

struct Ready {
    /// Rows that are left.
    rows: VecDeque<RecordBatch>,
    columns: Vec<Pieces>,
    /// Rows that were handed on.
    done: usize,
    batch_rows: usize,
    reserved: usize,
}

impl Run {
    fn new(exec: &EmbedExec, partition: usize, context: &Arc<TaskContext>) -> Result<Self> {
        let config = context.session_config();
        let settings = ElmoConfig::of(config.options());
        let counters = Counters::new(&exec.metrics, partition);
        let reservation = MemoryConsumer::new(format!("EmbedExec[{partition}]")).register(context.memory_pool());
        Ok(Self {
            input: exec.input.execute(partition, Arc::clone(context))?,
            schema: exec.schema(),
            work: Work {
                calls: Arc::clone(&exec.calls),
                cache_bytes: settings.cache_mb.saturating_mul(1 << 20),
                counters,
                partition,
            },
            windows: VecDeque::new(),
            open: Vec::new(),
            ready: None,
            ended: false,
            waits: false,
            depth: if exec.stops_early { 1 } else { WINDOWS },
            batch_rows: config.batch_size(),
            window_rows: config.batch_size(),
            read: 0,
            reservation,
        })
    }

    /// The next rows; reads ahead while it waits for them.
    async fn next(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            if let Some(batch) = self.hand_on()? {
                return Ok(Some(batch.record_output(&self.work.counters.baseline)));
            }
            let full = self.ended || self.waits || self.windows.len() >= self.depth;
            let Self { windows, input, .. } = self;
            match (windows.front_mut(), full) {
                (None, true) if self.ended && self.open.is_empty() => return Ok(None),
                (None, true) => self.launch()?,
                (Some(window), true) => {
                    let columns = (&mut window.task).await;
                    self.land(columns)?;
                }
                (Some(window), false) => tokio::select! {
                    biased;
                    columns = &mut window.task => self.land(columns)?,
                    rows = input.next() => self.take(rows)?,
                },
                (None, false) => match input.next().now_or_never() {
                    Some(rows) => self.take(rows)?,
                    // Devices have nothing to do: what is there goes to them while the input makes us wait.
                    None if !self.open.is_empty() => self.launch()?,
                    None => {
                        let rows = input.next().await;
                        self.take(rows)?;
                    }
                },
            }
        }
    }

    /// Adds rows to the open window, and starts it when it is full or the last.
    fn take(&mut self, rows: Option<Result<RecordBatch>>) -> Result<()> {
        match rows.transpose()? {
            None => {
                self.ended = true;
                if self.open.is_empty() { Ok(()) } else { self.launch() }
            }
            Some(rows) if rows.num_rows() == 0 => Ok(()),
            Some(rows) => {
                let texts = self.texts(&rows)?;
                self.window_rows = window_rows(&self.work.calls, &texts, self.batch_rows);
                self.open.push((rows, texts));
                if self.open_rows() >= self.window_rows { self.launch() } else { Ok(()) }
            }
        }
    }

    fn texts(&self, rows: &RecordBatch) -> Result<Vec<ArrayRef>> {
        let _timer = self.work.counters.baseline.elapsed_compute().timer();
        let text = |call: &BoundCall| call.text.evaluate(rows)?.into_array(rows.num_rows());
        self.work.calls.iter().map(text).collect()
    }

    fn open_rows(&self) -> usize {
        self.open.iter().map(|(rows, _)| rows.num_rows()).sum()
    }

    /// Starts a window with the rows at hand; those beyond it stay for the next.
    fn launch(&mut self) -> Result<()> {
        while !self.open.is_empty() && self.windows.len() < self.depth {
            let rows = self.open_rows();
            let count = rows.min(self.window_rows.max(1));
            let needs = self.needs(count, rows);
            if self.reservation.try_grow(needs).is_err() {
                if self.windows.is_empty() && self.ready.is_none() {
                    return Err(no_memory(needs, self.reservation.size()));
                }
                self.waits = true;
                return Ok(());
            }
            self.waits = false;
            let (rows, texts) = self.cut(count)?;
            let (work, first) = (self.work.clone(), self.read);
            self.read += rows.iter().map(RecordBatch::num_rows).sum::<usize>();
            let task = SpawnedTask::spawn(async move { work.embed(texts, first).await });
            self.windows.push_back(Window { rows, task, reserved: needs });
            // A window that is not full waits for more rows, unless there are none.
            if self.open_rows() < self.window_rows && !self.ended {
                break;
            }
        }
        // What does not fit waits until a window is handed on.
        self.waits = !self.open.is_empty() && self.open_rows() >= self.window_rows;
        Ok(())
    }

    /// Bytes that a window of the first `count` of the open `rows` will take: its rows, its texts twice, its vectors.
    fn needs(&self, count: usize, rows: usize) -> usize {
        let share = |bytes: usize| bytes / rows.max(1) * count;
        let there = self.open.iter().map(|(batch, _)| rows_bytes(batch)).sum();
        let mut bytes = share(there);
        for (n, call) in self.work.calls.iter().enumerate() {
            let texts = share(self.open.iter().map(|(_, texts)| slice_bytes(&texts[n])).sum());
            bytes += 2 * texts + vector_bytes(call, count, texts);
        }
        bytes
    }

    /// Takes the first `count` of the open rows.
    fn cut(&mut self, count: usize) -> Result<(Vec<RecordBatch>, Vec<ArrayRef>)> {
        let (mut batches, mut texts, mut left) = (Vec::new(), vec![Vec::new(); self.work.calls.len()], count);
        while left > 0 && !self.open.is_empty() {
            let (batch, columns) = self.open.remove(0);
            let n = left.min(batch.num_rows());
            if n < batch.num_rows() {
                let (from, rest) = (n, batch.num_rows() - n);
                let rest_texts = columns.iter().map(|text| text.slice(from, rest)).collect();
                self.open.insert(0, (batch.slice(from, rest), rest_texts));
            }
            batches.push(batch.slice(0, n));
            columns.iter().zip(&mut texts).for_each(|(text, all)| all.push(text.slice(0, n)));
            left -= n;
        }
        let texts = texts.iter().map(|parts| join(parts)).collect::<Result<_>>()?;
        Ok((join_rows(&self.input.schema(), batches)?, texts))
    }

    /// The oldest window has its vectors.
    fn land(&mut self, columns: Result<Result<Vec<Pieces>>, tokio::task::JoinError>) -> Result<()> {
        let columns = columns.map_err(|e| exec_datafusion_err!("a window of rows was not embedded: {e}"))??;
        let Some(Window { rows, reserved, .. }) = self.windows.pop_front() else {
            return internal_err!("a window landed that was not under way");
        };
        // What it really takes: how many tokens there would be was a guess.
        let real = rows.iter().map(rows_bytes).sum::<usize>() + columns.iter().map(Pieces::bytes).sum::<usize>();
        match real.checked_sub(reserved) {
            Some(more) => {
                let grown = self.reservation.try_grow(more);
                grown.map_err(|_| no_memory(more, self.reservation.size()))?;
            }
            None => self.reservation.shrink(reserved - real),
        }
        self.ready = Some(Ready { rows: rows.into(), columns, done: 0, batch_rows: self.batch_rows, reserved: real });
        Ok(())
    }

    /// The next piece of the window that has landed.
    fn hand_on(&mut self) -> Result<Option<RecordBatch>> {
        let Some(ready) = &mut self.ready else { return Ok(None) };
        let Some(rows) = ready.rows.pop_front() else {
            self.reservation.shrink(ready.reserved.min(self.reservation.size()));
            self.ready = None;
            if !self.open.is_empty() && (self.waits || self.ended) {
                self.launch()?;
            }
            return Ok(None);
        };
        let _timer = self.work.counters.baseline.elapsed_compute().timer();
        let (from, n) = (ready.done, ready.rows_of_batch(rows.num_rows()));
        if n < rows.num_rows() {
            ready.rows.push_front(rows.slice(n, rows.num_rows() - n));
        }
        let mut columns = rows.slice(0, n).columns().to_vec();
        for pieces in &ready.columns {
            let arrays: Vec<&dyn Array> = pieces.arrays.iter().map(AsRef::as_ref).collect();
            columns.push(interleave(&arrays, &pieces.places[from..from + n])?);
        }
        ready.done += n;
        Ok(Some(RecordBatch::try_new(Arc::clone(&self.schema), columns)?))
    }
}

impl Ready {
    /// Rows of the next batch: as many as come to its most bytes, and at least one.
    fn rows_of_batch(&self, left: usize) -> usize {
        let mut bytes = 0;
        let fits = |row: &usize| {
            bytes += self.columns.iter().map(|pieces| pieces.row_bytes(*row)).sum::<usize>();
            bytes <= BATCH_BYTES
        };
        let rows = (self.done..self.done + left.min(self.batch_rows)).take_while(fits).count();
        rows.max(1)
    }
}

impl Pieces {
    /// Bytes of this window's values. Those of other windows are the memo's, and count by what is taken of them.
    fn bytes(&self) -> usize {
        let own = self.arrays.first().map_or(0, slice_bytes);
        let others: HashMap<(usize, usize), usize> =
            self.places.iter().enumerate().filter(|(_, place)| place.0 > 0).map(|(row, place)| (*place, row)).collect();
        own + others.into_values().map(|row| self.row_bytes(row)).sum::<usize>()
    }

    /// Bytes of a row's value: of a list, those of its items.
    fn row_bytes(&self, row: usize) -> usize {
        let (array, at) = self.places[row];
        let array = &self.arrays[array];
        match array.data_type() {
            DataType::List(_) => {
                let lists = array.as_list::<i32>();
                let items = lists.value_length(at) as usize;
                items * (self.item_bytes(lists.values()) + 4)
            }
            _ => self.item_bytes(array),
        }
    }

    /// Bytes of an item, which all have about the same: they hold a vector.
    fn item_bytes(&self, items: &ArrayRef) -> usize {
        match items.data_type() {
            DataType::FixedSizeList(_, width) => 4 * *width as usize,
            DataType::Struct(_) => {
                32 + items.as_struct().columns().iter().map(|column| self.item_bytes(column)).sum::<usize>()
            }
            _ => 8,
        }
    }
}

/// One NULL. Arrow's own have NULLs inside their vectors as well, which the type forbids and casts do not forgive.
fn null(kind: &DataType) -> Result<ArrayRef> {
    let validity = || Some(NullBuffer::new_null(1));
    Ok(match kind {
        DataType::FixedSizeList(item, width) if item.data_type() == &DataType::Float32 => {
            let zeros = Arc::new(Float32Array::from(vec![0.0; *width as usize]));
            Arc::new(FixedSizeListArray::try_new(Arc::clone(item), *width, zeros, validity())?)
        }
        DataType::Struct(fields) => {
            // A member may be looked at without its struct.
            let member = |field: &FieldRef| match field.is_nullable() && field.data_type().is_primitive() {
                true => Ok(new_null_array(field.data_type(), 1)),
                false => null(field.data_type()),
            };
            let columns = fields.iter().map(member).collect::<Result<_>>()?;
            Arc::new(StructArray::try_new(fields.clone(), columns, validity())?)
        }
        // Members that are never NULL, inside something that is.
        DataType::Boolean => Arc::new(BooleanArray::from(vec![false])),
        DataType::UInt32 => Arc::new(UInt32Array::from(vec![0])),
        other => new_null_array(other, 1),
    })
}

/// Bytes of the values of an array's own rows. Arrow counts a view as 16 bytes, however long its text, and of a
/// dictionary or a slice of lists everything that lies behind it.
fn slice_bytes(array: &ArrayRef) -> usize {
    match array.data_type() {
        DataType::Utf8View => array.as_string_view().lengths().map(|n| n as usize + 16).sum(),
        DataType::BinaryView => array.as_binary_view().lengths().map(|n| n as usize + 16).sum(),
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            let values = dictionary.values();
            slice_bytes(values) / values.len().max(1) * array.len() + 8 * array.len()
        }
        DataType::List(_) => {
            let lists = array.as_list::<i32>();
            let (first, last) = (lists.value_offsets()[0] as usize, lists.value_offsets()[array.len()] as usize);
            slice_bytes(&lists.values().slice(first, last - first)) + 4 * array.len()
        }
        DataType::LargeList(_) => {
            let lists = array.as_list::<i64>();
            let (first, last) = (lists.value_offsets()[0] as usize, lists.value_offsets()[array.len()] as usize);
            slice_bytes(&lists.values().slice(first, last - first)) + 8 * array.len()
        }
        DataType::Struct(_) => array.as_struct().columns().iter().map(slice_bytes).sum(),
        _ => array.to_data().get_slice_memory_size().unwrap_or_else(|_| array.get_array_memory_size()),
    }
}

fn rows_bytes(rows: &RecordBatch) -> usize {
    rows.columns().iter().map(slice_bytes).sum()
}

/// Bytes of the vectors of texts, as far as one can tell before they are tokenised.
fn vector_bytes(call: &BoundCall, rows: usize, text_bytes: usize) -> usize {
    let vectors = match call.call.options.spec.level {
        Level::Sentence => rows,
        Level::Token => text_bytes / BYTES_PER_TOKEN + rows,
    };
    // The softmax takes them in another order.
    let copies = if call.call.kind.is_score() { 2 } else { 1 };
    vectors.saturating_mul(4 * copies * call.width())
}

/// Rows of a window, from the texts of one batch.
fn window_rows(calls: &[BoundCall], texts: &[ArrayRef], batch_rows: usize) -> usize {
    let of_call = |(call, text): (&BoundCall, &ArrayRef)| {
        let row = slice_bytes(text) / text.len().max(1) + 1;
        call.window_bytes() / row
    };
    let rows = calls.iter().zip(texts).map(of_call).min().unwrap_or(batch_rows);
    rows.clamp(WINDOW_ROWS.min(batch_rows.max(1)), batch_rows.max(1))
}

fn no_memory(needs: usize, held: usize) -> DataFusionError {
    resources_datafusion_err!(
        "embedding the next rows needs {needs} bytes beside {held}, and the memory of the query has no room: raise \
         --memory-limit (datafusion.runtime.memory_limit), or lower datafusion.execution.batch_size"
    )
}

impl BoundCall {
    /// Bytes of text whose vectors are as many as a window may hold.
    fn window_bytes(&self) -> usize {
        match self.call.options.spec.level {
            Level::Sentence => WINDOW_TEXT_BYTES,
            Level::Token => WINDOW_TEXT_BYTES.min(WINDOW_VECTOR_BYTES / (4 * self.width().max(1)) * BYTES_PER_TOKEN),
        }
    }

    fn width(&self) -> usize {
        let layout = self.models.layout(self.call.options.model.as_deref(), &self.call.options.spec);
        layout.map_or(1, |layout| layout.width())
    }

    /// Opens the model, where that takes long on a thread that may wait.
    async fn embedder(&self) -> Result<ColumnEmbedder> {
        let name = self.call.options.model.as_deref().unwrap_or_else(|| self.models.default_name());
        if self.models.is_open(name) {
            return self.call.embedder(&self.models);
        }
        let (call, models) = (self.call.clone(), self.models.clone());
        let opened = SpawnedTask::spawn_blocking(move || call.embedder(&models)).join().await;
        opened.map_err(|e| exec_datafusion_err!("the model was not opened: {e}"))?
    }
}

impl Work {
    /// The columns of all calls for one window; `first` counts the rows before it.
    async fn embed(self, texts: Vec<ArrayRef>, first: usize) -> Result<Vec<Pieces>> {
        let calls = self.calls.iter().zip(&texts);
        try_join_all(calls.map(|(call, text)| self.column(call, text, first))).await
    }

    async fn column(&self, call: &BoundCall, text: &ArrayRef, first: usize) -> Result<Pieces> {
        let memo: &Arc<Memo> = call.models.memo();
        let found = memo.look_up(&call.call.identity(&call.models), text, self.cache_bytes)?;
        let Lookup { places, flights, own, fresh, repeated, remembered } = found;
        self.counters.dedup_hits.add(repeated);
        self.counters.cache_hits.add(remembered);
        let values = self.compute(call, text, fresh.values(), first).await?;
        own.publish(Arc::clone(&values));
        let mut arrays = vec![values];
        let mut places: Vec<Option<(usize, usize)>> =
            places.into_iter().map(|place| place.map(|(flight, row)| (flight as usize, row as usize))).collect();
        for (number, flight) in flights.iter().enumerate().skip(1) {
            arrays.push(self.wait_for(call, text, first, (number, flight), &mut places).await?);
        }
        let nulls = (arrays.len(), 0);
        arrays.push(null(call.field.data_type())?);
        Ok(Pieces { arrays, places: places.into_iter().map(|place| place.unwrap_or(nulls)).collect() })
    }

    /// The values of another window's flight; when that gave up, those texts are computed here.
    async fn wait_for(
        &self,
        call: &BoundCall,
        text: &ArrayRef,
        first: usize,
        (number, flight): (usize, &Arc<Flight>),
        places: &mut [Option<(usize, usize)>],
    ) -> Result<ArrayRef> {
        if let Some(values) = flight.landed().await {
            return Ok(values);
        }
        let mut rows: Vec<u64> = Vec::new();
        let mut again: HashMap<usize, usize> = HashMap::new();
        for (row, place) in places.iter_mut().enumerate() {
            if let Some((there, at)) = place
                && *there == number
            {
                *at = *again.entry(*at).or_insert_with(|| {
                    rows.push(row as u64);
                    rows.len() - 1
                });
            }
        }
        self.compute(call, text, &rows, first).await
    }

    /// Embeds the texts of some rows.
    async fn compute(&self, call: &BoundCall, text: &ArrayRef, rows: &[u64], first: usize) -> Result<ArrayRef> {
        if rows.is_empty() {
            return Ok(new_empty_array(call.field.data_type()));
        }
        let texts = take(text, &UInt64Array::from(rows.to_vec()), None)?;
        let embedder = call.embedder().await?;
        let failed = |error| self.failed(call, error, rows, first);
        let pending = embedder.submit_async(&texts).await.map_err(failed)?;
        let done = pending.await.map_err(failed)?;
        self.counters.add(&done);
        if !call.call.kind.is_score() {
            return call.call.column(&call.models, &texts, done);
        }
        // The softmax over a vocabulary takes longer than the biLM.
        let call = call.clone();
        let scored = SpawnedTask::spawn_blocking(move || call.call.column(&call.models, &texts, done)).join().await;
        scored.map_err(|e| exec_datafusion_err!("texts were not scored: {e}"))?
    }

    /// Says which row it was.
    fn failed(&self, call: &BoundCall, error: elmo::Error, rows: &[u64], first: usize) -> DataFusionError {
        let elmo::Error::Row { row, reason } = error else { return call.call.failed(error) };
        let row = rows.get(row).map_or(first, |row| first + *row as usize);
        let placed = match self.partition {
            0 => format!("row {row}: {reason}"),
            partition => format!("row {row} of partition {partition}: {reason}"),
        };
        let reason = RowError::reported(reason.label(), placed);
        call.call.failed(elmo::Error::Row { row, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: two vectors of four numbers are 32 bytes, however many rows have them.
    #[test]
    fn a_remembered_value_counts_once() {
        let item = Arc::new(datafusion::arrow::datatypes::Field::new("item", DataType::Float32, false));
        let vectors = |rows: usize| -> ArrayRef {
            let numbers = Arc::new(Float32Array::from(vec![0.0; 4 * rows]));
            Arc::new(FixedSizeListArray::new(Arc::clone(&item), 4, numbers, None))
        };
        let own = vectors(0);
        let pieces = |places: Vec<(usize, usize)>| Pieces { arrays: vec![Arc::clone(&own), vectors(9)], places };
        let shared = (0..1000).map(|row| (1, row % 2)).collect();
        assert_eq!(pieces(shared).bytes() - pieces(Vec::new()).bytes(), 32);
    }
}
