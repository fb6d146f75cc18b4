//! Rows into the bytes of one Parquet file, on other threads: several row groups are encoded at the same time.
//!
//! ```text
//! rows -> units -> row group n      encoded on a blocking thread
//!               -> row group n + 1  on another one, when group n has all of its rows but is not encoded yet
//!                     |
//!               the file, in the order of the groups
//! ```
//!
//! Where a row group ends depends on the rows alone, so the bytes are those of [`Encoder`](super::Encoder).

use std::{collections::VecDeque, mem, sync::Arc, thread};

use arrow::{array::RecordBatch, datatypes::SchemaRef};
use datafusion::common::runtime::SpawnedTask;
use futures::FutureExt;
use parquet::{
    arrow::arrow_writer::ArrowRowGroupWriterFactory,
    errors::{ParquetError, Result},
    file::writer::SerializedFileWriter,
};
use tokio::{
    sync::mpsc::{self, UnboundedReceiver, UnboundedSender},
    task::{JoinError, spawn_blocking},
};

use super::{
    Encoding, encoder, encoding,
    row_group::{Closed, RowGroup},
    units::{Unit, Units},
};

/// Maximum number of row groups that are encoded at the same time. Each may have all of its rows in memory, and its encoded bytes. Row
/// groups of huge rows are fewer: in all, those that are complete have as many bytes as this number of others.
const MAX_GROUPS: usize = 4;

/// Row groups that are encoded at the same time on this machine.
pub(crate) fn row_groups_at_once() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(MAX_GROUPS)
}

/// Encodes the rows of one file.
pub(super) struct Groups {
    schema: SchemaRef,
    file: SerializedFileWriter<Vec<u8>>,
    factory: ArrowRowGroupWriterFactory,
    units: Units,
    /// The row group that gets the next unit.
    open: Option<Open>,
    /// Row groups before it that are not in the file yet, in order.
    before: VecDeque<Complete>,
    /// Number of row groups that have begun.
    begun: usize,
    rows: u64,
    row_group_bytes: u64,
    at_once: usize,
}

/// A row group that has all of its rows.
struct Complete {
    bytes: u64,
    task: SpawnedTask<Result<Closed>>,
}

/// A row group that gets units. The channel holds those that are not encoded yet: a row group at most.
struct Open {
    units: UnboundedSender<Unit>,
    bytes: u64,
    task: SpawnedTask<Result<Closed>>,
}

impl Groups {
    /// Begins a file.
    ///
    /// # Errors
    /// When Parquet has no type for a column.
    pub(super) fn new(schema: &SchemaRef, encoding: &Encoding) -> Result<Self> {
        let (file, factory) = encoder::begin(Vec::new(), schema, encoding)?;
        Ok(Self {
            schema: Arc::clone(schema),
            file,
            factory,
            units: Units::default(),
            open: None,
            before: VecDeque::new(),
            begun: 0,
            rows: 0,
            row_group_bytes: encoding.row_group_bytes,
            at_once: row_groups_at_once(),
        })
    }

    /// Adds rows; waits while too many row groups are being encoded.
    ///
    /// # Errors
    /// When rows, these or earlier ones, do not match the schema.
    pub(super) async fn push(&mut self, batch: &RecordBatch) -> Result<()> {
        self.rows += batch.num_rows() as u64;
        for unit in self.units.push(batch) {
            self.encode(unit).await?;
        }
        Ok(())
    }

    async fn encode(&mut self, unit: Unit) -> Result<()> {
        let room = usize::from(self.open.is_none());
        self.append_until(self.at_once - room).await?;
        let open = match &mut self.open {
            Some(open) => open,
            none => {
                let group = RowGroup::new(&self.file, &self.factory, &self.schema, self.begun)?;
                self.begun += 1;
                none.insert(Open::begin(group))
            }
        };
        open.bytes += unit.bytes;
        // Where the task has ended, it has failed; its error is returned when its turn comes.
        let failed = open.units.send(unit).is_err();
        if failed || open.bytes >= self.row_group_bytes {
            self.end_group();
        }
        Ok(())
    }

    fn end_group(&mut self) {
        self.before.extend(self.open.take().map(|Open { bytes, task, .. }| Complete { bytes, task }));
    }

    /// Appends the row groups that are encoded, so that they are uploaded soon, and waits until at most `limit` others are left, of a
    /// limited size.
    async fn append_until(&mut self, limit: usize) -> Result<()> {
        let max_bytes = (self.at_once as u64).saturating_mul(self.row_group_bytes);
        loop {
            let bytes: u64 = self.before.iter().map(|group| group.bytes).sum();
            let is_over = self.before.len() > limit || bytes > max_bytes;
            let Some(first) = self.before.front_mut() else { return Ok(()) };
            let closed = match (&mut first.task).now_or_never() {
                None if !is_over => return Ok(()),
                None => (&mut first.task).await,
                Some(closed) => closed,
            };
            self.before.pop_front();
            closed.map_err(panicked)??.append(&mut self.file)?;
        }
    }

    /// Encodes the rest and writes the footer with these key-value pairs.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub(super) async fn finish(&mut self, footer: &[(String, String)]) -> Result<()> {
        if let Some(unit) = self.units.close() {
            self.encode(unit).await?;
        }
        self.end_group();
        self.append_until(0).await?;
        for pair in encoding::footer(footer, &self.schema) {
            self.file.append_key_value_metadata(pair);
        }
        self.file.finish().map(drop)
    }

    /// Row groups that have begun.
    pub(super) fn begun(&self) -> usize {
        self.begun
    }

    /// Rows so far.
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// The bytes of the file that were not taken yet.
    pub(super) fn take(&mut self) -> Vec<u8> {
        mem::take(self.file.inner_mut())
    }
}

impl Open {
    fn begin(group: RowGroup) -> Self {
        let (units, received) = mpsc::unbounded_channel();
        Self { units, bytes: 0, task: SpawnedTask::spawn(encode_all(group, received)) }
    }
}

/// Encodes units until no more come.
async fn encode_all(mut group: RowGroup, mut units: UnboundedReceiver<Unit>) -> Result<Closed> {
    while let Some(unit) = units.recv().await {
        let encoded = spawn_blocking(move || group.write(&unit).map(|()| group));
        group = encoded.await.map_err(panicked)??;
    }
    spawn_blocking(move || group.close()).await.map_err(panicked)?
}

/// Continues a panic of the encoder. Otherwise the runtime is shutting down.
fn panicked(error: JoinError) -> ParquetError {
    match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(cancelled) => ParquetError::External(Box::new(cancelled)),
    }
}

#[cfg(test)]
mod tests {
    use arrow::{
        array::{ArrayRef, Int64Array, StringArray},
        datatypes::{DataType, Field, Schema},
    };
    use proptest::prelude::*;

    use super::*;
    use crate::sink::{Codec, Encoder};

    fn rows(count: usize) -> RecordBatch {
        RecordBatch::try_from_iter([
            ("id", Arc::new(Int64Array::from_iter(0..count as i64)) as ArrayRef),
            ("text", Arc::new(StringArray::from_iter_values((0..count).map(|i| format!("text {}", i * 7919))))),
        ])
        .unwrap()
    }

    /// A unit fills each row group.
    fn encoding() -> Encoding {
        Encoding { vectors: "vector".into(), codec: Codec::Zstd, row_group_bytes: 1 << 10 }
    }

    async fn encoded(rows: &RecordBatch, arrivals: &[usize]) -> Vec<u8> {
        let mut groups = Groups::new(&rows.schema(), &encoding()).unwrap();
        let (mut start, mut bytes) = (0, Vec::new());
        for size in arrivals.iter().cycle() {
            let count = (*size).min(rows.num_rows() - start);
            groups.push(&rows.slice(start, count)).await.unwrap();
            bytes.extend(groups.take());
            start += count;
            if start == rows.num_rows() {
                break;
            }
        }
        groups.finish(&[]).await.unwrap();
        assert_eq!(groups.rows(), rows.num_rows() as u64);
        bytes.extend(groups.take());
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Expected: the bytes of one thread, which are those of Arrow's writer.
        #[test]
        fn the_file_is_that_of_one_thread(count in 1_usize..60_000, arrivals in prop::collection::vec(1_usize..30_000, 1..6)) {
            let rows = rows(count);
            let mut encoder = Encoder::new(Vec::new(), &rows.schema(), &encoding()).unwrap();
            encoder.push(&rows).iter().for_each(|unit| encoder.encode(unit).unwrap());
            encoder.finish(&[]).unwrap();
            let runtime = tokio::runtime::Runtime::new().unwrap();
            prop_assert!(runtime.block_on(encoded(&rows, &arrivals)) == *encoder.out());
        }
    }

    #[tokio::test]
    async fn rows_that_do_not_match_are_an_error_in_their_turn() {
        let schema: SchemaRef = Arc::new(Schema::new(vec![
            Field::new("id", DataType::Int64, false),
            Field::new("text", DataType::Utf8, false),
        ]));
        let mut groups = Groups::new(&schema, &encoding()).unwrap();
        groups.push(&rows(5000)).await.unwrap();
        let pushed = groups.push(&rows(5000).project(&[0]).unwrap()).await;
        let error = match pushed {
            Err(error) => error,
            Ok(()) => groups.finish(&[]).await.unwrap_err(),
        };
        assert!(error.to_string().contains("no column text"), "{error}");
    }
}
