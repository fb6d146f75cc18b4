//! The functions for the DataFrame API: `elmo_embed(&models, col("text"))` returns a call as an [`Expr`].
//!
//! Functions over texts take the models, which determine the type of the result. [`with_options`] adds options.

use datafusion::{
    common::{ScalarValue, plan_err},
    error::Result,
    logical_expr::{AggregateUDF, Expr, ScalarUDF, expr::ScalarFunction, lit},
};

use super::{
    elmo_centroid::ElmoCentroid,
    elmo_cosine::ElmoCosine,
    elmo_dot::ElmoDot,
    elmo_embed::ElmoEmbed,
    elmo_l2::ElmoL2,
    elmo_perplexity::ElmoPerplexity,
    elmo_similarity::ElmoSimilarity,
    elmo_span::ElmoSpan,
    elmo_surprisal::ElmoSurprisal,
    elmo_tokens::ElmoTokens,
    elmo_word::{BY_WORD, ElmoWord},
    elmo_words::ElmoWords,
    registry::parameters,
    try_elmo_embed::TryElmoEmbed,
};
use crate::{
    args::{is_string, literal_expr},
    models::Models,
};

/// The vector of a text.
#[must_use]
pub fn elmo_embed(models: &Models, text: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoEmbed::new(models.clone())).call(vec![text])
}

/// The tokens of a text, each with its byte offsets and its vector.
#[must_use]
pub fn elmo_tokens(models: &Models, text: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoTokens::new(models.clone())).call(vec![text])
}

/// The vector of the first occurrence of a word in a text.
#[must_use]
pub fn elmo_word(models: &Models, text: Expr, word: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoWord::new(models.clone())).call(vec![text, word])
}

/// The vectors of all occurrences of a word in a text.
#[must_use]
pub fn elmo_words(models: &Models, text: Expr, word: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoWords::new(models.clone())).call(vec![text, word])
}

/// The vector of the word at `start..end` of a text: `elmo_word(text, start, end)` in SQL.
#[must_use]
pub fn elmo_word_at(models: &Models, text: Expr, start: Expr, end: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoWord::new(models.clone())).call(vec![text, start, end])
}

/// The vector of a text, or the error that prevented it.
#[must_use]
pub fn try_elmo_embed(models: &Models, text: Expr) -> Expr {
    ScalarUDF::new_from_impl(TryElmoEmbed::new(models.clone())).call(vec![text])
}

/// The cosine of the vectors of two texts.
#[must_use]
pub fn elmo_similarity(models: &Models, text_a: Expr, text_b: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoSimilarity::new(models.clone())).call(vec![text_a, text_b])
}

/// The tokens of a text, each with its byte offsets and its surprisal.
#[must_use]
pub fn elmo_surprisal(models: &Models, text: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoSurprisal::new(models.clone())).call(vec![text])
}

/// The perplexity of a text.
#[must_use]
pub fn elmo_perplexity(models: &Models, text: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoPerplexity::new(models.clone())).call(vec![text])
}

/// The cosine of two vectors.
#[must_use]
pub fn elmo_cosine(a: Expr, b: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoCosine::default()).call(vec![a, b])
}

/// The dot product of two vectors.
#[must_use]
pub fn elmo_dot(a: Expr, b: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoDot::default()).call(vec![a, b])
}

/// The Euclidean distance of two vectors.
#[must_use]
pub fn elmo_l2(a: Expr, b: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoL2::default()).call(vec![a, b])
}

/// The mean vector of the tokens in the byte range `start..end` of a text, given all its tokens.
#[must_use]
pub fn elmo_span(tokens: Expr, start: Expr, end: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoSpan::default()).call(vec![tokens, start, end])
}

/// The mean of the vectors of a group.
#[must_use]
pub fn elmo_centroid(embedding: Expr) -> Expr {
    AggregateUDF::new_from_impl(ElmoCentroid::default()).call(vec![embedding])
}

/// Adds options by name to a call: `with_options(elmo_embed(&models, col("text")), &[("pooling", "max")])`.
///
/// # Errors
/// A planning error when the expression is not a call of a function with options, or the function has no such option.
/// Values are checked when the query is planned.
pub fn with_options(call: Expr, options: &[(&str, &str)]) -> Result<Expr> {
    let Expr::ScalarFunction(ScalarFunction { func, mut args }) = call else {
        return plan_err!("options belong to a call of an elmo function, not to {call}");
    };
    // Options are literals, and `end` is no string.
    let is_option = |arg: &Expr| literal_expr(arg).is_some_and(|value| is_string(&value.data_type()));
    let is_by_word = args.len() == BY_WORD.columns || args.get(BY_WORD.columns).is_some_and(is_option);
    let Some(parameters) = parameters(func.name(), is_by_word) else {
        return plan_err!("{} takes no options", func.name());
    };
    for (name, value) in options {
        let Some(index) = parameters.options().iter().position(|option| option == name) else {
            let legal = parameters.options().join(", ");
            return plan_err!("{}: no option {name:?}; known options: {legal}", parameters.function);
        };
        let position = parameters.columns + index;
        while args.len() <= position {
            args.push(Expr::Literal(ScalarValue::Null, None));
        }
        args[position] = lit(*value);
    }
    Ok(Expr::ScalarFunction(ScalarFunction { func, args }))
}
