//! COPY writes times to Parquet in the units that it has: no seconds, and no `Date64`. The writer would store bare integers, which only
//! Arrow's readers take for times.

use std::{any::Any, sync::Arc};

use arrow::datatypes::{DataType, Field, SchemaRef};
use datafusion::{
    catalog::TableProvider,
    common::{
        Column, Result, plan_err,
        tree_node::{Transformed, TreeNode},
    },
    datasource::{
        file_format::{file_type_to_format, parquet::ParquetFormat},
        listing::ListingTable,
        source_as_provider,
    },
    logical_expr::{
        Expr, LogicalPlan, LogicalPlanBuilder, cast,
        dml::{CopyTo, DmlStatement},
    },
};

use crate::source::types::{shown, times_of_parquet};

/// The plan with such columns of a COPY to Parquet converted to milliseconds, as `elmo embed` does; also below EXPLAIN.
///
/// # Errors
/// For INSERT into a table of Parquet files that has such columns.
pub(super) fn convert(plan: LogicalPlan) -> Result<LogicalPlan> {
    let converted = plan.transform_down(|node| match node {
        LogicalPlan::Copy(copy) if file_type_to_format(&copy.file_type)?.get_ext() == "parquet" => {
            let input = in_milliseconds(&copy.input)?;
            let is_changed = input.is_some();
            let input = input.map_or_else(|| Arc::clone(&copy.input), Arc::new);
            let copy = LogicalPlan::Copy(CopyTo { input, ..copy });
            Ok(if is_changed { Transformed::yes(copy) } else { Transformed::no(copy) })
        }
        LogicalPlan::Dml(insert) => {
            check_table(&insert)?;
            Ok(Transformed::no(LogicalPlan::Dml(insert)))
        }
        other => Ok(Transformed::no(other)),
    })?;
    Ok(converted.data)
}

/// The rows with other columns; `None` if all columns stay.
fn in_milliseconds(rows: &LogicalPlan) -> Result<Option<LogicalPlan>> {
    let mut columns = Vec::new();
    let mut is_changed = false;
    for (qualifier, field) in rows.schema().iter() {
        let column = Expr::Column(Column::new(qualifier.cloned(), field.name()));
        let stored = times_of_parquet(field.data_type());
        let stays = &stored == field.data_type();
        is_changed |= !stays;
        columns.push(if stays {
            column
        } else {
            cast(column, stored).alias_qualified(qualifier.cloned(), field.name())
        });
    }
    if !is_changed {
        return Ok(None);
    }
    LogicalPlanBuilder::from(rows.clone()).project(columns)?.build().map(Some)
}

fn check_table(insert: &DmlStatement) -> Result<()> {
    let Ok(table) = source_as_provider(&insert.target) else { return Ok(()) };
    let Some(table) = (table.as_ref() as &dyn Any).downcast_ref::<ListingTable>() else { return Ok(()) };
    if !(table.options().format.as_ref() as &dyn Any).is::<ParquetFormat>() {
        return Ok(());
    }
    let schema: SchemaRef = table.schema();
    let is_stored = |field: &&Arc<Field>| times_of_parquet(field.data_type()) == *field.data_type();
    match schema.fields().iter().find(|field| !is_stored(field)) {
        Some(field) => plan_err!(
            "column \"{}\" is {}, which Parquet has no type for; {}",
            field.name(),
            shown(field.data_type()),
            advice(field.data_type())
        ),
        None => Ok(()),
    }
}

fn advice(kind: &DataType) -> &'static str {
    match kind {
        DataType::Timestamp(..) | DataType::Date64 => "declare it in the table as timestamp(3)",
        _ => "declare it in the table with milliseconds",
    }
}
