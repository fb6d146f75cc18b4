//! What of a plan may run elsewhere, and is the same there.
//!
//! Ballista 55 cuts plans into stages with rows on the way between them. Some of what it cuts, plans anew or sends gives
//! other rows: an order that a shuffle loses, joins whose sides are changed over later, windows without their FILTER, rows
//! that come twice when an executor dies between two stages. So it is given nothing to cut: a *part* is a chain of
//! operators over the files of one scan, each of which works on one partition at a time, and has a single stage. What is
//! not known here to travel stays; that is never wrong.

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

use super::{PARTITIONS, SPLIT_BYTES, scans};

pub(super) type Plan = Arc<dyn ExecutionPlan>;

/// Limits travel in 32 bits, and would be cut to them.
const MOST_ROWS: usize = u32::MAX as usize;

/// Bytes of files that are one task's work: some batches of the engine, when they are packed as Parquet.
const ONE_TASK_BYTES: u64 = 64 << 10;

/// Levels of operators and of operations that a thread's stack surely has room for, in every process on the way.
const DEEPEST: usize = 1000;

/// Whether a plan is a part: its operators and all that they compute travel.
pub(super) fn is_part(plan: &Plan) -> bool {
    match plan.children().as_slice() {
        [] => is_leaf(plan) && travels(plan),
        [input] => is_step(plan) && travels(plan) && is_part(input),
        _ => false,
    }
}

/// Whether an operator works row by row, and travels: rows may be brought to it in any portions.
pub(super) fn is_row_by_row(node: &Plan) -> bool {
    let known = embeds(node) || node.is::<ProjectionExec>() || node.is::<FilterExec>();
    known && node.fetch().is_none() && travels(node)
}

/// Whether anything in an operator needs a model.
pub(super) fn has_calls(node: &Plan) -> bool {
    embeds(node)
        || any_expr(node, &mut |expr| function(expr).is_some_and(|call| elmo_udfs::functions::embeds(call.fun())))
}

/// Whether anything in a plan needs a model.
pub(super) fn has_calls_within(plan: &Plan) -> bool {
    has_calls(plan) || plan.children().into_iter().any(has_calls_within)
}

fn embeds(node: &Plan) -> bool {
    node.name() == elmo_udfs::plan::EXEC_NAME
}

fn is_leaf(node: &Plan) -> bool {
    match files(node) {
        Some(scan) => !scans::is_lost(scan),
        None => node.is::<PlaceholderRowExec>() && node.output_partitioning().partition_count() == 1,
    }
}

fn files(node: &Plan) -> Option<&FileScanConfig> {
    let scan = node.downcast_ref::<DataSourceExec>()?;
    (scan.data_source().as_ref() as &dyn std::any::Any).downcast_ref()
}

/// Whether an operator works on one partition at a time, and all of it travels.
fn is_step(node: &Plan) -> bool {
    match node.downcast_ref::<AggregateExec>() {
        Some(aggregate) => is_partial(aggregate),
        None => embeds(node) || node.is::<ProjectionExec>() || node.is::<FilterExec>() || node.is::<LocalLimitExec>(),
    }
}

/// Groups of one partition, to be put together by somebody else. Without what depends on an order of rows.
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

/// Whether an operator's expressions and numbers are the same elsewhere.
fn travels(node: &Plan) -> bool {
    node.fetch().is_none_or(|rows| rows <= MOST_ROWS) && !any_expr(node, &mut |expr| !expr_travels(expr))
}

fn expr_travels(expr: &Arc<dyn PhysicalExpr>) -> bool {
    // One that settings change, as a time zone does, would be another with those of executors.
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

/// Whether any expression of an operator, or of what is inside of it, is so.
fn any_expr(node: &Plan, is_so: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> bool) -> bool {
    let mut found = false;
    let looked = node.apply_expressions(&mut |expr| {
        found = found || within(expr, is_so);
        Ok(TreeNodeRecursion::Continue)
    });
    found || looked.is_err()
}

fn within(expr: &Arc<dyn PhysicalExpr>, is_so: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> bool) -> bool {
    is_so(expr) || expr.children().into_iter().any(|child| within(child, is_so))
}

/// Whether a plan and its expressions have so many levels that processes on the way might have no room for them.
pub(super) fn is_too_deep(plan: &Plan) -> bool {
    is_deeper(plan, DEEPEST)
}

/// Whether a plan or one of its expressions has more than so many levels. Looks at no more of them than that.
fn is_deeper(plan: &Plan, levels: usize) -> bool {
    fn expr_is_deeper(expr: &Arc<dyn PhysicalExpr>, levels: usize) -> bool {
        levels == 0 || expr.children().into_iter().any(|child| expr_is_deeper(child, levels - 1))
    }
    let mut deeper = levels == 0;
    if !deeper {
        let looked: Result<_> = plan.apply_expressions(&mut |expr| {
            deeper = deeper || expr_is_deeper(expr, levels);
            Ok(TreeNodeRecursion::Continue)
        });
        deeper |= looked.is_err();
    }
    deeper || plan.children().into_iter().any(|child| is_deeper(child, levels - 1))
}

/// Whether a part is work for several executors as it is: it is small, or its files give enough tasks. A Parquet file is
/// cut between row groups, of which it may have one.
pub(super) fn spreads(part: &Plan) -> bool {
    let Some(scan) = scan_of(part) else { return true };
    let groups = scan.file_groups.iter().filter(|group| !group.is_empty()).count();
    let tasks = match scan.file_source().file_type() {
        "parquet" | "arrow" => distinct_files(scan).min(groups),
        _ => groups,
    };
    tasks >= PARTITIONS / 2 || bytes(scan) <= ONE_TASK_BYTES
}

/// Whether a part without calls is worth the way: much is read, and little comes of it.
pub(super) fn reduces(part: &Plan) -> bool {
    fn leaves_out(plan: &Plan) -> bool {
        let here = plan.is::<FilterExec>() || plan.is::<AggregateExec>() || plan.is::<SortExec>();
        here || plan.children().into_iter().any(leaves_out)
    }
    leaves_out(part) && scan_of(part).is_some_and(|scan| bytes(scan) > SPLIT_BYTES as u64)
}

/// A sort that gives each task's own first rows of a part, if there is one: the first rows of all are among them.
pub(super) fn first_rows(sort: &SortExec, part: &Plan) -> Option<Plan> {
    let known = sort.fetch().is_some_and(|rows| rows <= MOST_ROWS) && is_part(part);
    let travels = known && sort.expr().iter().all(|key| !within(&key.expr, &mut |expr| !expr_travels(expr)));
    let each = || SortExec::new(sort.expr().clone(), Arc::clone(part)).with_preserve_partitioning(true);
    travels.then(|| Arc::new(each().with_fetch(sort.fetch())) as Plan)
}

/// A part of which all files are one partition: what counts the rows of all must be one task.
pub(super) fn in_one_task(part: &Plan) -> Result<Plan> {
    if let [input] = part.children()[..] {
        return replace_children_if_necessary(Arc::clone(part), vec![in_one_task(input)?]);
    }
    let Some(scan) = files(part) else { return Ok(Arc::clone(part)) };
    let all = scan.file_groups.iter().flat_map(FileGroup::files).cloned().collect();
    let scan = FileScanConfigBuilder::from(scan.clone()).with_file_groups(vec![FileGroup::new(all)]).build();
    Ok(DataSourceExec::from_data_source(scan))
}

fn scan_of(part: &Plan) -> Option<&FileScanConfig> {
    match part.children().as_slice() {
        [input] => scan_of(input),
        _ => files(part),
    }
}

fn distinct_files(scan: &FileScanConfig) -> usize {
    let files = scan.file_groups.iter().flat_map(FileGroup::files);
    files.map(|file| &file.object_meta.location).collect::<std::collections::BTreeSet<_>>().len()
}

/// Bytes to be read of all files.
fn bytes(scan: &FileScanConfig) -> u64 {
    let files = scan.file_groups.iter().flat_map(FileGroup::files);
    files
        .map(|file| file.range.as_ref().map_or(file.object_meta.size, |range| (range.end - range.start).unsigned_abs()))
        .sum()
}
