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
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The file is of another kind.
    #[error("{path}: this is {kind}, not a weights file; {}", kind.remedy())]
    NotWeights {
        /// The file.
        path: PathBuf,
        /// Its kind.
        kind: FileKind,
    },
    /// The file is damaged.
    #[error("{path}: broken {kind}: {reason}; download or convert the file again")]
    Broken {
        /// The file.
        path: PathBuf,
        /// Its kind by its first bytes.
        kind: FileKind,
        /// What is wrong.
        reason: String,
    },
    /// Tensors are missing or differ from the options.
    #[error(
        "{path}: {} of the tensors that options.json asks for cannot be used: {}; are these options and weights of the same model?",
        problems.len(),
        list(problems)
    )]
    Tensors {
        /// The file.
        path: PathBuf,
        /// All problems.
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
        /// Index of the first such value.
        index: Vec<usize>,
        /// The value.
        value: f64,
    },
    /// The weights cannot be written.
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
        /// A possible reason, or empty.
        hint: &'static str,
    },
    /// A link, which is never followed: it can point out of the model.
    #[error("is {0}, which is never followed; store the values themselves")]
    Link(&'static str),
    /// A group.
    #[error("is not a dataset")]
    NotADataset,
    /// Another shape.
    #[error("has shape {found:?} instead of {expected:?}")]
    Shape {
        /// Shape that the options require.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<u64>,
    },
    /// Not a supported floating-point type.
    #[error("has type {found} instead of float32")]
    Type {
        /// The type in the file.
        found: String,
    },
    /// The values are stored in other files.
    #[error("keeps its values in other files (external storage), which is refused; store the values themselves")]
    ExternalStorage,
    /// A virtual dataset, whose values are those of other datasets.
    #[error("is a virtual dataset, which is refused; store the values themselves")]
    Virtual,
    /// An unsupported filter.
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
    /// Part of a biLM, but not of the model that the options describe.
    #[error("is present, but the options describe a model without it")]
    Unexpected,
    /// Declared, but not written completely.
    #[error("was never written completely")]
    Unwritten,
    /// The dataset is damaged.
    #[error("cannot be read: {0}")]
    Broken(String),
}

impl What {
    pub(super) fn wrong_shape(spec: &TensorSpec, found: &[usize]) -> Self {
        Self::Shape { expected: spec.shape.clone(), found: found.iter().map(|&d| d as u64).collect() }
    }
}
