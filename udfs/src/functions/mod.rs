//! The SQL functions, one file each.

mod byte_offset;
mod downcast;
pub mod elmo_centroid;
pub mod elmo_cosine;
pub mod elmo_dot;
pub mod elmo_embed;
pub mod elmo_functions;
pub mod elmo_l2;
pub mod elmo_mixes;
pub mod elmo_models;
pub mod elmo_perplexity;
pub mod elmo_similarity;
pub mod elmo_span;
pub mod elmo_surprisal;
pub mod elmo_tokens;
pub mod elmo_word;
pub mod elmo_words;
mod expr_fn;
mod registry;
mod token_lists;
pub mod try_elmo_embed;
mod word_search;

use std::sync::Arc;

use datafusion::catalog::{TableFunction, TableFunctionImpl};

#[cfg(feature = "codec")]
pub(crate) use self::registry::{internal, models};
pub(crate) use self::{
    downcast::{text_function, to_volatile},
    registry::{is_ours, parameters},
};
pub use self::{
    expr_fn::{
        elmo_centroid, elmo_cosine, elmo_dot, elmo_embed, elmo_l2, elmo_perplexity, elmo_similarity, elmo_span,
        elmo_surprisal, elmo_tokens, elmo_word, elmo_word_at, elmo_words, try_elmo_embed, with_options,
    },
    registry::{aggregate, embeds, scalar},
};
pub use crate::documentation::OPTIONS;
use crate::models::Models;

/// All table functions of this crate.
#[must_use]
pub fn table(models: &Models) -> Vec<TableFunction> {
    let functions: [(&str, Arc<dyn TableFunctionImpl>); 3] = [
        (elmo_models::NAME, Arc::new(elmo_models::ElmoModels::new(models.clone()))),
        (elmo_mixes::NAME, Arc::new(elmo_mixes::ElmoMixes::new(models.clone()))),
        (elmo_functions::NAME, Arc::new(elmo_functions::ElmoFunctions::new(models.clone()))),
    ];
    functions.into_iter().map(|(name, function)| TableFunction::new(name.to_owned(), function)).collect()
}

/// The names of all functions, sorted.
pub const NAMES: [&str; 16] = [
    elmo_centroid::NAME,
    elmo_cosine::NAME,
    elmo_dot::NAME,
    elmo_embed::NAME,
    elmo_functions::NAME,
    elmo_l2::NAME,
    elmo_mixes::NAME,
    elmo_models::NAME,
    elmo_perplexity::NAME,
    elmo_similarity::NAME,
    elmo_span::NAME,
    elmo_surprisal::NAME,
    elmo_tokens::NAME,
    elmo_word::NAME,
    elmo_words::NAME,
    try_elmo_embed::NAME,
];
