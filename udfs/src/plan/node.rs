//! The logical operator `Embed`: adds one column per embedding call to its input.

use std::{cmp::Ordering, collections::HashSet, fmt, hash::Hash, sync::Arc};

use datafusion::{
    common::{Column, DFSchema, DFSchemaRef, Result, internal_err},
    logical_expr::{
        Expr, ExprSchemable, Extension, LogicalPlan, ScalarUDF, UserDefinedLogicalNodeCore, expr::ScalarFunction,
    },
};

/// An embedding call. Only its text is an expression of the operator: optimiser rules that fold constants or eliminate
/// common subexpressions must not see the call itself.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Hash)]
pub(crate) struct EmbedCall {
    pub(crate) text: Expr,
    pub(crate) function: OrderedUdf,
    /// The options, which are literals.
    pub(crate) options: Vec<Expr>,
    /// The name of the column that the call becomes.
    pub(crate) name: String,
}

/// A function with an arbitrary order, which [`UserDefinedLogicalNodeCore`] requires.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct OrderedUdf(pub(crate) Arc<ScalarUDF>);

impl PartialOrd for OrderedUdf {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        self.0.name().partial_cmp(other.0.name()).filter(|order| *order != Ordering::Equal || self == other)
    }
}

impl EmbedCall {
    pub(crate) fn try_new(call: Expr, name: String) -> Result<Self> {
        let Expr::ScalarFunction(ScalarFunction { func, args }) = call else {
            return internal_err!("{call} is not a call of a function");
        };
        let mut args = args.into_iter();
        let Some(text) = args.next() else { return internal_err!("{} without a text", func.name()) };
        Ok(Self { text, function: OrderedUdf(func), options: args.collect(), name })
    }

    /// The whole call.
    pub(crate) fn expr(&self) -> Expr {
        let args = [self.text.clone()].into_iter().chain(self.options.iter().cloned()).collect();
        Expr::ScalarFunction(ScalarFunction { func: Arc::clone(&self.function.0), args })
    }
}

/// Adds one column per call. Preserves the order and the number of rows.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Embed {
    pub(crate) input: LogicalPlan,
    pub(crate) calls: Vec<EmbedCall>,
    /// Whether an operator above may stop before the last row. If so, rows are not embedded ahead of demand.
    pub(crate) stops_early: bool,
    schema: DFSchemaRef,
}

impl Embed {
    /// An operator above `input`.
    pub(crate) fn try_new(input: LogicalPlan, calls: Vec<EmbedCall>, stops_early: bool) -> Result<Self> {
        let schema = input.schema();
        let mut fields: Vec<_> =
            schema.iter().map(|(qualifier, field)| (qualifier.cloned(), Arc::clone(field))).collect();
        for call in &calls {
            fields.push(call.expr().alias(&call.name).to_field(schema)?);
        }
        let schema = Arc::new(DFSchema::new_with_metadata(fields, schema.metadata().clone())?);
        Ok(Self { input, calls, stops_early, schema })
    }

    pub(crate) fn into_plan(self) -> LogicalPlan {
        LogicalPlan::Extension(Extension { node: Arc::new(self) })
    }

    /// The columns of the calls.
    pub(crate) fn columns(&self) -> Vec<Column> {
        let inputs = self.input.schema().fields().len();
        self.schema.columns().split_off(inputs)
    }
}

impl PartialOrd for Embed {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        self.calls.partial_cmp(&other.calls).filter(|order| *order != Ordering::Equal || self == other)
    }
}

impl UserDefinedLogicalNodeCore for Embed {
    fn name(&self) -> &str {
        "Embed"
    }

    fn inputs(&self) -> Vec<&LogicalPlan> {
        vec![&self.input]
    }

    fn schema(&self) -> &DFSchemaRef {
        &self.schema
    }

    fn expressions(&self) -> Vec<Expr> {
        self.calls.iter().map(|call| call.text.clone()).collect()
    }

    /// Filters on the added columns stay above the operator.
    fn prevent_predicate_push_down_columns(&self) -> HashSet<String> {
        self.columns().into_iter().map(|column| column.name).collect()
    }

    fn fmt_for_explain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calls: Vec<String> = self.calls.iter().map(|call| format!("{} AS {}", call.expr(), call.name)).collect();
        write!(f, "Embed: {}", calls.join(", "))?;
        if self.stops_early { f.write_str(", stops early") } else { Ok(()) }
    }

    fn with_exprs_and_inputs(&self, exprs: Vec<Expr>, mut inputs: Vec<LogicalPlan>) -> Result<Self> {
        match (inputs.pop(), inputs.is_empty()) {
            (Some(input), true) if exprs.len() == self.calls.len() => {
                let calls = self.calls.iter().zip(exprs);
                let calls = calls.map(|(call, text)| EmbedCall { text, ..call.clone() }).collect();
                Self::try_new(input, calls, self.stops_early)
            }
            _ => internal_err!("Embed has one input and one text per call"),
        }
    }

    /// The columns that the texts read are not listed: DataFusion adds them.
    fn necessary_children_exprs(&self, output_columns: &[usize]) -> Option<Vec<Vec<usize>>> {
        let inputs = self.input.schema().fields().len();
        Some(vec![output_columns.iter().copied().filter(|column| *column < inputs).collect()])
    }

    fn supports_limit_pushdown(&self) -> bool {
        true
    }
}
