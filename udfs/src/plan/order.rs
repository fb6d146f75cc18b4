//! Keeps the order that a query asked for, where embeddings are computed above its sort.
//!
//! DataFusion notes at the sort that its order is wanted. What stands above a sort in its own plans computes nothing; in
//! ours it may, and gets more partitions to do so, each in order, which nobody puts in order again.

use std::sync::Arc;

use datafusion::{
    common::{Result, config::ConfigOptions},
    physical_optimizer::PhysicalOptimizerRule,
    physical_plan::{
        ExecutionPlan, ExecutionPlanProperties, Partitioning, repartition::RepartitionExec,
        replace_children_if_necessary,
    },
};

use super::exec::EmbedExec;

/// Takes the partitions back that were added between the top of a plan and its sort.
#[derive(Debug, Default)]
pub(crate) struct KeepOrder;

impl PhysicalOptimizerRule for KeepOrder {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        if embeds_in_order(&plan) { in_one_partition(plan) } else { Ok(plan) }
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

/// Whether an embedding stands at the top, above rows in one order.
fn embeds_in_order(plan: &Arc<dyn ExecutionPlan>) -> bool {
    if plan.is::<EmbedExec>() {
        let is_one = plan.output_partitioning().partition_count() == 1;
        return is_one && plan.children().iter().all(|input| input.output_ordering().is_some());
    }
    below(plan).is_some_and(|input| embeds_in_order(&input))
}

fn in_one_partition(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    if plan.is::<EmbedExec>() {
        return Ok(plan);
    }
    let Some(input) = below(&plan) else { return Ok(plan) };
    let input = in_one_partition(input)?;
    let round_robin = plan.downcast_ref::<RepartitionExec>().map(RepartitionExec::partitioning);
    match round_robin {
        Some(Partitioning::RoundRobinBatch(_)) => Ok(input),
        _ => replace_children_if_necessary(plan, vec![input]),
    }
}
