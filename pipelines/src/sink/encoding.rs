//! The encoding of an output file.
//!
//! Vectors are encoded as byte streams and compressed, without dictionary and statistics: every value occurs once, and
//! no query searches for vectors between two bounds. The other columns have both, and a page index.

use arrow::datatypes::Schema;
use parquet::{
    arrow::{ArrowSchemaConverter, add_encoded_arrow_schema_to_metadata},
    basic::{Compression, Encoding as PageEncoding, Type, ZstdLevel},
    errors::ParquetError,
    file::{
        metadata::KeyValue,
        properties::{EnabledStatistics, WriterProperties, WriterPropertiesBuilder},
    },
    schema::types::ColumnDescriptor,
};
use serde::{Deserialize, Serialize};

/// Compression codec of the column chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Codec {
    /// Level 1: higher levels take more time without saving bytes, as vectors are noise except for their exponents.
    #[default]
    Zstd,
    /// For readers without zstd.
    Snappy,
    /// The raw block format.
    Lz4,
    /// No compression.
    None,
}

impl Codec {
    /// The legal words of the command line.
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
    /// Compression codec of the column chunks.
    pub codec: Codec,
    /// A row group ends when its rows, not encoded, have this many bytes.
    pub row_group_bytes: u64,
}

impl Encoding {
    /// Without key-value metadata, which the writer appends when it closes.
    pub(super) fn properties(&self, schema: &Schema) -> Result<WriterProperties, ParquetError> {
        let properties = WriterProperties::builder()
            .set_created_by(concat!("elmo version ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_compression(self.codec.compression())
            .set_statistics_enabled(EnabledStatistics::Page)
            // Row groups end where the writer flushes, never within a unit.
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

/// The footer's key-value pairs: the caller's, then the Arrow schema, in the order in which Arrow's own writer has them.
pub(super) fn footer(pairs: &[(String, String)], schema: &Schema) -> Vec<KeyValue> {
    let mut properties = WriterProperties::new();
    add_encoded_arrow_schema_to_metadata(schema, &mut properties);
    let schema = properties.key_value_metadata().cloned().unwrap_or_default();
    pairs.iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone())).chain(schema).collect()
}
