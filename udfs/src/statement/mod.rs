//! SQL statements: parsing with the extensions of this crate, planning, and execution.

mod ast;
mod copy;
mod named_arguments;
mod null_values;
mod show_functions;

use std::sync::Arc;

pub use datafusion::sql::parser::Statement;
use datafusion::{
    common::plan_datafusion_err,
    dataframe::DataFrame,
    error::{DataFusionError, Result},
    execution::memory_pool::MemoryPool,
    logical_expr::LogicalPlan,
    prelude::SessionContext,
    sql::{parser::DFParserBuilder, sqlparser::dialect::dialect_from_str},
};

/// Plans a statement as [`SessionContext::sql`] does, but accepts named options with gaps.
///
/// DataFusion 55 rejects `elmo_embed(text, pooling => 'max')`, because the parameter `layers` comes first. Here missing
/// options are filled with NULL, which means the default value.
///
/// # Errors
/// When the statement cannot be parsed or planned, or there is not exactly one.
pub async fn sql(context: &SessionContext, statement: &str) -> Result<DataFrame> {
    let mut statements = parse(context, statement)?;
    match (statements.pop(), statements.len()) {
        (Some(only), 0) => run(context, only).await,
        (None, _) => Err(plan_datafusion_err!("there is no statement")),
        (Some(_), more) => Err(plan_datafusion_err!("there are {} statements; pass one at a time", more + 1)),
    }
}

/// Parses the statements of a text, in order. Pass them to [`run`].
///
/// # Errors
/// When a statement cannot be parsed, or a call of `elmo_word` in it is wrong.
pub fn parse(context: &SessionContext, text: &str) -> Result<Vec<Statement>> {
    let state = context.state();
    let settings = &state.config().options().sql_parser;
    let dialect = dialect_from_str(settings.dialect)
        .ok_or_else(|| plan_datafusion_err!("datafusion.sql_parser.dialect: no dialect {:?}", settings.dialect))?;
    let parser = DFParserBuilder::new(text).with_dialect(dialect.as_ref());
    let statements = parser.with_recursion_limit(settings.recursion_limit.get()).build()?.parse_statements()?;
    let rewritten = statements.into_iter().map(|mut statement| {
        named_arguments::fill_gaps(&mut statement)?;
        null_values::type_nulls(&mut statement);
        Ok(statement)
    });
    rewritten.collect()
}

/// Plans a statement, and executes it if it returns no rows (CREATE, SET).
///
/// COPY of vectors to Parquet writes them as `elmo embed` does: with byte stream split encoding, row groups that are
/// bounded in bytes, and a footer that names the model. SHOW FUNCTIONS lists all functions, including those without
/// fixed argument types.
///
/// # Errors
/// When the statement cannot be planned.
pub async fn run(context: &SessionContext, statement: Statement) -> Result<DataFrame> {
    let function_filter = show_functions::filter(&statement);
    let plan = context.state().statement_to_plan(statement).await?;
    let plan = prepared(plan, &context.runtime_env().memory_pool).await?;
    let frame = context.execute_logical_plan(plan).await?;
    match function_filter {
        Some(filter) => show_functions::add_missing(context, frame, &filter).await,
        None => Ok(frame),
    }
}

/// Adds to the plan of a COPY the options that [`run`] sets. Returns other plans unchanged. If the memory pool is limited,
/// row groups are smaller.
///
/// # Errors
/// When the model of a call cannot be opened.
pub async fn prepared(plan: LogicalPlan, pool: &Arc<dyn MemoryPool>) -> Result<LogicalPlan> {
    if !matches!(plan, LogicalPlan::Copy(_) | LogicalPlan::Analyze(_)) {
        return Ok(plan);
    }
    // Reading the weights blocks.
    let row_group_bytes = copy::row_group_bytes(pool.as_ref());
    let prepared = tokio::task::spawn_blocking(move || copy::add_vector_options(plan, row_group_bytes)).await;
    prepared.unwrap_or_else(|e| Err(DataFusionError::External(Box::new(e))))
}
