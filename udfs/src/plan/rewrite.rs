//! Rewrites calls before any other optimiser rule: functions that are defined by others are expanded, so that equal
//! work is recognised, and calls on constants are made volatile, so that they are not evaluated when the query is
//! planned.

use std::any::Any;

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

use super::values::rewrite_values;
use crate::functions::{elmo_similarity::ElmoSimilarity, elmo_word::ElmoWord, to_volatile};

/// The rule. As a [`FunctionRewrite`] it runs in the analyser.
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

/// The same as the first optimiser rule: PREPARE optimises a plan that was not analysed.
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
            expanded.transform_data(rewrite_values)
        })
    }
}

/// Expands `elmo_word` and `elmo_similarity`, and makes calls on constants volatile.
pub(crate) fn expand(expr: Expr) -> Result<Transformed<Expr>> {
    if let Expr::ScalarFunction(ScalarFunction { func, args }) = &expr {
        let inner = func.inner().as_ref() as &dyn Any;
        if let Some(word) = inner.downcast_ref::<ElmoWord>() {
            return word.expand(args).map(Transformed::yes);
        }
        if let Some(similarity) = inner.downcast_ref::<ElmoSimilarity>() {
            return similarity.expand(args).map(Transformed::yes);
        }
    }
    Ok(to_volatile(expr))
}
