//! What a plan must look like for Ballista 55 to cut it into tasks and to send them.
//!
//! A task is the plan of a stage with a share of the partitions of its scans. What Ballista does not cut right, and what
//! is lost when a plan becomes bytes, is put in other words here; the rows are the same.

use std::sync::Arc;

use datafusion::{
    common::{
        Result,
        tree_node::{Transformed, TreeNode},
    },
    datasource::{memory::MemorySourceConfig, source::DataSourceExec},
    physical_plan::{
        ExecutionPlan, ExecutionPlanProperties, Partitioning,
        coalesce_partitions::CoalescePartitionsExec,
        joins::{HashJoinExec, NestedLoopJoinExec, PartitionMode},
        limit::{GlobalLimitExec, LocalLimitExec},
        memory::LazyMemoryExec,
        projection::{ProjectionExec, ProjectionExpr},
        repartition::RepartitionExec,
        replace_children_if_necessary,
        sorts::{sort::SortExec, sort_preserving_merge::SortPreservingMergeExec},
        union::UnionExec,
    },
};

use crate::sql::lines::LinesExec;

type Plan = Arc<dyn ExecutionPlan>;

/// The plan as Ballista can cut it into tasks.
pub(super) fn cuttable(plan: Plan) -> Result<Plan> {
    let cut = plan.transform_up(|node| {
        let changes =
            [files_singly, limit_of_rows, numbers_without_columns, join_by_keys, join_in_one_task, branches_as_stages];
        for change in changes {
            if let Some(changed) = change(&node)? {
                return Ok(Transformed::yes(changed));
            }
        }
        Ok(Transformed::no(node))
    });
    Ok(cut?.data)
}

/// Only scans that Ballista knows are shared among tasks: files of lines are scans of one partition each.
fn files_singly(node: &Plan) -> Result<Option<Plan>> {
    let files = node.downcast_ref::<LinesExec>().map(LinesExec::singly).filter(|files| files.len() > 1);
    files.map(UnionExec::try_new).transpose()
}

/// The scheduler forgets how many rows are wanted of a table of rows when it gives a task its share.
fn limit_of_rows(node: &Plan) -> Result<Option<Plan>> {
    let Some(scan) = node.downcast_ref::<DataSourceExec>() else { return Ok(None) };
    let is_rows = (scan.data_source().as_ref() as &dyn std::any::Any).is::<MemorySourceConfig>();
    let limit = scan.fetch().filter(|_| is_rows);
    let whole = limit.and_then(|limit| Some((limit, scan.with_fetch(None)?)));
    Ok(whole.map(|(limit, whole)| Arc::new(LocalLimitExec::new(whole, limit)) as Plan))
}

/// `range()` and `generate_series()` of which no column is read lose that as bytes, and come back with one.
fn numbers_without_columns(node: &Plan) -> Result<Option<Plan>> {
    let Some(numbers) = node.downcast_ref::<LazyMemoryExec>().filter(|numbers| numbers.schema().fields().is_empty())
    else {
        return Ok(None);
    };
    let fresh = || numbers.generators().iter().map(|numbers| numbers.read().reset_state()).collect::<Vec<_>>();
    let first = fresh().iter().find_map(|numbers| numbers.write().generate_next_batch().transpose()).transpose()?;
    let Some(first) = first else { return Ok(None) };
    let whole: Plan = Arc::new(LazyMemoryExec::try_new(first.schema(), fresh())?);
    Ok(Some(Arc::new(ProjectionExec::try_new(Vec::<ProjectionExpr>::new(), whole)?)))
}

/// Ballista makes a join by keys of one that collects its left side, unless it knows that side to be small and of no
/// consequence for unmatched rows. Where there was one partition there are many then, and nobody above puts them together.
/// Sessions of clusters plan no such joins, unless somebody sets the thresholds.
fn join_by_keys(node: &Plan) -> Result<Option<Plan>> {
    let Some(join) = node.downcast_ref::<HashJoinExec>() else { return Ok(None) };
    if *join.partition_mode() != PartitionMode::CollectLeft || join.null_aware {
        return Ok(None);
    }
    let (left, right): (Vec<_>, Vec<_>) = join.on().iter().cloned().unzip();
    let by = |side: &Plan, keys| RepartitionExec::try_new(Arc::clone(side), Partitioning::Hash(keys, 1));
    let sides: Vec<Plan> = vec![Arc::new(by(join.left(), left)?), Arc::new(by(join.right(), right)?)];
    let join = join.builder().with_partition_mode(PartitionMode::Partitioned).with_new_children(sides)?;
    Ok(Some(join.build_exec()?))
}

/// Every task would have the whole left side and a share of the right, and say of its own which rows of the left have no
/// partner.
fn join_in_one_task(node: &Plan) -> Result<Option<Plan>> {
    use datafusion::common::JoinType::{Full, Left, LeftAnti, LeftMark, LeftSemi};
    let Some(join) = node.downcast_ref::<NestedLoopJoinExec>() else { return Ok(None) };
    let about_left = matches!(join.join_type(), Left | Full | LeftSemi | LeftAnti | LeftMark);
    if !about_left || join.right().is::<GlobalLimitExec>() {
        return Ok(None);
    }
    // A limit of nothing, for the sake of what it asks of its input: one partition. Without it the scheduler, which goes
    // over the needs of operators once more, would find that nobody needs that.
    let whole = Arc::new(CoalescePartitionsExec::new(Arc::clone(join.right())));
    let right = Arc::new(GlobalLimitExec::new(whole, 0, None));
    Ok(Some(replace_children_if_necessary(Arc::clone(node), vec![Arc::clone(join.left()), right])?))
}

/// Of a union a task may have no share of a branch, and a sort of no partitions cannot be read by executors: such a branch
/// is a stage of its own.
fn branches_as_stages(node: &Plan) -> Result<Option<Plan>> {
    let branches = node.children();
    if !node.is::<UnionExec>() || !branches.iter().any(|branch| sorts(branch)) {
        return Ok(None);
    }
    let stages = branches.into_iter().map(|branch| if sorts(branch) { stage(branch) } else { Arc::clone(branch) });
    let stages = stages.collect();
    Ok(Some(replace_children_if_necessary(Arc::clone(node), stages)?))
}

fn sorts(plan: &Plan) -> bool {
    plan.is::<SortExec>() || plan.children().into_iter().any(sorts)
}

/// Ballista begins a stage below what puts partitions together.
fn stage(plan: &Plan) -> Plan {
    match plan.output_ordering() {
        Some(order) => Arc::new(SortPreservingMergeExec::new(order.clone(), Arc::clone(plan))),
        None => Arc::new(CoalescePartitionsExec::new(Arc::clone(plan))),
    }
}
