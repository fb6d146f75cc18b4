//! One SQL function, one file.

pub mod elmo_centroid;
pub mod elmo_cosine;
pub mod elmo_dot;
pub mod elmo_embed;
pub mod elmo_functions;
pub mod elmo_l2;
pub mod elmo_models;
pub mod elmo_perplexity;
pub mod elmo_similarity;
pub mod elmo_span;
pub mod elmo_surprisal;
pub mod elmo_tokens;
pub mod elmo_word;
mod fluent;
pub mod try_elmo_embed;

pub use fluent::{
    elmo_centroid, elmo_cosine, elmo_dot, elmo_embed, elmo_l2, elmo_perplexity, elmo_similarity, elmo_span,
    elmo_surprisal, elmo_tokens, elmo_word, try_elmo_embed, with_options,
};

use std::sync::Arc;

use datafusion::{
    catalog::{TableFunction, TableFunctionImpl},
    logical_expr::{AggregateUDF, ScalarUDF},
};

use crate::{Models, args::Shape, text_function::TextFunction};
use elmo_centroid::ElmoCentroid;
use elmo_cosine::ElmoCosine;
use elmo_dot::ElmoDot;
use elmo_embed::ElmoEmbed;
use elmo_l2::ElmoL2;
use elmo_perplexity::ElmoPerplexity;
use elmo_similarity::ElmoSimilarity;
use elmo_span::ElmoSpan;
use elmo_surprisal::ElmoSurprisal;
use elmo_tokens::ElmoTokens;
use elmo_word::ElmoWord;
use try_elmo_embed::TryElmoEmbed;

/// Every scalar function of this crate.
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

/// Every aggregate function of this crate.
#[must_use]
pub fn aggregate() -> Vec<AggregateUDF> {
    vec![AggregateUDF::new_from_impl(ElmoCentroid::default())]
}

/// Every table function of this crate.
#[must_use]
pub fn table(models: &Models) -> Vec<TableFunction> {
    let functions: [(&str, Arc<dyn TableFunctionImpl>); 2] = [
        (elmo_models::NAME, Arc::new(elmo_models::ElmoModels::new(models.clone()))),
        (elmo_functions::NAME, Arc::new(elmo_functions::ElmoFunctions::new(models.clone()))),
    ];
    functions.into_iter().map(|(name, function)| TableFunction::new(name.to_owned(), function)).collect()
}

/// The names of all functions, sorted.
pub const NAMES: [&str; 14] = [
    elmo_centroid::NAME,
    elmo_cosine::NAME,
    elmo_dot::NAME,
    elmo_embed::NAME,
    elmo_functions::NAME,
    elmo_l2::NAME,
    elmo_models::NAME,
    elmo_perplexity::NAME,
    elmo_similarity::NAME,
    elmo_span::NAME,
    elmo_surprisal::NAME,
    elmo_tokens::NAME,
    elmo_word::NAME,
    try_elmo_embed::NAME,
];

/// The functions that take options.
pub(crate) const SHAPES: [Shape; 7] = [
    elmo_embed::SHAPE,
    elmo_tokens::SHAPE,
    elmo_word::SHAPE,
    try_elmo_embed::SHAPE,
    elmo_similarity::SHAPE,
    elmo_surprisal::SHAPE,
    elmo_perplexity::SHAPE,
];

/// Whether a function embeds texts, and so needs models.
#[must_use]
pub fn embeds(function: &ScalarUDF) -> bool {
    models(function).is_some()
}

/// The models that a function may use, if it uses any.
pub(crate) fn models(function: &ScalarUDF) -> Option<&Models> {
    let inner = function.inner().as_ref() as &dyn std::any::Any;
    let of_texts = text_function(function).map(|(function, _)| &function.models);
    let of_word = || inner.downcast_ref::<ElmoWord>().map(|word| &word.models);
    let of_similarity = || inner.downcast_ref::<ElmoSimilarity>().map(|similarity| &similarity.models);
    of_texts.or_else(of_word).or_else(of_similarity)
}

/// Makes a function over one text.
pub(crate) type Make = fn(TextFunction) -> ScalarUDF;

/// A function over one text, if that is what it is, and how the same with other settings is made.
pub(crate) fn text_function(function: &ScalarUDF) -> Option<(&TextFunction, Make)> {
    let inner = function.inner().as_ref() as &dyn std::any::Any;
    if let Some(found) = inner.downcast_ref::<ElmoEmbed>() {
        return Some((&found.0, |function| ScalarUDF::new_from_impl(ElmoEmbed(function))));
    }
    if let Some(found) = inner.downcast_ref::<ElmoTokens>() {
        return Some((&found.0, |function| ScalarUDF::new_from_impl(ElmoTokens(function))));
    }
    if let Some(found) = inner.downcast_ref::<ElmoSurprisal>() {
        return Some((&found.0, |function| ScalarUDF::new_from_impl(ElmoSurprisal(function))));
    }
    if let Some(found) = inner.downcast_ref::<ElmoPerplexity>() {
        return Some((&found.0, |function| ScalarUDF::new_from_impl(ElmoPerplexity(function))));
    }
    let found = inner.downcast_ref::<TryElmoEmbed>()?;
    Some((&found.0, |function| ScalarUDF::new_from_impl(TryElmoEmbed(function))))
}
