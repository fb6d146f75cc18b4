//! Format and compression of a file, by its name.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Format {
    /// A row per line, one column `text`.
    Text,
    /// Comma-separated values with a header line.
    Csv,
    /// As CSV, with tabs.
    Tsv,
    /// One JSON object per line, or an array of objects.
    Json,
    /// Parquet.
    Parquet,
    /// Arrow IPC, file or stream.
    Arrow,
}

impl Format {
    /// The known extensions, for messages.
    pub const EXTENSIONS: &str =
        ".txt, .csv, .tsv, .jsonl, .ndjson, .json, .parquet, .arrow, .arrows, each also with .gz or .zst";
    /// The words that name a format; `auto` stands for the format by the name of each file.
    pub const WORDS: &'static [&'static str] = &["auto", "text", "csv", "tsv", "jsonl", "parquet", "arrow"];

    /// The format that a word names; `None` for `auto`.
    pub fn from_word(word: &str) -> Option<Self> {
        match word {
            "text" => Some(Self::Text),
            "csv" => Some(Self::Csv),
            "tsv" => Some(Self::Tsv),
            "jsonl" => Some(Self::Json),
            "parquet" => Some(Self::Parquet),
            "arrow" => Some(Self::Arrow),
            _ => None,
        }
    }

    /// The word that names it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Csv => "csv",
            Self::Tsv => "tsv",
            Self::Json => "jsonl",
            Self::Parquet => "parquet",
            Self::Arrow => "arrow",
        }
    }

    fn from_extension(extension: &str) -> Option<Self> {
        match extension.to_ascii_lowercase().as_str() {
            "txt" => Some(Self::Text),
            "csv" => Some(Self::Csv),
            "tsv" => Some(Self::Tsv),
            "jsonl" | "ndjson" | "json" => Some(Self::Json),
            "parquet" => Some(Self::Parquet),
            "arrow" | "arrows" => Some(Self::Arrow),
            _ => None,
        }
    }

    /// Whether types are inferred from text, so that values can be read as another type too.
    pub(crate) fn is_untyped(self) -> bool {
        matches!(self, Self::Text | Self::Csv | Self::Tsv | Self::Json)
    }

    /// Whether rows are lines of cells.
    pub(crate) fn has_cells(self) -> bool {
        matches!(self, Self::Csv | Self::Tsv)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Csv => "csv",
            Self::Tsv => "tsv",
            Self::Json => "json lines",
            Self::Parquet => "parquet",
            Self::Arrow => "arrow",
        })
    }
}

/// The compression of a whole file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Compression {
    /// Nothing.
    None,
    /// `.gz`, several members allowed.
    Gzip,
    /// `.zst`, several frames allowed.
    Zstd,
}

/// Format and compression by the extensions of `name`; `None` when they are not known.
pub(crate) fn of_name(name: &str) -> Option<(Format, Compression)> {
    let (rest, extension) = name.rsplit_once('.')?;
    let compression = match extension.to_ascii_lowercase().as_str() {
        "gz" => Compression::Gzip,
        "zst" => Compression::Zstd,
        _ => return Format::from_extension(extension).map(|format| (format, Compression::None)),
    };
    Format::from_extension(rest.rsplit_once('.')?.1).map(|format| (format, compression))
}

/// The compression by the last extension of `name`, for a file whose format is given.
pub(super) fn compression_of(name: &str) -> Compression {
    match name.rsplit_once('.').map(|(_, extension)| extension.to_ascii_lowercase()).as_deref() {
        Some("gz") => Compression::Gzip,
        Some("zst") => Compression::Zstd,
        _ => Compression::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let cases = [
            ("a.txt", Some((Format::Text, Compression::None))),
            ("a.b.CSV.GZ", Some((Format::Csv, Compression::Gzip))),
            ("a.jsonl.zst", Some((Format::Json, Compression::Zstd))),
            ("a.ndjson", Some((Format::Json, Compression::None))),
            ("a.parquet", Some((Format::Parquet, Compression::None))),
            ("a.parquet.gz", Some((Format::Parquet, Compression::Gzip))),
            ("a.gz", None),
            ("txt", None),
            ("a.json", Some((Format::Json, Compression::None))),
            ("a.json.gz", Some((Format::Json, Compression::Gzip))),
            ("a.tsv.zst", Some((Format::Tsv, Compression::Zstd))),
            ("a.md", None),
        ];
        for (name, expected) in cases {
            assert_eq!(of_name(name), expected, "{name}");
        }
    }
}
