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
        utils::merge_schema,
    },
    optimizer::{OptimizerConfig, OptimizerRule},
};

use super::values::rewrite_values;
use crate::functions::{elmo_similarity::ElmoSimilarity, elmo_word::ElmoWord, elmo_words::ElmoWords, to_volatile};

/// The rule. As a [`FunctionRewrite`] it runs in the analyser.
#[derive(Debug, Default)]
pub(crate) struct Rewrite;

impl FunctionRewrite for Rewrite {
    fn name(&self) -> &str {
        "elmo"
    }

    fn rewrite(&self, expr: Expr, schema: &DFSchema, _: &ConfigOptions) -> Result<Transformed<Expr>> {
        expand(expr, schema)
    }
}

/// The same as the first optimiser rule: PREPARE optimises a plan that was not analysed.
impl OptimizerRule for Rewrite {
    fn name(&self) -> &str {
        "elmo"
    }

    fn rewrite(&self, plan: LogicalPlan, _: &dyn OptimizerConfig) -> Result<Transformed<LogicalPlan>> {
        plan.transform_up_with_subqueries(|node| {
            let (names, schema) = (NamePreserver::new(&node), input_schema(&node)?);
            let expanded = node.map_expressions(|expr| {
                let name = names.save(&expr);
                Ok(expr.transform_up(|e| expand(e, &schema))?.update_data(|expr| name.restore(expr)))
            })?;
            expanded.transform_data(rewrite_values)
        })
    }
}

/// The columns that the expressions of an operator may name.
pub(crate) fn input_schema(node: &LogicalPlan) -> Result<DFSchema> {
    let mut schema = merge_schema(&node.inputs());
    if let LogicalPlan::TableScan(scan) = node {
        schema.merge(&DFSchema::try_from_qualified_schema(scan.table_name.clone(), &scan.source.schema())?);
    }
    Ok(schema)
}

/// Expands `elmo_word`, `elmo_words` and `elmo_similarity`, and makes calls on constants volatile. The schema has the
/// columns that the expression may name.
pub(crate) fn expand(expr: Expr, schema: &DFSchema) -> Result<Transformed<Expr>> {
    if let Expr::ScalarFunction(ScalarFunction { func, args }) = &expr {
        let inner = func.inner().as_ref() as &dyn Any;
        let expanded = match (inner.downcast_ref::<ElmoWord>(), inner.downcast_ref::<ElmoWords>()) {
            (Some(word), _) => word.expand(args, schema)?,
            (_, Some(words)) => words.expand(args)?,
            _ => match inner.downcast_ref::<ElmoSimilarity>() {
                Some(similarity) => Some(similarity.expand(args)?),
                None => None,
            },
        };
        if let Some(expanded) = expanded {
            return Ok(Transformed::yes(expanded));
        }
    }
    Ok(to_volatile(expr))
}
