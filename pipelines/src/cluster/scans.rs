//! Properties of file scans that DataFusion 55 does not serialise: the compression of CSV and JSON files, the record
//! terminator of CSV, and whether JSON files are arrays and Arrow files are streams. Executors infer the compression
//! from the file names; the client runs the other scans itself.

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

use crate::{
    source::{Compression, of_name},
    sql::TextFormat,
};

/// Whether a scan has properties that are lost in serialisation, and would return other rows on an executor.
pub(super) fn loses_properties(scan: &FileScanConfig) -> bool {
    let source = scan.file_source().as_ref() as &dyn std::any::Any;
    let kind = scan.file_source().file_type();
    let has_terminator = source.downcast_ref::<CsvSource>().is_some_and(|csv| csv.terminator().is_some());
    // Such as the row index.
    let has_virtual = !scan.file_source().table_schema().virtual_columns().is_empty();
    // Executors read Arrow streams as Arrow files, and fail.
    has_terminator
        || has_virtual
        || kind == "arrow_stream"
        || (matches!(kind, "csv" | "json") && compression_of_names(scan) != scan.file_compression_type)
}

/// Whether a query reads JSON arrays, which executors would read as line-delimited JSON. Physical scans do not show it.
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

/// Sets the compression of the scans of a deserialised plan from the file names.
pub(super) fn with_compression_of_names(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let restored = plan.transform_up(|node| {
        let source =
            node.downcast_ref::<DataSourceExec>().map(|scan| scan.data_source().as_ref() as &dyn std::any::Any);
        let scan = source.and_then(|source| source.downcast_ref::<FileScanConfig>());
        match scan.filter(|scan| matches!(scan.file_source().file_type(), "csv" | "json")) {
            Some(scan) if compression_of_names(scan) != scan.file_compression_type => {
                let compression = compression_of_names(scan);
                let scan = FileScanConfigBuilder::from(scan.clone()).with_file_compression_type(compression).build();
                Ok(Transformed::yes(DataSourceExec::from_data_source(scan) as Arc<dyn ExecutionPlan>))
            }
            _ => Ok(Transformed::no(node)),
        }
    });
    restored.map(|restored| restored.data)
}

/// The compression according to the extensions of a scan's files; uncompressed if they differ.
fn compression_of_names(scan: &FileScanConfig) -> FileCompressionType {
    let files = scan.file_groups.iter().flat_map(|group| group.files());
    let mut codecs = files.map(|file| of_name(file.object_meta.location.as_ref()).map(|(_, codec)| codec));
    let first = codecs.next().flatten();
    match first.filter(|_| codecs.all(|other| other == first)) {
        Some(Compression::Gzip) => FileCompressionType::GZIP,
        Some(Compression::Zstd) => FileCompressionType::ZSTD,
        Some(Compression::None) | None => FileCompressionType::UNCOMPRESSED,
    }
}
