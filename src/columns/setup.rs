//! What all requests of a column embedder share: engine, settings and output types.

use std::sync::Arc;

use crate::{
    columns::vectors::{self, Outcome, VectorType},
    engine::{Embedder, Recipe, Vectors},
    pooling::{self, Joiner},
    spec::{EmbedSpec, Normalize},
};

/// Engine, settings and output types of a column embedder.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) embedder: Embedder,
    pub(super) spec: EmbedSpec,
    pub(super) recipe: Arc<Recipe>,
    pub(super) vector_type: VectorType,
}

impl Setup {
    /// Applies the settings that work on finished vectors: normalisation and rounding.
    pub(super) fn finish_vector(&self, mut values: Vec<f32>) -> Vec<f32> {
        if self.spec.normalize == Normalize::L2 {
            pooling::normalize_l2(&mut values, self.vector_type.layer);
        }
        vectors::round(&mut values, self.vector_type.float);
        values
    }

    /// Joins the sentences of a text; `None` at level `token`.
    pub(super) fn joiner(&self) -> Option<Joiner> {
        self.recipe.pooling.map(|pooling| Joiner::new(pooling, self.vector_type.layer))
    }

    pub(super) fn pooled(&self, joiner: Joiner) -> Outcome {
        joiner.finish().map_or(Outcome::Null, |vector| Outcome::Pooled(self.finish_vector(vector)))
    }
}

/// Adds the sentences of a text in their order.
pub(super) fn push_all(joiner: &mut Joiner, sentences: Vec<Vectors>) {
    for sentence in sentences {
        if let Vectors::Pooled(partial) = sentence {
            joiner.push(partial);
        }
    }
}
