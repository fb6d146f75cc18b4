//! [`RowsExec`] runs row-by-row operators on workers over rows of one process: of the client, such as those of a table in memory, or
//! of the worker that writes the one file of a COPY. It sends them in chunks, each to one worker, and to another one if that is lost.

use std::{collections::VecDeque, fmt, sync::Arc};

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions},
        datatypes::{DataType, SchemaRef},
    },
    common::{DataFusionError, Result, internal_err, plan_datafusion_err, runtime::SpawnedTask},
    datasource::memory::MemorySourceConfig,
    execution::{
        SendableRecordBatchStream, TaskContext,
        memory_pool::{MemoryConsumer, MemoryReservation},
    },
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties,
        empty::EmptyExec,
        metrics::{BaselineMetrics, ExecutionPlanMetricsSet, MetricBuilder, MetricsSet},
        replace_children_if_necessary,
        stream::RecordBatchStreamAdapter,
    },
};
use datafusion_distributed::NetworkCoalesceExec;
use elmo_udfs::plan::exec::EmbedExec;
use futures::{Stream, StreamExt, TryStreamExt};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{
    cluster_exec::{ClusterExec, lost_worker, without},
    error::ClusterError,
    members::Member,
    peers::{Peers, name_of},
    service::Greeting,
    stage_exec::{Changed, StageExec},
};
use crate::{error::Exit, operator::operator, sql::InOrderExec};

type Plan = Arc<dyn ExecutionPlan>;

/// Maximum rows of a chunk.
const CHUNK_ROWS: usize = 4096;
/// Maximum bytes of a chunk; less for calls that return a vector per token.
const CHUNK_BYTES: usize = 1 << 20;
/// Maximum number of workers that may be lost while they compute the same chunk.
const MAX_LOST: usize = 3;
/// Rows of a partition, of which a worker computes several at a time.
const PARTITION_ROWS: usize = 256;
/// Maximum partitions of a chunk.
const MAX_PARTITIONS: usize = 8;
/// Maximum chunks in flight per partition of the input.
const MAX_CHUNKS: usize = 3;
/// Maximum chunks in flight over all partitions. Each partition has at least one.
const MAX_TOTAL_CHUNKS: usize = 12;

/// Runs a chain of row-by-row operators on workers over the rows of its input. Preserves the order of rows.
pub(super) struct RowsExec {
    /// The chain over an [`EmptyExec`].
    chain: Plan,
    /// Number of operators in the chain.
    length: usize,
    input: Plan,
    /// Whether a limit above may end the query early. Chunks are then as small as input batches, and sent one at a
    /// time.
    stops_early: bool,
    workers: Workers,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

impl RowsExec {
    /// Runs the first `length` operators of `chain` over `input`.
    pub(super) fn try_new(
        chain: &Plan,
        length: usize,
        input: Plan,
        stops_early: bool,
        workers: Workers,
    ) -> Result<Self> {
        let properties = Arc::clone(with_input(chain, length, &input)?.properties());
        let empty: Plan = Arc::new(EmptyExec::new(input.schema()));
        let chain = with_input(chain, length, &empty)?;
        Ok(Self { chain, length, input, stops_early, workers, properties, metrics: ExecutionPlanMetricsSet::new() })
    }

    /// The operator that a worker has decoded. `chain` is what [`Self::chain`] was in the client.
    pub(super) fn received(chain: &Plan, input: Plan, of: Received, peers: &Arc<Peers>) -> Result<Self> {
        let Received { length, stops_early, members, changed } = of;
        let member = |(url, greeting): (String, Greeting)| {
            let url = url.parse().map_err(|e| plan_datafusion_err!("the address of a worker, {url}: {e}"))?;
            Ok(Member { url, greeting })
        };
        let members = members.into_iter().map(member).collect::<Result<_>>()?;
        let workers = Workers::new(members, peers, &changed.into());
        Self::try_new(chain, length, input, stops_early, workers)
    }

    /// What a worker needs besides chain and input.
    pub(super) fn sent(&self) -> Received {
        let members = self.workers.members.iter();
        Received {
            length: self.length,
            stops_early: self.stops_early,
            members: members.map(|member| (member.url.to_string(), member.greeting.clone())).collect(),
            changed: self.workers.changed.to_vec(),
        }
    }

    /// The operator on some of its workers.
    pub(super) fn on(&self, members: &Arc<[Member]>) -> Result<Self> {
        let workers = Workers::new(Arc::clone(members), &self.workers.peers, &self.workers.changed);
        Self::try_new(&self.chain, self.length, Arc::clone(&self.input), self.stops_early, workers)
    }

    /// The chain over an [`EmptyExec`].
    pub(super) fn chain(&self) -> &Plan {
        &self.chain
    }

    /// The operator with one more row-by-row operator above its chain.
    pub(super) fn under(&self, operator: &Plan, stops_early: bool) -> Result<Self> {
        let chain = replace_children_if_necessary(Arc::clone(operator), vec![Arc::clone(&self.chain)])?;
        Self::try_new(&chain, self.length + 1, Arc::clone(&self.input), stops_early, self.workers.clone())
    }
}

/// A serialised [`RowsExec`], without chain and input.
#[derive(Serialize, Deserialize)]
pub(super) struct Received {
    length: usize,
    stops_early: bool,
    /// Addresses and answers of the workers.
    members: Vec<(String, Greeting)>,
    changed: Vec<(String, String)>,
}

/// The workers of a query, and the settings of its session.
#[derive(Clone)]
pub(super) struct Workers {
    members: Arc<[Member]>,
    /// The members that have not been lost.
    left: Arc<Mutex<Arc<[Member]>>>,
    peers: Arc<Peers>,
    changed: Changed,
}

impl Workers {
    pub(super) fn new(members: Arc<[Member]>, peers: &Arc<Peers>, changed: &Changed) -> Self {
        let left = Arc::new(Mutex::new(Arc::clone(&members)));
        Self { members, left, peers: Arc::clone(peers), changed: Arc::clone(changed) }
    }

    fn left(&self) -> Arc<[Member]> {
        Arc::clone(&self.left.lock())
    }

    /// Sends no more chunks to a lost worker.
    fn lose(&self, lost: &str) {
        let mut left = self.left.lock();
        let is_last = left.iter().all(|member| name_of(&member.url) == lost);
        // If all have been lost, some of them may have come back.
        let from = if is_last { &self.members } else { &*left };
        if let Some(others) = without(from, lost) {
            *left = others;
        }
    }
}

/// Replaces the input of the first `length` operators of a chain.
fn with_input(chain: &Plan, length: usize, input: &Plan) -> Result<Plan> {
    match chain.children()[..] {
        [next] if length > 0 => {
            replace_children_if_necessary(Arc::clone(chain), vec![with_input(next, length - 1, input)?])
        }
        _ => Ok(Arc::clone(input)),
    }
}

/// Sends chunks of one partition.
#[derive(Clone)]
struct Sender {
    chain: Plan,
    length: usize,
    schema: SchemaRef,
    workers: Workers,
    context: Arc<TaskContext>,
    memory: Arc<MemoryReservation>,
}

impl Sender {
    /// Runs the chain over a chunk; returns its rows in order.
    async fn send(self, chunk: Vec<RecordBatch>) -> Result<Vec<ReservedBatch>> {
        let partitions = partitions(&chunk)?;
        drop(chunk);
        let scan = MemorySourceConfig::try_new_exec(&partitions, Arc::clone(&self.schema), None)?;
        let chain = with_input(&self.chain, self.length, &(scan as Plan))?;
        let stage: Plan = Arc::new(StageExec::new(chain, Arc::clone(&self.workers.changed)));
        let boundary = Arc::new(NetworkCoalesceExec::try_new(stage, 1, 1)?);
        let plan: Plan = Arc::new(InOrderExec::new(boundary));
        let cluster = ClusterExec::new(Arc::clone(&plan), self.workers.left(), false);
        let cluster = cluster.watched(&self.workers.peers, false);
        let mut attempts = 0;
        loop {
            attempts += 1;
            // Each execution goes to the next worker.
            let rows = cluster.once(Arc::clone(&plan), self.workers.left(), &self.context)?;
            let rows: Result<Vec<_>> =
                rows.map(|batch| ReservedBatch::try_new(batch?, &self.memory)).try_collect().await;
            let Err(error) = rows else { return rows };
            let Some(lost) = lost_worker(&error) else { return Err(error) };
            self.workers.lose(&lost);
            if attempts == MAX_LOST && self.workers.members.len() <= MAX_LOST {
                return Err(error);
            }
            if attempts == MAX_LOST {
                // The rows may be the cause, so they are not sent to the workers that are left.
                let message =
                    format!("{MAX_LOST} workers were lost while they computed the same rows; the last one: {error}");
                let help = Some("see the logs of the workers, for example for a lack of memory".to_owned());
                return Err(ClusterError::Failed { message, exit: Exit::Failed, help }.into());
            }
            tracing::warn!("rows are sent to another worker: {error}");
        }
    }
}

/// Divides the rows of a chunk evenly into partitions. Does not concatenate batches: a merged dictionary might exceed its
/// key type.
fn partitions(chunk: &[RecordBatch]) -> Result<Vec<Vec<RecordBatch>>> {
    let count: usize = chunk.iter().map(RecordBatch::num_rows).sum();
    let step = count.div_ceil((count / PARTITION_ROWS).clamp(1, MAX_PARTITIONS)).max(1);
    let (mut partitions, mut room) = (Vec::new(), 0);
    for batch in chunk {
        let mut start = 0;
        while start < batch.num_rows() {
            if room == 0 {
                partitions.push(Vec::new());
                room = step;
            }
            let rows = room.min(batch.num_rows() - start);
            if let Some(partition) = partitions.last_mut() {
                partition.push(compact(&batch.slice(start, rows))?);
            }
            (start, room) = (start + rows, room - rows);
        }
    }
    Ok(partitions)
}

/// A buffered batch and its memory reservation.
struct ReservedBatch {
    batch: RecordBatch,
    _memory: MemoryReservation,
}

impl ReservedBatch {
    fn try_new(batch: RecordBatch, memory: &MemoryReservation) -> Result<Self> {
        let reservation = memory.new_empty();
        reservation.try_grow(batch.get_array_memory_size())?;
        Ok(Self { batch, _memory: reservation })
    }
}

/// Maximum bytes of a chunk for a chain. Bounds the size of its vectors.
fn chunk_bytes(chain: &Plan) -> usize {
    let here = chain.downcast_ref().and_then(EmbedExec::bounded_text);
    let below = chain.children().into_iter().map(chunk_bytes);
    below.chain(here).min().unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES)
}

/// Rows and their size in bytes.
type Piece = (RecordBatch, usize);

/// Groups the input into chunks of at most [`CHUNK_ROWS`] rows and `max_bytes` bytes. No chunk is empty; a single row
/// may exceed `max_bytes`.
fn chunks(
    input: SendableRecordBatchStream,
    stops_early: bool,
    max_bytes: usize,
) -> impl Stream<Item = Result<Vec<RecordBatch>>> + Send {
    futures::stream::try_unfold((input, VecDeque::new()), move |(mut input, mut pending)| async move {
        let is_full = |rows: usize, bytes: usize| rows >= CHUNK_ROWS || bytes >= max_bytes || (stops_early && rows > 0);
        let (mut chunk, mut rows, mut bytes) = (Vec::new(), 0, 0);
        while !is_full(rows, bytes) {
            if pending.is_empty() {
                let Some(batch) = input.next().await.transpose()? else { break };
                pending.extend(pieces(&batch, max_bytes));
            }
            // A piece that does not fit starts the next chunk.
            let fits = |(piece, size): &mut Piece| {
                rows + piece.num_rows() <= CHUNK_ROWS && bytes + *size <= max_bytes || rows == 0
            };
            match pending.pop_front_if(fits) {
                Some((piece, size)) => {
                    (rows, bytes) = (rows + piece.num_rows(), bytes + size);
                    chunk.push(piece);
                }
                None if pending.is_empty() => {}
                None => break,
            }
        }
        Ok::<_, DataFusionError>((!chunk.is_empty()).then_some((chunk, (input, pending))))
    })
}

/// Slices a batch into pieces of at most the size of a chunk, assuming rows of equal size.
fn pieces(batch: &RecordBatch, max_bytes: usize) -> Vec<Piece> {
    let each = bytes_of(batch).div_ceil(batch.num_rows().max(1)).max(1);
    let step = (max_bytes / each).clamp(1, CHUNK_ROWS);
    let piece = |start: usize| {
        let piece = batch.slice(start, step.min(batch.num_rows() - start));
        let size = piece.num_rows() * each;
        (piece, size)
    };
    (0..batch.num_rows()).step_by(step).map(piece).collect()
}

/// The size of a batch's rows. The batch may be a slice of a larger one.
fn bytes_of(batch: &RecordBatch) -> usize {
    let column = |column: &ArrayRef| match column.data_type() {
        DataType::Utf8View => column.as_string_view().lengths().map(|length| length as usize).sum(),
        DataType::BinaryView => column.as_binary_view().lengths().map(|length| length as usize).sum(),
        _ => column.to_data().get_slice_memory_size().unwrap_or_else(|_| column.get_array_memory_size()),
    };
    batch.columns().iter().map(column).sum()
}

/// Copies view columns, as IPC would send the whole buffers that they point into.
fn compact(batch: &RecordBatch) -> Result<RecordBatch> {
    let column = |column: &ArrayRef| match column.data_type() {
        DataType::Utf8View => Arc::new(column.as_string_view().gc()) as ArrayRef,
        DataType::BinaryView => Arc::new(column.as_binary_view().gc()),
        _ => Arc::clone(column),
    };
    let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    let columns = batch.columns().iter().map(column).collect();
    Ok(RecordBatch::try_new_with_options(batch.schema(), columns, &rows)?)
}

impl fmt::Debug for RowsExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowsExec").field("chain", &self.chain).finish_non_exhaustive()
    }
}

impl DisplayAs for RowsExec {
    fn fmt_as(&self, kind: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RowsExec: workers={}", self.workers.members.len())?;
        let mut node = &self.chain;
        for _ in 0..self.length {
            f.write_str(", ")?;
            node.fmt_as(kind, f)?;
            node = node.children()[0];
        }
        Ok(())
    }
}

impl ExecutionPlan for RowsExec {
    operator!("RowsExec", inputs: [input]);

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Ok([input]) = <[_; 1]>::try_from(children) else { return internal_err!("RowsExec has one input") };
        Ok(Arc::new(Self::try_new(&self.chain, self.length, input, self.stops_early, self.workers.clone())?))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let input = self.input.execute(partition, Arc::clone(&context))?;
        let memory = MemoryConsumer::new(format!("RowsExec[{partition}]")).register(context.memory_pool());
        let sender = Sender {
            chain: Arc::clone(&self.chain),
            length: self.length,
            schema: self.input.schema(),
            workers: self.workers.clone(),
            context,
            memory: Arc::new(memory),
        };
        let metrics = BaselineMetrics::new(&self.metrics, partition);
        let embedded = MetricBuilder::new(&self.metrics).counter("rows_embedded", partition);
        let partitions = self.properties.output_partitioning().partition_count();
        let in_flight = if self.stops_early { 1 } else { (MAX_TOTAL_CHUNKS / partitions.max(1)).clamp(1, MAX_CHUNKS) };
        // A task per chunk, so that chunks make progress while the stream is not polled.
        let sent = chunks(input, self.stops_early, chunk_bytes(&self.chain)).map_ok(move |chunk| {
            let sent = SpawnedTask::spawn(sender.clone().send(chunk));
            async move { sent.await.unwrap_or_else(|e| Err(DataFusionError::ExecutionJoin(Box::new(e)))) }
        });
        let batches = sent.try_buffered(in_flight).map_ok(|batches| futures::stream::iter(batches.into_iter().map(Ok)));
        let batches = batches.try_flatten().map_ok(move |reserved: ReservedBatch| {
            metrics.record_output(reserved.batch.num_rows());
            embedded.add(reserved.batch.num_rows());
            reserved.batch
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), batches)))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}
