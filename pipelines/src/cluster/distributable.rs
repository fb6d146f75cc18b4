//! Decides which operators and expressions may run on executors with unchanged results.
//!
//! Ballista 55 splits plans at shuffles into stages, and some of its rewrites change results: shuffles lose orderings,
//! join inputs are swapped after planning, windows lose their FILTER, and a failed executor can duplicate rows between
//! stages. A *subplan* therefore has a single stage: a chain of operators over one scan, each of which processes one
//! partition at a time. This is an allow-list: operators and expressions that are not listed run in the client.

use std::sync::Arc;

use datafusion::{
    common::{Result, tree_node::TreeNodeRecursion},
    config::ConfigOptions,
    datasource::{
        physical_plan::{FileGroup, FileScanConfig, FileScanConfigBuilder},
        source::DataSourceExec,
    },
    physical_expr::{
        PhysicalExpr, ScalarFunctionExpr,
        expressions::{
            BinaryExpr, CaseExpr, CastExpr, Column, InListExpr, IsNotNullExpr, IsNullExpr, LikeExpr, Literal,
            NegativeExpr, NotExpr, TryCastExpr,
        },
    },
    physical_plan::{
        ExecutionPlan, ExecutionPlanProperties, InputOrderMode,
        aggregates::{AggregateExec, AggregateMode},
        filter::FilterExec,
        limit::LocalLimitExec,
        placeholder_row::PlaceholderRowExec,
        projection::ProjectionExec,
        replace_children_if_necessary,
        sorts::sort::SortExec,
    },
};

use super::{MIN_SPLIT_BYTES, TARGET_PARTITIONS, scans};

pub(super) type Plan = Arc<dyn ExecutionPlan>;

/// Largest limit that can be serialised: the codec truncates limits to 32 bits.
const MAX_LIMIT: usize = u32::MAX as usize;

/// Size of a scan that does not need several tasks: compressed as Parquet, a few batches of the engine.
const SINGLE_TASK_BYTES: u64 = 64 << 10;

/// Maximum depth of plans and expressions. Encoding, decoding and execution recurse; this depth fits the stacks of all
/// processes.
const MAX_DEPTH: usize = 1000;

/// Whether a plan is a subplan that executors can run.
pub(super) fn is_subplan(plan: &Plan) -> bool {
    match plan.children().as_slice() {
        [] => is_leaf(plan) && is_serialisable(plan),
        [input] => is_partition_local(plan) && is_serialisable(plan) && is_subplan(input),
        _ => false,
    }
}

/// Whether an operator maps or filters single rows, so that executors can run it on chunks of rows.
pub(super) fn is_row_by_row(node: &Plan) -> bool {
    let known = embeds(node) || node.is::<ProjectionExec>() || node.is::<FilterExec>();
    known && node.fetch().is_none() && is_serialisable(node)
}

/// Whether an operator or one of its expressions needs a model.
pub(super) fn has_calls(node: &Plan) -> bool {
    embeds(node)
        || any_expr(node, &mut |expr| function(expr).is_some_and(|call| elmo_udfs::functions::embeds(call.fun())))
}

/// Whether an operator of a plan needs a model.
pub(super) fn contains_calls(plan: &Plan) -> bool {
    has_calls(plan) || plan.children().into_iter().any(contains_calls)
}

fn embeds(node: &Plan) -> bool {
    node.name() == elmo_udfs::plan::EXEC_NAME
}

fn is_leaf(node: &Plan) -> bool {
    match file_scan(node) {
        Some(scan) => !scans::loses_properties(scan),
        None => node.is::<PlaceholderRowExec>() && node.output_partitioning().partition_count() == 1,
    }
}

fn file_scan(node: &Plan) -> Option<&FileScanConfig> {
    let scan = node.downcast_ref::<DataSourceExec>()?;
    (scan.data_source().as_ref() as &dyn std::any::Any).downcast_ref()
}

/// Whether an operator processes each partition of its input on its own.
fn is_partition_local(node: &Plan) -> bool {
    match node.downcast_ref::<AggregateExec>() {
        Some(aggregate) => is_partial(aggregate),
        None => embeds(node) || node.is::<ProjectionExec>() || node.is::<FilterExec>() || node.is::<LocalLimitExec>(),
    }
}

/// Whether this is the first phase of a two-phase aggregation, independent of the order of rows.
fn is_partial(aggregate: &AggregateExec) -> bool {
    let is_plain = |function: &Arc<_>| {
        let function: &datafusion::physical_expr::aggregate::AggregateFunctionExpr = function;
        function.order_bys().is_empty() && !function.is_reversed() && !function.ignore_nulls()
    };
    *aggregate.mode() == AggregateMode::Partial
        && *aggregate.input_order_mode() == InputOrderMode::Linear
        && aggregate.limit_options().is_none()
        && !aggregate.group_expr().has_grouping_set()
        && aggregate.aggr_expr().iter().all(is_plain)
}

/// Whether an operator's limit and expressions are the same after serialisation.
fn is_serialisable(node: &Plan) -> bool {
    node.fetch().is_none_or(|rows| rows <= MAX_LIMIT) && !any_expr(node, &mut |expr| !is_serialisable_expr(expr))
}

/// Whether one node of an expression is the same after serialisation.
fn is_serialisable_expr(expr: &Arc<dyn PhysicalExpr>) -> bool {
    // Functions that depend on the session, such as on its time zone, would use the executor's configuration.
    let is_fixed =
        |call: &ScalarFunctionExpr| call.fun().inner().with_updated_config(&ConfigOptions::default()).is_none();
    match function(expr) {
        Some(call) => is_fixed(call),
        None => {
            expr.is::<Column>()
                || expr.is::<Literal>()
                || expr.is::<BinaryExpr>()
                || expr.is::<CaseExpr>()
                || expr.is::<CastExpr>()
                || expr.is::<TryCastExpr>()
                || expr.is::<NotExpr>()
                || expr.is::<IsNullExpr>()
                || expr.is::<IsNotNullExpr>()
                || expr.is::<InListExpr>()
                || expr.is::<LikeExpr>()
                || expr.is::<NegativeExpr>()
        }
    }
}

fn function(expr: &Arc<dyn PhysicalExpr>) -> Option<&ScalarFunctionExpr> {
    expr.downcast_ref()
}

/// Whether a predicate holds for any expression of an operator, or for any subexpression.
fn any_expr(node: &Plan, predicate: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> bool) -> bool {
    let mut found = false;
    let visited = node.apply_expressions(&mut |expr| {
        found = found || any_subexpr(expr, predicate);
        Ok(TreeNodeRecursion::Continue)
    });
    found || visited.is_err()
}

fn any_subexpr(expr: &Arc<dyn PhysicalExpr>, predicate: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> bool) -> bool {
    predicate(expr) || expr.children().into_iter().any(|child| any_subexpr(child, predicate))
}

/// Whether a plan or one of its expressions is deeper than [`MAX_DEPTH`].
pub(super) fn is_too_deep(plan: &Plan) -> bool {
    is_deeper(plan, MAX_DEPTH)
}

/// Whether a plan or one of its expressions has more than `levels` levels. Recurses no deeper than that.
fn is_deeper(plan: &Plan, levels: usize) -> bool {
    fn expr_is_deeper(expr: &Arc<dyn PhysicalExpr>, levels: usize) -> bool {
        levels == 0 || expr.children().into_iter().any(|child| expr_is_deeper(child, levels - 1))
    }
    let mut deeper = levels == 0;
    if !deeper {
        let visited: Result<_> = plan.apply_expressions(&mut |expr| {
            deeper = deeper || expr_is_deeper(expr, levels);
            Ok(TreeNodeRecursion::Continue)
        });
        deeper |= visited.is_err();
    }
    deeper || plan.children().into_iter().any(|child| is_deeper(child, levels - 1))
}

/// Whether a subplan has enough tasks to occupy several executors, or is too small to need them. Parquet files are
/// split between row groups, and may have only one, so their splits are not counted.
pub(super) fn is_parallel(subplan: &Plan) -> bool {
    let Some(scan) = scan_of(subplan) else { return true };
    let groups = scan.file_groups.iter().filter(|group| !group.is_empty()).count();
    let tasks = match scan.file_source().file_type() {
        "parquet" | "arrow" => distinct_files(scan).min(groups),
        _ => groups,
    };
    tasks >= TARGET_PARTITIONS / 2 || bytes(scan) <= SINGLE_TASK_BYTES
}

/// Whether a subplan without calls is worth sending: it reads much and returns little.
pub(super) fn reduces(subplan: &Plan) -> bool {
    fn has_reduction(plan: &Plan) -> bool {
        let here = plan.is::<FilterExec>() || plan.is::<AggregateExec>() || plan.is::<SortExec>();
        here || plan.children().into_iter().any(has_reduction)
    }
    has_reduction(subplan) && scan_of(subplan).is_some_and(|scan| bytes(scan) > MIN_SPLIT_BYTES as u64)
}

/// A sort with a limit that runs per partition of a subplan. Its rows include the first rows of the whole. `None` if
/// the sort has no limit or cannot be serialised.
pub(super) fn partition_top_k(sort: &SortExec, subplan: &Plan) -> Option<Plan> {
    let has_limit = sort.fetch().is_some_and(|rows| rows <= MAX_LIMIT) && is_subplan(subplan);
    let mut keys = sort.expr().iter();
    let can_send = has_limit && keys.all(|key| !any_subexpr(&key.expr, &mut |expr| !is_serialisable_expr(expr)));
    let top_k = || SortExec::new(sort.expr().clone(), Arc::clone(subplan)).with_preserve_partitioning(true);
    can_send.then(|| Arc::new(top_k().with_fetch(sort.fetch())) as Plan)
}

/// A subplan with all files in one partition, so that one task has the metrics of all rows.
pub(super) fn in_one_task(subplan: &Plan) -> Result<Plan> {
    if let [input] = subplan.children()[..] {
        return replace_children_if_necessary(Arc::clone(subplan), vec![in_one_task(input)?]);
    }
    let Some(scan) = file_scan(subplan) else { return Ok(Arc::clone(subplan)) };
    let all = scan.file_groups.iter().flat_map(FileGroup::files).cloned().collect();
    let scan = FileScanConfigBuilder::from(scan.clone()).with_file_groups(vec![FileGroup::new(all)]).build();
    Ok(DataSourceExec::from_data_source(scan))
}

fn scan_of(subplan: &Plan) -> Option<&FileScanConfig> {
    match subplan.children().as_slice() {
        [input] => scan_of(input),
        _ => file_scan(subplan),
    }
}

fn distinct_files(scan: &FileScanConfig) -> usize {
    let files = scan.file_groups.iter().flat_map(FileGroup::files);
    files.map(|file| &file.object_meta.location).collect::<std::collections::BTreeSet<_>>().len()
}

/// The number of bytes that a scan reads.
fn bytes(scan: &FileScanConfig) -> u64 {
    let files = scan.file_groups.iter().flat_map(FileGroup::files);
    files
        .map(|file| file.range.as_ref().map_or(file.object_meta.size, |range| (range.end - range.start).unsigned_abs()))
        .sum()
}
