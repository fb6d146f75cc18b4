//! Errors of the LM head.

use std::path::PathBuf;

use thiserror::Error;

/// A model has no LM head, or its vocabulary is invalid.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LmHeadError {
    /// The model has none.
    #[error(
        "the model {0} has no LM head: surprisal and perplexity need vocab.txt and softmax.safetensors beside the \
         weights, which training keeps and published weights lack"
    )]
    Missing(String),
    /// The vocabulary cannot be used.
    #[error("{path}: {reason}")]
    Vocab {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// One of its files is there without the other.
    #[error(
        "{missing}: missing, but {found} is there, and an LM head is both: restore the file, or remove {found} for a model \
         without an LM head"
    )]
    Half {
        /// The file that is missing.
        missing: PathBuf,
        /// Name of the file that is there.
        found: &'static str,
    },
    /// The softmax was written with other weights than those beside it.
    #[error(
        "{path}: belongs to the weights with fingerprint {found}, but those beside it have {expected}; if a training run \
         is replacing the model, try again, otherwise copy all files of one model"
    )]
    OtherModel {
        /// The softmax.
        path: PathBuf,
        /// Fingerprint of the weights.
        expected: String,
        /// Fingerprint in the file.
        found: String,
    },
    /// The softmax was written for other words, or for the same ones in another order.
    #[error(
        "{path}: these are not the words, in the order, that {softmax} was written for; copy vocab.txt and \
         softmax.safetensors of one model"
    )]
    OtherWords {
        /// The vocabulary.
        path: PathBuf,
        /// The softmax.
        softmax: PathBuf,
    },
}
