//! Text files as tables: a row per line, in one column `text`. DataFusion has no such format.

use std::{fmt, sync::Arc};

use arrow::{
    array::{ArrayRef, AsArray, RecordBatch, RecordBatchOptions},
    compute::{CastOptions, cast_with_options},
    datatypes::{DataType, Field, Schema, SchemaRef},
};
use async_trait::async_trait;
use datafusion::{
    catalog::{Session, TableProvider},
    common::{DataFusionError, Result, internal_err, project_schema},
    execution::{SendableRecordBatchStream, TaskContext},
    logical_expr::{Expr, TableType},
    physical_expr::{EquivalenceProperties, Partitioning},
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties,
        execution_plan::{Boundedness, EmissionType},
        stream::RecordBatchStreamAdapter,
    },
};

use super::error::external;
use crate::{
    operator::operator,
    source::{InputFile, Plan, Position, Request, Rows, Slice, SourceError},
};

/// A table of text files.
#[derive(Debug)]
pub(super) struct LinesTable {
    exec: LinesExec,
}

impl LinesTable {
    /// Creates a table. Fails if one of the files cannot be opened.
    pub(super) async fn try_new(files: Vec<InputFile>) -> Result<Arc<dyn TableProvider>> {
        let mut all = Vec::new();
        for file in files {
            let name = file.to_string();
            let plan = Plan::resolve(vec![file], &Request::texts("text")).await.map_err(external)?;
            all.push(LinesFile { name, plan: Arc::new(plan) });
        }
        Ok(Arc::new(Self { exec: LinesExec::new(all, true) }))
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
        Ok(Arc::new(LinesExec::new(self.exec.files.clone(), columns > 0)))
    }
}

fn schema() -> Schema {
    Schema::new(vec![Field::new("text", DataType::Utf8View, true)])
}

#[derive(Debug, Clone)]
struct LinesFile {
    /// The name in messages.
    name: String,
    plan: Arc<Plan>,
}

/// Reads text files, one per partition.
#[derive(Debug, Clone)]
pub(super) struct LinesExec {
    files: Vec<LinesFile>,
    /// Whether the column `text` is projected. Without it, batches have a row count only.
    with_text: bool,
    properties: Arc<PlanProperties>,
}

impl LinesExec {
    fn new(files: Vec<LinesFile>, with_text: bool) -> Self {
        let schema = Arc::new(if with_text { schema() } else { Schema::empty() });
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema),
            Partitioning::UnknownPartitioning(files.len()),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Self { files, with_text, properties: Arc::new(properties) }
    }
}

impl DisplayAs for LinesExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files: Vec<&str> = self.files.iter().map(|file| file.name.as_str()).collect();
        write!(f, "LinesExec: {}", files.join(", "))
    }
}

impl ExecutionPlan for LinesExec {
    operator!("LinesExec", inputs: []);

    fn with_new_children(self: Arc<Self>, _: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn execute(&self, partition: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let Some(file) = self.files.get(partition).cloned() else { return internal_err!("no file {partition}") };
        let (schema, with_text) = (self.schema(), self.with_text);
        let batch_schema = Arc::clone(&schema);
        let rows = Rows::new(Arc::clone(&file.plan), Position::default());
        let batches = futures::stream::try_unfold(rows, move |mut rows| {
            let (schema, file) = (Arc::clone(&batch_schema), file.name.clone());
            async move {
                let Some(slice) = rows.next().await.map_err(external)? else { return Ok(None) };
                let columns = if with_text { vec![to_utf8_view(&slice, &file)?] } else { Vec::new() };
                let count = RecordBatchOptions::new().with_row_count(Some(slice.len()));
                Ok::<_, DataFusionError>(Some((RecordBatch::try_new_with_options(schema, columns, &count)?, rows)))
            }
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
    }
}

/// Casts lines to strings. Invalid UTF-8 is an error rather than NULL.
fn to_utf8_view(slice: &Slice, file: &str) -> Result<ArrayRef> {
    let strict = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(&slice.text, &DataType::Utf8View, &strict).map_err(|_| {
        let lines = slice.text.as_binary_opt::<i32>();
        let bad = lines.and_then(|lines| lines.iter().flatten().position(|line| std::str::from_utf8(line).is_err()));
        let row = slice.start.row + bad.unwrap_or_default() as u64;
        external(SourceError::Malformed { file: file.to_owned(), row, reason: "the line is not UTF-8".to_owned() })
    })
}
