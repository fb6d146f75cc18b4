//! Reads Parquet files, row group by row group.

use std::{cell::Cell, sync::Arc};

use arrow::{
    array::RecordBatch,
    datatypes::{Schema, SchemaRef},
};
use futures::TryStreamExt;
use object_store::ObjectStoreExt;
use parquet::{
    arrow::{
        ParquetRecordBatchStreamBuilder, ProjectionMask,
        arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions},
        async_reader::ParquetRecordBatchStream,
    },
    basic::Type,
    errors::ParquetError,
    file::metadata::ParquetMetaData,
};

use super::{InputFile, NOT_PARQUET, SourceError, bytes::Opened, contain::contain_async, reason::without_data, types};
use crate::stores::{
    StoreError,
    file::{StoreFile, cause},
};

/// Average size of a batch, in uncompressed bytes of the columns read.
const BATCH_BYTES: u64 = 4 << 20;
const BATCH_ROWS: u64 = 8192;

/// The first bytes of a file; the second of one whose footer is encrypted.
const MAGIC: [&[u8]; 2] = [b"PAR1", b"PARE"];
pub(super) const MAGIC_BYTES: u64 = 4;

type Builder = ParquetRecordBatchStreamBuilder<StoreFile>;

/// Rows of a Parquet file.
pub(super) struct Rows {
    stream: ParquetRecordBatchStream<StoreFile>,
    /// Number of rows of the file.
    pub(super) total: u64,
    _opened: Opened,
}

impl Rows {
    /// Reads the columns `read` from row `skip` on; row groups before it are not fetched.
    pub(super) async fn open(file: &InputFile, read: &[usize], skip: u64) -> Result<Self, SourceError> {
        let (opened, builder) = builder(file).await?;
        let mask = ProjectionMask::roots(builder.parquet_schema(), read.iter().copied());
        let rows = batch_rows(builder.metadata(), &mask);
        let total = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
        let stream = builder
            .with_projection(mask)
            .with_batch_size(rows)
            .with_offset(usize::try_from(skip).unwrap_or(usize::MAX))
            .build()
            .map_err(|e| error(file, skip, e))?;
        Ok(Self { stream, total, _opened: opened })
    }

    pub(super) async fn next(&mut self, file: &InputFile, row: u64) -> Result<Option<RecordBatch>, SourceError> {
        contain(self.stream.try_next()).await.map_err(|e| error(file, row, e))
    }
}

/// Refuses a file that does not begin as Parquet does. An empty one has an error of its own.
pub(super) fn check_start(file: &InputFile, start: &[u8]) -> Result<(), SourceError> {
    match start.is_empty() || MAGIC.contains(&start) {
        true => Ok(()),
        false => Err(SourceError::malformed(file, 0, NOT_PARQUET)),
    }
}

/// Converts panics of the reader to errors.
pub(crate) async fn contain<T>(reading: impl Future<Output = Result<T, ParquetError>>) -> Result<T, ParquetError> {
    let damaged = || ParquetError::General("damaged: the reader cannot make sense of it".to_owned());
    contain_async(reading).await.unwrap_or_else(|| Err(damaged()))
}

async fn builder(file: &InputFile) -> Result<(Opened, Builder), SourceError> {
    let opened = Opened::whole(file).await?;
    if opened.size == 0 {
        return Err(SourceError::NoBytes { file: file.to_string() });
    }
    let reader = || StoreFile { store: Arc::clone(&opened.store), path: opened.path.clone(), size: opened.size };
    let failed = |e| error(file, 0, e);
    let builder = match contain(Builder::new(reader())).await {
        Ok(builder) => builder,
        Err(error) => {
            let start = opened.store.get_range(&opened.path, 0..MAGIC_BYTES.min(opened.size)).await;
            start.map_or(Ok(()), |start| check_start(file, &start))?;
            return Err(failed(error));
        }
    };
    let best = best_schema(&builder);
    if &best == builder.schema() {
        return Ok((opened, builder));
    }
    let options = ArrowReaderOptions::new().with_schema(best);
    let metadata = ArrowReaderMetadata::try_new(Arc::clone(builder.metadata()), options).map_err(failed)?;
    let builder = Builder::new_with_metadata(reader(), metadata);
    Ok((opened, builder))
}

/// The types in which the columns are read.
fn best_schema(builder: &Builder) -> SchemaRef {
    let (schema, leaves, place) = (builder.schema(), builder.parquet_schema().columns(), Cell::new(0));
    let is_int96 = |leaf: usize| leaves.get(leaf).is_some_and(|leaf| leaf.physical_type() == Type::INT96);
    let fields = schema.fields().iter().map(|field| {
        let kind = types::from_parquet(field.data_type(), &place, &is_int96);
        field.as_ref().clone().with_data_type(kind)
    });
    Arc::new(Schema::new_with_metadata(fields.collect::<Vec<_>>(), schema.metadata().clone()))
}

/// The schema in the file's footer.
pub(super) async fn schema(file: &InputFile) -> Result<SchemaRef, SourceError> {
    let (_, builder) = builder(file).await?;
    Ok(Arc::new(Schema::new(builder.schema().fields().clone())))
}

/// Number of rows, and uncompressed bytes of the columns in `mask`.
fn size(metadata: &ParquetMetaData, mask: &ProjectionMask) -> (u64, u64) {
    let (mut rows, mut bytes) = (0, 0);
    for group in metadata.row_groups() {
        rows += u64::try_from(group.num_rows()).unwrap_or(0);
        let leaves = group.columns().iter().enumerate().filter(|(leaf, _)| mask.leaf_included(*leaf));
        bytes += leaves.map(|(_, column)| u64::try_from(column.uncompressed_size()).unwrap_or(0)).sum::<u64>();
    }
    (rows, bytes)
}

/// Number of rows of a batch, by the average size of a row.
fn batch_rows(metadata: &ParquetMetaData, mask: &ProjectionMask) -> usize {
    let (rows, bytes) = size(metadata, mask);
    let rows = BATCH_BYTES.saturating_mul(rows).checked_div(bytes).unwrap_or(BATCH_ROWS);
    usize::try_from(rows.clamp(1, BATCH_ROWS)).unwrap_or(1)
}

fn error(file: &InputFile, row: u64, error: ParquetError) -> SourceError {
    match (cause(error), &file.location) {
        (Ok(source), _) if matches!(*source, object_store::Error::Precondition { .. }) => {
            SourceError::Changed { file: file.to_string() }
        }
        (Ok(source), Some(location)) => StoreError::request("read", location, *source).into(),
        (Ok(source), None) => SourceError::malformed(file, row, source.to_string()),
        (Err(reason), _) => SourceError::malformed(file, row, without_data(&reason)),
    }
}
