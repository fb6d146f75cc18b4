//! A table of listed files in a format of DataFusion, with the columns that their folders name.
//!
//! DataFusion's `ListingTable` would list the files once more by rules of its own, look all of them up at once, and take
//! partitions only of folders that it lists itself.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::{
    catalog::{Session, TableProvider},
    common::{ColumnStatistics, Result, ScalarValue, Statistics, project_schema, stats::Precision},
    datasource::{
        file_format::FileFormat,
        listing::PartitionedFile,
        physical_plan::{FileGroup, FileScanConfigBuilder},
        table_schema::TableSchema,
    },
    execution::object_store::ObjectStoreUrl,
    logical_expr::{Expr, TableProviderFilterPushDown, TableType},
    physical_expr::LexOrdering,
    physical_plan::{ExecutionPlan, empty::EmptyExec},
};
use datafusion_datasource::compute_all_files_statistics;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectMeta, ObjectStore};

use super::{error::external, file_errors::with_file_name, partitions::Partitions};
use crate::source::{InputFile, SourceError};

/// Number of files that are looked up at the same time.
pub(super) const CONCURRENT_FILES: usize = 16;

/// See the module.
#[derive(Debug)]
pub(super) struct FileTable {
    pub(super) format: Arc<dyn FileFormat>,
    pub(super) store: ObjectStoreUrl,
    pub(super) files: Vec<InputFile>,
    /// The columns in the files and then those of the folders, as the scan counts them.
    scanned: TableSchema,
    /// The columns in the files, with the types in which DataFusion reads their statistics.
    stated: SchemaRef,
    partitions: Partitions,
    /// The columns of the table, and their places in `scanned`.
    schema: SchemaRef,
    places: Vec<usize>,
}

impl FileTable {
    /// A table of files with the columns `columns`. A column that a folder names, too, is that of the folder. Without
    /// `views`, views are read as plain strings.
    pub(super) fn new(
        format: Arc<dyn FileFormat>,
        store: ObjectStoreUrl,
        files: Vec<InputFile>,
        columns: &SchemaRef,
        views: bool,
    ) -> Result<Self> {
        let partitions = Partitions::of(&files, |_| false)?;
        let of_folders = partitions.fields();
        let is_hidden = |field: &Field| of_folders.iter().any(|folder| folder.name() == field.name());
        // CSV is read by position, so that the column stays, under a name that nothing refers to.
        let in_files = columns.fields().iter().enumerate().map(|(place, field)| match is_hidden(field) {
            true => Arc::new(field.as_ref().clone().with_name(format!("{}#{place}", field.name()))),
            false => Arc::clone(field),
        });
        let stated = Arc::new(Schema::new_with_metadata(in_files.collect::<Vec<_>>(), columns.metadata().clone()));
        let in_files = if views { Arc::clone(&stated) } else { without_views(&stated) };
        let partition_columns: Vec<_> = of_folders.iter().map(|field| Arc::new(field.clone())).collect();
        let scanned = TableSchema::builder(in_files).with_table_partition_cols(partition_columns).build();
        let shown = (0..columns.fields().len()).filter(|place| !is_hidden(columns.field(*place)));
        let places: Vec<usize> = shown.chain(columns.fields().len()..scanned.table_schema().fields().len()).collect();
        let schema = Arc::new(scanned.table_schema().project(&places)?);
        Ok(Self { format, store, files, scanned, stated, partitions, schema, places })
    }

    /// The files as they are now, with their statistics, up to the file that completes `limit` rows. Whether there are more.
    async fn scanned_files(
        &self,
        session: &dyn Session,
        kept: &[usize],
        limit: Option<usize>,
    ) -> Result<(Vec<PartitionedFile>, bool)> {
        let store = session.runtime_env().object_store(&self.store)?;
        // A closure in a stream would be inferred to take one lifetime only.
        let files: Vec<_> = kept.iter().map(|file| self.scanned_file(session, &store, *file)).collect();
        let mut files = stream::iter(files).buffered(CONCURRENT_FILES);
        let (mut scanned, mut rows) = (Vec::new(), Precision::Exact(0));
        while let Some(file) = files.try_next().await? {
            rows = rows.add(&file.statistics.as_ref().map_or(Precision::Absent, |statistics| statistics.num_rows));
            scanned.push(file);
            if matches!((rows, limit), (Precision::Exact(rows), Some(limit)) if rows >= limit) {
                break;
            }
        }
        let more = scanned.len() < kept.len();
        Ok((scanned, more))
    }

    async fn scanned_file(
        &self,
        session: &dyn Session,
        store: &Arc<dyn ObjectStore>,
        number: usize,
    ) -> Result<PartitionedFile> {
        let file = &self.files[number];
        let missing = || external(SourceError::Missing { address: file.to_string() });
        let meta = match &file.location {
            Some(location) => location.head().await.map_err(external)?.ok_or_else(missing)?,
            None => return Err(missing()),
        };
        let meta = ObjectMeta { location: path(file), ..meta };
        let values = self.partitions.values(number)?;
        let (mut statistics, mut ordering) = (Statistics::new_unknown(self.scanned.file_schema()), None);
        if session.config().collect_statistics() {
            let columns = Arc::clone(&self.stated);
            let found = self.format.infer_stats_and_ordering(session, store, columns, &meta).await;
            let found = found.map_err(|error| with_file_name(error, &file.to_string()))?;
            (statistics, ordering) = (found.statistics, found.ordering);
            if !Arc::ptr_eq(&self.stated, self.scanned.file_schema()) {
                statistics = with_types(statistics, self.scanned.file_schema());
            }
        }
        let mut scanned = PartitionedFile::from(meta);
        let nulls: Vec<usize> = (0..values.len()).filter(|place| values[*place].is_null()).collect();
        scanned.partition_values = values;
        let mut scanned = scanned.with_statistics(Arc::new(statistics)).with_ordering(ordering);
        // DataFusion takes it for granted that a partition is not NULL.
        if let Some(statistics) = scanned.statistics.as_mut().filter(|_| !nulls.is_empty()) {
            let columns = &mut Arc::make_mut(statistics).column_statistics;
            nulls.iter().for_each(|place| {
                columns[self.scanned.file_schema().fields().len() + place] = ColumnStatistics::new_unknown();
            });
        }
        Ok(scanned)
    }
}

/// The schema with plain strings instead of views. Batches of a reader share the buffers of views, and a memory pool counts
/// them for each batch.
fn without_views(schema: &SchemaRef) -> SchemaRef {
    let fields = schema.fields().iter().map(|field| match field.data_type() {
        DataType::Utf8View => Arc::new(field.as_ref().clone().with_data_type(DataType::Utf8)),
        DataType::BinaryView => Arc::new(field.as_ref().clone().with_data_type(DataType::Binary)),
        _ => Arc::clone(field),
    });
    Arc::new(Schema::new_with_metadata(fields.collect::<Vec<_>>(), schema.metadata().clone()))
}

/// Statistics with bounds of the types of a schema. DataFusion 55 drops the statistics of a column whose declared type
/// differs from that in the file.
fn with_types(mut statistics: Statistics, schema: &SchemaRef) -> Statistics {
    for (column, field) in statistics.column_statistics.iter_mut().zip(schema.fields()) {
        let cast = |value: &ScalarValue| value.cast_to(field.data_type()).ok();
        for bound in [&mut column.min_value, &mut column.max_value] {
            *bound = match &*bound {
                Precision::Exact(value) => cast(value).map_or(Precision::Absent, Precision::Exact),
                Precision::Inexact(value) => cast(value).map_or(Precision::Absent, Precision::Inexact),
                Precision::Absent => Precision::Absent,
            };
        }
    }
    statistics
}

/// The path of a file in its store.
pub(super) fn path(file: &InputFile) -> object_store::path::Path {
    file.location.as_ref().map(|location| location.path.clone()).unwrap_or_default()
}

/// The order of the rows of all files.
fn common_ordering(files: &[PartitionedFile]) -> Vec<LexOrdering> {
    let first = files.first().and_then(|file| file.ordering.clone());
    first.filter(|first| files.iter().all(|file| file.ordering.as_ref() == Some(first))).into_iter().collect()
}

#[async_trait]
impl TableProvider for FileTable {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    fn supports_filters_pushdown(&self, filters: &[&Expr]) -> Result<Vec<TableProviderFilterPushDown>> {
        Ok(self.partitions.pushdown(filters, &TableProviderFilterPushDown::Inexact))
    }

    async fn scan(
        &self,
        session: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let kept = self.partitions.matching(session, filters)?;
        // Other filters may reject rows that the limit counts.
        let limit_of_files = limit.filter(|_| filters.iter().all(|filter| self.partitions.decide(filter)));
        let (files, more) = self.scanned_files(session, &kept, limit_of_files).await?;
        if files.is_empty() {
            return Ok(Arc::new(EmptyExec::new(project_schema(&self.schema, projection)?)));
        }
        let ordering = common_ordering(&files);
        let groups = FileGroup::new(files).split_files(session.config().target_partitions());
        let all = Arc::clone(self.scanned.table_schema());
        let (groups, statistics) =
            compute_all_files_statistics(groups, all, session.config().collect_statistics(), more)?;
        let columns = match projection {
            Some(columns) => columns.iter().map(|column| self.places[*column]).collect(),
            None => self.places.clone(),
        };
        let source = self.format.file_source(self.scanned.clone());
        let scan = FileScanConfigBuilder::new(self.store.clone(), source)
            .with_file_groups(groups)
            .with_statistics(statistics)
            .with_projection_indices(Some(columns))?
            .with_limit(limit)
            .with_output_ordering(ordering)
            .build();
        self.format.create_physical_plan(session, scan).await
    }
}
