//! The output of one partition: reads rows, embeds them in chunks, and returns them in order.
//!
//! ```text
//! input -> chunk of rows -> distinct texts -> cache, or engine shared by all queries -> columns -> batches
//! ```
//!
//! Each chunk is a task, so it makes progress while the stream is not polled. Dropping the stream cancels the tasks,
//! and the engine skips their queued sentences.

use std::collections::VecDeque;

use datafusion::{
    arrow::{
        array::{ArrayRef, RecordBatch},
        datatypes::SchemaRef,
    },
    common::{Result, exec_datafusion_err, internal_err, runtime::SpawnedTask},
    execution::{SendableRecordBatchStream, TaskContext},
    physical_plan::metrics::RecordOutput,
};
use futures::{FutureExt, StreamExt};
use tokio::task::JoinError;

use super::{
    call::BoundCall,
    chunk::{ChunkColumn, CompletedChunk, RunningChunk},
    concat::{concat_rows, concat_texts},
    memory::PartitionMemory,
    size::{ChunkLimits, array_bytes, batch_bytes, call_bytes, chunk_rows},
    worker::ChunkWorker,
};

/// Maximum number of running chunks per partition, unless an operator above may stop early.
const MAX_RUNNING: usize = 4;

/// The state of one partition.
pub(super) struct EmbedStream {
    input: SendableRecordBatchStream,
    schema: SchemaRef,
    worker: ChunkWorker,
    /// Running chunks, the oldest first.
    running: VecDeque<RunningChunk>,
    /// Rows that do not belong to a chunk yet, each batch with its texts: one array per call.
    buffered: Vec<(RecordBatch, Vec<ArrayRef>)>,
    /// Bytes of these rows.
    buffered_bytes: usize,
    completed: Option<CompletedChunk>,
    input_ended: bool,
    /// Whether the next chunk has to wait until the memory of a completed one is released.
    memory_exhausted: bool,
    max_running: usize,
    batch_rows: usize,
    chunk_rows: usize,
    /// Rows in all chunks so far, for error messages.
    rows_read: usize,
    limits: ChunkLimits,
    memory: PartitionMemory,
}

impl EmbedStream {
    pub(super) fn new(
        input: SendableRecordBatchStream,
        schema: SchemaRef,
        worker: ChunkWorker,
        stops_early: bool,
        context: &TaskContext,
        memory: PartitionMemory,
    ) -> Self {
        let batch_rows = context.session_config().batch_size();
        Self {
            input,
            schema,
            worker,
            running: VecDeque::new(),
            buffered: Vec::new(),
            buffered_bytes: 0,
            completed: None,
            input_ended: false,
            memory_exhausted: false,
            max_running: if stops_early { 1 } else { MAX_RUNNING },
            batch_rows,
            chunk_rows: batch_rows,
            rows_read: 0,
            limits: ChunkLimits::within(context.memory_pool().as_ref()),
            memory,
        }
    }

    /// The next batch. While it waits for a chunk, it reads the input and starts further chunks.
    pub(super) async fn next(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            if let Some(batch) = self.next_completed()? {
                return Ok(Some(batch.record_output(&self.worker.metrics.baseline)));
            }
            let stop_reading = self.input_ended || self.memory_exhausted || self.running.len() >= self.max_running;
            let Self { running, input, .. } = self;
            match (running.front_mut(), stop_reading) {
                (None, true) if self.input_ended && self.buffered.is_empty() => return Ok(None),
                (None, true) => self.start_chunks()?,
                (Some(chunk), true) => {
                    let columns = (&mut chunk.task).await;
                    self.complete(columns)?;
                }
                (Some(chunk), false) => tokio::select! {
                    biased;
                    columns = &mut chunk.task => self.complete(columns)?,
                    rows = input.next() => self.buffer(rows)?,
                },
                (None, false) => match input.next().now_or_never() {
                    Some(rows) => self.buffer(rows)?,
                    // The devices are idle and the input is not ready: start with the rows at hand.
                    None if !self.buffered.is_empty() => self.start_chunks()?,
                    None => {
                        let rows = input.next().await;
                        self.buffer(rows)?;
                    }
                },
            }
        }
    }

    /// Buffers input rows, and starts a chunk when they fill one or the input has ended.
    fn buffer(&mut self, rows: Option<Result<RecordBatch>>) -> Result<()> {
        match rows.transpose()? {
            None => {
                self.input_ended = true;
                if self.buffered.is_empty() { Ok(()) } else { self.start_chunks() }
            }
            Some(rows) if rows.num_rows() == 0 => Ok(()),
            Some(rows) => {
                let texts = self.texts(&rows)?;
                self.chunk_rows = chunk_rows(&self.worker.calls, &texts, self.batch_rows, self.limits.vector_bytes);
                let bytes = batch_bytes(&rows);
                self.memory.count(bytes);
                self.buffered_bytes += bytes;
                self.buffered.push((rows, texts));
                if self.buffered_rows() >= self.chunk_rows { self.start_chunks() } else { Ok(()) }
            }
        }
    }

    fn texts(&self, rows: &RecordBatch) -> Result<Vec<ArrayRef>> {
        let _timer = self.worker.metrics.baseline.elapsed_compute().timer();
        let text = |call: &BoundCall| call.text.evaluate(rows)?.into_array(rows.num_rows());
        self.worker.calls.iter().map(text).collect()
    }

    fn buffered_rows(&self) -> usize {
        self.buffered.iter().map(|(rows, _)| rows.num_rows()).sum()
    }

    /// Starts chunks with the buffered rows, as many as may run and memory allows.
    fn start_chunks(&mut self) -> Result<()> {
        while !self.buffered.is_empty() && self.running.len() < self.max_running {
            let buffered = self.buffered_rows();
            let count = buffered.min(self.chunk_rows.max(1));
            let bytes = self.estimated_bytes(count, buffered);
            if !self.memory.take(bytes) {
                match (self.running.is_empty() && self.completed.is_none(), count) {
                    (false, _) => {
                        self.memory_exhausted = true;
                        return Ok(());
                    }
                    (true, 1) => return Err(self.memory.exhausted(bytes)),
                    (true, _) => self.chunk_rows = count / 2,
                }
                continue;
            }
            self.memory_exhausted = false;
            let (rows, texts) = self.take_rows(count)?;
            // The rows were counted when they were read.
            let left = self.buffered.iter().map(|(batch, _)| batch_bytes(batch)).sum();
            let bytes = bytes + std::mem::replace(&mut self.buffered_bytes, left).saturating_sub(left);
            self.memory.keep(bytes);
            let (worker, first_row) = (self.worker.clone(), self.rows_read);
            self.rows_read += rows.iter().map(RecordBatch::num_rows).sum::<usize>();
            let task = SpawnedTask::spawn(async move { worker.embed(texts, first_row).await });
            self.running.push_back(RunningChunk { rows, task, reserved: bytes });
            // An incomplete chunk waits for more rows, unless there are none.
            if self.buffered_rows() < self.chunk_rows && !self.input_ended {
                break;
            }
        }
        // A full chunk that may not run yet stops reading.
        self.memory_exhausted = !self.buffered.is_empty() && self.buffered_rows() >= self.chunk_rows;
        Ok(())
    }

    /// Estimated bytes that a chunk of the first `count` of `buffered` rows needs in addition to these rows.
    fn estimated_bytes(&self, count: usize, buffered: usize) -> usize {
        let of_call = |(n, call)| {
            let texts: usize = self.buffered.iter().map(|(_, texts)| array_bytes(&texts[n])).sum();
            call_bytes(call, count, texts / buffered.max(1) * count)
        };
        self.worker.calls.iter().enumerate().map(of_call).sum()
    }

    /// Removes the first `count` buffered rows. Returns them with their texts: one array per call.
    fn take_rows(&mut self, count: usize) -> Result<(Vec<RecordBatch>, Vec<ArrayRef>)> {
        let (mut batches, mut texts, mut missing) = (Vec::new(), vec![Vec::new(); self.worker.calls.len()], count);
        while missing > 0 && !self.buffered.is_empty() {
            let (batch, columns) = self.buffered.remove(0);
            let n = missing.min(batch.num_rows());
            if n < batch.num_rows() {
                let rest = batch.num_rows() - n;
                let rest_texts = columns.iter().map(|text| text.slice(n, rest)).collect();
                self.buffered.insert(0, (batch.slice(n, rest), rest_texts));
            }
            batches.push(batch.slice(0, n));
            columns.iter().zip(&mut texts).for_each(|(text, all)| all.push(text.slice(0, n)));
            missing -= n;
        }
        let texts = texts.iter().map(|parts| concat_texts(parts)).collect::<Result<_>>()?;
        Ok((concat_rows(&self.input.schema(), batches)?, texts))
    }

    /// Takes the results of the oldest running chunk, and corrects its memory reservation, which was an estimate.
    fn complete(&mut self, columns: Result<Result<Vec<ChunkColumn>>, JoinError>) -> Result<()> {
        let columns = columns.map_err(|e| exec_datafusion_err!("a chunk of rows was not embedded: {e}"))??;
        let Some(RunningChunk { rows, reserved, .. }) = self.running.pop_front() else {
            return internal_err!("a chunk completed that was not running");
        };
        let vectors: usize = columns.iter().map(ChunkColumn::bytes).sum();
        // The next batch is a copy.
        let bytes = rows.iter().map(batch_bytes).sum::<usize>() + vectors + vectors.min(self.limits.batch_bytes);
        self.memory.release(reserved);
        self.memory.count(bytes);
        self.completed = Some(CompletedChunk::new(rows, columns, bytes));
        Ok(())
    }

    /// The next batch of the completed chunk. After its last batch, releases its memory and returns `None`.
    fn next_completed(&mut self) -> Result<Option<RecordBatch>> {
        let Some(chunk) = &mut self.completed else { return Ok(None) };
        if chunk.is_empty() {
            self.memory.release(chunk.reserved);
            self.completed = None;
            if self.input_ended && self.buffered.is_empty() && self.running.is_empty() {
                self.memory.keep_nothing();
            }
            if !self.buffered.is_empty() && (self.memory_exhausted || self.input_ended) {
                self.start_chunks()?;
            }
            return Ok(None);
        }
        let _timer = self.worker.metrics.baseline.elapsed_compute().timer();
        chunk.next_batch(&self.schema, self.batch_rows, self.limits.batch_bytes)
    }
}
