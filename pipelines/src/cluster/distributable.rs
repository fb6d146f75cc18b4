//! Decides which operators and expressions may run on workers with unchanged results.
//!
//! This is an allow-list: operators and expressions that are not listed run in the client.

use std::sync::Arc;

use datafusion::{
    common::{Result, tree_node::TreeNodeRecursion},
    config::ConfigOptions,
    physical_expr::{
        PhysicalExpr, ScalarFunctionExpr,
        expressions::{
            BinaryExpr, CaseExpr, CastExpr, Column, InListExpr, IsNotNullExpr, IsNullExpr, LikeExpr, Literal,
            NegativeExpr, NotExpr, TryCastExpr,
        },
    },
    physical_plan::{
        ExecutionPlan, filter::FilterExec, limit::LocalLimitExec, projection::ProjectionExec, sorts::sort::SortExec,
    },
};

use super::rows_exec::RowsExec;

type Plan = Arc<dyn ExecutionPlan>;

/// Largest limit that can be serialised: the codec truncates limits to 32 bits.
const MAX_LIMIT: usize = u32::MAX as usize;

/// Maximum depth of plans and expressions. Encoding, decoding and execution recurse; this depth fits the stacks of all
/// processes.
const MAX_DEPTH: usize = 1000;

/// Whether an operator maps or filters single rows, so that workers can run it on chunks of rows.
pub(super) fn is_row_by_row(node: &Plan) -> bool {
    let known = embeds(node) || node.is::<ProjectionExec>() || node.is::<FilterExec>();
    known && node.fetch().is_none() && is_serialisable(node)
}

/// Whether an operator or one of its expressions needs a model.
pub(super) fn has_calls(node: &Plan) -> bool {
    embeds(node)
        || node.is::<RowsExec>()
        || any_expr(node, &mut |expr| function(expr).is_some_and(|call| elmo_udfs::functions::embeds(call.fun())))
}

/// Whether an operator of a plan needs a model.
pub(super) fn contains_calls(plan: &Plan) -> bool {
    has_calls(plan) || plan.children().into_iter().any(contains_calls)
}

fn embeds(node: &Plan) -> bool {
    node.name() == elmo_udfs::plan::EXEC_NAME
}

/// Whether an operator processes each partition of its input on its own.
pub(super) fn is_partition_local(node: &Plan) -> bool {
    embeds(node) || node.is::<ProjectionExec>() || node.is::<FilterExec>() || node.is::<LocalLimitExec>()
}

/// Whether an operator's limit and expressions are the same after serialisation.
pub(super) fn is_serialisable(node: &Plan) -> bool {
    let mut is_lossy = |expr: &Arc<dyn PhysicalExpr>| !is_serialisable_expr(expr);
    let exprs_are = match node.downcast_ref::<SortExec>() {
        // A sort with a limit also has a filter that it sets while it runs, and makes anew when it is decoded.
        Some(sort) => !sort.expr().iter().any(|key| any_subexpr(&key.expr, &mut is_lossy)),
        None => !any_expr(node, &mut is_lossy),
    };
    node.fetch().is_none_or(|rows| rows <= MAX_LIMIT) && exprs_are
}

/// Whether one node of an expression is the same after serialisation.
fn is_serialisable_expr(expr: &Arc<dyn PhysicalExpr>) -> bool {
    // Functions that depend on the session, such as on its time zone, would use the worker's configuration.
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
