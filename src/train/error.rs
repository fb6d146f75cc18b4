//! Errors of training.

use thiserror::Error;

use super::CollectiveError;
use crate::model::DeviceError;

/// A step cannot be made.
#[derive(Debug, Error, Clone)]
#[non_exhaustive]
pub enum TrainError {
    /// The recipe contradicts itself, the model or the vocabulary.
    #[error("recipe: {0}")]
    Recipe(String),
    /// The window does not fit the recipe or the vocabulary.
    #[error("window: {0}")]
    Window(String),
    /// The loss or a gradient is not a finite number. Nothing was changed: neither weights nor states.
    #[error(
        "step {step}: {what} is not a finite number; nothing was changed in this step: lower the learning rate or the \
         clip, or go back to an earlier checkpoint"
    )]
    NotFinite {
        /// Number of the step, from 1.
        step: u64,
        /// The loss, or the norm of the gradient.
        what: &'static str,
    },
    /// A snapshot is not one of this model and recipe.
    #[error("snapshot: {0}; is it one of this model and recipe?")]
    Snapshot(String),
    /// An exchange with the other processes of the run failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The processes of the run have different weights, which they never should.
    #[error(
        "after step {step}: `{name}` of process {rank} is not that of process 0: the processes compute differently; do they run \
         the same program on processors of one kind?"
    )]
    Diverged {
        /// The last step.
        step: u64,
        /// The tensor, as a snapshot names it.
        name: String,
        /// The process.
        rank: usize,
    },
    /// libtorch or the device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<tch::TchError> for TrainError {
    fn from(error: tch::TchError) -> Self {
        Self::Device(error.into())
    }
}
