//! Errors of finding, fetching and opening a model.

use std::path::{Path, PathBuf};

use thiserror::Error;

use super::magic::WrongContent;
use crate::{
    error::{Exit, Fault},
    reply::summary,
    stores::StoreError,
};

/// A model that cannot be found, fetched or used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelsError {
    /// Not a URL.
    #[error("{url} is not a URL: {reason}")]
    Url {
        /// What was given.
        url: String,
        /// Why.
        reason: String,
    },
    /// Not a directory, a zip or a built-in name.
    #[error("no model {0}: not a model directory, not a zip of one, not a built-in name")]
    NotFound(String),
    /// A zip that lacks a file.
    #[error("the model {model} has no {missing}")]
    Incomplete {
        /// The model.
        model: String,
        /// File names.
        missing: &'static str,
    },
    /// A file of another format than its role requires.
    #[error("{file}: {wrong}")]
    Content {
        /// Path or URL.
        file: String,
        /// The format that was found.
        wrong: WrongContent,
    },
    /// A zip that is not unpacked.
    #[error("the zip {file} is rejected: {reason}")]
    Zip {
        /// Path or URL.
        file: String,
        /// Why.
        reason: String,
    },
    /// The model is not in the cache, and `--offline` was given.
    #[error("{0} is not in the cache, and --offline forbids fetching it")]
    Offline(String),
    /// A file cannot be read from the store or web server.
    #[error("cannot fetch {url}: {}", summary(source))]
    Fetch {
        /// The file.
        url: String,
        /// The error of the store.
        source: object_store::Error,
    },
    /// The store for a URL cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A local file of a model cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A file or directory cannot be written: in the cache, or of a converted model.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The files are complete, but not a usable model.
    #[error("the model {model} cannot be used: {source}")]
    Bad {
        /// The model.
        model: String,
        /// Why.
        source: elmo::Error,
    },
    /// The target of a conversion exists.
    #[error("{0} already exists")]
    Exists(PathBuf),
    /// A bug, or a file larger than any model.
    #[error("{0}")]
    Internal(String),
}

impl Fault for ModelsError {
    fn exit(&self) -> Exit {
        match self {
            Self::Url { .. } => Exit::Usage,
            Self::Store(error) => error.exit(),
            Self::Fetch { .. } | Self::Write { .. } => Exit::Storage,
            Self::Exists(_) => Exit::Usage,
            Self::Internal(_) => Exit::Failed,
            _ => Exit::Model,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            Self::Store(error) => return error.help(),
            Self::NotFound(_) => "give --model DIR, ZIP, URL, or a built-in name: books or tiny",
            Self::Incomplete { .. } => {
                "a model directory contains options.json and weights.hdf5 or weights.safetensors; \
                 files with other names are given as --options FILE --weights FILE"
            }
            Self::Content { wrong, .. } => wrong.remedy(),
            Self::Offline(_) => "run the command once without --offline, or give a local directory",
            Self::Exists(_) => "give the name of a new directory",
            Self::Fetch { .. } => "check the URL, the network and the credentials of the store",
            Self::Write { .. } => "check the permissions of the directory and the space on its disk",
            _ => return None,
        };
        Some(text.into())
    }
}

impl ModelsError {
    pub(super) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_path_buf(), source }
    }

    pub(super) fn write(path: &Path, source: std::io::Error) -> Self {
        Self::Write { path: path.to_path_buf(), source }
    }
}
