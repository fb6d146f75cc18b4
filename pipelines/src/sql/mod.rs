//! `elmo sql`: a DataFusion session with the embedding functions, with files and URLs as tables, and with several
//! result formats.
//!
//! ```text
//! text -> statements -> logical plan -> physical plan -> batches -> Printer
//! ```
//!
//! It is built on DataFusion rather than on `datafusion-cli`, which depends on a cloud SDK and an allocator, and
//! registers object stores of its own instead of those of `elmo embed`.

mod atomic_write;
mod cell;
mod cells;
mod commit;
mod compact_exec;
mod copy;
mod copy_place;
mod error;
mod exhausted;
mod explain_copy;
mod file_errors;
mod file_table;
mod files;
mod format_options;
mod in_order_exec;
mod infer_json;
mod json_reader;
mod keep_order;
mod lines;
mod memory;
mod memory_pool;
mod missing;
mod nearest;
mod no_rows;
mod output_folder;
mod parquet_times;
mod parquet_types;
mod partitions;
mod plain_text;
mod print;
mod remote;
mod run;
mod shell;
#[cfg(feature = "cluster")]
mod sink_options;
#[cfg(feature = "cluster")]
mod stage_files_exec;
mod staging;
mod tab_separated;
mod table;
mod text;
mod text_format;
#[cfg(feature = "cluster")]
mod unnamed;

use std::{
    collections::{BTreeSet, HashMap},
    num::NonZeroUsize,
    sync::Arc,
};

use datafusion::{
    catalog::DynamicFileCatalog,
    common::Result as PlanResult,
    dataframe::DataFrame,
    datasource::file_format::format_as_file_type,
    execution::{
        SendableRecordBatchStream,
        memory_pool::TrackConsumersPool,
        runtime_env::RuntimeEnvBuilder,
        session_state::{SessionState, SessionStateBuilder},
    },
    logical_expr::{LogicalPlan, LogicalPlanBuilder},
    physical_plan::{ExecutionPlan, execute_stream},
    prelude::{SessionConfig, SessionContext},
};
use elmo::mix::ScalarMix;
use elmo_udfs::{ElmoSession, ModelSource, Statement};
use parking_lot::Mutex;

#[cfg(feature = "cluster")]
pub(crate) use self::{
    atomic_write::PUBLISH_EXEC,
    commit::StagedFiles,
    error::{sql_error, to_sql_error},
    file_errors::{CLUSTER_EXEC, STAGE_EXEC, name_files_in_errors},
    files::StoreRegistry,
    in_order_exec::InOrderExec,
    memory_pool::SharedPool,
    run::embedding_progress,
    sink_options::{Described, SinkOptions, described},
    stage_files_exec::{OnWorker, SinkSettings, StageFilesExec, Tasks, Writes},
    staging::Publishing,
    text_format::TextFormat,
    unnamed::{Record, UnnamedFiles},
};
use self::{
    atomic_write::{Output, make_writes_atomic},
    commit::CommitState,
    compact_exec::compact,
    copy::Target,
    file_errors::InferringFactory,
    files::FileTables,
    format_options::Options,
    keep_order::{KeepOrder, SplitInOrder},
    print::Printer,
    run::{next_batch, write_results, written_rows},
    tab_separated::TabSeparated,
};
pub use self::{
    error::SqlError,
    print::{Expanded, Format, Out, OutputOptions},
    remote::Remote,
    shell::{Command, FunctionHelp, Input, Names, Prompt, Screen, ShellSettings, default_history, help, page},
};
#[cfg(not(feature = "cluster"))]
use self::{error::sql_error, files::StoreRegistry, memory_pool::SharedPool};
use crate::{
    error::{Error, Result},
    models::{LazyModel, ModelSpec, Warn},
    report::Progress,
    stores::Stores,
};

/// Settings of a session.
#[derive(Debug)]
pub struct Settings {
    /// Models by their SQL name. The first is the default.
    pub models: Vec<(String, ModelSpec)>,
    /// Scalar mixes by their SQL name.
    pub mixes: Vec<(String, ScalarMix)>,
    /// Never open a socket for a model.
    pub offline: bool,
    /// Devices, precision and batch size of the biLM.
    pub engine: elmo::EmbedderSettings,
    /// Processes that run parts of queries; `None` to run everything in this process.
    pub remote: Option<Arc<dyn Remote>>,
    /// Size of the memory pool in bytes; `None` for no limit. Operators spill to disk or fail when it is exhausted.
    pub memory_limit: Option<NonZeroUsize>,
}

/// The outcome of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Rows written; `None` for a statement without a result set.
    pub rows: Option<u64>,
    /// Whether the result has more rows than the table shows.
    pub truncated: bool,
    /// Columns of the result that the table does not show.
    pub hidden_columns: usize,
}

/// A SQL session.
#[derive(Clone)]
pub struct Sql {
    context: SessionContext,
    stores: Stores,
    on_cluster: bool,
    commits: Arc<CommitState>,
    memory_limit: Option<NonZeroUsize>,
    /// The SQL names of the models.
    models: Arc<[String]>,
    /// Columns of the files that were queried, for completion.
    file_columns: Arc<Mutex<BTreeSet<String>>>,
}

impl std::fmt::Debug for Sql {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sql").finish_non_exhaustive()
    }
}

/// Whose files a statement writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Files {
    /// Those that it names, which all processes find.
    OfUser,
    /// A temporary one.
    OfThisProcess,
}

/// Number of the largest memory consumers that an out-of-memory error lists.
const LISTED_CONSUMERS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4);

/// Configuration of a session without a cluster.
fn session_config() -> SessionConfig {
    with_newlines_in_values(SessionConfig::new().with_information_schema(true))
}

/// Reads CSV files without splitting them. A split at a newline inside a quoted cell would give wrong rows silently.
pub(crate) fn with_newlines_in_values(config: SessionConfig) -> SessionConfig {
    config.set_bool("datafusion.catalog.newlines_in_values", true)
}

impl Sql {
    /// Creates a session. Opens no model and accesses no store. Requires a multi-threaded Tokio runtime.
    ///
    /// # Errors
    /// [`SqlError`] if DataFusion cannot be set up, for example without a temporary folder; [`Error::Usage`] if a scalar
    /// mix has the name of another one or of built-in layers.
    pub fn new(settings: Settings, stores: &Stores) -> Result<Self> {
        // DataFusion validates its caches by size and modification time, and object stores report times in whole
        // seconds: a file replaced within a second would be served from the cache.
        let mut runtime = RuntimeEnvBuilder::new()
            .with_object_store_registry(Arc::new(StoreRegistry(stores.clone())))
            .with_metadata_cache_limit(0)
            .with_object_list_cache_limit(0)
            .with_file_statistics_cache_limit(0);
        if let Some(bytes) = settings.memory_limit {
            let pool = TrackConsumersPool::new(SharedPool::new(bytes.get()), LISTED_CONSUMERS);
            runtime = runtime.with_memory_pool(Arc::new(pool));
        }
        let runtime = runtime.build_arc().map_err(sql_error)?;
        let files = Arc::new(FileTables::new(stores));
        let remote = settings.remote.clone();
        let (on_cluster, memory_limit) = (remote.is_some(), settings.memory_limit);
        let config = session_config();
        let config = memory_limit.map_or(config.clone(), |limit| memory::limit_buffers(config, limit));
        let names = settings.models.iter().map(|(name, _)| name.clone()).collect();
        let mut builder = SessionStateBuilder::new()
            .with_config(config)
            .with_runtime_env(runtime)
            .with_default_features()
            .with_elmo(&models(settings, stores)?);
        builder.physical_optimizers().get_or_insert_default().rules.insert(0, Arc::new(SplitInOrder));
        builder = builder.with_physical_optimizer_rule(Arc::new(KeepOrder));
        if let Some(remote) = remote {
            builder = remote.extend(builder);
        }
        let tables = builder.table_factories().get_or_insert_default();
        for factory in tables.values_mut() {
            *factory = Arc::new(InferringFactory(Arc::clone(factory)));
        }
        if let Some(csv) = tables.get("CSV").cloned() {
            tables.insert("TSV".to_owned(), Arc::new(TabSeparated(csv)));
        }
        tables.insert("TEXT".to_owned(), Arc::clone(&files) as _);
        let context = SessionContext::new_with_state(builder.build());
        let tables = Arc::clone(context.state().catalog_list());
        context.register_catalog_list(Arc::new(DynamicFileCatalog::new(tables, Arc::clone(&files) as _)));
        files.set_session(context.state_weak_ref());
        Ok(Self {
            context,
            stores: stores.clone(),
            on_cluster,
            commits: Arc::default(),
            memory_limit,
            models: names,
            file_columns: Arc::default(),
        })
    }

    /// Whether parts of queries run on a cluster.
    pub fn is_on_cluster(&self) -> bool {
        self.on_cluster
    }

    /// The DataFusion session, for programs that read the batches of queries themselves. COPY and INSERT publish all files or none
    /// by [`Self::run`] only.
    pub fn context(&self) -> &SessionContext {
        &self.context
    }

    /// Prevents the running statement from committing files, so that its future can be dropped. Returns `false` if it
    /// is committing already; the caller must then wait for it.
    pub fn stop(&self) -> bool {
        self.commits.cancel()
    }

    /// Parses the statements in a text.
    ///
    /// # Errors
    /// [`SqlError`] with line and column if one of them is invalid.
    pub fn parse(&self, text: &str) -> Result<Vec<Statement>> {
        elmo_udfs::parse(&self.context, text).map_err(sql_error)
    }

    /// Runs a statement and writes its result.
    ///
    /// # Errors
    /// [`SqlError`] if it cannot be planned or executed, [`Error::BrokenPipe`] if the reader of `out` is gone,
    /// [`Error::Failed`] if writing to `out` fails.
    pub async fn run(
        &self,
        mut statement: Statement,
        mut options: OutputOptions,
        progress: &dyn Progress,
        out: Out,
    ) -> Result<Outcome> {
        self.commits.reset();
        let target = copy::complete(&mut statement, &self.stores)?;
        self.check_file_type(&mut statement)?;
        if let Some(target) = &target {
            target.check().await?;
        }
        let folder = target.as_ref().and_then(|target| target.folder.as_ref());
        let existing = folder.map(|folder| folder.existing).unwrap_or_default();
        let frame = elmo_udfs::run(&self.context, statement).await;
        let frame = frame.map_err(|error| missing::plan_error(error, &self.context))?;
        copy::check_columns(frame.logical_plan(), self.context.state().config_options())?;
        parquet_types::check_plan(frame.logical_plan())?;
        let frame = explain_copy::show(frame, existing).map_err(sql_error)?;
        // DDL and SET statements have been executed at this point; they have no result.
        if frame.schema().fields().is_empty() {
            return Ok(Outcome { rows: None, truncated: false, hidden_columns: 0 });
        }
        if options.format.has_names() {
            copy::check_names(&format!("--format {}", options.format), frame.schema().fields())?;
        }
        if options.format == Format::Parquet {
            parquet_types::check(frame.schema().fields())?;
            return self.write_parquet(frame, progress, out).await;
        }
        self.remember_columns(frame.logical_plan());
        if matches!(frame.logical_plan(), LogicalPlan::Explain(_) | LogicalPlan::Analyze(_)) {
            // The end of a line of a plan is as important as its start.
            options.width = None;
        }
        let (plan, stream) = self.start(self.limit_to_table(frame, options)?, target, Files::OfUser).await?;
        let printer = Printer::new(options, stream.schema(), out)?;
        let outcome = write_results(&plan, stream, printer, progress).await;
        progress.finish();
        outcome
    }

    /// Validates and normalises the file type and the options of CREATE EXTERNAL TABLE, also below EXPLAIN.
    fn check_file_type(&self, statement: &mut Statement) -> Result<()> {
        let create = match statement {
            Statement::CreateExternalTable(create) => create,
            Statement::Explain(explain) => return self.check_file_type(&mut explain.statement),
            _ => return Ok(()),
        };
        // The name that COPY uses.
        if ["jsonl", "ndjson"].iter().any(|name| create.file_type.eq_ignore_ascii_case(name)) {
            "JSON".clone_into(&mut create.file_type);
        }
        let (state, file_type) = (self.context.state(), create.file_type.to_ascii_uppercase());
        if state.table_factories().contains_key(&file_type) {
            // The factory of TEXT says that it takes none.
            let given = if file_type == "TEXT" { &[] } else { create.options.as_slice() };
            let (statement, file_type) = ("CREATE EXTERNAL TABLE", file_type.as_str());
            return Options { statement, file_type, others: &[], given }.check();
        }
        // NDJSON has a table factory but no file format.
        let mut types: Vec<_> = state.table_factories().keys().map(String::as_str).filter(|k| *k != "NDJSON").collect();
        types.sort_unstable();
        let message = format!("STORED AS {}: unknown file type", create.file_type);
        Err(Error::usage(message, format!("use one of {}", types.join(", "))))
    }

    /// Adds a limit for table output on a cluster, whose workers compute ahead of what is read. The limit is
    /// one more than the table shows, to detect whether there are more.
    fn limit_to_table(&self, frame: DataFrame, options: OutputOptions) -> Result<DataFrame> {
        use LogicalPlan::{Analyze, Copy, Dml, Explain};
        let is_query = !matches!(frame.logical_plan(), Explain(_) | Analyze(_) | Copy(_) | Dml(_));
        match self.on_cluster && options.format == Format::Table && is_query {
            // Larger limits cannot be serialised.
            true if options.max_rows < u32::MAX as usize => {
                frame.limit(0, Some(options.max_rows + 1)).map_err(sql_error)
            }
            _ => Ok(frame),
        }
    }

    /// Writes the result as Parquet, as COPY would. The sink writes to an object store, so this goes through a
    /// temporary file.
    async fn write_parquet(&self, frame: DataFrame, progress: &dyn Progress, mut out: Out) -> Result<Outcome> {
        let folder = tempfile::tempdir().map_err(|e| Error::io(&std::env::temp_dir(), e))?;
        let path = folder.path().join("result.parquet");
        let (state, input) = frame.into_parts();
        if matches!(
            input,
            LogicalPlan::Explain(_) | LogicalPlan::Analyze(_) | LogicalPlan::Copy(_) | LogicalPlan::Dml(_)
        ) {
            return Err(Error::usage("only the result of a query can be written as Parquet", "use --format table"));
        }
        let factory = state.get_file_format_factory("parquet");
        let factory = factory.ok_or_else(|| Error::Failed("DataFusion was built without Parquet".to_owned()))?;
        let target = path.to_string_lossy().into_owned();
        let copy = LogicalPlanBuilder::copy_to(input, target, format_as_file_type(factory), HashMap::new(), Vec::new());
        let copy = copy.and_then(LogicalPlanBuilder::build).map_err(sql_error)?;
        let copy = elmo_udfs::prepared(copy, &state.runtime_env().memory_pool).await;
        let frame = DataFrame::new(state, copy.map_err(sql_error)?);
        let (plan, mut stream) = self.start(frame, None, Files::OfThisProcess).await?;
        let mut rows = 0;
        while let Some(batch) = next_batch(&plan, &mut stream, progress).await? {
            rows += written_rows(&batch);
        }
        progress.finish();
        let mut file = std::fs::File::open(&path).map_err(|e| Error::io(&path, e))?;
        std::io::copy(&mut file, &mut out).and_then(|_| out.flush()).map_err(print::io_failed)?;
        Ok(Outcome { rows: Some(rows), truncated: false, hidden_columns: 0 })
    }

    /// Plans a query and starts its execution. `target` is that of a COPY.
    async fn start(
        &self,
        frame: DataFrame,
        target: Option<Target>,
        files: Files,
    ) -> Result<(Arc<dyn ExecutionPlan>, SendableRecordBatchStream)> {
        let (mut state, logical) = frame.into_parts();
        let logical = parquet_times::convert(logical).map_err(sql_error)?;
        let is_copy = target.is_some();
        let mut output = Output::of(&logical, target, &self.stores);
        #[cfg(feature = "cluster")]
        if files == Files::OfUser {
            state.config_mut().set_extension(Arc::new(output.writes(&self.stores)));
        }
        #[cfg(not(feature = "cluster"))]
        let _ = files;
        let planned = match self.plan(&mut state, &logical).await {
            Err(error) => Err(file_errors::name_file_of_plan_error(error, &state, &logical).await),
            planned => planned,
        };
        match output.target.as_ref().and_then(|target| target.folder.as_ref()) {
            Some(_) if is_copy => output.no_rows = no_rows::plan(&logical, &state).await.map_err(sql_error)?,
            // As for COPY, before anything is computed.
            Some(folder) => drop(folder.replaced().await?),
            None => {}
        }
        let plan = planned.and_then(|plan| make_writes_atomic(plan, &output, &self.commits));
        let plan = plan.and_then(file_errors::name_files_in_errors);
        let plan = plan.map_err(sql_error)?;
        let stream = execute_stream(Arc::clone(&plan), state.task_ctx()).map_err(sql_error)?;
        Ok((plan, stream))
    }

    /// Plans a query as DataFusion does, in between reducing the batches of wide rows to the memory limit.
    async fn plan(&self, state: &mut SessionState, logical: &LogicalPlan) -> PlanResult<Arc<dyn ExecutionPlan>> {
        let optimized = state.optimize(logical)?;
        let Some(limit) = self.memory_limit else {
            return state.query_planner().create_physical_plan(&optimized, state).await;
        };
        // Of a cluster, most partitions are elsewhere.
        let partitions = if self.on_cluster { 1 } else { state.config().target_partitions() };
        let rows = state.config().batch_size();
        let rows = memory::batch_rows(&optimized, rows, limit, partitions)?;
        *state.config_mut() = memory::limit_merges(state.config().clone().with_batch_size(rows), limit);
        let plan = state.query_planner().create_physical_plan(&optimized, state).await?;
        let measured = memory::measured_rows(&plan, rows, limit, partitions)?;
        *state.config_mut() = state.config().clone().with_batch_size(measured);
        // Some operators take the number of rows when they are planned.
        let plan = match measured == rows {
            true => plan,
            false => state.query_planner().create_physical_plan(&optimized, state).await?,
        };
        compact(plan, memory::batch_bytes(limit, partitions))
    }
}

/// The models and the scalar mixes of a session by name.
fn models(settings: Settings, stores: &Stores) -> Result<elmo_udfs::Models> {
    let warn = if settings.remote.is_some() { Warn::OnDescribe } else { Warn::OnOpen };
    let Settings { models, mixes, offline, engine, .. } = settings;
    let default = models.first().map_or_else(String::new, |(name, _)| name.clone());
    let runtime = tokio::runtime::Handle::current();
    let lazy = models.into_iter().map(|(name, spec)| {
        let (stores, settings, runtime) = (stores.clone(), engine.clone(), runtime.clone());
        let model = LazyModel { spec, offline, stores, settings, runtime, warn, read: Default::default() };
        (name, Arc::new(model) as Arc<dyn ModelSource>)
    });
    let models = elmo_udfs::Models::lazy(default, lazy.collect::<Vec<_>>());
    let with_mixes = mixes.into_iter().try_fold(models, |models, (name, mix)| models.with_mix(name, mix));
    with_mixes.map_err(|reason| Error::usage(reason, "give the scalar mix another name"))
}
