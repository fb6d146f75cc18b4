//! Adds the name of the file, and of a CSV or JSON file the row, to errors about the content of a file. DataFusion's
//! readers report what is wrong with a row, but not in which file of the table, and few say in which row.

use std::{any::Any, fmt, sync::Arc};

use async_trait::async_trait;
use datafusion::{
    arrow::{array::RecordBatch, datatypes::SchemaRef, error::ArrowError},
    catalog::{Session, TableProvider, TableProviderFactory},
    common::{
        DataFusionError, Result,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    datasource::{
        file_format::FileFormat,
        file_format::file_compression_type::FileCompressionType,
        listing::{ListingTable, ListingTableUrl, PartitionedFile},
        physical_plan::{CsvSource, FileOpener, FileScanConfig, FileSource},
        source::DataSourceExec,
        source_as_provider,
        table_schema::TableSchema,
    },
    execution::{object_store::ObjectStoreUrl, session_state::SessionState},
    logical_expr::{CreateExternalTable, LogicalPlan},
    physical_expr::{
        EquivalenceProperties, PhysicalExpr, PhysicalSortExpr, ScalarFunctionExpr, projection::ProjectionExprs,
    },
    physical_plan::{DisplayFormatType, ExecutionPlan, SortOrderPushdownResult, metrics::ExecutionPlanMetricsSet},
};
use datafusion_datasource::morsel::{Morsel, MorselPlan, MorselPlanner, Morselizer};
use futures::{StreamExt, TryFutureExt, TryStreamExt, stream::BoxStream};
use object_store::ObjectStore;

use super::{
    cells::Cells,
    error::{external, is_caused_by_store, is_invalid_arrow, message, wrapped_by_store},
    json_reader::JsonReader,
    plain_text::{Broken, TextStore},
    text_format::with_text_formats,
};
use crate::source::{
    SourceError, csv,
    reason::{Reason, of_own_io},
};

/// Files examined concurrently while searching for an unreadable one.
const CONCURRENT_READS: usize = 16;

/// Name of the operator whose input runs on a cluster.
pub(crate) const CLUSTER_EXEC: &str = "ClusterExec";

/// Name of the operator at the top of what a worker runs.
pub(crate) const STAGE_EXEC: &str = "StageExec";

/// Wraps the file sources of a final physical plan in [`FileErrorSource`]s. Plans below a [`CLUSTER_EXEC`] stay as they
/// are: the wrapper cannot be serialised.
///
/// # Errors
/// As [`TreeNode::transform_down`].
pub(crate) fn name_files_in_errors(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let wrapped = plan.transform_down(|node| {
        if node.name() == CLUSTER_EXEC {
            return Ok(Transformed::new(node, false, TreeNodeRecursion::Jump));
        }
        let scan = node.downcast_ref::<DataSourceExec>().map(|scan| scan.data_source().as_ref() as &dyn Any);
        let Some(scan) = scan.and_then(|scan| scan.downcast_ref::<FileScanConfig>()) else {
            return Ok(Transformed::no(node));
        };
        let source = Arc::new(FileErrorSource { source: Arc::clone(scan.file_source()), batch_rows: 1 });
        // `FileScanConfigBuilder` may change the output ordering.
        let mut scan = scan.clone();
        scan.file_source = source;
        Ok(Transformed::yes(DataSourceExec::from_data_source(scan) as Arc<dyn ExecutionPlan>))
    });
    wrapped.map(|wrapped| wrapped.data)
}

/// Adds the file name to an error about the content of a file. Other errors are returned unchanged.
pub(super) fn with_file_name(error: DataFusionError, file: &str) -> DataFusionError {
    let root = error.find_root();
    let file = || file.to_owned();
    match broken(root) {
        Some(Broken { row, reason }) => {
            external(SourceError::Malformed { file: file(), row: *row, reason: reason.clone() })
        }
        None if is_content_error(root) => external(SourceError::Unreadable { file: file(), reason: reason(&error) }),
        None => error,
    }
}

fn broken(root: &DataFusionError) -> Option<&Broken> {
    let DataFusionError::External(inner) = root else { return None };
    inner.downcast_ref()
}

/// Why content is invalid, without data.
fn reason(error: &DataFusionError) -> String {
    use std::io::ErrorKind::UnexpectedEof;
    match error.find_root() {
        DataFusionError::IoError(error) if let Some(own) = of_own_io(error) => Reason::from(own).to_string(),
        DataFusionError::IoError(error) if error.kind() == UnexpectedEof => "the compressed data end early".to_owned(),
        DataFusionError::IoError(_) => "the compressed data are damaged".to_owned(),
        _ => message(error).into_owned(),
    }
}

fn is_content_error(root: &DataFusionError) -> bool {
    use ArrowError as A;
    use DataFusionError as E;
    match root {
        E::External(_) => broken(root).is_some(),
        E::ArrowError(error, _) => match error.as_ref() {
            A::IoError(_, error) => super::error::is_invalid_data(error),
            // Raised by an expression that the scan evaluates.
            A::DivideByZero | A::ArithmeticOverflow(_) | A::ComputeError(_) | A::MemoryError(_) => false,
            _ => true,
        },
        E::ParquetError(error) => !is_caused_by_store(error.as_ref()),
        E::ObjectStore(error) => wrapped_by_store(error).is_some_and(|inner| is_content_error(inner.find_root())),
        E::Internal(text) => is_invalid_arrow(text),
        E::IoError(error) => super::error::is_invalid_data(error),
        _ => false,
    }
}

/// Creates external tables with another factory. Infers the columns of CSV and JSON files as elsewhere, and adds the file
/// name if that fails.
#[derive(Debug)]
pub(super) struct InferringFactory(pub(super) Arc<dyn TableProviderFactory>);

#[async_trait]
impl TableProviderFactory for InferringFactory {
    async fn create(&self, session: &dyn Session, command: &CreateExternalTable) -> Result<Arc<dyn TableProvider>> {
        let inferring = session.as_any().downcast_ref().map(with_text_formats).transpose()?;
        let session = inferring.as_ref().map_or(session, |session| session as &dyn Session);
        let error = match self.0.create(session, command).await {
            Err(error) if is_content_error(error.find_root()) => error,
            created => return created,
        };
        let file = unreadable_file_of_command(session, command).await.ok().flatten();
        Err(with_file_name(error, &file.unwrap_or_else(|| command.locations.join(", "))))
    }
}

/// The first file of CREATE EXTERNAL TABLE whose schema cannot be inferred.
async fn unreadable_file_of_command(session: &dyn Session, command: &CreateExternalTable) -> Result<Option<String>> {
    let state = session.as_any().downcast_ref::<SessionState>();
    let Some((state, factory)) = state.and_then(|s| Some((s, s.get_file_format_factory(&command.file_type)?))) else {
        return Ok(None);
    };
    let format = factory.create(state, &command.options)?;
    let mut urls = Vec::new();
    for location in &command.locations {
        let url = ListingTableUrl::parse(location)?;
        urls.push(match url.is_folder() && url.get_glob().is_none() {
            true => {
                // As the factory: of a folder, only files with the default extension are read.
                let compression = format.compression_type();
                let extension = compression.and_then(|compression| format.get_ext_with_compression(&compression).ok());
                url.with_glob(&format!("*.{}", extension.unwrap_or_else(|| command.file_type.to_lowercase())))?
            }
            false => url,
        });
    }
    unreadable_file(session, format.as_ref(), &urls, "").await
}

/// The first file whose schema cannot be inferred.
async fn unreadable_file(
    session: &dyn Session,
    format: &dyn FileFormat,
    urls: &[ListingTableUrl],
    extension: &str,
) -> Result<Option<String>> {
    for url in urls {
        let store = &session.runtime_env().object_store(url)?;
        let files = url.list_all_files(session, store.as_ref(), extension).await?;
        let schemas = files.map_ok(|file| async move {
            Ok((format.infer_schema(session, store, std::slice::from_ref(&file)).await, file))
        });
        let mut schemas = schemas.try_buffered(CONCURRENT_READS);
        while let Some((schema, file)) = schemas.try_next().await? {
            if schema.is_err() {
                return Ok(Some(address(url.object_store().as_str(), &file.location)));
            }
        }
    }
    Ok(None)
}

/// Adds the file name to an error of physical planning, which reads the statistics of Parquet files.
pub(super) async fn name_file_of_plan_error(
    error: DataFusionError,
    session: &dyn Session,
    plan: &LogicalPlan,
) -> DataFusionError {
    if !is_content_error(error.find_root()) {
        return error;
    }
    let mut tables = Vec::new();
    // The visitor does not fail.
    let _ = plan.apply_with_subqueries(|node| {
        if let LogicalPlan::TableScan(scan) = node {
            tables.extend(source_as_provider(&scan.source));
        }
        Ok(TreeNodeRecursion::Continue)
    });
    for table in tables {
        let table = table.as_ref() as &dyn Any;
        let Some(table) = table.downcast_ref::<ListingTable>() else { continue };
        let options = table.options();
        let file =
            unreadable_file(session, options.format.as_ref(), table.table_paths(), &options.file_extension).await;
        if let Ok(Some(file)) = file {
            return with_file_name(error, &file);
        }
    }
    error
}

/// The name of a file in messages: a path for local files, a URL for others.
pub(super) fn address(store: &str, file: impl std::fmt::Display) -> String {
    format!("{}{file}", if store.starts_with("file:") { "/" } else { store })
}

/// A file source that adds the file name to errors, and reads the text of CSV and JSON files. It forwards what execution
/// and display need, and the hint of a sort, which workers give to the scans that they receive; the other optimizer hooks keep their
/// defaults, because it is inserted into final plans only.
struct FileErrorSource {
    source: Arc<dyn FileSource>,
    /// Set before files are opened.
    batch_rows: usize,
}

impl FileErrorSource {
    /// The store and the scan of CSV and JSON files; `None` for other formats.
    fn text(
        &self,
        store: &Arc<dyn ObjectStore>,
        scan: &FileScanConfig,
    ) -> Option<(Arc<dyn ObjectStore>, FileScanConfig)> {
        let csv = (self.source.as_ref() as &dyn Any).downcast_ref::<CsvSource>();
        if csv.is_none() && self.source.file_type() != "json" {
            return None;
        }
        let compression = scan.file_compression_type;
        let text = TextStore { store: Arc::clone(store), compression, cells: csv.map(Cells::of_source) };
        let mut scan = scan.clone();
        scan.file_compression_type = FileCompressionType::UNCOMPRESSED;
        Some((Arc::new(text), scan))
    }

    /// Reads files row by row; `None` where that may cost much more than the scan, or change nothing.
    fn rows(
        &self,
        store: &Arc<dyn ObjectStore>,
        scan: &FileScanConfig,
        partition: usize,
    ) -> Option<Arc<dyn FileOpener>> {
        let mut calls = false;
        let found = self.source.apply_expressions(&mut |root| {
            root.apply(|node| {
                calls |= node.downcast_ref::<ScalarFunctionExpr>().is_some();
                Ok(TreeNodeRecursion::Continue)
            })
        });
        if found.is_err() || calls {
            return None;
        }
        self.reader(1).create_file_opener(Arc::clone(store), scan, partition).ok()
    }

    /// The source that reads CSV and JSON files.
    fn reader(&self, batch_rows: usize) -> Arc<dyn FileSource> {
        match self.source.file_type() {
            "json" => Arc::new(JsonReader { source: Arc::clone(&self.source), batch_rows }),
            "csv" => {
                let columns = self.source.table_schema().file_schema().fields().len();
                self.source.with_batch_size(csv::batch_rows(batch_rows, columns))
            }
            _ => self.source.with_batch_size(batch_rows),
        }
    }
}

impl FileSource for FileErrorSource {
    fn create_file_opener(
        &self,
        store: Arc<dyn ObjectStore>,
        scan: &FileScanConfig,
        partition: usize,
    ) -> Result<Arc<dyn FileOpener>> {
        self.source.create_file_opener(store, scan, partition)
    }

    fn create_morselizer(
        &self,
        store: Arc<dyn ObjectStore>,
        scan: &FileScanConfig,
        partition: usize,
    ) -> Result<Box<dyn Morselizer>> {
        let url = scan.object_store_url.clone();
        let (inner, rows) = match self.text(&store, scan) {
            Some((store, scan)) => {
                let rows = self.rows(&store, &scan, partition);
                (self.reader(self.batch_rows).create_morselizer(store, &scan, partition)?, rows)
            }
            None => (self.source.create_morselizer(store, scan, partition)?, None),
        };
        let rows =
            rows.map(|opener| RowByRow { opener, columns: Arc::clone(self.source.table_schema().file_schema()) });
        Ok(Box::new(FileErrorMorselizer { inner, store: url, rows }))
    }

    fn table_schema(&self) -> &TableSchema {
        self.source.table_schema()
    }

    fn with_batch_size(&self, rows: usize) -> Arc<dyn FileSource> {
        Arc::new(Self { source: self.source.with_batch_size(rows), batch_rows: rows })
    }

    fn filter(&self) -> Option<Arc<dyn PhysicalExpr>> {
        self.source.filter()
    }

    fn projection(&self) -> Option<&ProjectionExprs> {
        self.source.projection()
    }

    fn metrics(&self) -> &ExecutionPlanMetricsSet {
        self.source.metrics()
    }

    fn file_type(&self) -> &str {
        self.source.file_type()
    }

    fn fmt_extra(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt_extra(format, f)
    }

    fn supports_repartitioning(&self) -> bool {
        self.source.supports_repartitioning()
    }

    fn try_pushdown_sort(
        &self,
        order: &[PhysicalSortExpr],
        properties: &EquivalenceProperties,
    ) -> Result<SortOrderPushdownResult<Arc<dyn FileSource>>> {
        let pushed = self.source.try_pushdown_sort(order, properties)?;
        Ok(pushed.map(|source| Arc::new(Self { source, batch_rows: self.batch_rows }) as Arc<dyn FileSource>))
    }

    fn reorder_files(&self, files: Vec<PartitionedFile>) -> Vec<PartitionedFile> {
        self.source.reorder_files(files)
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        self.source.apply_expressions(f)
    }
}

#[derive(Debug)]
struct FileErrorMorselizer {
    inner: Box<dyn Morselizer>,
    store: ObjectStoreUrl,
    rows: Option<RowByRow>,
}

impl Morselizer for FileErrorMorselizer {
    fn plan_file(&self, file: PartitionedFile) -> Result<Box<dyn MorselPlanner>> {
        let name = address(self.store.as_str(), &file.object_meta.location);
        let whole = || PartitionedFile { range: None, ..file.clone() };
        let again = self.rows.as_ref().map(|rows| (rows.clone(), whole()));
        let scanned = Arc::new(ScannedFile { name, again });
        let inner = self.inner.plan_file(file).map_err(|error| with_file_name(error, &scanned.name))?;
        Ok(Box::new(WithFileName { inner, file: scanned }))
    }
}

/// Reads CSV and JSON files row by row.
#[derive(Clone)]
struct RowByRow {
    opener: Arc<dyn FileOpener>,
    columns: SchemaRef,
}

impl fmt::Debug for RowByRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RowByRow")
    }
}

impl RowByRow {
    /// The first row that cannot be read, as an error.
    async fn first_broken(&self, file: PartitionedFile) -> Option<DataFusionError> {
        let mut batches = self.opener.open(file).ok()?.await.ok()?;
        let mut row = 0;
        while let Some(batch) = batches.next().await {
            match batch {
                Ok(batch) => row += batch.num_rows() as u64,
                Err(error) if broken(error.find_root()).is_some() => return Some(error),
                Err(error) if is_content_error(error.find_root()) => {
                    return Some(external(Broken { row, reason: self.with_column(reason(&error)) }));
                }
                Err(_) => return None,
            }
        }
        None
    }

    /// The CSV reader says `for column 0 at line 7` of the first column of the seventh record.
    fn with_column(&self, reason: String) -> String {
        let Some((before, after)) = reason.split_once(" for column ") else { return reason };
        let number = after.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse::<usize>().ok());
        match number.and_then(|number| self.columns.fields().get(number)) {
            Some(column) => format!("{before} for column {:?}", column.name()),
            None => reason,
        }
    }
}

/// What an error about a file needs.
#[derive(Debug)]
struct ScannedFile {
    name: String,
    /// To read it again.
    again: Option<(RowByRow, PartitionedFile)>,
}

impl ScannedFile {
    /// Adds the name and, for an error in a row of CSV or JSON, the row.
    async fn explain(&self, error: DataFusionError) -> DataFusionError {
        let root = error.find_root();
        let is_about_row =
            is_content_error(root) && broken(root).is_none() && !matches!(root, DataFusionError::IoError(_));
        let first = match &self.again {
            Some((rows, file)) if is_about_row => rows.first_broken(file.clone()).await,
            _ => None,
        };
        with_file_name(first.unwrap_or(error), &self.name)
    }
}

/// A planner or morsel of one file, with what errors need.
#[derive(Debug)]
struct WithFileName<T> {
    inner: T,
    file: Arc<ScannedFile>,
}

impl MorselPlanner for WithFileName<Box<dyn MorselPlanner>> {
    fn plan(self: Box<Self>) -> Result<Option<MorselPlan>> {
        let Self { inner, file } = *self;
        let Some(mut plan) = inner.plan().map_err(|error| with_file_name(error, &file.name))? else { return Ok(None) };
        let planner = |inner, file| Box::new(WithFileName { inner, file }) as Box<dyn MorselPlanner>;
        let morsels = plan.take_morsels().into_iter();
        let morsels = morsels.map(|inner| Box::new(WithFileName { inner, file: Arc::clone(&file) }) as Box<dyn Morsel>);
        let planners = plan.take_ready_planners().into_iter().map(|inner| planner(inner, Arc::clone(&file)));
        let pending = plan.take_pending_planner();
        let mut plan = MorselPlan::new().with_morsels(morsels.collect()).with_planners(planners.collect());
        if let Some(pending) = pending {
            let file_of_error = Arc::clone(&file);
            plan.set_pending_planner(
                pending
                    .map_ok(move |inner| planner(inner, file))
                    .map_err(move |error| with_file_name(error, &file_of_error.name)),
            );
        }
        Ok(Some(plan))
    }
}

impl Morsel for WithFileName<Box<dyn Morsel>> {
    fn into_stream(self: Box<Self>) -> BoxStream<'static, Result<RecordBatch>> {
        let Self { inner, file } = *self;
        let explained = move |batch: Result<RecordBatch>| {
            let file = Arc::clone(&file);
            async move {
                match batch {
                    Ok(batch) => Ok(batch),
                    Err(error) => Err(file.explain(error).await),
                }
            }
        };
        inner.into_stream().then(explained).boxed()
    }
}
