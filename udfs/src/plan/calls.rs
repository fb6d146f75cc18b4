//! The embedding calls in expressions, and the rows for which each call is needed.
//!
//! DataFusion evaluates some operands only for some rows: the branches of CASE, the later arguments of COALESCE, the
//! operands of AND and OR. The *path condition* of a call is the condition under which evaluation reaches it.
//!
//! A call can be extracted: its result is computed by an operator below, and the expression reads a column. Where the
//! path condition does not hold, the extracted call gets NULL as its text, which costs nothing. A path condition that
//! itself depends on an embedding is known once that embedding is a column, so calls are extracted in several rounds.

use std::sync::Arc;

use datafusion::{
    common::{
        Column, Result, internal_datafusion_err,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    logical_expr::{
        BinaryExpr, Case, Expr, Operator,
        expr::ScalarFunction,
        lit,
        utils::{conjunction, disjunction, split_binary_owned},
        when,
    },
};

use super::expr::is_pure;
use crate::functions;

/// Whether an expression has an embedding call that can be extracted.
pub(super) fn has_calls(expr: &Expr) -> bool {
    expr.exists(|e| Ok(is_call(e))).unwrap_or(true)
}

/// Whether an expression is an embedding call on a text that depends on the row.
fn is_call(expr: &Expr) -> bool {
    let Expr::ScalarFunction(function) = expr else { return false };
    functions::text_function(&function.func).is_some()
        && function.args.split_first().is_some_and(|(text, options)| {
            text.any_column_refs()
                && is_pure(text)
                && !has_calls(text)
                && options.iter().all(|option| matches!(option, Expr::Literal(..)))
        })
}

/// The condition under which evaluation reaches an expression.
#[derive(Debug, Clone, PartialEq)]
enum PathCondition {
    /// All of these conditions hold, each evaluated only where those before it hold. Empty: for every row.
    Known(Vec<Expr>),
    /// The condition depends on an embedding that has not been extracted yet.
    Pending,
    /// The condition is not an expression over a row: an element of a list, an argument that a function may not
    /// evaluate.
    Unknown,
}

impl PathCondition {
    /// Adds a condition.
    fn and(&self, condition: Expr) -> Self {
        match self {
            Self::Known(_) if has_calls(&condition) => Self::Pending,
            Self::Known(_) if !is_pure(&condition) => Self::Unknown,
            Self::Known(conditions) => Self::Known(conditions.iter().cloned().chain([condition]).collect()),
            other => other.clone(),
        }
    }
}

/// The rows that need a call, over all of its occurrences with a known path condition.
#[derive(Debug, Clone, PartialEq)]
enum NeededRows {
    All,
    /// The rows for which one of these path conditions holds.
    Where(Vec<Vec<Expr>>),
}

impl NeededRows {
    fn or(&mut self, more: Self) {
        match (&mut *self, more) {
            (Self::All, _) => {}
            (_, Self::All) => *self = Self::All,
            (Self::Where(paths), Self::Where(more)) => {
                paths.extend(more.into_iter().filter(|path| !paths.contains(path)).collect::<Vec<_>>());
            }
        }
    }
}

/// A call that can be extracted.
#[derive(Debug, Clone)]
pub(super) struct Extractable {
    /// The call as it occurs in the expressions.
    pub(super) call: Expr,
    /// The call as the operator computes it: its text is NULL for the rows that do not need it.
    pub(super) computed: Expr,
}

impl Extractable {
    /// A call that is computed for all rows.
    pub(super) fn unconditional(call: Expr) -> Self {
        Self { computed: call.clone(), call }
    }

    /// Whether it is computed for all rows.
    pub(super) fn is_unconditional(&self) -> bool {
        self.call == self.computed
    }

    /// The same, computed only for the rows for which another condition holds as well.
    pub(super) fn only_where(self, condition: Option<&Expr>) -> Result<Self> {
        match condition {
            Some(condition) => {
                let computed = conditional_call(&self.computed, &[vec![condition.clone()]])?;
                Ok(Self { computed, ..self })
            }
            None => Ok(self),
        }
    }
}

/// The distinct calls of expressions that one operator evaluates, as far as their path conditions are known.
pub(super) fn extractable_calls(exprs: &[Expr]) -> Result<Vec<Extractable>> {
    let mut needed: Vec<(Expr, NeededRows)> = Vec::new();
    for expr in exprs {
        let mut visit = |call: Expr, path: &PathCondition| {
            if let PathCondition::Known(conditions) = path {
                let rows = match conditions.is_empty() {
                    true => NeededRows::All,
                    false => NeededRows::Where(vec![conditions.clone()]),
                };
                match needed.iter_mut().find(|(other, _)| *other == call) {
                    Some((_, other)) => other.or(rows),
                    None => needed.push((call.clone(), rows)),
                }
            }
            call
        };
        walk(expr.clone(), &PathCondition::Known(Vec::new()), &mut visit)?;
    }
    let extractable = |(call, rows): (Expr, NeededRows)| {
        let computed = match rows {
            NeededRows::All => call.clone(),
            NeededRows::Where(paths) => conditional_call(&call, &paths)?,
        };
        Ok(Extractable { call, computed })
    };
    needed.into_iter().map(extractable).collect()
}

/// The distinct calls of expressions, whatever their path conditions.
pub(super) fn calls_of(exprs: &[Expr]) -> Result<Vec<Expr>> {
    let mut calls = Vec::new();
    let mut visit = |call: Expr, _: &PathCondition| {
        if !calls.contains(&call) {
            calls.push(call.clone());
        }
        call
    };
    for expr in exprs {
        walk(expr.clone(), &PathCondition::Known(Vec::new()), &mut visit)?;
    }
    Ok(calls)
}

/// Replaces extracted calls by their columns, except where a column may be NULL although the call is needed.
pub(super) fn replace_extracted(expr: Expr, columns: &[(Extractable, Column)]) -> Result<Expr> {
    let mut visit = |call: Expr, path: &PathCondition| {
        let column = columns.iter().find(|(extracted, _)| extracted.call == call);
        let has_value =
            |extracted: &Extractable| extracted.is_unconditional() || matches!(path, PathCondition::Known(_));
        match column.filter(|(extracted, _)| has_value(extracted)) {
            Some((_, column)) => Expr::Column(column.clone()),
            None => call,
        }
    };
    walk(expr, &PathCondition::Known(Vec::new()), &mut visit)
}

/// Whether the path condition of every call is known, or will be once other calls are extracted.
pub(super) fn paths_are_known(expr: &Expr) -> bool {
    let mut known = true;
    let mut visit = |call: Expr, path: &PathCondition| {
        known &= *path != PathCondition::Unknown;
        call
    };
    walk(expr.clone(), &PathCondition::Known(Vec::new()), &mut visit).is_ok() && known
}

/// Called for each call and its path condition; returns what replaces the call.
type Visit<'v> = dyn FnMut(Expr, &PathCondition) -> Expr + 'v;

/// Visits the calls of an expression in the order of evaluation.
fn walk(expr: Expr, path: &PathCondition, visit: &mut Visit<'_>) -> Result<Expr> {
    if is_call(&expr) {
        return Ok(visit(expr, path));
    }
    if !has_calls(&expr) {
        return Ok(expr);
    }
    match expr {
        Expr::Case(case) => walk_case(case, path, visit),
        Expr::BinaryExpr(BinaryExpr { op: op @ (Operator::And | Operator::Or), .. }) => {
            walk_logic(expr, op, path, visit)
        }
        Expr::AggregateFunction(mut aggregate) => {
            let params = &mut aggregate.params;
            let mut filtered = path.clone();
            if let Some(filter) = params.filter.take() {
                filtered = path.and(Expr::IsTrue(filter.clone()));
                params.filter = Some(Box::new(walk(*filter, path, visit)?));
            }
            for arg in &mut params.args {
                *arg = walk(std::mem::take(arg), &filtered, visit)?;
            }
            for key in &mut params.order_by {
                key.expr = walk(std::mem::take(&mut key.expr), &filtered, visit)?;
            }
            Ok(Expr::AggregateFunction(aggregate))
        }
        Expr::ScalarFunction(mut function) => {
            let conditional: Vec<Expr> = match function.func.conditional_arguments(&function.args) {
                Some((_, conditional)) => conditional.into_iter().cloned().collect(),
                None => Vec::new(),
            };
            for arg in &mut function.args {
                let path = if conditional.contains(arg) { &PathCondition::Unknown } else { path };
                *arg = walk(std::mem::take(arg), path, visit)?;
            }
            Ok(Expr::ScalarFunction(function))
        }
        // The body of a lambda is evaluated for elements, not for rows.
        Expr::HigherOrderFunction(_) | Expr::Lambda(_) => walk_children(expr, &PathCondition::Unknown, visit),
        other => walk_children(other, path, visit),
    }
}

fn walk_children(expr: Expr, path: &PathCondition, visit: &mut Visit<'_>) -> Result<Expr> {
    Ok(expr.map_children(|child| walk(child, path, visit).map(Transformed::yes))?.data)
}

/// A branch is reached where its condition holds and no condition before it does.
fn walk_case(mut case: Case, path: &PathCondition, visit: &mut Visit<'_>) -> Result<Expr> {
    let base = case.expr.clone();
    if let Some(base) = case.expr.take() {
        case.expr = Some(Box::new(walk(*base, path, visit)?));
    }
    let mut path = path.clone();
    for (condition, value) in &mut case.when_then_expr {
        let holds = match &base {
            None => condition.as_ref().clone(),
            Some(base) => base.as_ref().clone().eq(condition.as_ref().clone()),
        };
        **condition = walk(std::mem::take(condition), &path, visit)?;
        **value = walk(std::mem::take(value), &path.and(Expr::IsTrue(Box::new(holds.clone()))), visit)?;
        path = path.and(Expr::IsNotTrue(Box::new(holds)));
    }
    if let Some(value) = case.else_expr.take() {
        case.else_expr = Some(Box::new(walk(*value, &path, visit)?));
    }
    Ok(Expr::Case(case))
}

/// Operands without calls are evaluated first, and decide for which rows the operands with calls are evaluated. This
/// includes operands without calls that come later, unless they may fail: they might be evaluated for rows that an
/// earlier operand excludes. Among the operands with calls, each decides about the later ones.
fn walk_logic(expr: Expr, operator: Operator, path: &PathCondition, visit: &mut Visit<'_>) -> Result<Expr> {
    let does_not_decide = |operand: &Expr| match operator {
        Operator::And => Expr::IsNotFalse(Box::new(operand.clone())),
        _ => Expr::IsNotTrue(Box::new(operand.clone())),
    };
    let operands = split_binary_owned(expr, operator);
    let first_call = operands.iter().position(has_calls).unwrap_or(operands.len());
    let cheap = operands.iter().enumerate().filter(|(index, operand)| {
        !has_calls(operand) && is_pure(operand) && (*index < first_call || cannot_fail(operand))
    });
    let path = cheap.fold(path.clone(), |path, (_, operand)| path.and(does_not_decide(operand)));
    let mut earlier: Vec<Expr> = Vec::new();
    let mut unknown = false;
    let walked = operands.into_iter().map(|operand| {
        if !has_calls(&operand) {
            // Whether the operands after a volatile one are evaluated is unknown.
            unknown |= !is_pure(&operand);
            return Ok(operand);
        }
        let mut path = if unknown { PathCondition::Unknown } else { path.clone() };
        for other in &earlier {
            if !needs_all_calls(other, &operand)? {
                path = path.and(does_not_decide(other));
            }
        }
        earlier.push(operand.clone());
        walk(operand, &path, visit)
    });
    let walked = walked.collect::<Result<Vec<_>>>()?;
    let joined = if operator == Operator::And { conjunction(walked) } else { disjunction(walked) };
    joined.ok_or_else(|| internal_datafusion_err!("{operator} without operands"))
}

/// Whether an expression evaluates without an error for every row: it has no division, cast or function.
fn cannot_fail(expr: &Expr) -> bool {
    let may_fail = |e: &Expr| match e {
        Expr::BinaryExpr(BinaryExpr { op, .. }) => !matches!(
            op,
            Operator::And
                | Operator::Or
                | Operator::Eq
                | Operator::NotEq
                | Operator::Lt
                | Operator::LtEq
                | Operator::Gt
                | Operator::GtEq
                | Operator::IsDistinctFrom
                | Operator::IsNotDistinctFrom
        ),
        Expr::Column(_)
        | Expr::Literal(..)
        | Expr::Not(_)
        | Expr::IsNull(_)
        | Expr::IsNotNull(_)
        | Expr::IsTrue(_)
        | Expr::IsFalse(_)
        | Expr::IsUnknown(_)
        | Expr::IsNotTrue(_)
        | Expr::IsNotFalse(_)
        | Expr::IsNotUnknown(_)
        | Expr::Between(_)
        | Expr::InList(_)
        | Expr::Case(_)
        | Expr::TryCast(_) => false,
        _ => true,
    };
    !expr.exists(|e| Ok(may_fail(e))).unwrap_or(true)
}

/// Whether `a` needs every call of `b` for every row: then evaluating `b` costs nothing more.
fn needs_all_calls(a: &Expr, b: &Expr) -> Result<bool> {
    let calls = extractable_calls(std::slice::from_ref(a))?;
    let unconditional: Vec<Expr> =
        calls.into_iter().filter(Extractable::is_unconditional).map(|extractable| extractable.call).collect();
    let mut all = true;
    let mut visit = |call: Expr, _: &PathCondition| {
        all &= unconditional.contains(&call);
        call
    };
    walk(b.clone(), &PathCondition::Known(Vec::new()), &mut visit)?;
    Ok(all)
}

/// The call with NULL as its text where none of the path conditions holds.
fn conditional_call(call: &Expr, paths: &[Vec<Expr>]) -> Result<Expr> {
    let Expr::ScalarFunction(function) = call else { return Ok(call.clone()) };
    let mut args = function.args.clone();
    args[0] = conditional_text(paths, &args[0])?;
    Ok(Expr::ScalarFunction(ScalarFunction { func: Arc::clone(&function.func), args }))
}

/// Nested CASE expressions rather than a conjunction: AND may evaluate conditions for rows where they fail, such as
/// `10 / x > 1` after `x <> 0`. If there are several paths, each becomes a number or NULL, as DataFusion would simplify
/// nested CASE expressions over booleans to AND.
fn conditional_text(paths: &[Vec<Expr>], text: &Expr) -> Result<Expr> {
    let nested = |path: &[Expr], value: Expr| {
        path.iter().rev().try_fold(value, |inner, condition| when(condition.clone(), inner).end())
    };
    if let [path] = paths {
        return nested(path, text.clone());
    }
    let branch = |path: &Vec<Expr>| {
        let holds = Expr::IsNotNull(Box::new(nested(path, lit(1_i8))?));
        Ok((Box::new(holds), Box::new(text.clone())))
    };
    let branches = paths.iter().map(branch).collect::<Result<_>>()?;
    Ok(Expr::Case(Case::new(None, branches, None)))
}

/// Replaces all occurrences of some expressions by columns.
pub(super) fn replace_exprs(expr: Expr, columns: &[(Expr, Column)]) -> Result<Expr> {
    if columns.is_empty() {
        return Ok(expr);
    }
    let replaced = expr.transform_down(|e| match columns.iter().find(|(expr, _)| *expr == e) {
        Some((_, column)) => Ok(Transformed::new(Expr::Column(column.clone()), true, TreeNodeRecursion::Jump)),
        None => Ok(Transformed::no(e)),
    });
    Ok(replaced?.data)
}
