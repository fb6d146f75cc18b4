//! Readers whose errors name the file. DataFusion's say what is wrong with a row, and not in which of ten thousand files.

use std::{any::Any, fmt, sync::Arc};

use async_trait::async_trait;
use datafusion::{
    arrow::{array::RecordBatch, error::ArrowError},
    catalog::{Session, TableProvider, TableProviderFactory},
    common::{
        DataFusionError, Result,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    datasource::{
        file_format::FileFormat,
        listing::{ListingTable, ListingTableUrl, PartitionedFile},
        physical_plan::{FileOpener, FileScanConfig, FileSource},
        source::DataSourceExec,
        source_as_provider,
        table_schema::TableSchema,
    },
    execution::{object_store::ObjectStoreUrl, session_state::SessionState},
    logical_expr::{CreateExternalTable, LogicalPlan},
    physical_expr::{PhysicalExpr, projection::ProjectionExprs},
    physical_plan::{DisplayFormatType, ExecutionPlan, metrics::ExecutionPlanMetricsSet},
};
use datafusion_datasource::morsel::{Morsel, MorselPlan, MorselPlanner, Morselizer};
use futures::{StreamExt, TryFutureExt, TryStreamExt, stream::BoxStream};
use object_store::ObjectStore;

use super::{
    error::{is_no_arrow, is_of_store, message, within_store},
    files::external,
};
use crate::source::SourceError;

/// Files that are looked at together for the broken one.
const AT_ONCE: usize = 16;

/// The operator below which a plan runs elsewhere.
pub(crate) const ELSEWHERE: &str = "ClusterExec";

/// A plan that is about to run, with readers whose errors name the file. What runs elsewhere stays as it is: these readers
/// do not travel.
///
/// # Errors
/// As DataFusion, when it takes a plan apart.
pub(crate) fn naming_files(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    let named = plan.transform_down(|node| {
        if node.name() == ELSEWHERE {
            return Ok(Transformed::new(node, false, TreeNodeRecursion::Jump));
        }
        let scan = node.downcast_ref::<DataSourceExec>().map(|scan| scan.data_source().as_ref() as &dyn Any);
        let Some(scan) = scan.and_then(|scan| scan.downcast_ref::<FileScanConfig>()) else {
            return Ok(Transformed::no(node));
        };
        let source = Arc::new(Naming(Arc::clone(scan.file_source())));
        // Not by its builder, which has a mind of its own about the order of rows.
        let mut scan = scan.clone();
        scan.file_source = source;
        Ok(Transformed::yes(DataSourceExec::from_data_source(scan) as Arc<dyn ExecutionPlan>))
    });
    named.map(|named| named.data)
}

/// An error with the file whose contents it is about; any other as it is.
pub(super) fn named(error: DataFusionError, file: &str) -> DataFusionError {
    match is_of_contents(error.find_root()) {
        true => external(SourceError::Unreadable { file: file.to_owned(), reason: message(&error).into_owned() }),
        false => error,
    }
}

fn is_of_contents(root: &DataFusionError) -> bool {
    use ArrowError as A;
    use DataFusionError as E;
    match root {
        E::ArrowError(error, _) => match error.as_ref() {
            A::IoError(_, error) => super::error::is_of_contents(error),
            // An expression that is computed while the file is read.
            A::DivideByZero | A::ArithmeticOverflow(_) | A::ComputeError(_) | A::MemoryError(_) => false,
            _ => true,
        },
        E::ParquetError(error) => !is_of_store(error.as_ref()),
        E::ObjectStore(error) => within_store(error).is_some_and(|inner| is_of_contents(inner.find_root())),
        E::Internal(text) => is_no_arrow(text),
        E::IoError(error) => super::error::is_of_contents(error),
        _ => false,
    }
}

/// Files that DataFusion makes a table of, whose columns it guesses.
#[derive(Debug)]
pub(super) struct Guessing(pub(super) Arc<dyn TableProviderFactory>);

#[async_trait]
impl TableProviderFactory for Guessing {
    async fn create(&self, session: &dyn Session, command: &CreateExternalTable) -> Result<Arc<dyn TableProvider>> {
        let error = match self.0.create(session, command).await {
            Err(error) if is_of_contents(error.find_root()) => error,
            made => return made,
        };
        let file = broken(session, command).await.ok().flatten();
        Err(named(error, &file.unwrap_or_else(|| command.locations.join(", "))))
    }
}

/// The first file of a table whose columns cannot be guessed.
async fn broken(session: &dyn Session, command: &CreateExternalTable) -> Result<Option<String>> {
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
                // The others of a folder are not read.
                let packed = format.compression_type().and_then(|packed| format.get_ext_with_compression(&packed).ok());
                url.with_glob(&format!("*.{}", packed.unwrap_or_else(|| command.file_type.to_lowercase())))?
            }
            false => url,
        });
    }
    first_broken(session, format.as_ref(), &urls, "").await
}

/// The first of these files that says no columns.
async fn first_broken(
    session: &dyn Session,
    format: &dyn FileFormat,
    urls: &[ListingTableUrl],
    ending: &str,
) -> Result<Option<String>> {
    for url in urls {
        let store = &session.runtime_env().object_store(url)?;
        let files = url.list_all_files(session, store.as_ref(), ending).await?;
        let tried = files.map_ok(|file| async move {
            Ok((format.infer_schema(session, store, std::slice::from_ref(&file)).await, file))
        });
        let mut tried = tried.try_buffered(AT_ONCE);
        while let Some((schema, file)) = tried.try_next().await? {
            if schema.is_err() {
                return Ok(Some(address(url.object_store().as_str(), &file.location)));
            }
        }
    }
    Ok(None)
}

/// An error of planning with the file that it is about: what Parquet files say of their rows is read then.
pub(super) async fn named_in_plan(
    error: DataFusionError,
    session: &dyn Session,
    plan: &LogicalPlan,
) -> DataFusionError {
    if !is_of_contents(error.find_root()) {
        return error;
    }
    let mut tables = Vec::new();
    // A plan that cannot be walked has no names.
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
        let file = first_broken(session, options.format.as_ref(), table.table_paths(), &options.file_extension).await;
        if let Ok(Some(file)) = file {
            return named(error, &file);
        }
    }
    error
}

/// A file as its owner would call it: on this machine, by its path.
pub(super) fn address(store: &str, file: &object_store::path::Path) -> String {
    format!("{}{file}", if store.starts_with("file:") { "/" } else { store })
}

/// What stands in one kind of files, as its own reader reads it. Nothing that only planners ask for is answered: it is put
/// into plans that are finished.
struct Naming(Arc<dyn FileSource>);

impl FileSource for Naming {
    fn create_file_opener(
        &self,
        store: Arc<dyn ObjectStore>,
        scan: &FileScanConfig,
        partition: usize,
    ) -> Result<Arc<dyn FileOpener>> {
        self.0.create_file_opener(store, scan, partition)
    }

    fn create_morselizer(
        &self,
        store: Arc<dyn ObjectStore>,
        scan: &FileScanConfig,
        partition: usize,
    ) -> Result<Box<dyn Morselizer>> {
        let inner = self.0.create_morselizer(store, scan, partition)?;
        Ok(Box::new(NamingFiles { inner, store: scan.object_store_url.clone() }))
    }

    fn table_schema(&self) -> &TableSchema {
        self.0.table_schema()
    }

    fn with_batch_size(&self, rows: usize) -> Arc<dyn FileSource> {
        Arc::new(Self(self.0.with_batch_size(rows)))
    }

    fn filter(&self) -> Option<Arc<dyn PhysicalExpr>> {
        self.0.filter()
    }

    fn projection(&self) -> Option<&ProjectionExprs> {
        self.0.projection()
    }

    fn metrics(&self) -> &ExecutionPlanMetricsSet {
        self.0.metrics()
    }

    fn file_type(&self) -> &str {
        self.0.file_type()
    }

    fn fmt_extra(&self, how: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt_extra(how, f)
    }

    fn supports_repartitioning(&self) -> bool {
        self.0.supports_repartitioning()
    }

    fn reorder_files(&self, files: Vec<PartitionedFile>) -> Vec<PartitionedFile> {
        self.0.reorder_files(files)
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        self.0.apply_expressions(f)
    }
}

#[derive(Debug)]
struct NamingFiles {
    inner: Box<dyn Morselizer>,
    store: ObjectStoreUrl,
}

impl Morselizer for NamingFiles {
    fn plan_file(&self, file: PartitionedFile) -> Result<Box<dyn MorselPlanner>> {
        let name: Arc<str> = address(self.store.as_str(), &file.object_meta.location).into();
        let inner = self.inner.plan_file(file).map_err(|error| named(error, &name))?;
        Ok(Box::new(OfFile { inner, name }))
    }
}

/// A step of reading a file.
#[derive(Debug)]
struct OfFile<T> {
    inner: T,
    name: Arc<str>,
}

impl MorselPlanner for OfFile<Box<dyn MorselPlanner>> {
    fn plan(self: Box<Self>) -> Result<Option<MorselPlan>> {
        let Self { inner, name } = *self;
        let Some(mut plan) = inner.plan().map_err(|error| named(error, &name))? else { return Ok(None) };
        let planner = |inner, name| Box::new(OfFile { inner, name }) as Box<dyn MorselPlanner>;
        let morsels = plan.take_morsels().into_iter();
        let morsels = morsels.map(|inner| Box::new(OfFile { inner, name: Arc::clone(&name) }) as Box<dyn Morsel>);
        let planners = plan.take_ready_planners().into_iter().map(|inner| planner(inner, Arc::clone(&name)));
        let pending = plan.take_pending_planner();
        let mut plan = MorselPlan::new().with_morsels(morsels.collect()).with_planners(planners.collect());
        if let Some(pending) = pending {
            let of_error = Arc::clone(&name);
            plan.set_pending_planner(
                pending.map_ok(move |inner| planner(inner, name)).map_err(move |error| named(error, &of_error)),
            );
        }
        Ok(Some(plan))
    }
}

impl Morsel for OfFile<Box<dyn Morsel>> {
    fn into_stream(self: Box<Self>) -> BoxStream<'static, Result<RecordBatch>> {
        let Self { inner, name } = *self;
        inner.into_stream().map(move |batch| batch.map_err(|error| named(error, &name))).boxed()
    }
}
