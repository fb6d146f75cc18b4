//! The functions as Rust calls, for the DataFrame API: `elmo_embed(&models, col("text"))`. Those over texts take the models,
//! as the type of their result is known from the model alone. Options follow as literals: see [`with_options`].

use datafusion::{
    common::plan_err,
    error::Result,
    logical_expr::{AggregateUDF, Expr, ScalarUDF, expr::ScalarFunction, lit},
};

use super::{
    SHAPES, elmo_centroid::ElmoCentroid, elmo_cosine::ElmoCosine, elmo_dot::ElmoDot, elmo_embed::ElmoEmbed,
    elmo_l2::ElmoL2, elmo_perplexity::ElmoPerplexity, elmo_similarity::ElmoSimilarity, elmo_span::ElmoSpan,
    elmo_surprisal::ElmoSurprisal, elmo_tokens::ElmoTokens, elmo_word::ElmoWord, try_elmo_embed::TryElmoEmbed,
};
use crate::Models;

/// The vector of a text.
#[must_use]
pub fn elmo_embed(models: &Models, text: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoEmbed::new(models.clone())).call(vec![text])
}

/// The tokens of a text, each with its place and its vector.
#[must_use]
pub fn elmo_tokens(models: &Models, text: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoTokens::new(models.clone())).call(vec![text])
}

/// The vector of the word at bytes `start..end` of a text.
#[must_use]
pub fn elmo_word(models: &Models, text: Expr, start: Expr, end: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoWord::new(models.clone())).call(vec![text, start, end])
}

/// The vector of a text, or why there is none.
#[must_use]
pub fn try_elmo_embed(models: &Models, text: Expr) -> Expr {
    ScalarUDF::new_from_impl(TryElmoEmbed::new(models.clone())).call(vec![text])
}

/// How near two texts are.
#[must_use]
pub fn elmo_similarity(models: &Models, text_a: Expr, text_b: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoSimilarity::new(models.clone())).call(vec![text_a, text_b])
}

/// The tokens of a text, each with its place and its surprisal.
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

/// The vector of a piece of a text whose tokens are known.
#[must_use]
pub fn elmo_span(tokens: Expr, start: Expr, end: Expr) -> Expr {
    ScalarUDF::new_from_impl(ElmoSpan::default()).call(vec![tokens, start, end])
}

/// The mean of vectors.
#[must_use]
pub fn elmo_centroid(embedding: Expr) -> Expr {
    AggregateUDF::new_from_impl(ElmoCentroid::default()).call(vec![embedding])
}

/// A call with options, by their names: `with_options(elmo_embed(&models, col("text")), &[("pooling", "max")])`.
///
/// # Errors
/// A planning error when it is no call of a function with options, or has no such option. Values are checked when the plan
/// is made.
pub fn with_options(call: Expr, options: &[(&str, &str)]) -> Result<Expr> {
    let Expr::ScalarFunction(ScalarFunction { func, mut args }) = call else {
        return plan_err!("options belong to a call of an elmo function, not to {call}");
    };
    let Some(shape) = SHAPES.iter().find(|shape| shape.name == func.name()) else {
        return plan_err!("{} takes no options", func.name());
    };
    for (name, value) in options {
        let Some(place) = shape.parameters.iter().skip(shape.columns).position(|there| there == name) else {
            let legal = shape.parameters[shape.columns..].join(", ");
            return plan_err!("{}: no option {name:?}; there are {legal}", shape.name);
        };
        let place = shape.columns + place;
        while args.len() <= place {
            args.push(Expr::Literal(datafusion::common::ScalarValue::Null, None));
        }
        args[place] = lit(*value);
    }
    Ok(Expr::ScalarFunction(ScalarFunction { func, args }))
}
