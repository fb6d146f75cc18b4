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
//! | function | what it gives |
//! |---|---|
//! | `elmo_embed(text [, options])` | [a vector](mod@functions::elmo_embed) |
//! | `elmo_tokens(text [, options])` | [the tokens with their places and vectors](mod@functions::elmo_tokens) |
//! | `elmo_word(text, start, end [, options])` | [the vector of a word in its context](mod@functions::elmo_word) |
//! | `try_elmo_embed(text [, options])` | [a vector, or why there is none](mod@functions::try_elmo_embed) |
//! | `elmo_similarity(text_a, text_b [, options])` | [how near two texts are](mod@functions::elmo_similarity) |
//! | `elmo_cosine(a, b)`, `elmo_dot(a, b)`, `elmo_l2(a, b)` | [how near two vectors are](mod@functions::elmo_cosine) |
//! | `elmo_span(tokens, start, end)` | [the vector of a piece of a text](mod@functions::elmo_span) |
//! | `elmo_centroid(embedding)` | [the mean of vectors, an aggregate](mod@functions::elmo_centroid) |
//! | `elmo_models()`, `elmo_functions()` | [tables](functions::elmo_models) of what there is |
//!
//! [`session`] and [`ElmoSession::with_elmo`] add the planner rules as well, which compute each embedding of a query once
//! and after everything that makes rows fewer: [`plan`].
//!
//! Options are literals, read when the query is planned: a wrong one is a planning error that lists the legal values,
//! and the type of the result (its dimension, the model's fingerprint) is known before a row is read.
//!
//! This crate knows [`elmo`] and DataFusion; it knows nothing of the command line, files or jobs.

use std::sync::Arc;

use datafusion::{
    dataframe::DataFrame, error::Result, logical_expr::registry::FunctionRegistry, prelude::SessionContext,
};

mod args;
pub mod functions;
mod measure;
mod models;
mod named;
pub mod plan;
mod rewrite;
mod text_function;

pub use models::{Card, ModelError, ModelSource, Models};
pub use plan::session::{ElmoSession, EmbedPlanner, session, session_with_config};

/// Registers the scalar and aggregate functions of this crate with a session, or with any other registry. The planner
/// rules and the table functions, for which registries have no place, come with [`ElmoSession::with_elmo`] only; without
/// the rules the functions give the same, slower.
///
/// # Errors
/// When the registry takes no functions.
pub fn register_all(registry: &mut dyn FunctionRegistry, models: &Models) -> Result<()> {
    for function in functions::scalar(models) {
        registry.register_udf(Arc::new(function))?;
    }
    for function in functions::aggregate() {
        registry.register_udaf(Arc::new(function))?;
    }
    // Some registries take none: then DataFusion may evaluate calls on literals when it plans, to the same values.
    let _ = registry.register_function_rewrite(Arc::new(rewrite::Rewrite));
    Ok(())
}

/// Plans a statement as [`SessionContext::sql`] does, and lets named options of our functions leave others out.
///
/// DataFusion 55 accepts named arguments only without gaps: `elmo_embed(text, pooling => 'max')` is refused there
/// because `layers` comes first. Here the options between are filled with NULL, which means the default.
///
/// # Errors
/// When the statement cannot be parsed or planned.
pub async fn sql(context: &SessionContext, statement: &str) -> Result<DataFrame> {
    let state = context.state();
    let dialect = state.config().options().sql_parser.dialect;
    let mut statement = state.sql_to_statement(statement, &dialect)?;
    named::fill_gaps(&mut statement);
    let plan = state.statement_to_plan(statement).await?;
    context.execute_logical_plan(plan).await
}
