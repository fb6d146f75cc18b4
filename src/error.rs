//! What can go wrong in the model, as data: whose fault it is, and where.

use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::{
    lm_head::LmHeadError, model::DeviceError, model_dir::ModelDirError, options::OptionsError, spec::SpecError,
    weights::WeightsError,
};

/// Any error of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// `options.json` is not a model description that we can run.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The weights do not fit the options, or the file is broken or hostile.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A directory does not hold one model.
    #[error(transparent)]
    ModelDir(#[from] ModelDirError),
    /// A model is no language model, or its vocabulary is none.
    #[error(transparent)]
    LmHead(#[from] LmHeadError),
    /// A setting has no such value, or two settings exclude each other.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// libtorch or the device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A file of a model could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A row cannot be embedded and the caller asked to fail on that.
    #[error("row {row}: {reason}")]
    Row {
        /// Row within the column that was given, from 0.
        row: usize,
        /// Why.
        reason: String,
    },
    /// A column of a type that holds no text.
    #[error("{reason}")]
    Column {
        /// What is wrong with it, and what would do.
        reason: String,
    },
    /// Arrow refused the arrays that we built: more values than its offsets can count.
    #[error("the vectors do not fit one Arrow array: {0}; give fewer rows at a time")]
    Arrow(#[from] arrow::error::ArrowError),
    /// The engine of another process failed, or did not answer.
    #[error(transparent)]
    Elsewhere(Box<dyn std::error::Error + Send + Sync>),
    /// The embedder was closed while work was waiting.
    #[error("the embedder is closed")]
    Closed,
}

/// Whose fault an [`enum@Error`] is; the binary maps it to an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Wrong words on the command line, in SQL or in a settings file.
    Usage,
    /// A row of the input.
    Input,
    /// The model's files.
    Model,
    /// Disk, network, device: a retry may help.
    System,
}

impl Error {
    /// Whose fault it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Spec(_) => ErrorKind::Usage,
            Self::Row { .. } | Self::Column { .. } | Self::Arrow(_) => ErrorKind::Input,
            Self::Options(_) | Self::Weights(_) | Self::ModelDir(_) | Self::LmHead(_) => ErrorKind::Model,
            Self::Device(DeviceError::MissingTensor { .. } | DeviceError::TensorShape { .. }) => ErrorKind::Model,
            Self::Device(_) | Self::Io { .. } | Self::Elsewhere(_) | Self::Closed => ErrorKind::System,
        }
    }

    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_path_buf(), source }
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
