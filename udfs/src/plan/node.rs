//! `Embed` in a logical plan: its input's columns, and those of some embedding calls behind them.

use std::{cmp::Ordering, collections::HashSet, fmt, hash::Hash, sync::Arc};

use datafusion::{
    common::{Column, DFSchema, DFSchemaRef, Result, internal_err},
    logical_expr::{
        Expr, ExprSchemable, Extension, LogicalPlan, ScalarUDF, UserDefinedLogicalNodeCore, expr::ScalarFunction,
    },
};

/// A call whose text is an expression of the plan. The rest of it is none: rules that evaluate what is constant, or merge
/// what is equal, must not see the call.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Hash)]
pub(crate) struct EmbedCall {
    pub(crate) text: Expr,
    pub(crate) function: ScalarUdf,
    /// Literals.
    pub(crate) options: Vec<Expr>,
    /// Name of the column.
    pub(crate) name: String,
}

/// A function, in an order that means nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ScalarUdf(pub(crate) Arc<ScalarUDF>);

impl PartialOrd for ScalarUdf {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        self.0.name().partial_cmp(other.0.name()).filter(|order| *order != Ordering::Equal || self == other)
    }
}

impl EmbedCall {
    pub(crate) fn try_new(call: Expr, name: String) -> Result<Self> {
        let Expr::ScalarFunction(ScalarFunction { func, args }) = call else {
            return internal_err!("{call} is no call of a function");
        };
        let mut args = args.into_iter();
        let Some(text) = args.next() else { return internal_err!("{} without a text", func.name()) };
        Ok(Self { text, function: ScalarUdf(func), options: args.collect(), name })
    }

    /// The whole call.
    pub(crate) fn expr(&self) -> Expr {
        let args = [self.text.clone()].into_iter().chain(self.options.iter().cloned()).collect();
        Expr::ScalarFunction(ScalarFunction { func: Arc::clone(&self.function.0), args })
    }
}

/// Adds a column per call. Rows keep their order and their number.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Embed {
    pub(crate) input: LogicalPlan,
    pub(crate) calls: Vec<EmbedCall>,
    /// Whether somebody above may stop before the last row: then no row is embedded before it is asked for.
    pub(crate) stops_early: bool,
    schema: DFSchemaRef,
}

impl Embed {
    /// Puts `Embed` above `input`.
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

    /// Filters on vectors stay above.
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
            _ => internal_err!("Embed has one input, and a text per call"),
        }
    }

    /// What the calls read, DataFusion adds.
    fn necessary_children_exprs(&self, output_columns: &[usize]) -> Option<Vec<Vec<usize>>> {
        let inputs = self.input.schema().fields().len();
        Some(vec![output_columns.iter().copied().filter(|column| *column < inputs).collect()])
    }

    fn supports_limit_pushdown(&self) -> bool {
        true
    }
}
