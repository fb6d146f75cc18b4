//! Errors of this crate: one type with the cause as data, and the kind that decides the exit code.

mod lm_head;
mod model_dir;

use std::path::{Path, PathBuf};

use thiserror::Error;

pub use self::{lm_head::LmHeadError, model_dir::ModelDirError};
use crate::{
    engine::EngineError, mix::MixError, model::DeviceError, options::OptionsError, row_error::RowError,
    spec::SpecError, weights::WeightsError,
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
    /// A directory does not hold exactly one model.
    #[error(transparent)]
    ModelDir(#[from] ModelDirError),
    /// A model has no LM head, or its vocabulary is invalid.
    #[error(transparent)]
    LmHead(#[from] LmHeadError),
    /// A setting has an invalid value, or two settings exclude each other.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// libtorch or the device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The engine has stopped, or has a bug.
    #[error(transparent)]
    Engine(EngineError),
    /// A file of a model could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A row cannot be embedded, with on-error `fail`.
    #[error("row {row}: {reason}")]
    Row {
        /// Row of the input column, from 0.
        row: usize,
        /// Why.
        reason: RowError,
    },
    /// A column of a type that holds no text.
    #[error("{reason}")]
    Column {
        /// What is wrong, and which types are accepted.
        reason: String,
    },
    /// Arrow rejected the arrays that were built: more values than its offsets can count.
    #[error("the vectors do not fit one Arrow array: {0}; give fewer rows at a time")]
    Arrow(#[from] arrow::error::ArrowError),
    /// The engine of another process failed or did not respond.
    #[error(transparent)]
    Remote(Box<dyn std::error::Error + Send + Sync>),
    /// The embedder was closed.
    #[error("the embedder is closed")]
    Closed,
}

/// What an [`enum@Error`] is caused by; the binary maps it to an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Invalid arguments: on the command line, in SQL or in a settings file.
    Usage,
    /// A row of the input.
    Input,
    /// The model's files.
    Model,
    /// Disk, network, device: a retry may help.
    System,
}

impl Error {
    /// The cause.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Spec(_) | Self::Device(DeviceError::Precision { .. }) => ErrorKind::Usage,
            Self::Row { .. } | Self::Column { .. } | Self::Arrow(_) => ErrorKind::Input,
            Self::Options(_) | Self::Weights(_) | Self::ModelDir(_) | Self::LmHead(_) => ErrorKind::Model,
            Self::Device(DeviceError::MissingTensor { .. } | DeviceError::TensorShape { .. }) => ErrorKind::Model,
            Self::Device(_) | Self::Engine(_) | Self::Io { .. } | Self::Remote(_) | Self::Closed => ErrorKind::System,
        }
    }

    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_path_buf(), source }
    }
}

impl From<EngineError> for Error {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Device(error) => Self::Device(error),
            EngineError::Closed => Self::Closed,
            error => Self::Engine(error),
        }
    }
}

/// A mix that a caller gave; one in a model's folder is [`ModelDirError::InvalidMix`].
impl From<MixError> for Error {
    fn from(error: MixError) -> Self {
        Self::Spec(error.into())
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
