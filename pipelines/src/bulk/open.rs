//! A part that is not complete yet, and what becomes of it when the job is asked to stop.
//!
//! A part is durable as a whole or not at all, so that its bytes never depend on interruptions. What was computed of it
//! need not be lost for that: its rows are put aside beside the manifest, and the next run writes them first.

use std::{collections::VecDeque, io::Cursor, sync::Arc};

use arrow::{
    array::{Array, ArrayRef, RecordBatch},
    datatypes::{Schema, SchemaRef},
    error::ArrowError,
    ipc::{reader::StreamReader, writer::StreamWriter},
};
use object_store::PutMode;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Window;
use super::manifest::Counts;
use crate::{
    error::Result,
    sink::PartWriter,
    source::Position,
    stores::{Location, StoreError},
};

/// The first rows of an open part are kept in memory up to so many bytes; what follows is computed again after an
/// interruption.
const KEPT_BYTES: usize = 256 << 20;
/// Key of the note in the schema of the rows that are put aside.
const NOTE: &str = "elmo.partial";

/// A part on its way.
pub(super) struct OpenPart {
    pub(super) writer: PartWriter,
    /// What is in it so far.
    pub(super) counts: Counts,
    /// Windows that devices work on, in order.
    pub(super) under_way: VecDeque<Window>,
    /// Rows that the writer has yet to take.
    pub(super) unwritten: Option<RecordBatch>,
    pub(super) kept: Kept,
}

impl OpenPart {
    pub(super) fn new(writer: PartWriter, start: Position) -> Self {
        let kept = Kept {
            rows: Vec::new(),
            bytes: 0,
            full: false,
            note: Note { start, end: start, counts: Counts::default() },
        };
        Self { writer, counts: Counts::default(), under_way: VecDeque::new(), unwritten: None, kept }
    }

    /// Adds the rows of a window that ends before `end`.
    pub(super) fn add(&mut self, rows: RecordBatch, counts: Counts, end: Position) {
        self.counts += counts;
        self.kept.add(&rows, self.counts, end);
        self.unwritten = Some(rows);
    }

    /// Begins with rows that were put aside.
    pub(super) async fn take_up(&mut self, partial: Partial) -> Result<()> {
        for rows in &partial.rows {
            self.writer.write(rows).await?;
        }
        self.counts = partial.counts;
        self.kept.take_up(partial);
        Ok(())
    }
}

/// What is said about rows that are put aside.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Note {
    start: Position,
    end: Position,
    counts: Counts,
}

/// The first rows of an open part.
pub(super) struct Kept {
    rows: Vec<RecordBatch>,
    bytes: usize,
    /// Later rows came that are not kept.
    full: bool,
    note: Note,
}

impl Kept {
    fn add(&mut self, rows: &RecordBatch, counts: Counts, end: Position) {
        self.full |= self.bytes + memory(rows) > KEPT_BYTES;
        if !self.full {
            (self.note.counts, self.note.end) = (counts, end);
            self.bytes += memory(rows);
            self.rows.push(rows.clone());
        }
    }

    /// Begins with rows that were put aside: all of them, as their note speaks of all.
    fn take_up(&mut self, partial: Partial) {
        self.bytes = partial.rows.iter().map(memory).sum();
        (self.note.counts, self.note.end) = (partial.counts, partial.end);
        self.rows = partial.rows;
    }

    /// Puts the rows aside and says how many rows of the input they stand for.
    pub(super) async fn save(&mut self, location: &Location) -> Result<u64, StoreError> {
        if self.rows.is_empty() {
            return Ok(0);
        }
        let bytes = encode(&self.rows, &self.note).map_err(|e| damaged(location, e))?;
        let put = location.put(sealed(bytes).into(), PutMode::Overwrite).await;
        put.map_err(|e| StoreError::request("write", location, e))?;
        location.sync()?;
        Ok(self.note.counts.rows_in)
    }
}

/// Bytes of the values of a batch. Not of its buffers: batches that were read together share them.
fn memory(rows: &RecordBatch) -> usize {
    let size = |column: &ArrayRef| column.to_data().get_slice_memory_size().unwrap_or(column.get_array_memory_size());
    rows.columns().iter().map(size).sum()
}

/// Bytes of a SHA-256.
const SEAL: usize = 32;

/// With a hash at the end: a file that a crash left half written, or a disk changed, must not become vectors.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let seal = Sha256::digest(&bytes);
    bytes.extend_from_slice(&seal);
    bytes
}

fn unsealed(bytes: &[u8]) -> Result<&[u8], ArrowError> {
    let damaged = || ArrowError::IpcError("damaged: its hash is another one".to_owned());
    let (bytes, seal) = bytes.split_last_chunk::<SEAL>().ok_or_else(damaged)?;
    if Sha256::digest(bytes).as_slice() == seal { Ok(bytes) } else { Err(damaged()) }
}

fn damaged(location: &Location, error: ArrowError) -> StoreError {
    let source = std::io::Error::other(error);
    StoreError::Local { operation: "write", address: location.to_string(), source }
}

fn encode(rows: &[RecordBatch], note: &Note) -> Result<Vec<u8>, ArrowError> {
    let Some(first) = rows.first() else { return Ok(Vec::new()) };
    let note = serde_json::to_string(note).map_err(|e| ArrowError::JsonError(e.to_string()))?;
    let mut schema: Schema = first.schema().as_ref().clone();
    schema.metadata.insert(NOTE.to_owned(), note);
    let mut writer = StreamWriter::try_new(Vec::new(), &schema)?;
    for rows in rows {
        writer.write(rows)?;
    }
    writer.into_inner()
}

/// Rows that an earlier run put aside.
pub(super) struct Partial {
    pub(super) rows: Vec<RecordBatch>,
    pub(super) end: Position,
    pub(super) counts: Counts,
}

impl Partial {
    /// Reads what was put aside of the part that begins at `start`. What cannot be read is computed again.
    pub(super) async fn load(location: &Location, start: Position, schema: &SchemaRef) -> Option<Self> {
        let bytes = location.get().await.ok()??;
        match unsealed(&bytes).and_then(|bytes| decode(bytes, schema)) {
            Ok((rows, note)) if note.start == start => Some(Self { rows, end: note.end, counts: note.counts }),
            Ok(_) => None,
            Err(error) => {
                tracing::warn!(file = %location, %error, "what an interrupted job put aside cannot be read");
                None
            }
        }
    }
}

fn decode(bytes: &[u8], schema: &SchemaRef) -> Result<(Vec<RecordBatch>, Note), ArrowError> {
    let reader = StreamReader::try_new(Cursor::new(bytes), None)?;
    let note = reader.schema().metadata.get(NOTE).cloned().unwrap_or_default();
    let note: Note = serde_json::from_str(&note).map_err(|e| ArrowError::JsonError(e.to_string()))?;
    let mut rows = Vec::new();
    for batch in reader {
        rows.push(RecordBatch::try_new(Arc::clone(schema), batch?.columns().to_vec())?);
    }
    let there: usize = rows.iter().map(RecordBatch::num_rows).sum();
    if there as u64 != note.counts.rows_out {
        return Err(ArrowError::IpcError(format!("{there} rows instead of {}", note.counts.rows_out)));
    }
    Ok((rows, note))
}
