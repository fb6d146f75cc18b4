//! What DataFusion 55 leaves out when a scan of files becomes bytes: how CSV and JSON files are packed, and what ends a
//! record of CSV. Executors see from the names how files are packed; what cannot be seen is refused before it is sent.

use std::sync::Arc;

use datafusion::{
    common::{
        Result,
        tree_node::{Transformed, TreeNode},
    },
    datasource::{
        file_format::file_compression_type::FileCompressionType,
        physical_plan::{CsvSource, FileScanConfig, FileScanConfigBuilder},
        source::DataSourceExec,
    },
    physical_plan::ExecutionPlan,
};

use crate::source::{Compression, of_name};

/// Why a scan would read something else on an executor, if it would.
pub(super) fn lost(scan: &FileScanConfig) -> Option<&'static str> {
    let source = scan.file_source().as_ref() as &dyn std::any::Any;
    if source.downcast_ref::<CsvSource>().is_some_and(|csv| csv.terminator().is_some()) {
        return Some("CSV with a format.terminator");
    }
    let is_text = matches!(scan.file_source().file_type(), "csv" | "json");
    (is_text && packed(scan) != scan.file_compression_type)
        .then_some("packed files whose names do not end in .gz or .zst")
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
