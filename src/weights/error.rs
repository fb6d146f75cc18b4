//! Why weights cannot be used.

use std::{fmt, path::PathBuf};

use thiserror::Error;

use crate::{file_kind::FileKind, messages::list, options::TensorSpec};

/// Why weights cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The file could not be opened or read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Another kind of file.
    #[error("{path}: this is {kind}, not a weights file; {}", kind.remedy())]
    NotWeights {
        /// The file.
        path: PathBuf,
        /// What it is.
        kind: FileKind,
    },
    /// Not readable as what its first bytes say.
    #[error("{path}: broken {kind}: {reason}; download or convert the file again")]
    Broken {
        /// The file.
        path: PathBuf,
        /// What it says it is.
        kind: FileKind,
        /// What is wrong.
        reason: String,
    },
    /// Tensors are missing or are not what the options ask for; all of them.
    #[error(
        "{path}: {} of the tensors that options.json asks for cannot be used: {}; are these options and weights of the same model?",
        problems.len(),
        list(problems)
    )]
    Tensors {
        /// The file.
        path: PathBuf,
        /// What is wrong, by full name.
        problems: Vec<Problem>,
    },
    /// A value is NaN or infinite.
    #[error(
        "{path}: `{name}` holds {value} at {index:?}; every weight must be finite, download or convert the file again"
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// Full name of the tensor.
        name: String,
        /// Position of the first such value.
        index: Vec<usize>,
        /// The value.
        value: f64,
    },
    /// Weights that no file format can hold.
    #[error("cannot write the weights: {reason}")]
    Write {
        /// Why.
        reason: String,
    },
}

/// What is wrong with one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Full name.
    pub name: String,
    /// What is wrong.
    pub what: What,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.name, self.what)
    }
}

/// Kinds of [`Problem`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum What {
    /// No such dataset.
    #[error("is missing{hint}")]
    Missing {
        /// Why it may be so, or nothing.
        hint: &'static str,
    },
    /// A link to another place, which is never followed: it can point out of the model.
    #[error("is {0}, which is never followed; store the values themselves")]
    Link(&'static str),
    /// A group.
    #[error("is not a dataset")]
    NotADataset,
    /// Another shape.
    #[error("has shape {found:?} instead of {expected:?}")]
    Shape {
        /// What the options ask for.
        expected: Vec<usize>,
        /// What the file says.
        found: Vec<u64>,
    },
    /// Not a floating-point type that is understood.
    #[error("has type {found} instead of float32")]
    Type {
        /// The type in the file.
        found: String,
    },
    /// The values lie in other files.
    #[error("keeps its values in other files (external storage), which is refused; store the values themselves")]
    ExternalStorage,
    /// The values are those of other datasets.
    #[error("is a virtual dataset, which is refused; store the values themselves")]
    Virtual,
    /// A compression that is not known.
    #[error("uses the HDF5 filter {name}, which is not supported; store it uncompressed or with gzip")]
    Filter {
        /// Name or number of the filter.
        name: String,
    },
    /// Chunks larger than the dataset.
    #[error("has chunks of {bytes} bytes, larger than the dataset")]
    Chunk {
        /// Bytes of one chunk.
        bytes: u64,
    },
    /// Part of a biLM, but not of the one that the options describe.
    #[error("is there, but the options describe a model without it")]
    Unexpected,
    /// Declared, but never written.
    #[error("was never written completely")]
    Unwritten,
    /// The file is damaged there.
    #[error("cannot be read: {0}")]
    Broken(String),
}

impl What {
    pub(super) fn wrong_shape(spec: &TensorSpec, found: &[usize]) -> Self {
        Self::Shape { expected: spec.shape.clone(), found: found.iter().map(|&d| d as u64).collect() }
    }
}
