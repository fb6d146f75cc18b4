//! Errors of model directories.

use std::path::PathBuf;

use thiserror::Error;

use crate::mix::MixError;

/// A directory does not hold exactly one model.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelDirError {
    /// No such file.
    #[error("{dir}: no {wanted} in this model directory; it holds {found}")]
    Missing {
        /// The directory.
        dir: PathBuf,
        /// The names that were looked for.
        wanted: &'static str,
        /// The files in the directory.
        found: String,
    },
    /// Several files match.
    #[error(
        "{dir}: {candidates} could all be the {wanted}; name the pair with --options and --weights, or remove the others"
    )]
    Ambiguous {
        /// The directory.
        dir: PathBuf,
        /// Which part of the model.
        wanted: &'static str,
        /// The files.
        candidates: String,
    },
    /// Writing would leave two weights files, and the wrong one could be read.
    #[error("{dir}: {file} already exists; choose an empty directory, or remove that file")]
    Occupied {
        /// The directory.
        dir: PathBuf,
        /// The weights file in the other format.
        file: &'static str,
    },
    /// `warm_state.safetensors` belongs to another model.
    #[error(
        "{path}: belongs to the model with fingerprint {found}, but this one has {expected}; remove the file, or create \
         it again with elmo model convert --warm-state"
    )]
    WarmState {
        /// The file.
        path: PathBuf,
        /// Fingerprint of the model.
        expected: String,
        /// Fingerprint in the file.
        found: String,
    },
    /// `mix.json` in the model's folder is invalid.
    #[error(transparent)]
    InvalidMix(MixError),
    /// `mix.json` is for another number of layers.
    #[error("{path}: {found} scalars, but the model has {expected} layers; fit the mix again for this model")]
    Mix {
        /// The file.
        path: PathBuf,
        /// Layers of the model.
        expected: usize,
        /// Scalars in the file.
        found: usize,
    },
}
