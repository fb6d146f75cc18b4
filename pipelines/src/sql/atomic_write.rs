//! Makes the writes of a plan atomic: the files of a COPY or INSERT become visible when its sink has succeeded, or not
//! at all. See [`super::staging`] and [`super::commit`].

use std::{any::Any, fmt, panic::AssertUnwindSafe, sync::Arc};

use datafusion::{
    arrow::array::{Array, RecordBatch},
    common::{
        Result, exec_datafusion_err, exec_err, internal_err,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    datasource::{
        file_format::csv::CsvFormat,
        listing::{ListingTable, ListingTableUrl},
        sink::DataSinkExec,
        source_as_provider,
    },
    execution::{SendableRecordBatchStream, TaskContext},
    logical_expr::LogicalPlan,
    physical_expr::PhysicalExpr,
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties, replace_children_if_necessary,
        stream::RecordBatchStreamAdapter,
    },
};
use futures::{Stream, StreamExt, TryStreamExt};

use super::{
    commit::{CommitState, StagedFiles},
    copy::Target,
    file_errors::CLUSTER_EXEC,
    output_folder::{Existing, OutputFolder},
    staging::staging_context,
    text_format::TextFormat,
};
#[cfg(feature = "cluster")]
use super::{
    stage_files_exec::{SinkSettings, Writes},
    staging::publishing_context,
};
use crate::stores::{Location, Stores};

/// The output of a statement.
#[derive(Debug, Default)]
pub(super) struct Output {
    /// Hive partition columns.
    pub(super) partition_columns: Vec<String>,
    /// The target of a COPY, or of an INSERT into a folder, to which it appends.
    pub(super) target: Option<Target>,
    /// Writes the file of a COPY to a folder that would otherwise get none.
    pub(super) no_rows: Option<Arc<dyn ExecutionPlan>>,
}

/// Name of the operator that collects the files of a COPY from workers.
pub(crate) const PUBLISH_EXEC: &str = "PublishExec";

/// Wraps the input and the output of every sink of a plan in an [`AtomicWriteExec`].
///
/// # Errors
/// As [`TreeNode::transform_down`].
pub(super) fn make_writes_atomic(
    plan: Arc<dyn ExecutionPlan>,
    output: &Output,
    state: &Arc<CommitState>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let files = || Arc::new(StagedFiles::new(state, output.target.clone(), output.partition_columns.len()));
    let wrapped = plan.transform_down(|node| {
        let write = if node.name() == PUBLISH_EXEC {
            AtomicWriteExec::wrap(node, Side::Sink(output.no_rows.clone()), &files())
        } else if node.is::<DataSinkExec>() {
            write_to(&files(), node, &output.partition_columns, output.no_rows.clone())?
        } else if node.name() == CLUSTER_EXEC {
            // Sinks below are on workers.
            node
        } else {
            return Ok(Transformed::no(node));
        };
        Ok(Transformed::new(write, true, TreeNodeRecursion::Jump))
    });
    wrapped.map(|wrapped| wrapped.data)
}

/// Wraps a sink and its input. The files have these hive partition columns; `no_rows` writes one if there would be none.
///
/// # Errors
/// As [`replace_children_if_necessary`].
pub(super) fn write_to(
    files: &Arc<StagedFiles>,
    sink: Arc<dyn ExecutionPlan>,
    partition_columns: &[String],
    no_rows: Option<Arc<dyn ExecutionPlan>>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let inputs = sink
        .children()
        .into_iter()
        .map(|input| AtomicWriteExec::wrap(Arc::clone(input), Side::Input(partition_columns.into()), files));
    let inputs = inputs.collect();
    let sink = replace_children_if_necessary(sink, inputs)?;
    Ok(AtomicWriteExec::wrap(sink, Side::Sink(no_rows), files))
}

/// Commits after a sink's result, rolls back after its error.
async fn commit_or_rollback(
    files: &Arc<StagedFiles>,
    no_rows: Option<(Arc<dyn ExecutionPlan>, Arc<TaskContext>)>,
    result: BatchResult,
) -> BatchResult {
    let written = match (result, no_rows) {
        (Ok(batch), Some((plan, context))) => write_no_rows(files, &plan, context).await.map(|()| batch),
        (result, _) => result,
    };
    let result = match written {
        Ok(batch) => files.commit().await.map(|()| batch),
        Err(error) => Err(files.take_error().unwrap_or(error)),
    };
    if result.is_err() {
        files.rollback().await;
    }
    result
}

/// Writes the file of a folder that would otherwise be empty.
async fn write_no_rows(
    files: &Arc<StagedFiles>,
    plan: &Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
) -> Result<()> {
    if files.needs_file().await? {
        plan.execute(0, context)?.try_for_each(|_| std::future::ready(Ok(()))).await?;
    }
    Ok(())
}

impl Output {
    /// The output of a statement. `target` is that of a COPY.
    pub(super) fn of(statement: &LogicalPlan, target: Option<Target>, stores: &Stores) -> Self {
        match statement {
            LogicalPlan::Copy(copy) => Self { partition_columns: copy.partition_by.clone(), target, no_rows: None },
            LogicalPlan::Dml(insert) => {
                let table = source_as_provider(&insert.target).ok();
                let table = table.as_ref().and_then(|table| (table.as_ref() as &dyn Any).downcast_ref());
                table.map(|table| Self::of_table(table, stores)).unwrap_or_default()
            }
            LogicalPlan::Analyze(analyze) => Self::of(&analyze.input, target, stores),
            _ => Self::default(),
        }
    }

    /// What workers need to know of it.
    #[cfg(feature = "cluster")]
    pub(super) fn writes(&self, stores: &Stores) -> Writes {
        let has_tabs = self.target.as_ref().is_some_and(|target| target.has_tabs);
        let local =
            self.target.as_ref().filter(|target| target.folder.is_some()).and_then(|target| target.local.clone());
        let folder = local.map(|folder| {
            let is_new = !folder.exists();
            (folder, is_new)
        });
        let settings = SinkSettings { has_tabs, partition_columns: self.partition_columns.clone(), attempt: 0, folder };
        Writes { settings, stores: stores.clone() }
    }

    fn of_table(table: &ListingTable, stores: &Stores) -> Self {
        let columns = table.options().table_partition_cols.iter().map(|(name, _)| name.clone());
        let format = TextFormat::unwrapped(table.options().format.as_ref());
        let csv: Option<&CsvFormat> = (format as &dyn Any).downcast_ref();
        let has_tabs = csv.is_some_and(|csv| csv.delimiter() == b'\t');
        // A table of other files would not find them.
        let finds = |url: &ListingTableUrl| url.get_glob().as_ref().is_none_or(|glob| glob.as_str().contains(".tsv"));
        let has_tabs = has_tabs && table.table_paths().iter().all(finds);
        let location = table.table_paths().first().and_then(|url| stores.locate(url.as_str()).ok());
        let local = location.as_ref().and_then(Location::local_path);
        let folder = location.map(|location| OutputFolder::new(location, Existing::Append));
        let target = Target { folder, file: None, is_written: true, has_tabs, local };
        Self { partition_columns: columns.collect(), target: Some(target), no_rows: None }
    }
}

#[derive(Debug, Clone)]
enum Side {
    /// Below the sink: records errors of the input, and rejects NULL in these hive partition columns.
    Input(Arc<[String]>),
    /// Above the sink: runs it with staging stores, or the other plan if there are no rows, then commits or rolls back.
    Sink(Option<Arc<dyn ExecutionPlan>>),
}

#[derive(Debug)]
struct AtomicWriteExec {
    input: Arc<dyn ExecutionPlan>,
    side: Side,
    files: Arc<StagedFiles>,
}

impl AtomicWriteExec {
    fn wrap(input: Arc<dyn ExecutionPlan>, side: Side, files: &Arc<StagedFiles>) -> Arc<dyn ExecutionPlan> {
        Arc::new(Self { input, side, files: Arc::clone(files) })
    }
}

impl DisplayAs for AtomicWriteExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let option = self.files.folder().and_then(|folder| folder.existing.option());
        match (&self.side, option) {
            (Side::Input(_), _) => f.write_str("AtomicWriteExec: input"),
            (Side::Sink(_), None) => f.write_str("AtomicWriteExec: sink"),
            (Side::Sink(_), Some(option)) => write!(f, "AtomicWriteExec: sink, {option}=true"),
        }
    }
}

impl ExecutionPlan for AtomicWriteExec {
    fn name(&self) -> &'static str {
        "AtomicWriteExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.input.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, mut children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Some(input) = children.pop() else { return internal_err!("AtomicWriteExec has one input") };
        Ok(Self::wrap(input, self.side.clone(), &self.files))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let (files, schema) = (Arc::clone(&self.files), self.schema());
        Ok(match &self.side {
            Side::Input(columns) => {
                let (rows, columns) = (self.input.execute(partition, context)?, Arc::clone(columns));
                let rows = catch_panics(rows).map(move |batch| {
                    batch.and_then(|batch| reject_null_partitions(batch, &columns)).map_err(|error| {
                        files.record_error(error);
                        exec_datafusion_err!("the input of the sink failed")
                    })
                });
                Box::pin(RecordBatchStreamAdapter::new(schema, rows))
            }
            Side::Sink(no_rows) => {
                let staging = staging_context(&context, &files);
                let own = match self.input.name() {
                    #[cfg(feature = "cluster")]
                    PUBLISH_EXEC => publishing_context(&context, &files),
                    _ => Arc::clone(&staging),
                };
                let results = catch_panics(self.input.execute(partition, own)?);
                let context = staging;
                let no_rows = no_rows.clone().map(|plan| (plan, context));
                let results = results.then(move |result| {
                    let (files, no_rows) = (Arc::clone(&files), no_rows.clone());
                    async move { commit_or_rollback(&files, no_rows, result).await }
                });
                Box::pin(RecordBatchStreamAdapter::new(schema, results))
            }
        })
    }
}

type BatchResult = Result<RecordBatch>;

/// Rejects rows with NULL in a hive partition column. DataFusion 55 writes them to the folder of another value.
fn reject_null_partitions(batch: RecordBatch, columns: &[String]) -> BatchResult {
    let has_null = |name: &&String| batch.column_by_name(name).is_some_and(|column| column.logical_null_count() > 0);
    match columns.iter().find(has_null) {
        Some(name) => {
            exec_err!("PARTITIONED BY {name}: a row has NULL in this column; write coalesce({name}, …) instead")
        }
        None => Ok(batch),
    }
}

/// Turns panics of a stream into errors.
fn catch_panics(stream: SendableRecordBatchStream) -> impl Stream<Item = BatchResult> {
    let panicked = |_| Err(exec_datafusion_err!("computing or writing the rows panicked"));
    AssertUnwindSafe(stream).catch_unwind().map(move |next| next.unwrap_or_else(panicked))
}
