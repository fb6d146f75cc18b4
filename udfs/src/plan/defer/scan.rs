//! Removes calls from the filters of a table scan.

use datafusion::{
    common::Result,
    logical_expr::{Expr, TableProviderFilterPushDown, TableScan, TableScanBuilder},
};

use super::super::calls::has_calls;

/// Removes the filters with calls from a scan: the scan would embed texts, possibly when the query is planned.
///
/// Returns the scan, and the removed filters that the table promised to apply exactly; they must be applied above.
/// Columns that only these filters read are appended to the scan's columns.
pub(super) fn scan_without_calls(mut scan: TableScan) -> Result<(TableScan, Vec<Expr>)> {
    let (costly, cheap): (Vec<Expr>, Vec<Expr>) = scan.filters.iter().cloned().partition(has_calls);
    if costly.is_empty() {
        return Ok((scan, Vec::new()));
    }
    let support = scan.source.supports_filters_pushdown(&costly.iter().collect::<Vec<_>>())?;
    let exact = costly.into_iter().zip(support).filter(|(_, support)| *support == TableProviderFilterPushDown::Exact);
    let exact: Vec<Expr> = exact.map(|(filter, _)| filter).collect();
    if exact.is_empty() {
        scan.filters = cheap;
        return Ok((scan, exact));
    }
    let mut columns = match &scan.projection {
        Some(columns) => columns.clone(),
        None => (0..scan.source.schema().fields().len()).collect(),
    };
    for column in exact.iter().flat_map(Expr::column_refs) {
        let column = scan.source.schema().index_of(&column.name)?;
        if !columns.contains(&column) {
            columns.push(column);
        }
    }
    // The scan's limit counts rows after all filters, so it is dropped. A limit operator above applies it.
    let scan = TableScanBuilder::new(scan.table_name, scan.source).with_projection(Some(columns));
    Ok((scan.with_filters(cheap).build()?, exact))
}
