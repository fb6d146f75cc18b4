//! Rows in: files of many kinds become one sequence of rows.
//!
//! [`list()`] turns what the user typed into a list of files, always in the same order. [`Plan::resolve`] looks into
//! each file for its columns and settles which are read and as what type, before anything is computed. [`Rows`] then
//! reads one file after the other, so that a [`Position`] (file, row) names a row for ever: the manifest and every
//! error speak in positions.
//!
//! Nothing is ever held whole: compressed files are unpacked as they are read, and what one read returns is bounded by
//! bytes, except that a single row (or one record batch of an Arrow file, or the compressed columns of one Parquet row
//! group) is the smallest unit there is.

mod bytes;
mod contain;
mod count;
mod csv;
mod decode;
mod escapes;
mod format;
mod ipc;
mod json;
mod lines;
mod list;
mod lossless;
pub(crate) mod parquet;
mod plan;
pub(crate) mod reason;
mod rows;
mod schema;
mod types;

use thiserror::Error;

use crate::{
    error::{Exit, Fault},
    stores::StoreError,
};

pub(crate) use self::format::of_name;
use self::reason::Reason;
pub use self::{
    count::Counted,
    format::{Compression, Format},
    list::{InputFile, STDIN, check_unchanged, list},
    plan::{Keep, KeptTypes, Plan, Request},
    rows::{Rows, Slice},
    types::{is_text, row_bytes},
};

/// A row of the input: rows are counted from 0 within their file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Serialize, serde::Deserialize)]
pub struct Position {
    /// Index in the list of files.
    pub file: usize,
    /// Row in that file.
    pub row: u64,
}

/// An input that cannot be read, or does not hold what is asked for.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The address is wrong or the store fails.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is nothing at this address.
    #[error("{address}: no such file or folder, and no file whose name matches")]
    Missing {
        /// What was given.
        address: String,
    },
    /// A folder without a single file that we can read.
    #[error("{address}: no file with a known extension in it; known are {}", Format::EXTENSIONS)]
    Empty {
        /// The folder or pattern.
        address: String,
    },
    /// The file's name does not tell what is in it.
    #[error("{file}: the extension does not tell the format; known are {}", Format::EXTENSIONS)]
    Unknown {
        /// The file.
        file: String,
    },
    /// A glob pattern that is none.
    #[error("{pattern}: not a glob pattern: {reason}")]
    Pattern {
        /// What was given.
        pattern: String,
        /// What is wrong.
        reason: String,
    },
    /// No such column.
    #[error("{file}: no column {column:?}; there are {}{}", found.join(", "), hint(nearest))]
    Column {
        /// The file.
        file: String,
        /// The column asked for.
        column: String,
        /// The columns there are.
        found: Vec<String>,
        /// The one that may have been meant.
        nearest: Option<String>,
    },
    /// The text column holds something else.
    #[error("{file}: column {column:?} is {found}; a text column is string, binary or a list of strings")]
    NotText {
        /// The file.
        file: String,
        /// The column.
        column: String,
        /// Its type.
        found: String,
    },
    /// Two files disagree about a column that is kept.
    #[error(
        "{file}: column {column:?} is {found}, but {expected} in {first}, and one does not fit into the other; \
         leave it out with --keep or embed the files apart"
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
    #[error("{file}: column {column:?} is {found}, which Parquet cannot hold; leave it out with --keep")]
    Unstorable {
        /// The file.
        file: String,
        /// The column.
        column: String,
        /// Its type.
        found: String,
    },
    /// A kept column has the name of a column that we add.
    #[error("{file}: its column {column:?} has the name of a column that is added; leave it out with --keep")]
    Collision {
        /// The file.
        file: String,
        /// The column.
        column: String,
    },
    /// Two columns have the name of one that is read.
    #[error("{file}: two columns are called {column:?}, so that it is not clear which is meant")]
    Twice {
        /// The file.
        file: String,
        /// The column.
        column: String,
    },
    /// The input is in the folder that the job writes to.
    #[error("{file}: lies in the output folder, whose files this job makes")]
    InOutput {
        /// The file, or what was given.
        file: String,
    },
    /// The file is not what it was when the job began.
    #[error("{file}: changed or removed while it was read; rows of the old and a new file would be mixed")]
    Changed {
        /// The file.
        file: String,
    },
    /// A pipe or a device: it has no size and cannot be read twice.
    #[error("{file}: a pipe or device, no file")]
    NoFile {
        /// What was given.
        file: String,
    },
    /// The bytes are not what the format wants, where nobody counts rows.
    #[error("{file}: {reason}")]
    Unreadable {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// The bytes are not what the format wants.
    #[error("{file}: after row {row}: {reason}")]
    Malformed {
        /// The file.
        file: String,
        /// Rows before the broken one; where the reader does not know it, those before the few that it read at once.
        row: u64,
        /// What is wrong.
        reason: String,
    },
}

fn hint(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|n| format!("; did you mean {n:?}?")).unwrap_or_default()
}

/// Whether the file as a whole is damaged, not a row of it: packed data, and files that programs alone write.
fn is_damage(file: &str, reason: &str) -> bool {
    let is_binary = matches!(format::of_name(file), Some((Format::Parquet | Format::Arrow, _)));
    reason.contains("packed data") || (is_binary && !reason.contains("Cast error"))
}

impl SourceError {
    pub(crate) fn malformed(file: &InputFile, row: u64, reason: impl Into<Reason>) -> Self {
        Self::Malformed { file: file.to_string(), row, reason: reason.into().to_string() }
    }
}

impl Fault for SourceError {
    fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => error.exit(),
            Self::Pattern { .. } | Self::InOutput { .. } => Exit::Usage,
            _ => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            Self::Store(error) => return error.help(),
            // Their messages say what to do.
            Self::Disagree { .. }
            | Self::Unstorable { .. }
            | Self::Collision { .. }
            | Self::Unreadable { .. }
            | Self::Empty { .. } => return None,
            Self::Missing { .. } => "check the path; patterns like 'logs/*.csv' go in quotes",
            Self::Unknown { .. } => "rename the file, or convert it to one of these",
            Self::Pattern { .. } => "* stands for any part of a name, ** for any folders, ? for a character",
            Self::Column { .. } => "name the column of texts with --column, and those to keep with --keep",
            Self::NotText { .. } => "name another column with --column",
            Self::Twice { .. } => "rename one of them; a column that is only kept can be left out with --keep",
            Self::InOutput { .. } => "choose another --output",
            Self::Changed { .. } => {
                "put the file back and run the same command again, or begin anew with --overwrite from one that stays as it is"
            }
            Self::NoFile { .. } => "give its lines on standard input, with --input -",
            Self::Malformed { file, reason, .. } if is_damage(file, reason) => {
                "the file is damaged: fetch or make it again"
            }
            Self::Malformed { reason, .. } if reason.contains("UTF-16") => {
                "CSV and JSON files are UTF-8 throughout: iconv -f utf-16 -t utf-8 converts a file"
            }
            Self::Malformed { reason, .. } if reason.contains("UTF-8") => {
                "CSV and JSON files are UTF-8 throughout: iconv -f latin1 -t utf8 converts a file; lines of a .txt file and \
                 binary columns are checked row by row"
            }
            Self::Malformed { .. } => {
                "mend or remove the row; a column that is only kept can be left out with --keep, and numbers, dates \
                 and other single values of CSV and JSON files are taken as they are written with --types string"
            }
        };
        Some(help.to_owned())
    }
}
