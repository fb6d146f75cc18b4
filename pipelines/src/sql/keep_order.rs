//! Returns the rows of a query without ORDER BY in the order of its files and tables in memory.
//!
//! DataFusion distributes the batches of a scan over partitions, and returns rows as they come. [`KeepOrder`] takes the
//! redistribution out of the operators between the scan and the result, and concatenates the partitions of the scan,
//! which are consecutive parts of the files. DataFusion would distribute a table in memory by the size of its batches, so
//! [`SplitInOrder`] makes its partitions first. Queries whose result has no such order, such as GROUP BY, are left alone.

use std::{any::Any, sync::Arc};

use arrow::array::RecordBatch;
use datafusion::{
    common::{
        Result,
        config::ConfigOptions,
        tree_node::{Transformed, TreeNode},
    },
    datasource::{
        memory::MemorySourceConfig, physical_plan::FileScanConfig, sink::DataSinkExec, source::DataSourceExec,
    },
    physical_optimizer::PhysicalOptimizerRule,
    physical_plan::{
        ExecutionPlan, ExecutionPlanProperties, Partitioning,
        analyze::AnalyzeExec,
        coalesce_partitions::CoalescePartitionsExec,
        coop::CooperativeExec,
        filter::FilterExec,
        limit::{GlobalLimitExec, LocalLimitExec},
        memory::LazyMemoryExec,
        projection::ProjectionExec,
        repartition::RepartitionExec,
        replace_children_if_necessary,
        scalar_subquery::ScalarSubqueryExec,
        union::UnionExec,
        unnest::UnnestExec,
    },
};
use elmo_udfs::plan::{EXEC_NAME, config::ElmoConfig};

use super::{in_order_exec::InOrderExec, lines::LinesExec};

type Plan = Arc<dyn ExecutionPlan>;

/// The rule. It runs after the rules that distribute rows over partitions.
#[derive(Debug, Default)]
pub(super) struct KeepOrder;

impl PhysicalOptimizerRule for KeepOrder {
    fn optimize(&self, plan: Plan, config: &ConfigOptions) -> Result<Plan> {
        if ElmoConfig::from_options(config).keep_order { in_file_order(plan) } else { Ok(plan) }
    }

    fn name(&self) -> &str {
        "elmo_keep_order"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// The rule that splits tables in memory into consecutive partitions. It runs before the rules that distribute rows.
#[derive(Debug, Default)]
pub(super) struct SplitInOrder;

impl PhysicalOptimizerRule for SplitInOrder {
    fn optimize(&self, plan: Plan, config: &ConfigOptions) -> Result<Plan> {
        if !ElmoConfig::from_options(config).keep_order {
            return Ok(plan);
        }
        let split = plan.transform_up(|node| match split_in_order(&node, config.execution.target_partitions)? {
            Some(split) => Ok(Transformed::yes(split)),
            None => Ok(Transformed::no(node)),
        });
        split.map(|split| split.data)
    }

    fn name(&self) -> &str {
        "elmo_split_in_order"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// The scan of a table in memory with as many partitions as DataFusion would make. `None` if it would not make them, or
/// keeps a declared order.
fn split_in_order(plan: &Plan, partitions: usize) -> Result<Option<Plan>> {
    let Some(source) = plan.downcast_ref().and_then(in_memory) else { return Ok(None) };
    let batches: Vec<RecordBatch> = source.partitions().iter().flatten().cloned().collect();
    let is_split = source.partitions().len() >= partitions || batches.len() < partitions;
    if is_split || !source.sort_information().is_empty() {
        return Ok(None);
    }
    let at = |partition: usize| partition * batches.len() / partitions;
    let consecutive: Vec<_> = (0..partitions).map(|n| batches[at(n)..at(n + 1)].to_vec()).collect();
    let split = MemorySourceConfig::try_new(&consecutive, source.original_schema(), source.projection().clone())?;
    let split = split.with_show_sizes(source.show_sizes()).with_limit(plan.fetch());
    Ok(Some(DataSourceExec::from_data_source(split)))
}

fn in_memory(scan: &DataSourceExec) -> Option<&MemorySourceConfig> {
    (scan.data_source().as_ref() as &dyn Any).downcast_ref()
}

/// Rewrites a plan whose rows are the result of a query, or are written by COPY or INSERT.
fn in_file_order(plan: Plan) -> Result<Plan> {
    if plan.is::<DataSinkExec>() || plan.is::<AnalyzeExec>() {
        let children = plan.children().into_iter().map(|input| in_file_order(Arc::clone(input)));
        let children = children.collect::<Result<_>>()?;
        return replace_children_if_necessary(plan, children);
    }
    match partitions_in_file_order(&plan)? {
        Some(ordered) => Ok(concatenated(ordered)),
        None => Ok(plan),
    }
}

fn concatenated(plan: Plan) -> Plan {
    if plan.output_partitioning().partition_count() > 1 { Arc::new(InOrderExec::new(plan)) } else { plan }
}

/// A plan with the same rows, whose partitions in their order give the order of the files. `None` if the rows have
/// none.
fn partitions_in_file_order(plan: &Plan) -> Result<Option<Plan>> {
    if plan.is::<LinesExec>() || plan.is::<LazyMemoryExec>() {
        return Ok(Some(Arc::clone(plan)));
    }
    if let Some(scan) = plan.downcast_ref::<DataSourceExec>() {
        if in_memory(scan).is_some() {
            return Ok(Some(Arc::clone(plan)));
        }
        return Ok(scan_in_file_order(scan));
    }
    if plan.is::<ScalarSubqueryExec>() {
        // Its inputs behind the first one are the subqueries.
        let mut inputs: Vec<Plan> = plan.children().into_iter().map(Arc::clone).collect();
        let Some(first) = inputs.first_mut() else { return Ok(None) };
        let Some(ordered) = partitions_in_file_order(first)? else { return Ok(None) };
        *first = ordered;
        return replace_children_if_necessary(Arc::clone(plan), inputs).map(Some);
    }
    let mut inputs = Vec::new();
    for input in plan.children() {
        let Some(input) = partitions_in_file_order(input)? else { return Ok(None) };
        inputs.push(input);
    }
    if let Some(coalesce) = plan.downcast_ref::<CoalescePartitionsExec>() {
        let ordered = inputs.pop().map(concatenated);
        return Ok(ordered.map(|input| match coalesce.fetch() {
            Some(rows) => Arc::new(GlobalLimitExec::new(input, 0, Some(rows))),
            None => input,
        }));
    }
    if let Some(Partitioning::RoundRobinBatch(_)) = plan.downcast_ref().map(RepartitionExec::partitioning) {
        return Ok(inputs.pop());
    }
    let keeps_order = plan.is::<ProjectionExec>()
        || plan.is::<FilterExec>()
        || plan.is::<UnnestExec>()
        || plan.name() == EXEC_NAME
        || plan.is::<LocalLimitExec>()
        || plan.is::<GlobalLimitExec>()
        || plan.is::<CooperativeExec>()
        || plan.is::<UnionExec>();
    if keeps_order { replace_children_if_necessary(Arc::clone(plan), inputs).map(Some) } else { Ok(None) }
}

/// The scan without the redistribution of files to partitions that are idle.
fn scan_in_file_order(scan: &DataSourceExec) -> Option<Plan> {
    let files = (scan.data_source().as_ref() as &dyn Any).downcast_ref::<FileScanConfig>()?;
    let mut files = files.clone();
    files.preserve_order = true;
    Some(DataSourceExec::from_data_source(files))
}
