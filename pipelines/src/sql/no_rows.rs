//! What a COPY to a folder writes if its query has no rows: one file with the columns. DataFusion writes no file, and
//! the folder could not be read.

use std::sync::Arc;

use arrow::datatypes::Schema;
use datafusion::{
    common::Result,
    datasource::{
        file_format::file_type_to_format,
        listing::ListingTableUrl,
        physical_plan::{FileGroup, FileOutputMode, FileSinkConfig},
    },
    execution::session_state::SessionState,
    logical_expr::{
        LogicalPlan,
        dml::{CopyTo, InsertOp},
    },
    physical_plan::{ExecutionPlan, empty::EmptyExec},
};
use object_store::path::Path;
use url::Url;

use super::{copy::keeps_partition_columns, error::external};
use crate::source::hive;

/// The plan that writes the file; `None` if the statement is no COPY.
///
/// # Errors
/// As planning the COPY.
pub(super) async fn plan(statement: &LogicalPlan, state: &SessionState) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    match statement {
        LogicalPlan::Copy(copy) => plan_copy(copy, state).await.map(Some),
        LogicalPlan::Analyze(analyze) => Box::pin(plan(&analyze.input, state)).await,
        _ => Ok(None),
    }
}

async fn plan_copy(copy: &CopyTo, state: &SessionState) -> Result<Arc<dyn ExecutionPlan>> {
    let format = file_type_to_format(&copy.file_type)?.create(state, &copy.options)?;
    let compression = format.compression_type();
    let extension = compression.and_then(|compression| format.get_ext_with_compression(&compression).ok());
    let folder = ListingTableUrl::parse(&copy.output_url)?;
    let path = path(folder.prefix(), &copy.partition_by, &extension.unwrap_or_else(|| format.get_ext()));
    let keeps = keeps_partition_columns(copy, state.config_options());
    let columns = copy.input.schema().as_arrow();
    let kept = columns.fields().iter().filter(|field| keeps || !copy.partition_by.contains(field.name()));
    let schema = Arc::new(Schema::new_with_metadata(kept.cloned().collect::<Vec<_>>(), columns.metadata().clone()));
    let config = FileSinkConfig {
        original_url: copy.output_url.clone(),
        object_store_url: folder.object_store(),
        file_group: FileGroup::default(),
        table_paths: vec![url(&folder, &path)?],
        output_schema: Arc::clone(&schema),
        table_partition_cols: Vec::new(),
        insert_op: InsertOp::Append,
        keep_partition_by_columns: false,
        file_extension: format.get_ext(),
        file_output_mode: FileOutputMode::SingleFile,
    };
    format.create_writer_physical_plan(Arc::new(EmptyExec::new(schema)), state, config, None).await
}

/// A new name in the folders of partitions without values.
fn path(folder: &Path, partitions: &[String], extension: &str) -> Path {
    let folders = partitions.iter().map(|column| format!("{column}={}", hive::NULL));
    let file = format!("{}_0.{extension}", uuid::Uuid::new_v4().simple());
    folders.chain([file]).fold(folder.clone(), |path, name| path.join(name))
}

/// The URL of a path in the store of another URL.
fn url(folder: &ListingTableUrl, path: &Path) -> Result<ListingTableUrl> {
    let mut url = Url::parse(folder.object_store().as_str()).map_err(external)?;
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.clear().extend(path.parts().map(|part| part.as_ref().to_owned()));
    }
    ListingTableUrl::try_new(url, None)
}
