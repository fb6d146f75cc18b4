//! Layers of a batch to the result of each sentence: mix, layer norm, pooling.
//!
//! On the CPU in float32 the layers lie in host memory, and `host` reads them there. On a GPU `device` reduces them where they are, and
//! downloads the results only: of a sentence vector that is one row instead of one per token.

mod device;
mod host;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::{
    job::Job,
    sentence::{Recipe, Sentence, Vectors},
};
use crate::model::{Activations, DeviceError};

/// AllenNLP v0.9 `ScalarMix` and bilm-tf `weight_layers`.
const LAYER_NORM_EPSILON: f64 = 1e-12;

/// What is to be computed of a sentence of a batch.
struct Wanted<'r> {
    recipe: &'r Recipe,
    /// Tokens whose vectors are wanted.
    keep: Range<usize>,
    /// Its tokens without the boundaries.
    real: Range<usize>,
}

/// Computes the results of the sentences of a batch from its layers.
pub(super) fn reduce(activations: &Activations, jobs: &[Job]) -> Result<Vec<Vectors>, DeviceError> {
    let wanted = jobs.iter().map(|job| {
        let first = usize::from(job.recipe.boundaries);
        let real = first..first + job.sentence.words.len();
        Wanted { recipe: &job.recipe, keep: job.sentence.keep.clone(), real }
    });
    reduce_wanted(activations, &wanted.collect::<Vec<_>>())
}

/// Computes the results of a batch that was run outside the engine, one sentence per row: state `carry`.
pub(crate) fn reduce_in_order(
    activations: &Activations,
    sentences: &[Sentence],
    recipe: &Recipe,
) -> Result<Vec<Vectors>, DeviceError> {
    // Sentences of such a batch always include their boundaries, and `keep` counts them.
    let wanted = sentences.iter().map(|sentence| {
        let real = 1..sentence.words.len() - 1;
        Wanted { recipe, keep: sentence.keep.clone(), real }
    });
    reduce_wanted(activations, &wanted.collect::<Vec<_>>())
}

/// `wanted` has the sentences of the batch in their order.
fn reduce_wanted(activations: &Activations, wanted: &[Wanted<'_>]) -> Result<Vec<Vectors>, DeviceError> {
    if activations.is_on_host() { host::reduce(activations, wanted) } else { device::reduce(activations, wanted) }
}
