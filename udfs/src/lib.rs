//! ELMo as SQL functions for Apache DataFusion.
//!
//! ```no_run
//! use datafusion::prelude::SessionContext;
//! use elmo::Elmo;
//! use elmo_udfs::Models;
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let mut context = SessionContext::new();
//! elmo_udfs::register_all(&mut context, &Models::from(Elmo::open("models/original")?))?;
//! elmo_udfs::sql(&context, "SELECT id, elmo_embed(text, pooling => 'max') FROM 'reviews.parquet'").await?.show().await?;
//! # Ok(())
//! # }
//! ```
//!
//! | function | returns |
//! |---|---|
//! | `elmo_embed(text [, options])` | [a vector](mod@functions::elmo_embed) |
//! | `elmo_tokens(text [, options])` | [the tokens with their byte offsets and vectors](mod@functions::elmo_tokens) |
//! | `elmo_word(text, word [, options])`, `elmo_word(text, start, end [, options])` | [the vector of a word in its context](mod@functions::elmo_word) |
//! | `elmo_words(text, word [, options])` | [the vectors of all occurrences of a word](mod@functions::elmo_words) |
//! | `try_elmo_embed(text [, options])` | [a vector, or the error that prevented it](mod@functions::try_elmo_embed) |
//! | `elmo_similarity(text_a, text_b [, options])` | [the cosine of the vectors of two texts](mod@functions::elmo_similarity) |
//! | `elmo_surprisal(text [, options])`, `elmo_perplexity(text [, options])` | [how well the language model predicts a text](mod@functions::elmo_surprisal) |
//! | `elmo_cosine(a, b)`, `elmo_dot(a, b)`, `elmo_l2(a, b)` | [measures between two vectors](mod@functions::elmo_cosine) |
//! | `elmo_span(tokens, start, end)` | [the mean vector of a byte range of a text](mod@functions::elmo_span) |
//! | `elmo_centroid(embedding)` | [the mean of vectors, an aggregate](mod@functions::elmo_centroid) |
//! | `elmo_models()`, `elmo_mixes()`, `elmo_functions()` | [tables](functions::elmo_models) of the models, the scalar mixes and the functions |
//!
//! [`session`] and [`ElmoSession::with_elmo`] also add the planner rules of the module [`plan`], which compute each
//! embedding of a query once, and after filters, joins and limits.
//!
//! Options are literals and are read when the query is planned. An invalid value is a planning error that lists the
//! legal ones. The type of the result, including its dimension and the model's fingerprint, is known before a row is
//! read.
//!
//! This crate depends on [`elmo`] and DataFusion. It does not know the command line, file formats or jobs.

use std::sync::Arc;

use datafusion::{error::Result, logical_expr::registry::FunctionRegistry};

mod args;
mod cache;
mod call;
#[cfg(feature = "codec")]
pub mod codec;
mod documentation;
pub mod functions;
mod measure;
mod memory;
mod models;
pub mod plan;
mod statement;
mod sync;
mod text_function;
mod texts;

pub use self::{
    models::{Card, ModelError, ModelFailed, ModelSource, Models},
    plan::{
        EmbedPlanner,
        session::{ElmoSession, session, session_with_config},
    },
    statement::{Statement, parse, prepared, run, sql},
};

/// Registers the scalar and aggregate functions of this crate with a session or any other registry.
///
/// A registry cannot hold planner rules and table functions; use [`ElmoSession::with_elmo`] for these. Without the
/// rules the functions return the same results, but take longer.
///
/// # Errors
/// When the registry does not accept functions.
pub fn register_all(registry: &mut dyn FunctionRegistry, models: &Models) -> Result<()> {
    for function in functions::scalar(models) {
        registry.register_udf(Arc::new(function))?;
    }
    for function in functions::aggregate() {
        registry.register_udaf(Arc::new(function))?;
    }
    // Not all registries support rewrites. Without the rewrite, DataFusion may evaluate calls on constants when it
    // plans a query. Results are the same.
    let _ = registry.register_function_rewrite(Arc::new(plan::rewrite::Rewrite));
    Ok(())
}
