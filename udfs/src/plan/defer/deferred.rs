//! A plan whose embeddings are still to be computed.

use std::sync::Arc;

use datafusion::{
    common::{
        Column, DFSchema, DFSchemaRef, Result, internal_err,
        tree_node::{Transformed, TreeNode},
    },
    logical_expr::{Expr, LogicalPlan},
};

use super::super::calls::{has_calls, paths_are_known, replace_exprs};

/// A plan, and expressions over it that give the output columns.
pub(super) struct Deferred {
    pub(super) plan: LogicalPlan,
    /// Per column of `schema`, an expression over `plan`.
    pub(super) outputs: Vec<Expr>,
    /// The schema that the operators above expect.
    pub(super) schema: DFSchemaRef,
    /// Calls that `plan` has already computed for all of its rows, and their columns. Empty if `is_plan`.
    pub(super) computed: Vec<(Expr, Column)>,
    /// Whether the outputs are exactly the columns of `plan`.
    pub(super) is_plan: bool,
}

impl Deferred {
    /// A plan without deferred calls.
    pub(super) fn from_plan(plan: LogicalPlan) -> Self {
        let schema = Arc::clone(plan.schema());
        Self { plan, outputs: columns(&schema), schema, computed: Vec::new(), is_plan: true }
    }

    /// Converts an expression over `schema` into one over `plan`.
    pub(super) fn resolve(&self, expr: Expr) -> Result<Expr> {
        if self.is_plan {
            return Ok(expr);
        }
        let resolved = expr.transform(|e| match &e {
            Expr::Column(column) => match self.schema.maybe_index_of_column(column) {
                Some(index) => Ok(Transformed::yes(self.outputs[index].clone())),
                None => internal_err!("no column {column} in {}", self.schema),
            },
            _ => Ok(Transformed::no(e)),
        });
        replace_exprs(resolved?.data, &self.computed)
    }

    pub(super) fn resolve_all(&self, exprs: Vec<Expr>) -> Result<Vec<Expr>> {
        exprs.into_iter().map(|e| self.resolve(e)).collect()
    }

    /// Replaces expressions in the outputs by columns.
    pub(super) fn replace(mut self, columns: &[(Expr, Column)]) -> Result<Self> {
        if !columns.is_empty() {
            let outputs = self.outputs.into_iter().map(|output| replace_exprs(output, columns));
            self.outputs = outputs.collect::<Result<_>>()?;
        }
        Ok(self)
    }

    /// Removes the last outputs, so that `schema` remains.
    pub(super) fn truncate(mut self, schema: DFSchemaRef) -> Self {
        if self.schema == schema {
            return self;
        }
        self.outputs.truncate(schema.fields().len());
        Self { schema, is_plan: false, ..self }
    }

    /// The same outputs over another plan, which has at least the columns of the current one.
    pub(super) fn with_plan(self, plan: LogicalPlan) -> Self {
        let is_plan = self.is_plan && plan.schema() == &self.schema;
        Self { plan, is_plan, ..self }
    }

    /// The same outputs over a plan that has computed some calls.
    pub(super) fn with_computed(self, computed: Vec<(Expr, Column)>, plan: LogicalPlan) -> Result<Self> {
        let mut deferred = self.replace(&computed)?.with_plan(plan);
        deferred.is_plan &= computed.is_empty();
        deferred.computed.extend(computed);
        Ok(deferred)
    }
}

/// Whether an output can be deferred: it has calls, and their path conditions are known. Otherwise its calls are not
/// extracted, and the output is computed where it is defined.
pub(super) fn can_be_deferred(expr: &Expr) -> bool {
    has_calls(expr) && paths_are_known(expr)
}

/// The columns of a schema as expressions.
pub(super) fn columns(schema: &DFSchema) -> Vec<Expr> {
    schema.columns().into_iter().map(Expr::Column).collect()
}
