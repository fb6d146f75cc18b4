//! Properties of expressions that decide whether they may be evaluated elsewhere in a plan.

use datafusion::{common::tree_node::TreeNode, logical_expr::Expr};

use crate::functions;

/// Whether an expression depends only on the columns of its row: it has the same value wherever in the plan, and
/// however often, it is evaluated.
pub(super) fn is_pure(expr: &Expr) -> bool {
    let depends_on_more = |e: &Expr| {
        matches!(
            e,
            Expr::OuterReferenceColumn(..)
                | Expr::ScalarSubquery(_)
                | Expr::Exists(_)
                | Expr::InSubquery(_)
                | Expr::SetComparison(_)
                | Expr::Unnest(_)
                | Expr::LambdaVariable(_)
        )
    };
    !is_volatile(expr) && !expr.exists(|e| Ok(depends_on_more(e))).unwrap_or(true)
}

/// Whether an expression may have another value each time it is evaluated. Volatile functions of this crate are
/// excepted: they are declared volatile only to prevent constant folding.
pub(super) fn is_volatile(expr: &Expr) -> bool {
    let is_volatile = |e: &Expr| match e {
        Expr::ScalarFunction(function) if functions::text_function(&function.func).is_some() => false,
        e => e.is_volatile_node(),
    };
    expr.exists(|e| Ok(is_volatile(e))).unwrap_or(true)
}

/// Whether an expression has a subquery.
pub(super) fn has_subquery(expr: &Expr) -> bool {
    let is_subquery = |e: &Expr| {
        matches!(e, Expr::ScalarSubquery(_) | Expr::Exists(_) | Expr::InSubquery(_) | Expr::SetComparison(_))
    };
    expr.exists(|e| Ok(is_subquery(e))).unwrap_or(true)
}
