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
//! | function | module |
//! |---|---|
//! | `elmo_embed(text [, layers, pooling, model, tokenizer, sentences, state, on_long, on_error])` | [`functions::elmo_embed`] |
//!
//! Options are literals, read when the query is planned: a wrong one is a planning error that lists the legal values,
//! and the type of the result (its dimension, the model's fingerprint) is known before a row is read.
//!
//! This crate knows [`elmo`] and DataFusion; it knows nothing of the command line, files or jobs.

use std::sync::Arc;

use datafusion::{
    dataframe::DataFrame,
    error::Result,
    logical_expr::{ScalarUDF, registry::FunctionRegistry},
    prelude::SessionContext,
};

mod args;
pub mod functions;
mod models;
mod named;

pub use models::Models;

use functions::elmo_embed::ElmoEmbed;

/// Registers every function of this crate with a session, or with any other registry.
///
/// # Errors
/// When the registry takes no functions.
pub fn register_all(registry: &mut dyn FunctionRegistry, models: &Models) -> Result<()> {
    for function in all(models) {
        registry.register_udf(Arc::new(function))?;
    }
    Ok(())
}

/// Every scalar function of this crate, for registries that are built by hand.
#[must_use]
pub fn all(models: &Models) -> Vec<ScalarUDF> {
    vec![ScalarUDF::new_from_impl(ElmoEmbed::new(models.clone()))]
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
