//! Chunks: the rows that are submitted to the stage at once, from which the engine forms its batches.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, BooleanArray, RecordBatch},
    compute::{and, concat, concat_batches, filter_record_batch},
    datatypes::SchemaRef,
};
use elmo::{EmbeddedColumns, spec::Level};

use super::{manifest::Counts, reader::Reader};
use crate::{
    error::Result,
    source::{Malformed, Mark, Plan, Position, Slice, row_bytes},
    stage::{Stage, results},
};

/// Bytes of token vectors of a chunk, estimated.
const MAX_VECTOR_BYTES: usize = 48 << 20;
/// Bytes of text of a chunk.
const MAX_TEXT_BYTES: u64 = 8 << 20;
/// Bytes of text below which a chunk is not full.
const MIN_TEXT_BYTES: u64 = 4096;
/// Batches of every device in a chunk. Fewer than devices plan at once, so that few chunks are incomplete when a job is
/// interrupted.
const CHUNK_BATCHES: usize = 1;
/// Bytes of English text per token, with the space.
const BYTES_PER_TOKEN: usize = 5;

/// Rows in flight, with the data that is needed to write them to the output.
pub(super) struct Chunk {
    pub(super) slices: Vec<Slice>,
    /// The kept columns of all slices.
    kept: RecordBatch,
    /// Bytes of the input that were read when the chunk was submitted, for progress.
    pub(super) bytes_read: u64,
}

impl Chunk {
    /// Concatenates slices, of which there is at least one; also returns their texts.
    pub(super) fn new(plan: &Plan, slices: Vec<Slice>, bytes_read: u64) -> Result<(Self, ArrayRef)> {
        let texts: Vec<&dyn Array> = slices.iter().map(|slice| slice.text.as_ref()).collect();
        let text = concat(&texts).map_err(elmo::Error::from)?;
        let kept = concat_batches(plan.kept(), slices.iter().map(|slice| &slice.kept)).map_err(elmo::Error::from)?;
        Ok((Self { slices, kept, bytes_read }, text))
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> usize {
        self.kept.num_rows()
    }

    /// The malformed rows, with their files.
    pub(super) fn malformed<'c>(&'c self, plan: &'c Plan) -> impl Iterator<Item = (String, &'c Malformed)> {
        self.slices.iter().flat_map(|slice| {
            let file = |malformed| {
                (plan.files().nth(slice.start.file).map(ToString::to_string).unwrap_or_default(), malformed)
            };
            slice.malformed.iter().map(file)
        })
    }

    /// Which rows are for the output: not malformed ones, nor those that on-error `skip` leaves out; `None` for all.
    fn kept_rows(&self, added: &EmbeddedColumns) -> Result<(Option<BooleanArray>, u64)> {
        let malformed: u64 = self.slices.iter().map(|slice| slice.malformed.len() as u64).sum();
        if malformed == 0 {
            return Ok((added.keep.clone(), 0));
        }
        let well_formed = self.slices.iter().flat_map(|slice| {
            let is_malformed = |row: u64| slice.malformed.iter().any(|malformed| malformed.row == row);
            (0..slice.len() as u64).map(move |row| !is_malformed(slice.start.row + row))
        });
        let well_formed = BooleanArray::from(well_formed.collect::<Vec<bool>>());
        let kept = match &added.keep {
            Some(keep) => and(keep, &well_formed).map_err(elmo::Error::from)?,
            None => well_formed,
        };
        Ok((Some(kept), malformed))
    }

    /// The row after its last.
    pub(super) fn end(&self) -> Position {
        let last = self.slices.last();
        last.map(|s| Position { row: s.start.row + s.len() as u64, ..s.start }).unwrap_or_default()
    }

    /// The rows of the output: the kept columns and `added`, without malformed rows and those that on-error `skip` drops.
    pub(super) fn output(&self, schema: &SchemaRef, added: &EmbeddedColumns) -> Result<(RecordBatch, Counts)> {
        let mut columns = self.kept.columns().to_vec();
        columns.extend(results(schema.fields().len() - columns.len(), &added.vectors));
        columns.push(Arc::new(added.truncated.clone()));
        columns.push(Arc::new(added.error.clone()));
        let batch = RecordBatch::try_new(Arc::clone(schema), columns).map_err(elmo::Error::from)?;
        let (kept, malformed) = self.kept_rows(added)?;
        let batch = match &kept {
            None => batch,
            Some(kept) => filter_record_batch(&batch, kept).map_err(elmo::Error::from)?,
        };
        let counts = counts(added, batch.num_rows() as u64, malformed);
        Ok((batch, counts))
    }
}

fn counts(added: &EmbeddedColumns, rows_out: u64, malformed: u64) -> Counts {
    let stats = added.stats;
    Counts {
        rows_in: stats.rows as u64,
        rows_out,
        // Malformed rows were submitted as NULL.
        nulls: (stats.nulls as u64).saturating_sub(malformed),
        empty: stats.empty as u64,
        truncated: stats.truncated as u64,
        errors: stats.errors as u64,
        malformed,
        skipped: added.keep.as_ref().map_or(0, BooleanArray::false_count) as u64,
        sentences: stats.sentences as u64,
        tokens: stats.tokens as u64,
    }
}

/// Bytes of the values of a batch. Buffers are not counted, because batches that were read together share them.
pub(super) fn memory(rows: &RecordBatch) -> u64 {
    let size = |column: &ArrayRef| column.to_data().get_slice_memory_size().unwrap_or(column.get_array_memory_size());
    rows.columns().iter().map(|column| size(column) as u64).sum()
}

/// Divides the rows of the input into chunks.
pub(super) struct Chunker {
    rows: Reader,
    /// The chunk that is being read. It is a field because the future that reads it may be dropped.
    open: Open,
    /// Rows that were read and are not in a chunk yet.
    rest: Option<Slice>,
    /// Reading has ended; only rows that were read already follow.
    closed: bool,
    max_rows: usize,
    /// Bytes of text after which a chunk is full.
    text_bytes: u64,
    /// Estimated bytes of vectors of a row, and of a byte of text.
    vector_bytes: VectorBytes,
    /// State `carry`: chunks hold whole batches of this many rows.
    multiple: usize,
}

#[derive(Default)]
struct Open {
    slices: Vec<Slice>,
    rows: usize,
    bytes: u64,
}

impl Chunker {
    /// `mark` may say where a row begins that is not after `from`.
    pub(super) fn new(
        window_rows: usize,
        stage: &dyn Stage,
        plan: Arc<Plan>,
        from: Position,
        mark: Option<Mark>,
    ) -> Self {
        let multiple = stage.spec().batch_rows.unwrap_or(1);
        // An interrupted job writes all rows that it has read from standard input, so none are read ahead.
        let ahead = plan.files().all(|file| file.location.is_some());
        Self {
            rows: Reader::new(plan, from, mark, ahead),
            open: Open::default(),
            rest: None,
            closed: false,
            max_rows: window_rows.div_ceil(multiple).saturating_mul(multiple),
            text_bytes: chunk_text_bytes(stage),
            vector_bytes: VectorBytes::of(stage),
            multiple,
        }
    }

    /// The first row of the next chunk.
    pub(super) fn position(&self) -> Position {
        let next = self.open.slices.first().or(self.rest.as_ref());
        next.map_or_else(|| self.rows.position(), |slice| slice.start)
    }

    /// Bytes of the input that were read so far, for progress.
    pub(super) fn bytes_read(&self) -> u64 {
        self.rows.bytes_read()
    }

    /// Ends reading: only the rows that were read already follow. For an input that cannot be read again.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether no row is left.
    pub(super) async fn is_at_end(&mut self) -> Result<bool> {
        Ok(self.open.slices.is_empty() && self.peek().await?.is_none())
    }

    async fn peek(&mut self) -> Result<Option<&Slice>> {
        if self.rest.is_none() {
            self.rest = if self.closed { self.rows.buffered().await? } else { self.rows.next().await? };
        }
        Ok(self.rest.as_ref())
    }

    /// Slices of the next chunk, of at most `max_rows` rows; none at the end. The same chunk is returned until
    /// [`Chunker::advance`] is called, so the future may be dropped.
    pub(super) async fn next(&mut self, max_rows: u64) -> Result<Vec<Slice>> {
        let max_rows = usize::try_from(max_rows).unwrap_or(usize::MAX).min(self.max_rows);
        while self.open.rows < max_rows && self.peek().await?.is_some() {
            if !self.add(max_rows) {
                break;
            }
        }
        Ok(self.open.slices.clone())
    }

    /// Memory of the next chunk until its rows are written, in bytes: texts, kept columns, expected vectors.
    pub(super) fn next_bytes(&self) -> u64 {
        let kept: u64 = self.open.slices.iter().map(|slice| memory(&slice.kept)).sum();
        kept + self.open.bytes + self.vector_bytes.estimate(self.open.rows as u64, self.open.bytes)
    }

    /// Proceeds to the chunk after the one that [`Chunker::next`] returned last.
    pub(super) fn advance(&mut self) {
        self.open = Open::default();
    }

    /// Adds rows that were read to the chunk; false when the chunk is full before all are added.
    fn add(&mut self, max_rows: usize) -> bool {
        let Some(slice) = self.rest.take() else { return true };
        let mut sizes = vec![0; slice.len()];
        row_bytes(&slice.text, &mut sizes);
        let open = &mut self.open;
        let mut taken = 0;
        for size in sizes {
            let is_whole = (open.rows + taken).is_multiple_of(self.multiple);
            if open.rows + taken == max_rows || (open.bytes >= self.text_bytes && is_whole) {
                break;
            }
            open.bytes += size;
            taken += 1;
        }
        open.rows += taken;
        if taken > 0 {
            open.slices.push(slice.slice(0, taken));
        }
        let left = slice.len() - taken;
        self.rest = (left > 0).then(|| slice.slice(taken, left));
        left == 0
    }
}

/// Bytes of text after which a chunk is full: enough for [`CHUNK_BATCHES`] batches of every device, and at token level
/// at most [`MAX_VECTOR_BYTES`] of vectors.
fn chunk_text_bytes(stage: &dyn Stage) -> u64 {
    let mut tokens = stage.tokens_at_once().saturating_mul(CHUNK_BATCHES);
    if stage.spec().level == Level::Token {
        tokens = tokens.min(MAX_VECTOR_BYTES / (4 * stage.width().max(1)));
    }
    (tokens.saturating_mul(BYTES_PER_TOKEN) as u64).clamp(MIN_TEXT_BYTES, MAX_TEXT_BYTES)
}

/// Expected size of vectors, in bytes.
#[derive(Clone, Copy)]
struct VectorBytes {
    level: Level,
    vector: u64,
}

impl VectorBytes {
    fn of(stage: &dyn Stage) -> Self {
        Self { level: stage.spec().level, vector: 4 * stage.width() as u64 }
    }

    fn estimate(self, rows: u64, text_bytes: u64) -> u64 {
        let vectors = if self.level == Level::Token { text_bytes / BYTES_PER_TOKEN as u64 } else { rows };
        vectors.saturating_mul(self.vector)
    }
}
