//! Keeps the order that a query asked for, where embeddings are computed above its sort.
//!
//! DataFusion notes at the sort that its order is wanted. What stands above a sort in its own plans computes nothing; in
//! ours it may, and gets more partitions to do so, each in order, which nobody puts in order again.

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
        repartition::RepartitionExec,
        replace_children_if_necessary,
        sorts::{sort::SortExec, sort_preserving_merge::SortPreservingMergeExec},
    },
};

use super::exec::EmbedExec;
use crate::functions;

/// Takes the partitions back that were added between the top of a plan and its sort.
#[derive(Debug, Default)]
pub(crate) struct KeepOrder;

impl PhysicalOptimizerRule for KeepOrder {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        if embeds_above_a_sort(&plan, false)? { in_one_partition(plan) } else { Ok(plan) }
    }

    fn name(&self) -> &str {
        "keep_order"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// The only input of an operator that keeps its rows in their order.
fn below(plan: &Arc<dyn ExecutionPlan>) -> Option<Arc<dyn ExecutionPlan>> {
    match (plan.children().as_slice(), plan.maintains_input_order().as_slice()) {
        ([input], [true]) => Some(Arc::clone(input)),
        _ => None,
    }
}

/// Where the order of a query comes from.
fn is_sort(plan: &Arc<dyn ExecutionPlan>) -> bool {
    let sorts = plan.is::<SortExec>() || plan.is::<SortPreservingMergeExec>();
    sorts && plan.output_partitioning().partition_count() == 1
}

/// Whether between the top of a plan and its sort something is embedded, or computed of vectors.
fn embeds_above_a_sort(plan: &Arc<dyn ExecutionPlan>, seen: bool) -> Result<bool> {
    if is_sort(plan) {
        return Ok(seen);
    }
    let Some(input) = below(plan) else { return Ok(false) };
    embeds_above_a_sort(&input, seen || is_ours(plan)?)
}

fn is_ours(plan: &Arc<dyn ExecutionPlan>) -> Result<bool> {
    let mut found = plan.is::<EmbedExec>();
    plan.apply_expressions(&mut |expr| {
        expr.apply(|part| {
            let call = part.downcast_ref::<ScalarFunctionExpr>();
            found |= call.is_some_and(|call| functions::NAMES.contains(&call.fun().name()));
            Ok(TreeNodeRecursion::Continue)
        })
    })?;
    Ok(found)
}

fn in_one_partition(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    if is_sort(&plan) {
        return Ok(plan);
    }
    let Some(input) = below(&plan) else { return Ok(plan) };
    let input = in_one_partition(input)?;
    let partitioning = plan.downcast_ref::<RepartitionExec>().map(RepartitionExec::partitioning);
    match partitioning {
        Some(Partitioning::RoundRobinBatch(_)) => Ok(input),
        _ => replace_children_if_necessary(plan, vec![input]),
    }
}
