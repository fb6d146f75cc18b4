//! Preserves the order of a query whose embeddings are computed above its sort.
//!
//! DataFusion assumes that operators above the final sort compute nothing. Our plans compute embeddings there, so
//! DataFusion may repartition the sorted rows to compute in parallel. Each partition is sorted, but nothing merges them
//! in order.

use std::sync::Arc;

use datafusion::{
    common::{
        Result,
        config::ConfigOptions,
        tree_node::{TreeNode, TreeNodeRecursion},
    },
    physical_expr::ScalarFunctionExpr,
    physical_optimizer::PhysicalOptimizerRule,
    physical_plan::{
        ExecutionPlan, ExecutionPlanProperties, Partitioning,
        coalesce_partitions::CoalescePartitionsExec,
        repartition::RepartitionExec,
        replace_children_if_necessary,
        scalar_subquery::ScalarSubqueryExec,
        sorts::{sort::SortExec, sort_preserving_merge::SortPreservingMergeExec},
    },
};

use super::exec::EmbedExec;
use crate::functions;

/// Removes the repartitioning between the root of a plan and its sort.
#[derive(Debug, Default)]
pub(super) struct PreserveOrder;

impl PhysicalOptimizerRule for PreserveOrder {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        if is_sorted(&plan) && embeds(&plan)? { in_one_partition(plan) } else { Ok(plan) }
    }

    fn name(&self) -> &str {
        "elmo_preserve_order"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// The input whose order an operator preserves, if any. [`CoalescePartitionsExec`] counts as preserving the order: its
/// input will have one partition.
fn ordered_input(plan: &Arc<dyn ExecutionPlan>) -> Option<Arc<dyn ExecutionPlan>> {
    let children = plan.children();
    let first = || children.first().map(|input| Arc::clone(input));
    if let Some(coalesce) = plan.downcast_ref::<CoalescePartitionsExec>() {
        return if coalesce.fetch().is_none() { first() } else { None };
    }
    // The other inputs are the subqueries.
    if plan.is::<ScalarSubqueryExec>() {
        return first();
    }
    match (children.len(), plan.maintains_input_order().as_slice()) {
        (1, [true]) => first(),
        _ => None,
    }
}

/// Whether an operator sorts all rows into one partition.
fn is_sort(plan: &Arc<dyn ExecutionPlan>) -> bool {
    let sorts = plan.is::<SortExec>() || plan.is::<SortPreservingMergeExec>();
    sorts && plan.output_partitioning().partition_count() == 1
}

/// Whether the rows of a plan have the order of a sort, except for repartitioning.
fn is_sorted(plan: &Arc<dyn ExecutionPlan>) -> bool {
    is_sort(plan) || ordered_input(plan).is_some_and(|input| is_sorted(&input))
}

/// Whether a plan computes embeddings. Other plans are left alone.
fn embeds(plan: &Arc<dyn ExecutionPlan>) -> Result<bool> {
    let mut found = false;
    plan.apply(|node| {
        found |= node.is::<EmbedExec>();
        node.apply_expressions(&mut |expr| {
            expr.apply(|part| {
                let call = part.downcast_ref::<ScalarFunctionExpr>();
                found |= call.is_some_and(|call| functions::is_ours(call.fun().name()));
                Ok(TreeNodeRecursion::Continue)
            })
        })?;
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

/// Removes round-robin repartitioning down to the sort, and the operators that coalesce the partitions again.
fn in_one_partition(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    if is_sort(&plan) {
        return Ok(plan);
    }
    let Some(input) = ordered_input(&plan) else { return Ok(plan) };
    let input = in_one_partition(input)?;
    let partitioning = plan.downcast_ref::<RepartitionExec>().map(RepartitionExec::partitioning);
    let is_one = input.output_partitioning().partition_count() == 1;
    if matches!(partitioning, Some(Partitioning::RoundRobinBatch(_))) || (is_one && plan.is::<CoalescePartitionsExec>())
    {
        return Ok(input);
    }
    let others = plan.children().into_iter().skip(1).map(Arc::clone);
    let children = std::iter::once(input).chain(others).collect();
    replace_children_if_necessary(plan, children)
}
