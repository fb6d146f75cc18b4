//! The optimiser rule that computes embeddings as late as possible: after the filters, sorts, limits and joins that do
//! not need them.
//!
//! The rule rebuilds a plan from its leaves. It represents each operator by a *deferred* plan: a plan without
//! embeddings, and one expression over it per output column, which may contain calls. A projection that embeds becomes
//! such expressions. A sort, a limit or a filter is applied to the plan below them, unless it needs a vector itself.
//! Where a vector is needed, an [`Embed`](super::node::Embed) operator is put above the plan, and everything above
//! reads its column.
//!
//! The rule runs after DataFusion's rules, which push filters down and prune columns as if calls were cheap. Calls that
//! they duplicated become one call again.

mod deferred;
mod first_value;
mod groups;
mod join;
mod pass;
mod rows;
mod scan;

use std::sync::Arc;

use datafusion::{
    common::{
        Result, internal_err,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    logical_expr::{LogicalPlan, WriteOp},
    optimizer::{OptimizerConfig, OptimizerRule},
};

use self::pass::{COLUMN_PREFIX, Pass};
use super::{calls::has_calls, config::ElmoConfig};
use crate::functions::to_volatile;

/// The rule. [`ElmoSession::with_elmo`](super::session::ElmoSession::with_elmo) adds it after DataFusion's rules.
#[derive(Debug, Default)]
pub struct DeferEmbedding;

impl OptimizerRule for DeferEmbedding {
    fn name(&self) -> &str {
        "elmo_defer_embedding"
    }

    fn rewrite(&self, plan: LogicalPlan, config: &dyn OptimizerConfig) -> Result<Transformed<LogicalPlan>> {
        // Merging projections may have made texts constant. Their calls must not be folded when the query is planned.
        let plan = plan.transform_up_with_subqueries(|node| {
            node.map_expressions(|expr| expr.transform_up(|e| Ok(to_volatile(e))))
        })?;
        if !ElmoConfig::from_options(&config.options()).rules
            || !has_calls_to_defer(&plan.data)?
            || has_correlated_subquery(&plan.data)?
        {
            return Ok(plan);
        }
        let mut pass = Pass::new(last_column_number(&plan.data)? + 1);
        let schema = Arc::clone(plan.data.schema());
        let deferred = pass.defer(plan.data, false)?;
        let plan = pass.finish(deferred, false)?;
        if !schema.logically_equivalent_names_and_types(plan.schema()) {
            return internal_err!("deferring embeddings changed the columns of the plan");
        }
        Ok(Transformed::yes(plan))
    }
}

/// Whether a plan has calls outside of `Embed` operators.
fn has_calls_to_defer(plan: &LogicalPlan) -> Result<bool> {
    let mut found = false;
    plan.apply_with_subqueries(|node| {
        if is_update_or_delete(node) {
            return Ok(TreeNodeRecursion::Stop);
        }
        if !matches!(node, LogicalPlan::Extension(_)) {
            node.apply_expressions(|expr| {
                found |= has_calls(expr);
                Ok(TreeNodeRecursion::Continue)
            })?;
        }
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

/// Whether a plan has a subquery that reads columns of the outer query. DataFusion replaces it by a join in its next
/// pass, if it can, and does not recognise it when it has `Embed` operators.
fn has_correlated_subquery(plan: &LogicalPlan) -> Result<bool> {
    let mut found = false;
    plan.apply_with_subqueries(|node| {
        found |= matches!(node, LogicalPlan::Subquery(subquery) if !subquery.outer_ref_columns.is_empty());
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

/// Whether a statement passes the expressions of its input to the table instead of executing the input.
fn is_update_or_delete(plan: &LogicalPlan) -> bool {
    let LogicalPlan::Dml(statement) = plan else { return false };
    !matches!(statement.op, WriteOp::Insert(_) | WriteOp::Ctas)
}

/// The highest number in the column names of a plan that an earlier pass of this rule made.
fn last_column_number(plan: &LogicalPlan) -> Result<usize> {
    let mut last = 0;
    plan.apply_with_subqueries(|node| {
        let fields = node.schema().fields().iter();
        let numbers = fields.filter_map(|field| field.name().strip_prefix(COLUMN_PREFIX)?.parse::<u32>().ok());
        last = numbers.fold(last, |last, number| last.max(number as usize));
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(last)
}
