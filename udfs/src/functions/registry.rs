//! Lists of the scalar and aggregate functions.

use std::any::Any;

use datafusion::logical_expr::{AggregateUDF, ScalarUDF};

use super::{
    downcast::text_function,
    elmo_centroid::ElmoCentroid,
    elmo_cosine::ElmoCosine,
    elmo_dot::ElmoDot,
    elmo_embed::{self, ElmoEmbed},
    elmo_l2::ElmoL2,
    elmo_perplexity::{self, ElmoPerplexity},
    elmo_similarity::{self, ElmoSimilarity},
    elmo_span::ElmoSpan,
    elmo_surprisal::{self, ElmoSurprisal},
    elmo_tokens::{self, ElmoTokens},
    elmo_word::{self, ElmoWord},
    try_elmo_embed::{self, TryElmoEmbed},
};
use crate::{args::Parameters, models::Models};

/// All scalar functions of this crate.
#[must_use]
pub fn scalar(models: &Models) -> Vec<ScalarUDF> {
    vec![
        ScalarUDF::new_from_impl(ElmoEmbed::new(models.clone())),
        ScalarUDF::new_from_impl(ElmoTokens::new(models.clone())),
        ScalarUDF::new_from_impl(ElmoWord::new(models.clone())),
        ScalarUDF::new_from_impl(TryElmoEmbed::new(models.clone())),
        ScalarUDF::new_from_impl(ElmoSimilarity::new(models.clone())),
        ScalarUDF::new_from_impl(ElmoSurprisal::new(models.clone())),
        ScalarUDF::new_from_impl(ElmoPerplexity::new(models.clone())),
        ScalarUDF::new_from_impl(ElmoCosine::default()),
        ScalarUDF::new_from_impl(ElmoDot::default()),
        ScalarUDF::new_from_impl(ElmoL2::default()),
        ScalarUDF::new_from_impl(ElmoSpan::default()),
    ]
}

/// All aggregate functions of this crate.
#[must_use]
pub fn aggregate() -> Vec<AggregateUDF> {
    vec![AggregateUDF::new_from_impl(ElmoCentroid::default())]
}

/// The parameters of the functions that have options.
pub(crate) const PARAMETERS: [Parameters; 7] = [
    elmo_embed::PARAMETERS,
    elmo_tokens::PARAMETERS,
    elmo_word::PARAMETERS,
    try_elmo_embed::PARAMETERS,
    elmo_similarity::PARAMETERS,
    elmo_surprisal::PARAMETERS,
    elmo_perplexity::PARAMETERS,
];

/// Whether a function embeds texts.
#[must_use]
pub fn embeds(function: &ScalarUDF) -> bool {
    models(function).is_some()
}

/// The models that a function may use. `None` for functions that do not embed texts.
pub(crate) fn models(function: &ScalarUDF) -> Option<&Models> {
    let inner = function.inner().as_ref() as &dyn Any;
    let of_text = text_function(function).map(|(function, _)| &function.models);
    let of_word = || inner.downcast_ref::<ElmoWord>().map(|word| &word.models);
    let of_similarity = || inner.downcast_ref::<ElmoSimilarity>().map(|similarity| &similarity.models);
    of_text.or_else(of_word).or_else(of_similarity)
}
