//! The encoding of an output file, and its writer.
//!
//! Vectors are split into byte streams and packed, without dictionary and statistics: every value occurs once, and
//! nobody looks for vectors between two bounds. The other columns have both, and a page index.

use arrow::{
    array::RecordBatch,
    datatypes::{Schema, SchemaRef},
};
use parquet::{
    arrow::{ArrowSchemaConverter, AsyncArrowWriter},
    basic::{Compression, Encoding as PageEncoding, Type, ZstdLevel},
    errors::ParquetError,
    file::{
        metadata::KeyValue,
        properties::{EnabledStatistics, WriterProperties, WriterPropertiesBuilder},
    },
    schema::types::ColumnDescriptor,
};

use super::{
    SinkError,
    units::{Unit, Units},
    upload::Upload,
};
use crate::stores::{Location, StoreError, file::cause};

/// What column chunks are packed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Codec {
    /// Level 1: higher levels take more time for no fewer bytes, as vectors are noise but for their exponents.
    #[default]
    Zstd,
    /// For readers without zstd.
    Snappy,
    /// The raw block format.
    Lz4,
    /// Not packed.
    None,
}

impl Codec {
    /// Every legal word.
    pub const WORDS: &'static [&'static str] = &["zstd", "snappy", "lz4", "none"];

    /// The word of the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Zstd => "zstd",
            Self::Snappy => "snappy",
            Self::Lz4 => "lz4",
            Self::None => "none",
        }
    }

    fn compression(self) -> Compression {
        match self {
            Self::Zstd => Compression::ZSTD(ZstdLevel::try_new(1).unwrap_or_default()),
            Self::Snappy => Compression::SNAPPY,
            Self::Lz4 => Compression::LZ4_RAW,
            Self::None => Compression::UNCOMPRESSED,
        }
    }
}

impl std::str::FromStr for Codec {
    type Err = elmo::spec::SpecError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        [Self::Zstd, Self::Snappy, Self::Lz4, Self::None].into_iter().find(|codec| codec.as_str() == s).ok_or_else(
            || elmo::spec::SpecError::Value { option: "compression", value: s.to_owned(), legal: Self::WORDS.to_vec() },
        )
    }
}

/// How rows are encoded; part of the identity of an output.
#[derive(Debug, Clone)]
pub struct Encoding {
    /// The column with the vectors.
    pub vectors: String,
    /// What column chunks are packed with.
    pub codec: Codec,
    /// A row group ends when its rows, not encoded, have this many bytes.
    pub row_group_bytes: u64,
    /// Key-value pairs of the footer.
    pub metadata: Vec<(String, String)>,
}

impl Encoding {
    fn properties(&self, schema: &Schema) -> Result<WriterProperties, ParquetError> {
        let footer = self.metadata.iter().map(|(k, v)| KeyValue::new(k.clone(), v.clone())).collect();
        let properties = WriterProperties::builder()
            .set_created_by(concat!("elmo version ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_key_value_metadata(Some(footer))
            .set_compression(self.codec.compression())
            .set_statistics_enabled(EnabledStatistics::Page)
            // Row groups end where we flush, never in the middle of a unit.
            .set_max_row_group_row_count(None);
        let columns = ArrowSchemaConverter::new().convert(schema)?;
        let vectors = columns.columns().iter().filter(|column| self.is_vector(column));
        Ok(vectors.fold(properties, |properties, column| vector_column(properties, column)).build())
    }

    fn is_vector(&self, column: &ColumnDescriptor) -> bool {
        column.physical_type() == Type::FLOAT && column.path().parts().first() == Some(&self.vectors)
    }
}

fn vector_column(properties: WriterPropertiesBuilder, column: &ColumnDescriptor) -> WriterPropertiesBuilder {
    properties
        .set_column_encoding(column.path().clone(), PageEncoding::BYTE_STREAM_SPLIT)
        .set_column_dictionary_enabled(column.path().clone(), false)
        .set_column_statistics_enabled(column.path().clone(), EnabledStatistics::None)
}

/// What is known about a file that is there now.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Written {
    /// Rows in it.
    pub rows: u64,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256, hexadecimal.
    pub sha256: String,
}

/// Writes one file. It appears under its name in [`commit`](Self::commit), whole; if the writer is dropped before that,
/// it never does.
pub struct PartWriter {
    location: Location,
    writer: AsyncArrowWriter<Upload>,
    units: Units,
    rows: u64,
    /// Bytes in the row group that is open.
    group: u64,
    group_bytes: u64,
}

impl std::fmt::Debug for PartWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PartWriter").field("location", &self.location).field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl PartWriter {
    /// Begins a file; one that is written again is `expected` to have the SHA-256 of the first time.
    ///
    /// # Errors
    /// [`SinkError::Encode`] when Parquet has no type for a column.
    pub fn new(
        location: Location,
        schema: &SchemaRef,
        encoding: &Encoding,
        expected: Option<&str>,
    ) -> Result<Self, SinkError> {
        let failed = |e| error(&location, e);
        let properties = encoding.properties(schema).map_err(failed)?;
        let upload = Upload::new(location.clone(), expected);
        let writer = AsyncArrowWriter::try_new(upload, SchemaRef::clone(schema), Some(properties)).map_err(failed)?;
        let group_bytes = encoding.row_group_bytes;
        Ok(Self { location, writer, units: Units::default(), rows: 0, group: 0, group_bytes })
    }

    /// Adds rows.
    ///
    /// # Errors
    /// [`SinkError::Encode`] when they are not of the schema, [`SinkError::Store`] when the store fails.
    pub async fn write(&mut self, batch: &RecordBatch) -> Result<(), SinkError> {
        self.rows += batch.num_rows() as u64;
        for unit in self.units.push(batch).map_err(|e| error(&self.location, e.into()))? {
            self.encode(unit).await?;
        }
        Ok(())
    }

    async fn encode(&mut self, unit: Unit) -> Result<(), SinkError> {
        self.writer.write(&unit.rows).await.map_err(|e| error(&self.location, e))?;
        self.group += unit.bytes;
        if self.group >= self.group_bytes {
            self.group = 0;
            self.writer.flush().await.map_err(|e| error(&self.location, e))?;
        }
        Ok(())
    }

    /// Finishes the file; it is there, and on the disk, when this returns, unless its SHA-256 is not the expected one:
    /// then nothing appears, and the caller sees it by the hash.
    ///
    /// # Errors
    /// [`SinkError::Encode`] or [`SinkError::Store`] when the rest cannot be encoded or written. Then there is no file,
    /// or, when only writing through to the disk failed, one that may not outlive a power cut.
    pub async fn commit(mut self) -> Result<Written, SinkError> {
        if let Err(error) = self.finish().await {
            self.abort().await;
            return Err(error);
        }
        let upload = self.writer.into_inner();
        if upload.is_expected() {
            // After a power cut a manifest entry must not outlive its file.
            self.location.sync()?;
        }
        let (bytes, sha256) = upload.seal();
        Ok(Written { rows: self.rows, bytes, sha256 })
    }

    async fn finish(&mut self) -> Result<(), SinkError> {
        if let Some(unit) = self.units.close().map_err(|e| error(&self.location, e.into()))? {
            self.encode(unit).await?;
        }
        self.writer.finish().await.map(drop).map_err(|e| error(&self.location, e))
    }

    /// Leaves nothing behind.
    pub async fn abort(self) {
        self.writer.into_inner().abort().await;
    }
}

fn error(location: &Location, error: ParquetError) -> SinkError {
    match cause(error) {
        Ok(source) => StoreError::request("write", location, *source).into(),
        Err(reason) => SinkError::Encode { file: location.to_string(), reason },
    }
}
