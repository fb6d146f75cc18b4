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
//! | `elmo_surprisal(text [, options])`, `elmo_perplexity(text [, options])` | [what the language model makes of a text](mod@functions::elmo_surprisal) |
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

pub use datafusion::sql::parser::Statement;
use datafusion::{
    common::plan_datafusion_err,
    dataframe::DataFrame,
    error::{DataFusionError, Result},
    logical_expr::{LogicalPlan, registry::FunctionRegistry},
    prelude::SessionContext,
    sql::{parser::DFParserBuilder, sqlparser::dialect::dialect_from_str},
};

mod args;
#[cfg(feature = "codec")]
pub mod codec;
mod copy;
pub mod functions;
mod measure;
mod models;
mod named;
mod nulls;
pub mod plan;
mod rewrite;
mod show;
mod text_function;
mod values;

pub use models::{Card, ModelError, ModelFailed, ModelSource, Models};
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
/// When the statement cannot be parsed or planned, or there is not exactly one.
pub async fn sql(context: &SessionContext, statement: &str) -> Result<DataFrame> {
    let mut statements = parse(context, statement)?;
    match (statements.pop(), statements.len()) {
        (Some(only), 0) => run(context, only).await,
        (None, _) => Err(plan_datafusion_err!("there is no statement")),
        (Some(_), more) => Err(plan_datafusion_err!("there are {} statements; give them one by one", more + 1)),
    }
}

/// The statements of a text, in order, for [`run`].
///
/// # Errors
/// When one of them cannot be parsed.
pub fn parse(context: &SessionContext, text: &str) -> Result<Vec<Statement>> {
    let state = context.state();
    let settings = &state.config().options().sql_parser;
    let dialect = dialect_from_str(settings.dialect)
        .ok_or_else(|| plan_datafusion_err!("datafusion.sql_parser.dialect: no dialect {:?}", settings.dialect))?;
    let parser = DFParserBuilder::new(text).with_dialect(dialect.as_ref());
    let statements = parser.with_recursion_limit(settings.recursion_limit.get()).build()?.parse_statements()?;
    let filled = statements.into_iter().map(|mut statement| {
        named::fill_gaps(&mut statement);
        nulls::say_of_what(&mut statement);
        statement
    });
    Ok(filled.collect())
}

/// Plans a statement, and carries it out where it gives no rows (CREATE, SET). A COPY of vectors to Parquet writes them as
/// `elmo embed` does: split into byte streams, row groups that end by bytes, and a footer that names the model. SHOW
/// FUNCTIONS lists all functions, not only those whose argument types are fixed.
///
/// # Errors
/// When the statement cannot be planned.
pub async fn run(context: &SessionContext, statement: Statement) -> Result<DataFrame> {
    let shows_functions = show::functions(&statement);
    let plan = context.state().statement_to_plan(statement).await?;
    let frame = context.execute_logical_plan(prepared(plan).await?).await?;
    match shows_functions {
        Some(condition) => show::complete(context, frame, &condition).await,
        None => Ok(frame),
    }
}

/// What [`run`] does to the plan of a COPY.
///
/// # Errors
/// When the model of a call cannot be opened.
pub async fn prepared(plan: LogicalPlan) -> Result<LogicalPlan> {
    if !matches!(plan, LogicalPlan::Copy(_) | LogicalPlan::Analyze(_)) {
        return Ok(plan);
    }
    // Reading the weights takes a while.
    let prepared = tokio::task::spawn_blocking(|| copy::keep_vectors(plan)).await;
    prepared.unwrap_or_else(|e| Err(DataFusionError::External(Box::new(e))))
}
