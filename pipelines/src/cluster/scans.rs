//! What DataFusion 55 leaves out when a scan of files becomes bytes: how CSV and JSON files are packed, what ends a record
//! of CSV, whether JSON is an array, and Arrow a stream. Executors see from the names how files are packed; what cannot be
//! seen is read by the process that asks.

use std::sync::Arc;

use datafusion::{
    common::{
        Result,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    datasource::{
        file_format::{file_compression_type::FileCompressionType, json::JsonFormat},
        listing::ListingTable,
        physical_plan::{CsvSource, FileScanConfig, FileScanConfigBuilder},
        source::DataSourceExec,
        source_as_provider,
    },
    logical_expr::LogicalPlan,
    physical_plan::ExecutionPlan,
};

use crate::source::{Compression, of_name};

/// Whether a scan would read something else on an executor.
pub(super) fn is_lost(scan: &FileScanConfig) -> bool {
    let source = scan.file_source().as_ref() as &dyn std::any::Any;
    let kind = scan.file_source().file_type();
    let has_terminator = source.downcast_ref::<CsvSource>().is_some_and(|csv| csv.terminator().is_some());
    // Columns that no file has, such as the number of a row in it.
    let has_virtual = !scan.file_source().table_schema().virtual_columns().is_empty();
    // Executors read every Arrow file as one with a footer.
    has_terminator
        || has_virtual
        || kind == "arrow_stream"
        || (matches!(kind, "csv" | "json") && packed(scan) != scan.file_compression_type)
}

/// Whether a query reads JSON arrays, which executors would read as lines. Of a scan that cannot be seen.
pub(super) fn reads_json_arrays(plan: &LogicalPlan) -> Result<bool> {
    let mut found = false;
    plan.apply_with_subqueries(|node| {
        let LogicalPlan::TableScan(scan) = node else { return Ok(TreeNodeRecursion::Continue) };
        let Ok(table) = source_as_provider(&scan.source) else { return Ok(TreeNodeRecursion::Continue) };
        let table = table.as_ref() as &dyn std::any::Any;
        let format = table.downcast_ref::<ListingTable>().map(|table| Arc::clone(&table.options().format));
        let json =
            format.as_ref().and_then(|format| (format.as_ref() as &dyn std::any::Any).downcast_ref::<JsonFormat>());
        if json.is_some_and(|json| !json.options().newline_delimited) {
            found = true;
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(found)
}

/// A plan from elsewhere, its scans reading files as their names say that they are packed.
pub(super) fn restored(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let restored = plan.transform_up(|node| {
        let source =
            node.downcast_ref::<DataSourceExec>().map(|scan| scan.data_source().as_ref() as &dyn std::any::Any);
        let scan = source.and_then(|source| source.downcast_ref::<FileScanConfig>());
        match scan.filter(|scan| matches!(scan.file_source().file_type(), "csv" | "json")) {
            Some(scan) if packed(scan) != scan.file_compression_type => {
                let how = packed(scan);
                let scan = FileScanConfigBuilder::from(scan.clone()).with_file_compression_type(how).build();
                Ok(Transformed::yes(DataSourceExec::from_data_source(scan) as Arc<dyn ExecutionPlan>))
            }
            _ => Ok(Transformed::no(node)),
        }
    });
    restored.map(|restored| restored.data)
}

/// How the names of a scan's files say that they are packed; as if they were not, where they differ.
fn packed(scan: &FileScanConfig) -> FileCompressionType {
    let files = scan.file_groups.iter().flat_map(|group| group.files());
    let mut said = files.map(|file| of_name(file.object_meta.location.as_ref()).map(|(_, packed)| packed));
    let first = said.next().flatten();
    match first.filter(|_| said.all(|other| other == first)) {
        Some(Compression::Gzip) => FileCompressionType::GZIP,
        Some(Compression::Zstd) => FileCompressionType::ZSTD,
        Some(Compression::None) | None => FileCompressionType::UNCOMPRESSED,
    }
}
