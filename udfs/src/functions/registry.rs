//! Lists of the scalar and aggregate functions.

use std::any::Any;

use datafusion::logical_expr::{AggregateUDF, ScalarUDF};

use super::{
    byte_offset::ByteOffset,
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
    elmo_words::{self, ElmoWords},
    try_elmo_embed::{self, TryElmoEmbed},
    word_search::{Occurrences, WordSearch},
};
use crate::{args::Parameters, models::Models};

/// All scalar functions of this crate.
#[must_use]
pub fn scalar(models: &Models) -> Vec<ScalarUDF> {
    vec![
        ScalarUDF::new_from_impl(ElmoEmbed::new(models.clone())),
        ScalarUDF::new_from_impl(ElmoTokens::new(models.clone())),
        ScalarUDF::new_from_impl(ElmoWord::new(models.clone())),
        ScalarUDF::new_from_impl(ElmoWords::new(models.clone())),
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

/// The functions by which registered functions are defined. They occur in plans only.
pub(crate) fn internal() -> [ScalarUDF; 3] {
    [
        ScalarUDF::new_from_impl(WordSearch::new(Occurrences::First)),
        ScalarUDF::new_from_impl(WordSearch::new(Occurrences::All)),
        ScalarUDF::new_from_impl(ByteOffset::default()),
    ]
}

/// Whether a function of this name is one of this crate.
pub(crate) fn is_ours(name: &str) -> bool {
    super::NAMES.contains(&name) || internal().iter().any(|function| function.name() == name)
}

/// All aggregate functions of this crate.
#[must_use]
pub fn aggregate() -> Vec<AggregateUDF> {
    vec![AggregateUDF::new_from_impl(ElmoCentroid::default())]
}

/// The parameters of a function that has options. `is_by_word` selects the form `elmo_word(text, word)`.
pub(crate) fn parameters(function: &str, is_by_word: bool) -> Option<Parameters> {
    let all = [
        elmo_embed::PARAMETERS,
        elmo_tokens::PARAMETERS,
        if is_by_word { elmo_word::BY_WORD } else { elmo_word::BY_RANGE },
        elmo_words::PARAMETERS,
        try_elmo_embed::PARAMETERS,
        elmo_similarity::PARAMETERS,
        elmo_surprisal::PARAMETERS,
        elmo_perplexity::PARAMETERS,
    ];
    all.into_iter().find(|parameters| parameters.function == function)
}

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
    let of_words = || inner.downcast_ref::<ElmoWords>().map(|words| &words.models);
    of_text.or_else(of_word).or_else(of_words).or_else(of_similarity)
}
