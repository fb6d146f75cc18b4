//! Operators that embed row by row, brought to the cluster's executors with portions of the rows that they need.

use std::{collections::VecDeque, fmt, sync::Arc};

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions},
        datatypes::{DataType, SchemaRef},
    },
    common::{DataFusionError, Result, internal_err, runtime::SpawnedTask, tree_node::TreeNodeRecursion},
    datasource::memory::MemorySourceConfig,
    execution::{
        SendableRecordBatchStream, TaskContext,
        memory_pool::{MemoryConsumer, MemoryReservation},
    },
    physical_expr::PhysicalExpr,
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties,
        empty::EmptyExec,
        metrics::{BaselineMetrics, ExecutionPlanMetricsSet, MetricsSet},
        replace_children_if_necessary,
        stream::RecordBatchStreamAdapter,
    },
    prelude::SessionConfig,
};
use elmo_udfs::plan::exec::EmbedExec;
use futures::{Stream, StreamExt, TryStreamExt};

use super::{client::Cluster, travel::Plan};

/// Rows of a portion.
const ROWS: usize = 4096;
/// Bytes of a portion, from which on it is sent; fewer where each token has a vector.
const BYTES: usize = 1 << 20;
/// Rows from which on a portion is one more task.
const TASK_ROWS: usize = 256;
/// Tasks of a portion.
const TASKS: usize = 8;
/// Portions under way at once, for each partition of the input.
const AHEAD: usize = 3;
/// The same over all partitions, of which each has one in any case.
const AHEAD_IN_ALL: usize = 12;

/// Runs a chain of operators that work row by row on a cluster, over the rows of its input. Rows keep their order.
pub(super) struct ClusterRowsExec {
    /// The chain, over nothing.
    chain: Plan,
    /// Operators in it.
    length: usize,
    input: Plan,
    /// Somebody above may not want all rows: portions are as small as the batches that come, and go one by one.
    stops_early: bool,
    cluster: Cluster,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

impl ClusterRowsExec {
    /// The first `length` operators of `chain`, over `input`.
    pub(super) fn try_new(
        chain: &Plan,
        length: usize,
        input: Plan,
        stops_early: bool,
        cluster: Cluster,
    ) -> Result<Self> {
        let properties = Arc::clone(over(chain, length, &input)?.properties());
        let nothing: Plan = Arc::new(EmptyExec::new(input.schema()));
        let chain = over(chain, length, &nothing)?;
        Ok(Self { chain, length, input, stops_early, cluster, properties, metrics: ExecutionPlanMetricsSet::new() })
    }

    /// The chain over nothing, as bytes would have it.
    pub(super) fn chain(&self) -> &Plan {
        &self.chain
    }
}

/// The first operators of a chain over another input.
fn over(chain: &Plan, length: usize, input: &Plan) -> Result<Plan> {
    match chain.children()[..] {
        [next] if length > 0 => replace_children_if_necessary(Arc::clone(chain), vec![over(next, length - 1, input)?]),
        _ => Ok(Arc::clone(input)),
    }
}

/// What a portion needs to be computed.
#[derive(Clone)]
struct Sender {
    chain: Plan,
    length: usize,
    schema: SchemaRef,
    cluster: Cluster,
    config: SessionConfig,
    memory: Arc<MemoryReservation>,
}

impl Sender {
    /// The rows that the chain makes of a portion, in order.
    async fn send(self, portion: Vec<RecordBatch>) -> Result<Vec<Held>> {
        let tasks = tasks(&portion)?;
        drop(portion);
        let scan = MemorySourceConfig::try_new_exec(&tasks, Arc::clone(&self.schema), None)?;
        let plan = over(&self.chain, self.length, &(scan as Plan))?;
        let batches = self.cluster.run(plan, &self.config);
        batches.map(|batch| Held::try_new(batch?, &self.memory)).try_collect().await
    }
}

/// The rows of a portion in tasks of about as many. Batches stay apart: together, dictionaries may have too many values.
fn tasks(portion: &[RecordBatch]) -> Result<Vec<Vec<RecordBatch>>> {
    let count: usize = portion.iter().map(RecordBatch::num_rows).sum();
    let step = count.div_ceil((count / TASK_ROWS).clamp(1, TASKS)).max(1);
    let (mut tasks, mut room) = (Vec::new(), 0);
    for batch in portion {
        let mut start = 0;
        while start < batch.num_rows() {
            if room == 0 {
                tasks.push(Vec::new());
                room = step;
            }
            let rows = room.min(batch.num_rows() - start);
            if let Some(task) = tasks.last_mut() {
                task.push(by_itself(&batch.slice(start, rows))?);
            }
            (start, room) = (start + rows, room - rows);
        }
    }
    Ok(tasks)
}

/// A batch that is counted as long as it waits.
struct Held {
    batch: RecordBatch,
    _memory: MemoryReservation,
}

impl Held {
    fn try_new(batch: RecordBatch, memory: &MemoryReservation) -> Result<Self> {
        let held = memory.new_empty();
        held.try_grow(batch.get_array_memory_size())?;
        Ok(Self { batch, _memory: held })
    }
}

/// Bytes of a portion for a chain: its vectors are to fit into memory.
fn bytes_of_portion(chain: &Plan) -> usize {
    let here = chain.downcast_ref().and_then(EmbedExec::bounded_text);
    let below = chain.children().into_iter().map(bytes_of_portion);
    below.chain(here).min().unwrap_or(BYTES).min(BYTES)
}

/// Rows with their bytes.
type Piece = (RecordBatch, usize);

/// Batches in portions. None is empty.
fn portions(
    input: SendableRecordBatchStream,
    stops_early: bool,
    most: usize,
) -> impl Stream<Item = Result<Vec<RecordBatch>>> + Send {
    futures::stream::try_unfold((input, VecDeque::new()), move |(mut input, mut waiting)| async move {
        let is_full = |rows: usize, bytes: usize| rows >= ROWS || bytes >= most || (stops_early && rows > 0);
        let (mut portion, mut rows, mut bytes) = (Vec::new(), 0, 0);
        while !is_full(rows, bytes) {
            if waiting.is_empty() {
                let Some(batch) = input.next().await.transpose()? else { break };
                waiting.extend(pieces(&batch, most));
            }
            // One that would be too much begins the next portion.
            let fits =
                |(piece, size): &mut Piece| rows + piece.num_rows() <= ROWS && bytes + *size <= most || rows == 0;
            match waiting.pop_front_if(fits) {
                Some((piece, size)) => {
                    (rows, bytes) = (rows + piece.num_rows(), bytes + size);
                    portion.push(piece);
                }
                None if waiting.is_empty() => {}
                None => break,
            }
        }
        Ok::<_, DataFusionError>((!portion.is_empty()).then_some((portion, (input, waiting))))
    })
}

/// A batch in pieces that are no larger than a portion, if its rows are about as large as each other.
fn pieces(batch: &RecordBatch, most: usize) -> Vec<Piece> {
    let each = bytes_of(batch).div_ceil(batch.num_rows().max(1)).max(1);
    let step = (most / each).clamp(1, ROWS);
    let piece = |start: usize| {
        let piece = batch.slice(start, step.min(batch.num_rows() - start));
        let size = piece.num_rows() * each;
        (piece, size)
    };
    (0..batch.num_rows()).step_by(step).map(piece).collect()
}

/// Bytes of a batch that may be a slice of a larger one.
fn bytes_of(batch: &RecordBatch) -> usize {
    let column = |column: &ArrayRef| match column.data_type() {
        DataType::Utf8View => column.as_string_view().lengths().map(|length| length as usize).sum(),
        DataType::BinaryView => column.as_binary_view().lengths().map(|length| length as usize).sum(),
        _ => column.to_data().get_slice_memory_size().unwrap_or_else(|_| column.get_array_memory_size()),
    };
    batch.columns().iter().map(column).sum()
}

/// A batch without the texts of others: views are sent with everything that they could point at.
fn by_itself(batch: &RecordBatch) -> Result<RecordBatch> {
    let column = |column: &ArrayRef| match column.data_type() {
        DataType::Utf8View => Arc::new(column.as_string_view().gc()) as ArrayRef,
        DataType::BinaryView => Arc::new(column.as_binary_view().gc()),
        _ => Arc::clone(column),
    };
    let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    let columns = batch.columns().iter().map(column).collect();
    Ok(RecordBatch::try_new_with_options(batch.schema(), columns, &rows)?)
}

impl fmt::Debug for ClusterRowsExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { chain, cluster, .. } = self;
        f.debug_struct("ClusterRowsExec").field("cluster", cluster.address()).field("chain", chain).finish()
    }
}

impl DisplayAs for ClusterRowsExec {
    fn fmt_as(&self, kind: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterRowsExec: scheduler={}", self.cluster.address())?;
        let mut node = &self.chain;
        for _ in 0..self.length {
            f.write_str(", ")?;
            node.fmt_as(kind, f)?;
            node = node.children()[0];
        }
        Ok(())
    }
}

impl ExecutionPlan for ClusterRowsExec {
    fn name(&self) -> &'static str {
        "ClusterRowsExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Ok([input]) = <[_; 1]>::try_from(children) else { return internal_err!("ClusterRowsExec has one input") };
        Ok(Arc::new(Self::try_new(&self.chain, self.length, input, self.stops_early, self.cluster.clone())?))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let input = self.input.execute(partition, Arc::clone(&context))?;
        let memory = MemoryConsumer::new(format!("ClusterRowsExec[{partition}]")).register(context.memory_pool());
        let sender = Sender {
            chain: Arc::clone(&self.chain),
            length: self.length,
            schema: self.input.schema(),
            cluster: self.cluster.clone(),
            config: context.session_config().clone(),
            memory: Arc::new(memory),
        };
        let counted = BaselineMetrics::new(&self.metrics, partition);
        let partitions = self.properties.output_partitioning().partition_count();
        let ahead = if self.stops_early { 1 } else { (AHEAD_IN_ALL / partitions.max(1)).clamp(1, AHEAD) };
        // A task of its own each, or nothing would go on while nobody asks for rows.
        let sent = portions(input, self.stops_early, bytes_of_portion(&self.chain)).map_ok(move |portion| {
            let sent = SpawnedTask::spawn(sender.clone().send(portion));
            async move { sent.await.unwrap_or_else(|e| Err(DataFusionError::ExecutionJoin(Box::new(e)))) }
        });
        let batches = sent.try_buffered(ahead).map_ok(|batches| futures::stream::iter(batches.into_iter().map(Ok)));
        let batches = batches.try_flatten().map_ok(move |held: Held| {
            counted.record_output(held.batch.num_rows());
            held.batch
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), batches)))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}
