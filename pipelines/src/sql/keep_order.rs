//! Returns the rows of a query without ORDER BY in the order of its files.
//!
//! DataFusion distributes the batches of a scan over partitions, and returns rows as they come. This rule takes the
//! redistribution out of the operators between the scan and the result, and concatenates the partitions of the scan,
//! which are consecutive parts of the files. Queries whose result has no file order, such as GROUP BY, are left alone.

use std::{any::Any, sync::Arc};

use datafusion::{
    common::{Result, config::ConfigOptions},
    datasource::{physical_plan::FileScanConfig, sink::DataSinkExec, source::DataSourceExec},
    physical_optimizer::PhysicalOptimizerRule,
    physical_plan::{
        ExecutionPlan, ExecutionPlanProperties, Partitioning,
        analyze::AnalyzeExec,
        coalesce_partitions::CoalescePartitionsExec,
        coop::CooperativeExec,
        filter::FilterExec,
        limit::{GlobalLimitExec, LocalLimitExec},
        projection::ProjectionExec,
        repartition::RepartitionExec,
        replace_children_if_necessary,
        union::UnionExec,
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
    if plan.is::<LinesExec>() {
        return Ok(Some(Arc::clone(plan)));
    }
    if let Some(scan) = plan.downcast_ref::<DataSourceExec>() {
        return Ok(scan_in_file_order(scan));
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
