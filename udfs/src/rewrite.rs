//! What becomes of calls before a query is optimised: some are said with others, so that equal work is seen to be equal,
//! and calls on literals are kept for run time.

use datafusion::{
    common::{
        DFSchema, Result,
        config::ConfigOptions,
        tree_node::{Transformed, TreeNode},
    },
    logical_expr::{
        Expr, LogicalPlan,
        expr::ScalarFunction,
        expr_rewriter::{FunctionRewrite, NamePreserver},
    },
    optimizer::{OptimizerConfig, OptimizerRule},
};

use crate::{
    functions::{self, elmo_similarity::ElmoSimilarity, elmo_word::ElmoWord},
    text_function::is_constant,
    values,
};

/// Runs with DataFusion's analysis, before anything is evaluated.
#[derive(Debug, Default)]
pub(crate) struct Rewrite;

impl FunctionRewrite for Rewrite {
    fn name(&self) -> &str {
        "elmo"
    }

    fn rewrite(&self, expr: Expr, _: &DFSchema, _: &ConfigOptions) -> Result<Transformed<Expr>> {
        expand(expr)
    }
}

/// The same before all other optimiser rules: PREPARE optimises a plan that was never analysed.
impl OptimizerRule for Rewrite {
    fn name(&self) -> &str {
        "elmo"
    }

    fn rewrite(&self, plan: LogicalPlan, _: &dyn OptimizerConfig) -> Result<Transformed<LogicalPlan>> {
        plan.transform_up_with_subqueries(|node| {
            let names = NamePreserver::new(&node);
            let expanded = node.map_expressions(|expr| {
                let name = names.save(&expr);
                Ok(expr.transform_up(expand)?.update_data(|expr| name.restore(expr)))
            })?;
            expanded.transform_data(values::at_run_time)
        })
    }
}

pub(crate) fn expand(expr: Expr) -> Result<Transformed<Expr>> {
    if let Expr::ScalarFunction(ScalarFunction { func, args }) = &expr {
        let inner = func.inner().as_ref() as &dyn std::any::Any;
        if let Some(word) = inner.downcast_ref::<ElmoWord>() {
            return word.expand(args).map(Transformed::yes);
        }
        if let Some(similarity) = inner.downcast_ref::<ElmoSimilarity>() {
            return similarity.expand(args).map(Transformed::yes);
        }
    }
    Ok(to_run_time(expr))
}

/// A call on a literal that DataFusion would otherwise evaluate when it plans.
pub(crate) fn to_run_time(expr: Expr) -> Transformed<Expr> {
    let Expr::ScalarFunction(ScalarFunction { func, args }) = &expr else { return Transformed::no(expr) };
    let Some((function, make)) = functions::text_function(func) else { return Transformed::no(expr) };
    if function.is_at_run_time() || !is_constant(args, function.shape.columns) {
        return Transformed::no(expr);
    }
    Transformed::yes(make(function.at_run_time()).call(args.clone()))
}
