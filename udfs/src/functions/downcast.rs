//! Recognises the functions over one text among all scalar functions of a plan.

use std::any::Any;

use datafusion::{
    common::tree_node::Transformed,
    logical_expr::{Expr, ScalarUDF, expr::ScalarFunction},
};

use super::{
    elmo_embed::ElmoEmbed, elmo_perplexity::ElmoPerplexity, elmo_surprisal::ElmoSurprisal, elmo_tokens::ElmoTokens,
    try_elmo_embed::TryElmoEmbed,
};
use crate::text_function::{TextFunction, is_constant};

/// Constructs a function over one text.
pub(crate) type Constructor = fn(TextFunction) -> ScalarUDF;

/// Downcasts a function over one text. Also returns the constructor of its SQL function.
pub(crate) fn text_function(function: &ScalarUDF) -> Option<(&TextFunction, Constructor)> {
    let inner = function.inner().as_ref() as &dyn Any;
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

/// Replaces a call on a constant by a volatile one, which DataFusion does not evaluate while it plans the query.
pub(crate) fn to_volatile(expr: Expr) -> Transformed<Expr> {
    let Expr::ScalarFunction(ScalarFunction { func, args }) = &expr else { return Transformed::no(expr) };
    let Some((function, constructor)) = text_function(func) else { return Transformed::no(expr) };
    if function.is_volatile() || !is_constant(args, function.parameters.columns) {
        return Transformed::no(expr);
    }
    Transformed::yes(constructor(function.volatile()).call(args.clone()))
}
