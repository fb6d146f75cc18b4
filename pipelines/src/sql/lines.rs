//! Lines of text as a table: a row per line, in one column `text`. DataFusion knows no such format.

use std::{fmt, sync::Arc};

use arrow::{
    array::{ArrayRef, AsArray, RecordBatch, RecordBatchOptions},
    compute::{CastOptions, cast_with_options},
    datatypes::{DataType, Field, Schema, SchemaRef},
};
use async_trait::async_trait;
use datafusion::{
    catalog::{Session, TableProvider},
    common::{
        DataFusionError, Result, internal_err, plan_datafusion_err, project_schema, tree_node::TreeNodeRecursion,
    },
    execution::{SendableRecordBatchStream, TaskContext},
    logical_expr::{Expr, TableType},
    physical_expr::{EquivalenceProperties, Partitioning, PhysicalExpr},
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties,
        execution_plan::{Boundedness, EmissionType},
        stream::RecordBatchStreamAdapter,
    },
};
use futures::TryStreamExt;

use super::files::external;
use crate::{
    source::{InputFile, Plan, Position, Request, Rows, Slice, SourceError, list},
    stores::Stores,
};

/// Text files as a table.
#[derive(Debug)]
pub(super) struct LinesTable {
    exec: LinesExec,
}

impl LinesTable {
    /// A table of these files, each checked.
    pub(super) async fn of(files: Vec<InputFile>, stores: &Stores) -> Result<Arc<dyn TableProvider>> {
        let mut all = Vec::new();
        for file in files {
            let name = file.to_string();
            let url = file.location.as_ref().and_then(|location| location.url());
            let url = url.ok_or_else(|| plan_datafusion_err!("{name}: no URL says this name"))?.to_string();
            let plan = Plan::resolve(vec![file], &Request::texts("text")).await.map_err(external)?;
            all.push(LinesFile { url, name, plan: Some(Arc::new(plan)) });
        }
        Ok(Arc::new(Self { exec: LinesExec::new(all, stores, true) }))
    }
}

#[async_trait]
impl TableProvider for LinesTable {
    fn schema(&self) -> SchemaRef {
        Arc::new(schema())
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        _: &dyn Session,
        projection: Option<&Vec<usize>>,
        _: &[Expr],
        _: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let columns = project_schema(&self.schema(), projection)?.fields().len();
        Ok(Arc::new(LinesExec::new(self.exec.files.clone(), &self.exec.stores, columns > 0)))
    }
}

fn schema() -> Schema {
    Schema::new(vec![Field::new("text", DataType::Utf8View, true)])
}

/// A file of lines; who did not list it only knows where it is.
#[derive(Debug, Clone)]
struct LinesFile {
    url: String,
    /// For messages.
    name: String,
    plan: Option<Arc<Plan>>,
}

/// Reads text files, a partition each.
#[derive(Debug, Clone)]
pub(crate) struct LinesExec {
    files: Vec<LinesFile>,
    stores: Stores,
    /// Whether somebody reads the lines, and does not only count them.
    with_text: bool,
    properties: Arc<PlanProperties>,
}

impl LinesExec {
    fn new(files: Vec<LinesFile>, stores: &Stores, with_text: bool) -> Self {
        let schema = Arc::new(if with_text { schema() } else { Schema::empty() });
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema),
            Partitioning::UnknownPartitioning(files.len()),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Self { files, stores: stores.clone(), with_text, properties: Arc::new(properties) }
    }

    /// The same in another process, which looks for the files when it reads them.
    #[cfg(feature = "cluster")]
    pub(crate) fn elsewhere(files: Vec<(String, String)>, stores: &Stores, with_text: bool) -> Self {
        let file = |(url, name)| LinesFile { url, name, plan: None };
        Self::new(files.into_iter().map(file).collect(), stores, with_text)
    }

    /// What [`LinesExec::elsewhere`] needs: URLs with the names for messages, and whether there is a column.
    #[cfg(feature = "cluster")]
    pub(crate) fn parts(&self) -> (Vec<(String, String)>, bool) {
        (self.files.iter().map(|file| (file.url.clone(), file.name.clone())).collect(), self.with_text)
    }

    /// One operator per file.
    #[cfg(feature = "cluster")]
    pub(crate) fn singly(&self) -> Vec<Arc<dyn ExecutionPlan>> {
        let one = |file: &LinesFile| Self::new(vec![file.clone()], &self.stores, self.with_text);
        self.files.iter().map(|file| Arc::new(one(file)) as Arc<dyn ExecutionPlan>).collect()
    }
}

impl DisplayAs for LinesExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files: Vec<&str> = self.files.iter().map(|file| file.name.as_str()).collect();
        write!(f, "LinesExec: {}", files.join(", "))
    }
}

impl ExecutionPlan for LinesExec {
    fn name(&self) -> &'static str {
        "LinesExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, _: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn execute(&self, partition: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let Some(file) = self.files.get(partition).cloned() else { return internal_err!("no file {partition}") };
        let (schema, stores, with_text) = (self.schema(), self.stores.clone(), self.with_text);
        let there = Arc::clone(&schema);
        let batches = async move {
            let plan = file.plan(&stores).await?;
            let rows = Rows::new(plan, Position::default());
            Ok::<_, DataFusionError>(futures::stream::try_unfold(rows, move |mut rows| {
                let (schema, file) = (Arc::clone(&there), file.name.clone());
                async move {
                    let Some(slice) = rows.next().await.map_err(external)? else { return Ok(None) };
                    let columns = if with_text { vec![utf8(&slice, &file)?] } else { Vec::new() };
                    let count = RecordBatchOptions::new().with_row_count(Some(slice.len()));
                    Ok(Some((RecordBatch::try_new_with_options(schema, columns, &count)?, rows)))
                }
            }))
        };
        let batches = futures::stream::once(batches).try_flatten();
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
    }
}

impl LinesFile {
    async fn plan(&self, stores: &Stores) -> Result<Arc<Plan>> {
        if let Some(plan) = &self.plan {
            return Ok(Arc::clone(plan));
        }
        let files = list(stores, std::slice::from_ref(&self.url), None).await.map_err(external)?;
        Ok(Arc::new(Plan::resolve(files, &Request::texts("text")).await.map_err(external)?))
    }
}

/// Lines as text. Other encodings are refused rather than read as NULL.
fn utf8(slice: &Slice, file: &str) -> Result<ArrayRef> {
    let strict = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(&slice.text, &DataType::Utf8View, &strict).map_err(|_| {
        let lines = slice.text.as_binary_opt::<i32>();
        let bad = lines.and_then(|lines| lines.iter().flatten().position(|line| std::str::from_utf8(line).is_err()));
        let row = slice.start.row + bad.unwrap_or_default() as u64;
        external(SourceError::Malformed { file: file.to_owned(), row, reason: "the line is not UTF-8".to_owned() })
    })
}
