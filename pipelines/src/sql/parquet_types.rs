//! Refuses types that Parquet cannot hold before anything is computed. Its writer fails with the first rows, like a reader
//! of damaged files.

use std::any::Any;

use arrow::datatypes::{FieldRef, Fields};
use datafusion::{
    catalog::TableProvider,
    datasource::{listing::ListingTable, source_as_provider},
    logical_expr::LogicalPlan,
};

use crate::{
    error::{Error, Result},
    source::types,
};

/// Checks the columns of a COPY or INSERT to Parquet files; also below EXPLAIN.
///
/// # Errors
/// As [`check`].
pub(super) fn check_plan(plan: &LogicalPlan) -> Result<()> {
    match plan {
        LogicalPlan::Copy(copy) if copy.file_type.get_ext() == "parquet" => check(copy.input.schema().fields()),
        LogicalPlan::Dml(insert) => {
            let table = source_as_provider(&insert.target).ok();
            let table: Option<&ListingTable> =
                table.as_ref().and_then(|table| (table.as_ref() as &dyn Any).downcast_ref());
            match table.filter(|table| table.options().format.get_ext() == "parquet") {
                Some(table) => {
                    check(insert.input.schema().fields())?;
                    check_times(table.schema().fields())
                }
                None => Ok(()),
            }
        }
        LogicalPlan::Analyze(analyze) => check_plan(&analyze.input),
        LogicalPlan::Explain(explain) => check_plan(&explain.plan),
        _ => Ok(()),
    }
}

/// Checks columns that are written to Parquet.
///
/// # Errors
/// [`Error::Usage`] with the first column of a type that Parquet cannot hold.
pub(super) fn check(fields: &Fields) -> Result<()> {
    let Some(field) = fields.iter().find(|field| !types::is_storable(field)) else { return Ok(()) };
    let (name, kind) = (field.name(), types::shown(field.data_type()));
    Err(Error::usage(
        format!("column \"{name}\" is {kind}, which Parquet cannot hold"),
        format!("leave it out, or cast it, as with CAST(\"{name}\" AS VARCHAR) AS \"{name}\""),
    ))
}

/// Checks the columns of a table: COPY converts times to the units of Parquet ([`parquet_times`](super::parquet_times)), but a table has
/// the types that it was declared with.
fn check_times(fields: &Fields) -> Result<()> {
    let differs = |field: &&FieldRef| types::times_of_parquet(field.data_type()) != *field.data_type();
    let Some(field) = fields.iter().find(differs) else { return Ok(()) };
    let (name, kind) = (field.name(), types::shown(field.data_type()));
    Err(Error::usage(
        format!("column \"{name}\" of the table is {kind}, for which Parquet has no type"),
        "declare it with milliseconds, as with timestamp(3)",
    ))
}
