//! What of a query's scans is not in its physical plan.

use std::sync::Arc;

use datafusion::{
    common::{Result, tree_node::TreeNodeRecursion},
    datasource::{file_format::json::JsonFormat, listing::ListingTable, source_as_provider},
    logical_expr::LogicalPlan,
};

use crate::sql::TextFormat;

/// Whether a query reads JSON arrays, which workers would read as line-delimited JSON. Physical scans do not show it.
pub(super) fn reads_json_arrays(plan: &LogicalPlan) -> Result<bool> {
    let mut found = false;
    plan.apply_with_subqueries(|node| {
        let LogicalPlan::TableScan(scan) = node else { return Ok(TreeNodeRecursion::Continue) };
        let Ok(table) = source_as_provider(&scan.source) else { return Ok(TreeNodeRecursion::Continue) };
        let table = table.as_ref() as &dyn std::any::Any;
        let format = table.downcast_ref::<ListingTable>().map(|table| Arc::clone(&table.options().format));
        let json = format.as_ref().map(|format| TextFormat::unwrapped(format.as_ref()) as &dyn std::any::Any);
        let json = json.and_then(|json| json.downcast_ref::<JsonFormat>());
        if json.is_some_and(|json| !json.options().newline_delimited) {
            found = true;
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(found)
}
