//! Reads rows: files of many formats become one sequence of rows.
//!
//! [`list()`] expands the user's inputs to a list of files, always in the same order. [`Plan::resolve`] reads the schema
//! of each file and determines which columns are read and as what type, before anything is computed. [`Rows`] then reads
//! one file after the other. A row is identified by its [`Position`] (file, row), in the manifest and in errors.
//!
//! No file is held in memory: compressed files are decompressed as they are read, and the size of a batch is bounded in
//! bytes. The smallest units are a row, a record batch of an Arrow file, and the compressed columns of a Parquet row group.

pub(crate) mod beginning;
mod bytes;
pub(crate) mod contain;
mod count;
pub(crate) mod csv;
mod decode;
pub(crate) mod escapes;
mod format;
pub mod hive;
mod infer_csv;
pub(crate) mod infer_json;
mod ipc;
mod json;
mod json_array;
mod lines;
mod links;
mod list;
pub(crate) mod lossless;
mod mapped;
pub(crate) mod parquet;
mod pipe;
mod plan;
mod reading;
pub(crate) mod reason;
mod request;
mod rows;
mod schema;
mod sent;
mod sieve;
mod sizes;
pub(crate) mod types;

use std::path::PathBuf;

use thiserror::Error;

use crate::{
    error::{Exit, Fault},
    stores::StoreError,
};

use self::reason::{Reason, name, names};
pub use self::{
    beginning::Foreign,
    count::Counted,
    format::{Compression, Format},
    list::{InputFile, Listing, STDIN, check_kept, check_unchanged, list, listing, would_read},
    plan::Plan,
    reading::{Delimiter, OnMalformed, Reading},
    request::{InferRows, Keep, KeptTypes, Request},
    rows::{Rows, Slice},
    sent::SentPlan,
    sieve::Malformed,
    sizes::row_bytes,
    types::is_text,
};
pub(crate) use self::{
    decode::Decode, format::of_name, json::Json, json_array::Items, json_array::Shape, list::MANIFEST, mapped::Rewrite,
};

/// Byte offset of a row in an uncompressed text file. Reading can start there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Mark {
    /// The row within its file, from 0.
    pub row: u64,
    /// Bytes before it.
    pub byte: u64,
}

/// A row of the input: rows are counted from 0 within their file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Serialize, serde::Deserialize)]
pub struct Position {
    /// Index in the list of files.
    pub file: usize,
    /// Row in that file.
    pub row: u64,
}

/// An input that cannot be read, or that lacks what is asked for.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The address is wrong or the store fails.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is nothing at this address.
    #[error("{address}: no such file or folder, and no file matches it as a pattern")]
    Missing {
        /// What was given.
        address: String,
    },
    /// A folder without a file of a known format.
    #[error("{address}: contains no file with a known extension; known extensions: {}", Format::EXTENSIONS)]
    Empty {
        /// The folder or pattern.
        address: String,
    },
    /// The file's extension is not known.
    #[error("{file}: unknown extension; known extensions: {}", Format::EXTENSIONS)]
    Unknown {
        /// The file.
        file: String,
    },
    /// An invalid glob pattern.
    #[error("{pattern}: not a glob pattern: {reason}")]
    Pattern {
        /// What was given.
        pattern: String,
        /// What is wrong.
        reason: String,
    },
    /// No such column.
    #[error("{file}: no column {column:?}; existing columns: {}{}", names(found), hint(nearest))]
    Column {
        /// The file.
        file: String,
        /// The column asked for.
        column: String,
        /// The columns of the file.
        found: Vec<String>,
        /// The most similar name.
        nearest: Option<String>,
    },
    /// The text column is of another type.
    #[error("{file}: column \"{}\" is {found}; a text column is string, binary or a list of strings", name(column))]
    NotText {
        /// The file.
        file: String,
        /// The column.
        column: String,
        /// Its type.
        found: String,
    },
    /// A kept column has incompatible types in two files.
    #[error(
        "{file}: column \"{}\" is {found}, but {expected} in {first}, and neither type can hold the other; \
         leave it out with --keep or embed the files separately",
        name(column)
    )]
    Disagree {
        /// The file.
        file: String,
        /// The column.
        column: String,
        /// Its type there.
        found: String,
        /// The file that came before.
        first: String,
        /// The type there.
        expected: String,
    },
    /// A kept column of a type that Parquet does not have.
    #[error("{file}: column \"{}\" is {found}, which Parquet cannot hold; leave it out with --keep", name(column))]
    Unstorable {
        /// The file.
        file: String,
        /// The column.
        column: String,
        /// Its type.
        found: String,
    },
    /// A kept column has the name of a column that the job adds.
    #[error("{file}: column \"{}\" has the name of a column that the job adds; leave it out with --keep", name(column))]
    Collision {
        /// The file.
        file: String,
        /// The column.
        column: String,
    },
    /// Two columns have the name of one that is read.
    #[error("{file}: two columns are named \"{}\"", name(column))]
    Twice {
        /// The file.
        file: String,
        /// The column.
        column: String,
    },
    /// The input is in the folder that the job writes to.
    #[error("{file}: is in the output folder, which this job writes to")]
    InOutput {
        /// The file, or what was given.
        file: String,
    },
    /// The job would write over a file of its input.
    #[error("{file}: is also a file that this command writes, and the input would be lost")]
    Replaced {
        /// The file.
        file: String,
    },
    /// All files of the input are in the folder that the job writes to.
    #[error("{address}: contains no input files other than those of the output")]
    OnlyOutput {
        /// The folder or pattern.
        address: String,
    },
    /// A temporary file cannot be written.
    #[error("{file}: cannot be copied to the temporary folder {}: {source}", folder.display())]
    Temporary {
        /// The file that is copied.
        file: String,
        /// The folder.
        folder: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The file changed while the job ran.
    #[error("{file}: changed or removed while it was read; rows of the old and a new file would be mixed")]
    Changed {
        /// The file.
        file: String,
    },
    /// A pipe or a device: it has no size and cannot be read twice.
    #[error("{file}: a pipe or device, not a regular file")]
    NoFile {
        /// What was given.
        file: String,
    },
    /// A file without bytes in a format in which even a file without rows has some.
    #[error("{file}: is empty, and a Parquet or Arrow file never is")]
    NoBytes {
        /// The file.
        file: String,
    },
    /// A file of another kind than its name or `--input-format` says.
    #[error("{file}: not {format}: {}", foreign.what())]
    Foreign {
        /// The file.
        file: String,
        /// What it should be.
        format: Format,
        /// What it is.
        foreign: Foreign,
    },
    /// The file as a whole is not valid in its format or compression.
    #[error("{file}: after row {row}: {reason}")]
    Damaged {
        /// The file.
        file: String,
        /// Number of rows before the damage, as far as the reader knows it.
        row: u64,
        /// What is wrong.
        reason: String,
    },
    /// The bytes are not valid in the file's format; the row is not known.
    #[error("{file}: {reason}")]
    Unreadable {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// The bytes are not valid in the file's format.
    #[error("{file}: after row {row}: {reason}")]
    Malformed {
        /// The file.
        file: String,
        /// Number of rows before the broken one. If the reader does not know it, before the batch that holds it.
        row: u64,
        /// What is wrong.
        reason: String,
    },
}

/// Why a file as a whole cannot be read.
const NOT_PARQUET: &str = "not a Parquet file: it does not begin with PAR1";
const NOT_ARROW: &str = "not an Arrow file: it has no schema";

/// Whether the whole file is damaged rather than a row of it: true of compressed data and of binary formats.
fn is_damage(format: Format, reason: &str) -> bool {
    let is_binary = matches!(format, Format::Parquet | Format::Arrow);
    reason.contains("compressed data") || (is_binary && !reason.contains("Cast error"))
}

fn hint(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|n| format!("; did you mean \"{}\"?", name(n))).unwrap_or_default()
}

/// What separates the columns of a file that was read as one column whose name holds it.
fn other_delimiter(found: &[String]) -> Option<&'static str> {
    let [only] = found else { return None };
    let delimiters = [('\t', "\\t"), (';', ";"), ('|', "|"), (',', ",")];
    delimiters.into_iter().find(|(delimiter, _)| only.contains(*delimiter)).map(|(_, written)| written)
}

/// Whether a line is not one JSON object, in the words of the decoder and of those who parse lines.
fn is_no_json(reason: &str) -> bool {
    let words =
        ["not valid JSON:", "not a JSON object", "whilst parsing", "Truncated record", "JSON record to be an object"];
    words.iter().any(|words| reason.contains(words))
}

impl SourceError {
    /// A failure to write the temporary copy of a file.
    fn temporary(file: &InputFile, source: std::io::Error) -> Self {
        Self::Temporary { file: file.to_string(), folder: std::env::temp_dir(), source }
    }

    pub(crate) fn malformed(file: &InputFile, row: u64, reason: impl Into<Reason>) -> Self {
        let (file, format, reason) = (file.to_string(), file.format, reason.into().to_string());
        match is_damage(format, &reason) {
            true => Self::Damaged { file, row, reason },
            false => Self::Malformed { file, row, reason },
        }
    }
}

impl Fault for SourceError {
    fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => error.exit(),
            Self::Temporary { .. } => Exit::Storage,
            Self::Pattern { .. } | Self::InOutput { .. } | Self::Replaced { .. } => Exit::Usage,
            _ => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            Self::Store(error) => return error.help(),
            // The message says what to do.
            Self::Disagree { .. }
            | Self::Unstorable { .. }
            | Self::Collision { .. }
            | Self::Unreadable { .. }
            | Self::Empty { .. } => return None,
            Self::Missing { .. } => "check the path; patterns like 'logs/*.csv' go in quotes",
            Self::Unknown { .. } => "name its format with --input-format",
            Self::Pattern { .. } => "* stands for any part of a name, ** for any folders, ? for a character",
            Self::Column { found, .. } if let Some(delimiter) = other_delimiter(found) => {
                return Some(format!("if '{delimiter}' separates the columns, give --delimiter '{delimiter}'"));
            }
            Self::Column { .. } => "name the column of texts with --column, and those to keep with --keep",
            Self::NotText { .. } => "name another column with --column",
            Self::Twice { .. } => "rename one of them; a column that is only kept can be left out with --keep",
            Self::InOutput { .. } | Self::Replaced { .. } => "choose another --output",
            Self::OnlyOutput { .. } => "check the path of the input",
            Self::Temporary { file, .. } if file == STDIN => {
                "set TMPDIR to a folder with room, or save the input to a file"
            }
            Self::Temporary { .. } => "set TMPDIR to a folder with room, or decompress the file first",
            Self::Changed { .. } => {
                "restore the file and run the same command again, or start again with --overwrite from a file that does not change"
            }
            Self::NoFile { .. } => "give it on standard input, with - as the input and --input-format for its format",
            Self::NoBytes { file } if file == STDIN => {
                "check the command that writes to standard input; of the other formats, an empty input is one without rows"
            }
            Self::Damaged { file, .. } if file == STDIN => {
                "check that the command that writes to standard input writes one whole file of the format that --input-format \
                 names"
            }
            Self::Foreign { foreign, .. } => foreign.help(),
            Self::Damaged { reason, .. } if [NOT_PARQUET, NOT_ARROW].contains(&reason.as_str()) => {
                "name its format with --input-format, or give the file another name"
            }
            Self::NoBytes { .. } | Self::Damaged { .. } => "the file is damaged: download or create it again",
            Self::Malformed { reason, .. } if reason.contains("UTF-8") => {
                "CSV and JSON files are UTF-8 throughout: iconv -f latin1 -t utf8 converts a file; lines of a .txt file and \
                 binary columns are checked row by row"
            }
            Self::Malformed { reason, .. } if reason.contains("from which the columns were inferred") => {
                "--infer-rows all reads the columns of all rows first, and begins another job; --keep names the columns to \
                 keep and ignores others"
            }
            Self::Malformed { reason, .. } if ["not closed", "never closed"].iter().any(|end| reason.contains(end)) => {
                "close it: a cell of CSV that begins with a quotation mark ends with one, and two of them inside stand for one"
            }
            Self::Malformed { reason, .. }
                if reason.contains("line is longer") || reason.contains("no complete row") =>
            {
                "check that the input is of the format that its name or --input-format says"
            }
            Self::Malformed { reason, .. } if json_array::is_broken(reason) => {
                "correct the file: an array holds objects that are separated by commas, [{...}, {...}]"
            }
            Self::Malformed { reason, .. } if reason.contains("incorrect number of fields") || is_no_json(reason) => {
                "correct or remove the row, or leave such rows out with --on-malformed skip"
            }
            Self::Malformed { .. } => {
                "correct or remove the row; a column that is only kept can be left out with --keep, and --types string \
                 reads numbers, dates and other single values of CSV and JSON files as they are written"
            }
        };
        Some(help.to_owned())
    }
}
