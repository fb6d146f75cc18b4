//! `elmo sql`: DataFusion with our functions, files and URLs as tables, and results in any format.
//!
//! ```text
//! text -> statements -> plan -> batches -> Printer
//! ```
//!
//! Built on DataFusion itself and not on `datafusion-cli`: that one brings the SDK of a cloud, an allocator and object
//! stores of its own, where ours are to be the ones of `elmo embed`.

mod cell;
mod copy;
mod error;
mod files;
mod lines;
mod print;
mod readers;
mod remote;
mod repl;
mod staged;
mod whole;

use std::{collections::HashMap, num::NonZeroUsize, sync::Arc, time::Duration};

use datafusion::{
    catalog::DynamicFileCatalog,
    dataframe::DataFrame,
    datasource::file_format::format_as_file_type,
    execution::{
        SendableRecordBatchStream,
        memory_pool::{FairSpillPool, TrackConsumersPool},
        runtime_env::RuntimeEnvBuilder,
        session_state::SessionStateBuilder,
    },
    logical_expr::{LogicalPlan, LogicalPlanBuilder},
    physical_plan::{ExecutionPlan, execute_stream, metrics::MetricValue},
    prelude::{SessionConfig, SessionContext},
};
use elmo_udfs::{ElmoSession, ModelSource, Statement};
use futures::StreamExt;

pub use self::{
    error::SqlError,
    print::{Format, Out},
    remote::Remote,
    repl::{COMMANDS, Command, Repl, Typed, default_history},
};
#[cfg(not(feature = "cluster"))]
use self::{error::sql_error, files::Registry};
#[cfg(feature = "cluster")]
pub(crate) use self::{
    error::{judged, sql_error},
    files::Registry,
    readers::{ELSEWHERE, naming_files},
};
use self::{files::Files, print::Printer, readers::Guessing, staged::Commits};
use crate::{
    error::{Error, Result},
    models::{LazyModel, ModelSpec},
    report::{Progress, Snapshot},
    stores::Stores,
};

/// What queries may use.
#[derive(Debug)]
pub struct Settings {
    /// Models by the name that SQL knows them by; the first is meant when a query names none.
    pub models: Vec<(String, ModelSpec)>,
    /// Never open a socket for a model.
    pub offline: bool,
    /// Where and how the biLM runs.
    pub engine: elmo::EmbedderSettings,
    /// Processes that queries run on; `None` for this one.
    pub remote: Option<Arc<dyn Remote>>,
    /// Bytes that queries may hold before they spill to disk or give up; `None` for all there is.
    pub memory_limit: Option<NonZeroUsize>,
}

/// How a result is shown.
#[derive(Debug, Clone, Copy)]
pub struct Show {
    /// Its format.
    pub format: Format,
    /// Rows of a table.
    pub max_rows: usize,
}

/// What became of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Rows that were written; `None` when the statement gives none.
    pub rows: Option<u64>,
    /// There are more than the table shows.
    pub more: bool,
}

/// A session.
#[derive(Clone)]
pub struct Sql {
    context: SessionContext,
    stores: Stores,
    on_cluster: bool,
    commits: Arc<Commits>,
}

impl std::fmt::Debug for Sql {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sql").finish_non_exhaustive()
    }
}

/// Largest users of memory that an error names.
const NAMED_CONSUMERS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4);
/// How often somebody who watches hears of it.
const TICK: Duration = Duration::from_millis(250);

/// Settings of a session in one process.
fn session_config() -> SessionConfig {
    whole_cells(SessionConfig::new().with_information_schema(true))
}

/// A CSV file that is cut into parts would be cut within quoted cells of several lines, and nobody would say so.
pub(crate) fn whole_cells(config: SessionConfig) -> SessionConfig {
    config.set_bool("datafusion.catalog.newlines_in_values", true)
}

impl Sql {
    /// A session; opens no model and asks no store. Needs a runtime with several threads.
    ///
    /// # Errors
    /// [`SqlError`] when DataFusion cannot be set up, for lack of a folder for temporary files say.
    pub fn new(settings: Settings, stores: &Stores) -> Result<Self> {
        // What DataFusion remembers of files goes by their size and time, and stores tell times in whole seconds.
        let mut runtime = RuntimeEnvBuilder::new()
            .with_object_store_registry(Arc::new(Registry(stores.clone())))
            .with_metadata_cache_limit(0)
            .with_object_list_cache_limit(0)
            .with_file_statistics_cache_limit(0);
        if let Some(bytes) = settings.memory_limit {
            let pool = TrackConsumersPool::new(FairSpillPool::new(bytes.get()), NAMED_CONSUMERS);
            runtime = runtime.with_memory_pool(Arc::new(pool));
        }
        let runtime = runtime.build_arc().map_err(sql_error)?;
        let files = Arc::new(Files::new(stores));
        let remote = settings.remote.clone();
        let on_cluster = remote.is_some();
        let mut builder = SessionStateBuilder::new()
            .with_config(session_config())
            .with_runtime_env(runtime)
            .with_default_features()
            .with_elmo(&models(settings, stores));
        if let Some(remote) = remote {
            builder = remote.extend(builder);
        }
        let tables = builder.table_factories().get_or_insert_default();
        for factory in tables.values_mut() {
            *factory = Arc::new(Guessing(Arc::clone(factory)));
        }
        tables.insert("TEXT".to_owned(), Arc::clone(&files) as _);
        let context = SessionContext::new_with_state(builder.build());
        let tables = Arc::clone(context.state().catalog_list());
        context.register_catalog_list(Arc::new(DynamicFileCatalog::new(tables, Arc::clone(&files) as _)));
        files.belong_to(context.state_weak_ref());
        Ok(Self { context, stores: stores.clone(), on_cluster, commits: Arc::default() })
    }

    /// Whether queries run elsewhere.
    pub fn is_on_cluster(&self) -> bool {
        self.on_cluster
    }

    /// Lets no file of the running statement come into place from now on, so that it can be dropped; `false` where they do
    /// so already, and it is to be waited for.
    pub fn stop(&self) -> bool {
        self.commits.stop()
    }

    /// The statements in a text.
    ///
    /// # Errors
    /// [`SqlError`] with line and column when one of them cannot be parsed.
    pub fn parse(&self, text: &str) -> Result<Vec<Statement>> {
        elmo_udfs::parse(&self.context, text).map_err(sql_error)
    }

    /// Runs a statement and writes what it gives.
    ///
    /// # Errors
    /// [`SqlError`] when it cannot be planned or run, [`Error::BrokenPipe`] when nobody reads `out` any more,
    /// [`Error::Failed`] when it cannot be written to.
    pub async fn run(&self, mut statement: Statement, show: Show, watch: &dyn Progress, out: Out) -> Result<Answer> {
        self.commits.start();
        copy::complete(&mut statement, &self.stores)?;
        self.knows_kind(&mut statement)?;
        let frame = elmo_udfs::run(&self.context, statement).await.map_err(sql_error)?;
        // CREATE, SET and their like have been carried out by now.
        if frame.schema().fields().is_empty() {
            return Ok(Answer { rows: None, more: false });
        }
        if show.format == Format::Parquet {
            return self.parquet(frame, watch, out).await;
        }
        let (plan, stream) = self.start(self.shortened(frame, show)?).await?;
        let printer = Printer::new(show.format, stream.schema(), show.max_rows, out)?;
        let answer = written(&plan, stream, printer, watch).await;
        watch.finish();
        answer
    }

    /// Looks at the kind of files of a table that is to be made, also of one that is explained.
    fn knows_kind(&self, statement: &mut Statement) -> Result<()> {
        let create = match statement {
            Statement::CreateExternalTable(create) => create,
            Statement::Explain(explain) => return self.knows_kind(&mut explain.statement),
            _ => return Ok(()),
        };
        // As COPY calls it.
        if ["jsonl", "ndjson"].iter().any(|name| create.file_type.eq_ignore_ascii_case(name)) {
            "JSON".clone_into(&mut create.file_type);
        }
        let state = self.context.state();
        if state.table_factories().contains_key(&create.file_type.to_ascii_uppercase()) {
            return Ok(());
        }
        // NDJSON has a factory, and no format.
        let mut kinds: Vec<_> = state.table_factories().keys().map(String::as_str).filter(|k| *k != "NDJSON").collect();
        kinds.sort_unstable();
        let message = format!("STORED AS {}: no such kind of files", create.file_type);
        Err(Error::usage(message, format!("one of {}", kinds.join(", "))))
    }

    /// A cluster computes all rows before it gives the first: no more than a table shows, and one to know of more.
    fn shortened(&self, frame: DataFrame, show: Show) -> Result<DataFrame> {
        use LogicalPlan::{Analyze, Copy, Dml, Explain};
        let is_query = !matches!(frame.logical_plan(), Explain(_) | Analyze(_) | Copy(_) | Dml(_));
        match self.on_cluster && show.format == Format::Table && is_query {
            // More than that does not travel, and nobody reads it.
            true if show.max_rows < u32::MAX as usize => frame.limit(0, Some(show.max_rows + 1)).map_err(sql_error),
            _ => Ok(frame),
        }
    }

    /// Parquet as COPY writes it, by way of a temporary file: its footer comes last and its writer wants a store.
    async fn parquet(&self, frame: DataFrame, watch: &dyn Progress, mut out: Out) -> Result<Answer> {
        let folder = tempfile::tempdir().map_err(|e| Error::io(&std::env::temp_dir(), e))?;
        let path = folder.path().join("result.parquet");
        let (state, input) = frame.into_parts();
        if matches!(
            input,
            LogicalPlan::Explain(_) | LogicalPlan::Analyze(_) | LogicalPlan::Copy(_) | LogicalPlan::Dml(_)
        ) {
            return Err(Error::usage("only what a query selects can be written as Parquet", "show this as a table"));
        }
        let factory = state.get_file_format_factory("parquet");
        let factory = factory.ok_or_else(|| Error::Failed("DataFusion was built without Parquet".to_owned()))?;
        let target = path.to_string_lossy().into_owned();
        let copy = LogicalPlanBuilder::copy_to(input, target, format_as_file_type(factory), HashMap::new(), Vec::new());
        let copy = elmo_udfs::prepared(copy.and_then(LogicalPlanBuilder::build).map_err(sql_error)?).await;
        let frame = DataFrame::new(state, copy.map_err(sql_error)?);
        let (plan, mut stream) = self.start(frame).await?;
        let mut rows = 0;
        while let Some(batch) = next(&plan, &mut stream, watch).await? {
            rows += count_of(&batch);
        }
        watch.finish();
        let mut file = std::fs::File::open(&path).map_err(|e| Error::io(&path, e))?;
        std::io::copy(&mut file, &mut out).and_then(|_| out.flush()).map_err(print::io_failed)?;
        Ok(Answer { rows: Some(rows), more: false })
    }

    async fn start(&self, frame: DataFrame) -> Result<(Arc<dyn ExecutionPlan>, SendableRecordBatchStream)> {
        let tasks = Arc::new(frame.task_ctx());
        let folders = whole::folders(frame.logical_plan());
        let (state, logical) = frame.into_parts();
        let planned = match state.create_physical_plan(&logical).await {
            Err(error) => Err(readers::named_in_plan(error, &state, &logical).await),
            planned => planned,
        };
        let plan = planned.and_then(|plan| whole::or_nothing(plan, &folders, &self.commits));
        let plan = plan.and_then(readers::naming_files);
        let plan = plan.map_err(sql_error)?;
        let stream = execute_stream(Arc::clone(&plan), tasks).map_err(sql_error)?;
        Ok((plan, stream))
    }

    /// Names that a user may want to type: functions, tables, and columns of tables.
    pub(crate) async fn names(&self) -> Vec<String> {
        let state = self.context.state();
        let functions = state.scalar_functions().keys().chain(state.aggregate_functions().keys());
        let functions = functions.chain(state.window_functions().keys()).chain(state.table_functions().keys());
        let mut names: Vec<String> = functions.map(|name| format!("{name}(")).collect();
        for catalog in self.context.catalog_names() {
            let Some(catalog) = self.context.catalog(&catalog) else { continue };
            for schema in catalog.schema_names() {
                let Some(schema) = catalog.schema(&schema) else { continue };
                for name in schema.table_names() {
                    if let Ok(Some(table)) = schema.table(&name).await {
                        names.extend(table.schema().fields().iter().map(|field| field.name().clone()));
                    }
                    names.push(name);
                }
            }
        }
        names.sort();
        names.dedup();
        names
    }
}

/// The models of a session, by name.
fn models(settings: Settings, stores: &Stores) -> elmo_udfs::Models {
    let elsewhere = settings.remote.is_some();
    let Settings { models, offline, engine, .. } = settings;
    let default = models.first().map_or_else(String::new, |(name, _)| name.clone());
    let runtime = tokio::runtime::Handle::current();
    let lazy = models.into_iter().map(|(name, spec)| {
        let (stores, settings, runtime) = (stores.clone(), engine.clone(), runtime.clone());
        let model = LazyModel { spec, offline, stores, settings, runtime, elsewhere, read: Default::default() };
        (name, Arc::new(model) as Arc<dyn ModelSource>)
    });
    elmo_udfs::Models::lazy(default, lazy.collect::<Vec<_>>())
}

async fn written(
    plan: &Arc<dyn ExecutionPlan>,
    mut stream: SendableRecordBatchStream,
    mut printer: Printer,
    watch: &dyn Progress,
) -> Result<Answer> {
    let (mut rows, mut more) = (0, false);
    while let Some(batch) = next(plan, &mut stream, watch).await? {
        rows += batch.num_rows() as u64;
        if !printer.write(&batch)? {
            more = true;
            break;
        }
    }
    // What is left of a query that was answered in part stops here, before anybody waits for the printer.
    drop(stream);
    watch.finish();
    printer.finish()?;
    Ok(Answer { rows: Some(rows), more })
}

/// The next batch; tells whoever watches while it is awaited.
async fn next(
    plan: &Arc<dyn ExecutionPlan>,
    stream: &mut SendableRecordBatchStream,
    watch: &dyn Progress,
) -> Result<Option<arrow::array::RecordBatch>> {
    let mut tick = tokio::time::interval(TICK);
    loop {
        tokio::select! {
            batch = stream.next() => return batch.transpose().map_err(sql_error),
            _ = tick.tick() => {
                if let Some(snapshot) = embedded(plan) {
                    watch.update(&snapshot);
                }
            }
        }
    }
}

/// What the operators of a plan that embed have done so far; `None` in a plan without one.
fn embedded(plan: &Arc<dyn ExecutionPlan>) -> Option<Snapshot> {
    let below = plan.children().into_iter().filter_map(embedded);
    let here = (plan.name() == elmo_udfs::plan::EXEC_NAME).then(|| {
        let metrics = plan.metrics().unwrap_or_default();
        let sum = |name: &str| metrics.sum_by_name(name).map_or(0, |value| value.as_usize() as u64);
        let padded = metrics.iter().map(|metric| match metric.value() {
            MetricValue::Ratio { name, ratio_metrics } if name == "padding_ratio" => ratio_metrics.total() as u64,
            _ => 0,
        });
        let (rows, tokens) = (sum("rows_embedded"), sum("tokens"));
        Snapshot { rows, tokens, padded_tokens: padded.sum(), ..Snapshot::default() }
    });
    below.chain(here).reduce(|a, b| Snapshot {
        rows: a.rows + b.rows,
        tokens: a.tokens + b.tokens,
        padded_tokens: a.padded_tokens + b.padded_tokens,
        ..a
    })
}

/// COPY answers with one number.
fn count_of(batch: &arrow::array::RecordBatch) -> u64 {
    use arrow::{array::AsArray, datatypes::UInt64Type};
    let counts = batch.columns().first().and_then(|column| column.as_primitive_opt::<UInt64Type>());
    counts.map_or(0, |counts| counts.values().iter().sum())
}
