//! Text files as tables: a row per line in the column `text`, and the columns that folders name. DataFusion has no such
//! format.

use std::{fmt, sync::Arc};

use arrow::{
    array::{ArrayRef, AsArray, RecordBatch, RecordBatchOptions, StringArray},
    compute::{CastOptions, cast_with_options},
    datatypes::{DataType, Field, FieldRef, Schema, SchemaRef},
};
use async_trait::async_trait;
use datafusion::{
    catalog::{Session, TableProvider},
    common::{DataFusionError, Result, ScalarValue, internal_err, project_schema},
    execution::{SendableRecordBatchStream, TaskContext},
    logical_expr::{Expr, TableProviderFilterPushDown, TableType},
    physical_expr::{EquivalenceProperties, Partitioning},
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties,
        empty::EmptyExec,
        execution_plan::{Boundedness, EmissionType},
        stream::RecordBatchStreamAdapter,
    },
};
use futures::TryStreamExt;

use super::{error::external, partitions::Partitions};
use crate::{
    operator::operator,
    source::{InputFile, Plan, Position, Request, Rows, Slice, SourceError},
};

/// A table of text files.
#[derive(Debug)]
pub(super) struct LinesTable {
    files: Vec<InputFile>,
    partitions: Partitions,
    schema: SchemaRef,
}

impl LinesTable {
    /// Without `views`, lines are plain strings.
    pub(super) fn try_new(files: Vec<InputFile>, views: bool) -> Result<Arc<dyn TableProvider>> {
        // The texts are those of the file, whatever its folder is called.
        let partitions = Partitions::of(&files, |column| column == TEXT)?;
        let text = Field::new(TEXT, if views { DataType::Utf8View } else { DataType::Utf8 }, true);
        let schema = Arc::new(Schema::new([vec![text], partitions.fields()].concat()));
        Ok(Arc::new(Self { files, partitions, schema }))
    }
}

/// The column of lines.
const TEXT: &str = "text";

#[async_trait]
impl TableProvider for LinesTable {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    fn supports_filters_pushdown(&self, filters: &[&Expr]) -> Result<Vec<TableProviderFilterPushDown>> {
        Ok(self.partitions.pushdown(filters, &TableProviderFilterPushDown::Unsupported))
    }

    async fn scan(
        &self,
        session: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        _: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let schema = project_schema(&self.schema, projection)?;
        let kept = self.partitions.matching(session, filters)?;
        if kept.is_empty() {
            return Ok(Arc::new(EmptyExec::new(schema)));
        }
        let mut groups = Vec::new();
        for kept in kept.chunks(kept.len().div_ceil(session.config().target_partitions())) {
            let files = kept.iter().map(|file| self.files[*file].clone()).collect();
            let plan = Plan::resolve(files, &Request::texts(TEXT)).await.map_err(external)?;
            let values = kept.iter().map(|file| self.partitions.values(*file)).collect::<Result<_>>()?;
            groups.push(Arc::new(Group { plan: Arc::new(plan), values }));
        }
        let all = (0..self.schema.fields().len()).collect();
        let columns = projection.cloned().unwrap_or(all);
        Ok(Arc::new(LinesExec::new(groups, columns, schema)))
    }
}

/// Files that are read one after the other, so that few are open at a time.
#[derive(Debug)]
struct Group {
    plan: Arc<Plan>,
    /// The values of the partition columns, per file.
    values: Vec<Vec<ScalarValue>>,
}

impl Group {
    /// The columns `columns` of some rows, of which the first is the text.
    fn batch(&self, slice: &Slice, columns: &[usize], schema: SchemaRef) -> Result<RecordBatch> {
        let column = |(column, field): (&usize, &FieldRef)| match column.checked_sub(1) {
            None => {
                let file = self.plan.files().nth(slice.start.file).map(ToString::to_string).unwrap_or_default();
                to_strings(slice, &file, field.data_type())
            }
            Some(partition) => self.values[slice.start.file][partition].to_array_of_size(slice.len()),
        };
        let columns = columns.iter().zip(schema.fields()).map(column).collect::<Result<_>>()?;
        let count = RecordBatchOptions::new().with_row_count(Some(slice.len()));
        Ok(RecordBatch::try_new_with_options(schema, columns, &count)?)
    }
}

/// Reads text files, a group per partition.
#[derive(Debug, Clone)]
pub(super) struct LinesExec {
    groups: Vec<Arc<Group>>,
    /// The columns of the table that are read. Without any, batches have a row count only.
    columns: Arc<[usize]>,
    properties: Arc<PlanProperties>,
}

impl LinesExec {
    fn new(groups: Vec<Arc<Group>>, columns: Vec<usize>, schema: SchemaRef) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema),
            Partitioning::UnknownPartitioning(groups.len()),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Self { groups, columns: columns.into(), properties: Arc::new(properties) }
    }
}

impl DisplayAs for LinesExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files: Vec<String> =
            self.groups.iter().flat_map(|group| group.plan.files()).map(ToString::to_string).collect();
        write!(f, "LinesExec: {}", files.join(", "))
    }
}

impl ExecutionPlan for LinesExec {
    operator!("LinesExec", inputs: []);

    fn with_new_children(self: Arc<Self>, _: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let batch_rows = context.session_config().batch_size();
        let Some(group) = self.groups.get(partition).cloned() else { return internal_err!("no group {partition}") };
        let (schema, columns) = (self.schema(), Arc::clone(&self.columns));
        let batch_schema = Arc::clone(&schema);
        let rows = Rows::new(Arc::clone(&group.plan), Position::default());
        let batches = futures::stream::try_unfold(rows, move |mut rows| {
            let (schema, columns, group) = (Arc::clone(&batch_schema), Arc::clone(&columns), Arc::clone(&group));
            async move {
                let Some(slice) = rows.next().await.map_err(external)? else { return Ok(None) };
                let batch = group.batch(&slice, &columns, schema)?;
                Ok::<_, DataFusionError>(Some((batch, rows)))
            }
        });
        let batches = batches.map_ok(move |batch| futures::stream::iter(split(&batch, batch_rows))).try_flatten();
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
    }
}

/// Splits a batch into batches of at most `rows` rows. Each has its own copy of its lines: DataFusion counts the memory of
/// all lines that a batch refers to.
fn split(batch: &RecordBatch, rows: usize) -> Vec<Result<RecordBatch>> {
    if batch.num_rows() <= rows {
        return vec![Ok(batch.clone())];
    }
    let own = |column: &ArrayRef| match (column.as_string_view_opt(), column.as_string_opt::<i32>()) {
        (Some(lines), _) => Arc::new(lines.gc()) as ArrayRef,
        (_, Some(lines)) => Arc::new(lines.iter().collect::<StringArray>()),
        _ => Arc::clone(column),
    };
    let part = |first: usize| {
        let part = batch.slice(first, rows.min(batch.num_rows() - first));
        let count = RecordBatchOptions::new().with_row_count(Some(part.num_rows()));
        Ok(RecordBatch::try_new_with_options(part.schema(), part.columns().iter().map(own).collect(), &count)?)
    };
    (0..batch.num_rows()).step_by(rows).map(part).collect()
}

/// Casts lines to a type of strings. Invalid UTF-8 is an error rather than NULL.
fn to_strings(slice: &Slice, file: &str, data_type: &DataType) -> Result<ArrayRef> {
    let strict = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(&slice.text, data_type, &strict).map_err(|_| {
        let lines = slice.text.as_binary_opt::<i32>();
        let bad = lines.and_then(|lines| lines.iter().flatten().position(|line| std::str::from_utf8(line).is_err()));
        let row = slice.start.row + bad.unwrap_or_default() as u64;
        external(SourceError::Malformed { file: file.to_owned(), row, reason: "the line is not UTF-8".to_owned() })
    })
}
