//! The columns that the folders of files name, as in `year=2024/month=7/a.parquet`: their values per file, and which files
//! a filter leaves.

use arrow::{
    array::{ArrayRef, AsArray, RecordBatch, RecordBatchOptions},
    compute::concat,
    datatypes::{Field, Schema},
};
use datafusion::{
    catalog::Session,
    common::{DFSchema, Result, ScalarValue, tree_node::TreeNode},
    datasource::listing::helpers::expr_applicable_for_cols,
    logical_expr::{Expr, TableProviderFilterPushDown, utils::conjunction},
};

use crate::source::{InputFile, hive};

/// The partition columns of a table, with a row per file.
#[derive(Debug, Clone)]
pub(super) struct Partitions(RecordBatch);

impl Partitions {
    /// The partitions of files, without those whose columns `is_left_out`.
    pub(super) fn of(files: &[InputFile], is_left_out: impl Fn(&str) -> bool) -> Result<Self> {
        let fields = hive::fields(files.iter().map(|file| file.partitions.as_slice()));
        let fields: Vec<Field> = fields.into_iter().filter(|field| !is_left_out(field.name())).collect();
        let column = |field: &Field| -> Result<ArrayRef> {
            let values = files.iter().map(|file| {
                let partition = file.partitions.iter().find(|partition| partition.key == *field.name());
                hive::value(partition.and_then(|partition| partition.value.as_deref()), field.data_type())
            });
            let values = values.collect::<Result<Vec<_>, _>>()?;
            Ok(concat(&values.iter().map(AsRef::as_ref).collect::<Vec<_>>())?)
        };
        let columns = fields.iter().map(column).collect::<Result<Vec<_>>>()?;
        let rows = RecordBatchOptions::new().with_row_count(Some(files.len()));
        Ok(Self(RecordBatch::try_new_with_options(Schema::new(fields).into(), columns, &rows)?))
    }

    pub(super) fn fields(&self) -> Vec<Field> {
        self.0.schema().fields().iter().map(|field| field.as_ref().clone()).collect()
    }

    /// The values of a file.
    pub(super) fn values(&self, file: usize) -> Result<Vec<ScalarValue>> {
        self.0.columns().iter().map(|column| ScalarValue::try_from_array(column, file)).collect()
    }

    /// Whether a filter depends on nothing but partitions, so that it is decided for all rows of a file at once.
    pub(super) fn decide(&self, filter: &Expr) -> bool {
        let schema = self.0.schema();
        let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        let has_query = || {
            let is_query = |node: &Expr| {
                use Expr::{Exists, InSubquery, OuterReferenceColumn, ScalarSubquery, SetComparison};
                Ok(matches!(
                    node,
                    Exists(_) | InSubquery(_) | OuterReferenceColumn(..) | ScalarSubquery(_) | SetComparison(_)
                ))
            };
            filter.exists(is_query).unwrap_or(true)
        };
        !filter.column_refs().is_empty() && expr_applicable_for_cols(&names, filter) && !has_query()
    }

    /// How filters are applied: by leaving out files, or else by the operator above the scan.
    pub(super) fn pushdown(
        &self,
        filters: &[&Expr],
        otherwise: &TableProviderFilterPushDown,
    ) -> Vec<TableProviderFilterPushDown> {
        let pushdown = |filter: &&Expr| match self.decide(filter) {
            true => TableProviderFilterPushDown::Exact,
            false => otherwise.clone(),
        };
        filters.iter().map(pushdown).collect()
    }

    /// The files whose rows the filters do not all reject.
    pub(super) fn matching(&self, session: &dyn Session, filters: &[Expr]) -> Result<Vec<usize>> {
        let all = 0..self.0.num_rows();
        let Some(filter) = conjunction(filters.iter().filter(|filter| self.decide(filter)).cloned()) else {
            return Ok(all.collect());
        };
        let schema = DFSchema::try_from(self.0.schema())?;
        let filter = session.create_physical_expr(filter, &schema)?;
        let kept = filter.evaluate(&self.0)?.into_array(self.0.num_rows())?;
        let kept = kept.as_boolean();
        // NULL rejects a row as false does.
        Ok(kept.iter().enumerate().filter(|(_, kept)| *kept == Some(true)).map(|(file, _)| file).collect())
    }
}
