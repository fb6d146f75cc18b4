//! COPY writes times to Parquet in the units that it has: no seconds, and no `Date64`. The writer would store bare integers, which only
//! Arrow's readers take for times.

use std::sync::Arc;

use datafusion::{
    common::{
        Column, Result,
        tree_node::{Transformed, TreeNode},
    },
    datasource::file_format::file_type_to_format,
    logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder, cast, dml::CopyTo},
};

use crate::source::types::times_of_parquet;

/// Returns the plan in which each COPY to Parquet converts times in seconds and `Date64` to milliseconds, as `elmo embed` does; also
/// below EXPLAIN.
///
/// # Errors
/// Those of planning the projection.
pub(super) fn convert(plan: LogicalPlan) -> Result<LogicalPlan> {
    let converted = plan.transform_down(|node| match node {
        LogicalPlan::Copy(copy) if file_type_to_format(&copy.file_type)?.get_ext() == "parquet" => {
            let input = in_milliseconds(&copy.input, &copy.partition_by)?;
            let is_changed = input.is_some();
            let input = input.map_or_else(|| Arc::clone(&copy.input), Arc::new);
            let copy = LogicalPlan::Copy(CopyTo { input, ..copy });
            Ok(if is_changed { Transformed::yes(copy) } else { Transformed::no(copy) })
        }
        other => Ok(Transformed::no(other)),
    })?;
    Ok(converted.data)
}

/// The projection that converts the columns, except those of PARTITIONED BY, which are not stored in files; `None` if it changes none.
fn in_milliseconds(rows: &LogicalPlan, folders: &[String]) -> Result<Option<LogicalPlan>> {
    let mut columns = Vec::new();
    let mut is_changed = false;
    for (qualifier, field) in rows.schema().iter() {
        let column = Expr::Column(Column::new(qualifier.cloned(), field.name()));
        let stored = times_of_parquet(field.data_type());
        let stays = &stored == field.data_type() || folders.contains(field.name());
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
