//! Sizes in bytes: of arrays, of the vectors that a text will have, and of the chunks that bound both.

use datafusion::arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch},
    datatypes::DataType,
};
use datafusion::execution::memory_pool::MemoryPool;
use elmo::spec::Level;

use super::call::BoundCall;
use crate::memory::at_most;

/// Bytes of text per chunk, which keep the devices busy for several batches.
const CHUNK_TEXT_BYTES: usize = 256 << 10;
/// Minimum rows per chunk.
const MIN_CHUNK_ROWS: usize = 64;
/// Bytes of English text per token, including the space. An estimate.
const BYTES_PER_TOKEN: usize = 5;
/// Bytes per token besides its vector: its place in the text, and its end in the sentence that waits for a device.
const PLACE_BYTES: usize = 32;
/// The vectors of a chunk take at most this part of a memory limit. Four chunks run, and a chunk that completes exists
/// twice: as the results of its sentences, and as a column.
const VECTOR_PART: usize = 32;

/// Maximum sizes of chunks and of the batches that are cut from them.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkLimits {
    /// Estimated bytes of the vectors of a chunk.
    pub(super) vector_bytes: usize,
    /// Bytes of the vectors of an output batch.
    pub(super) batch_bytes: usize,
}

impl Default for ChunkLimits {
    fn default() -> Self {
        Self { vector_bytes: 48 << 20, batch_bytes: 32 << 20 }
    }
}

impl ChunkLimits {
    /// The limits in a query whose memory is limited.
    pub(super) fn within(pool: &dyn MemoryPool) -> Self {
        let Self { vector_bytes, batch_bytes } = Self::default();
        let part = |bytes| at_most(bytes, VECTOR_PART, pool);
        Self { vector_bytes: part(vector_bytes), batch_bytes: part(batch_bytes) }
    }
}

/// Bytes of the values of an array's rows. Arrow counts a view as 16 bytes, whatever the length of its text, and counts
/// all values of a dictionary, and all values of the list array that a slice was taken from.
pub(super) fn array_bytes(array: &ArrayRef) -> usize {
    match array.data_type() {
        DataType::Utf8View => array.as_string_view().lengths().map(|n| n as usize + 16).sum(),
        DataType::BinaryView => array.as_binary_view().lengths().map(|n| n as usize + 16).sum(),
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            let values = dictionary.values();
            array_bytes(values) / values.len().max(1) * array.len() + 8 * array.len()
        }
        DataType::List(_) => {
            let lists = array.as_list::<i32>();
            let (first, last) = (lists.value_offsets()[0] as usize, lists.value_offsets()[array.len()] as usize);
            array_bytes(&lists.values().slice(first, last - first)) + 4 * array.len()
        }
        DataType::LargeList(_) => {
            let lists = array.as_list::<i64>();
            let (first, last) = (lists.value_offsets()[0] as usize, lists.value_offsets()[array.len()] as usize);
            array_bytes(&lists.values().slice(first, last - first)) + 8 * array.len()
        }
        DataType::Struct(_) => array.as_struct().columns().iter().map(array_bytes).sum(),
        _ => array.to_data().get_slice_memory_size().unwrap_or_else(|_| array.get_array_memory_size()),
    }
}

/// Bytes of all columns of a batch.
pub(super) fn batch_bytes(rows: &RecordBatch) -> usize {
    rows.columns().iter().map(array_bytes).sum()
}

/// Bytes of one value of a result: for a list, the bytes of its items.
pub(super) fn value_bytes(array: &ArrayRef, row: usize) -> usize {
    match array.data_type() {
        DataType::List(_) => {
            let lists = array.as_list::<i32>();
            let items = lists.value_length(row) as usize;
            items * (item_bytes(lists.values()) + 4)
        }
        _ => item_bytes(array),
    }
}

/// Bytes per item. Items have about the same size, as each holds one vector.
fn item_bytes(items: &ArrayRef) -> usize {
    match items.data_type() {
        DataType::FixedSizeList(_, width) => 4 * *width as usize,
        DataType::Struct(_) => 32 + items.as_struct().columns().iter().map(item_bytes).sum::<usize>(),
        _ => 8,
    }
}

/// Estimated bytes that the call allocates for a chunk: copies of its texts as keys of the cache and as sentences, its
/// tokens, and its vectors as results of sentences and as a column. The number of tokens is unknown before the texts are
/// tokenised.
pub(super) fn call_bytes(call: &BoundCall, rows: usize, text_bytes: usize) -> usize {
    let tokens = text_bytes / BYTES_PER_TOKEN + rows;
    let vectors = match call.call.options.spec.level {
        Level::Sentence => rows,
        Level::Token => tokens,
    };
    // The softmax needs a reordered copy.
    let copies = if call.call.kind.is_score() { 3 } else { 2 };
    3 * text_bytes + tokens * PLACE_BYTES + vectors.saturating_mul(4 * copies * call.width())
}

/// Rows per chunk, estimated from the texts of one batch. `texts` has one array per call.
pub(super) fn chunk_rows(calls: &[BoundCall], texts: &[ArrayRef], batch_rows: usize, max_vectors: usize) -> usize {
    let of_call = |(call, text): (&BoundCall, &ArrayRef)| {
        let row = array_bytes(text) / text.len().max(1) + 1;
        let rows = chunk_text_bytes(call, max_vectors) / row;
        match call.call.options.spec.level {
            Level::Sentence => rows.min(max_vectors / (4 * call.width().max(1))),
            Level::Token => rows,
        }
    };
    let rows = calls.iter().zip(texts).map(of_call).min().unwrap_or(batch_rows);
    rows.clamp(MIN_CHUNK_ROWS.min(batch_rows.max(1)), batch_rows.max(1))
}

/// Bytes of text per chunk of a call: less than [`CHUNK_TEXT_BYTES`] where its token vectors would exceed `max_vectors`
/// bytes.
pub(super) fn chunk_text_bytes(call: &BoundCall, max_vectors: usize) -> usize {
    match call.call.options.spec.level {
        Level::Sentence => CHUNK_TEXT_BYTES,
        Level::Token => CHUNK_TEXT_BYTES.min(max_vectors / (4 * call.width().max(1)) * BYTES_PER_TOKEN),
    }
}
