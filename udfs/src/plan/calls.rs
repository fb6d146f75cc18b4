//! The embedding calls in expressions, and for which rows each is needed.
//!
//! DataFusion evaluates lazily: the branches of CASE, what COALESCE does not reach, and what AND or OR need not know. A
//! call in such a place is needed only for rows that get there, which is its *guard*. A call that is computed elsewhere
//! gets NULL as its text where its guard does not hold, and NULL costs nothing. A guard that depends on an embedding itself
//! is known once that one is a column: calls are lifted layer by layer.

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

use crate::functions;

/// Whether an expression has an embedding call that can be computed elsewhere.
pub(crate) fn has_calls(expr: &Expr) -> bool {
    expr.exists(|e| Ok(is_call(e))).unwrap_or(true)
}

/// A call on a text that differs from row to row.
pub(crate) fn is_call(expr: &Expr) -> bool {
    let Expr::ScalarFunction(function) = expr else { return false };
    functions::text_function(&function.func).is_some()
        && function.args.split_first().is_some_and(|(text, options)| {
            text.any_column_refs()
                && is_plain(text)
                && !has_calls(text)
                && options.iter().all(|option| matches!(option, Expr::Literal(..)))
        })
}

/// Has the same value whenever and wherever it is evaluated.
pub(crate) fn is_plain(expr: &Expr) -> bool {
    let is_odd = |e: &Expr| {
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
    !is_random(expr) && !expr.exists(|e| Ok(is_odd(e))).unwrap_or(true)
}

/// Has another value each time. Calls of ours on literals say so of themselves, but only to be left alone by the planner.
pub(crate) fn is_random(expr: &Expr) -> bool {
    let is_random = |e: &Expr| match e {
        Expr::ScalarFunction(function) if functions::text_function(&function.func).is_some() => false,
        e => e.is_volatile_node(),
    };
    expr.exists(|e| Ok(is_random(e))).unwrap_or(true)
}

/// What holds where an expression is evaluated.
#[derive(Debug, Clone, PartialEq)]
enum Guard {
    /// These conditions; none: it is evaluated for every row.
    Known(Vec<Expr>),
    /// What depends on another embedding, and is known when that one is computed.
    Later,
    /// Nothing that can be said of a row: an element of a list, an argument that a function may never look at.
    Never,
}

impl Guard {
    /// One more condition.
    fn and(&self, condition: Expr) -> Self {
        match self {
            Self::Known(_) if has_calls(&condition) => Self::Later,
            Self::Known(_) if !is_plain(&condition) => Self::Never,
            Self::Known(conditions) => Self::Known(conditions.iter().cloned().chain([condition]).collect()),
            other => other.clone(),
        }
    }
}

/// When a call is needed, over all places where it stands and that is known.
#[derive(Debug, Clone, PartialEq)]
enum Need {
    Always,
    /// Where all conditions of one of these hold, each looked at only where those before it hold.
    Where(Vec<Vec<Expr>>),
}

impl Need {
    fn or(&mut self, more: Self) {
        match (&mut *self, more) {
            (Self::Always, _) => {}
            (_, Self::Always) => *self = Self::Always,
            (Self::Where(guards), Self::Where(more)) => {
                guards.extend(more.into_iter().filter(|guard| !guards.contains(guard)).collect::<Vec<_>>());
            }
        }
    }
}

/// A call that can be computed elsewhere.
#[derive(Debug, Clone)]
pub(crate) struct Liftable {
    /// As it stands in the expressions.
    pub(crate) call: Expr,
    /// As it is to be computed: NULL where nobody needs it.
    pub(crate) computed: Expr,
}

impl Liftable {
    /// It has a value in every row.
    pub(crate) fn is_whole(&self) -> bool {
        self.call == self.computed
    }
}

/// The distinct calls of expressions that one operator evaluates for each of its rows, as far as it is known by now for
/// which rows they are needed.
pub(crate) fn liftable(exprs: &[Expr]) -> Result<Vec<Liftable>> {
    let mut needs: Vec<(Expr, Need)> = Vec::new();
    for expr in exprs {
        let mut note = |call: Expr, guard: &Guard| {
            if let Guard::Known(conditions) = guard {
                let need = match conditions.is_empty() {
                    true => Need::Always,
                    false => Need::Where(vec![conditions.clone()]),
                };
                match needs.iter_mut().find(|(there, _)| *there == call) {
                    Some((_, there)) => there.or(need),
                    None => needs.push((call.clone(), need)),
                }
            }
            call
        };
        walk(expr.clone(), &Guard::Known(Vec::new()), &mut note)?;
    }
    let liftable = |(call, need): (Expr, Need)| {
        let computed = match need {
            Need::Always => call.clone(),
            Need::Where(guards) => guarded(&call, &guards)?,
        };
        Ok(Liftable { call, computed })
    };
    needs.into_iter().map(liftable).collect()
}

/// Puts columns in the place of calls where it is known that the columns have their values.
pub(crate) fn put(expr: Expr, columns: &[(Liftable, Column)]) -> Result<Expr> {
    let mut replace = |call: Expr, guard: &Guard| {
        let column = columns.iter().find(|(there, _)| there.call == call);
        match column.filter(|(there, _)| there.is_whole() || matches!(guard, Guard::Known(_))) {
            Some((_, column)) => Expr::Column(column.clone()),
            None => call,
        }
    };
    walk(expr, &Guard::Known(Vec::new()), &mut replace)
}

/// Whether it will be known of every call for which rows it is needed.
pub(crate) fn can_wait(expr: &Expr) -> bool {
    let mut known = true;
    let mut look = |call: Expr, guard: &Guard| {
        known &= *guard != Guard::Never;
        call
    };
    walk(expr.clone(), &Guard::Known(Vec::new()), &mut look).is_ok() && known
}

/// What becomes of a call, given what holds where it stands.
type Visit<'v> = dyn FnMut(Expr, &Guard) -> Expr + 'v;

/// Visits the calls of an expression as DataFusion evaluates it.
fn walk(expr: Expr, guard: &Guard, visit: &mut Visit<'_>) -> Result<Expr> {
    if is_call(&expr) {
        return Ok(visit(expr, guard));
    }
    if !has_calls(&expr) {
        return Ok(expr);
    }
    match expr {
        Expr::Case(case) => walk_case(case, guard, visit),
        Expr::BinaryExpr(BinaryExpr { op: op @ (Operator::And | Operator::Or), .. }) => {
            walk_logic(expr, op, guard, visit)
        }
        Expr::AggregateFunction(mut aggregate) => {
            let params = &mut aggregate.params;
            let mut inside = guard.clone();
            if let Some(filter) = params.filter.take() {
                inside = guard.and(Expr::IsTrue(filter.clone()));
                params.filter = Some(Box::new(walk(*filter, guard, visit)?));
            }
            for arg in &mut params.args {
                *arg = walk(std::mem::take(arg), &inside, visit)?;
            }
            for key in &mut params.order_by {
                key.expr = walk(std::mem::take(&mut key.expr), &inside, visit)?;
            }
            Ok(Expr::AggregateFunction(aggregate))
        }
        Expr::ScalarFunction(mut function) => {
            let perhaps: Vec<Expr> = match function.func.conditional_arguments(&function.args) {
                Some((_, perhaps)) => perhaps.into_iter().cloned().collect(),
                None => Vec::new(),
            };
            for arg in &mut function.args {
                let guard = if perhaps.contains(arg) { &Guard::Never } else { guard };
                *arg = walk(std::mem::take(arg), guard, visit)?;
            }
            Ok(Expr::ScalarFunction(function))
        }
        // Its body is evaluated for elements, not for rows.
        Expr::HigherOrderFunction(_) | Expr::Lambda(_) => walk_children(expr, &Guard::Never, visit),
        other => walk_children(other, guard, visit),
    }
}

fn walk_children(expr: Expr, guard: &Guard, visit: &mut Visit<'_>) -> Result<Expr> {
    Ok(expr.map_children(|child| walk(child, guard, visit).map(Transformed::yes))?.data)
}

fn walk_case(mut case: Case, guard: &Guard, visit: &mut Visit<'_>) -> Result<Expr> {
    let base = case.expr.clone();
    if let Some(base) = case.expr.take() {
        case.expr = Some(Box::new(walk(*base, guard, visit)?));
    }
    let mut before = guard.clone();
    for (condition, value) in &mut case.when_then_expr {
        let holds = match &base {
            None => condition.as_ref().clone(),
            Some(base) => base.as_ref().clone().eq(condition.as_ref().clone()),
        };
        **condition = walk(std::mem::take(condition), &before, visit)?;
        **value = walk(std::mem::take(value), &before.and(Expr::IsTrue(Box::new(holds.clone()))), visit)?;
        before = before.and(Expr::IsNotTrue(Box::new(holds)));
    }
    if let Some(value) = case.else_expr.take() {
        case.else_expr = Some(Box::new(walk(*value, &before, visit)?));
    }
    Ok(Expr::Case(case))
}

/// The operands that need no embedding decide for which rows the others are evaluated, also those behind them, unless
/// these might fail for rows that they would never see; of the others, the first decides about those behind it.
fn walk_logic(expr: Expr, operator: Operator, guard: &Guard, visit: &mut Visit<'_>) -> Result<Expr> {
    let goes_on = |operand: &Expr| match operator {
        Operator::And => Expr::IsNotFalse(Box::new(operand.clone())),
        _ => Expr::IsNotTrue(Box::new(operand.clone())),
    };
    let operands = split_binary_owned(expr, operator);
    let first = operands.iter().position(has_calls).unwrap_or(operands.len());
    let cheap = operands.iter().enumerate().filter(|(place, operand)| {
        !has_calls(operand) && is_plain(operand) && (*place < first || cannot_fail(operand))
    });
    let guard = cheap.fold(guard.clone(), |guard, (_, operand)| guard.and(goes_on(operand)));
    let mut before: Vec<Expr> = Vec::new();
    let mut unknown = false;
    let walked = operands.into_iter().map(|operand| {
        if !has_calls(&operand) {
            // What is behind an operand that differs each time is evaluated or not.
            unknown |= !is_plain(&operand);
            return Ok(operand);
        }
        let mut needed = if unknown { Guard::Never } else { guard.clone() };
        for first in &before {
            if !has_all(first, &operand)? {
                needed = needed.and(goes_on(first));
            }
        }
        before.push(operand.clone());
        walk(operand, &needed, visit)
    });
    let walked = walked.collect::<Result<Vec<_>>>()?;
    let joined = if operator == Operator::And { conjunction(walked) } else { disjunction(walked) };
    joined.ok_or_else(|| internal_datafusion_err!("{operator} without operands"))
}

/// Whether an expression has a value for every row, whatever the row: no division, no cast, no function.
fn cannot_fail(expr: &Expr) -> bool {
    let may = |e: &Expr| match e {
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
    !expr.exists(|e| Ok(may(e))).unwrap_or(true)
}

/// Whether every call of `b` is needed for every row that `a` is evaluated for anyway.
fn has_all(a: &Expr, b: &Expr) -> Result<bool> {
    let whole: Vec<Expr> =
        liftable(std::slice::from_ref(a))?.into_iter().filter(Liftable::is_whole).map(|there| there.call).collect();
    let mut all = true;
    let mut look = |call: Expr, _: &Guard| {
        all &= whole.contains(&call);
        call
    };
    walk(b.clone(), &Guard::Known(Vec::new()), &mut look)?;
    Ok(all)
}

/// The call with NULL as its text where none of the guards holds.
fn guarded(call: &Expr, guards: &[Vec<Expr>]) -> Result<Expr> {
    let Expr::ScalarFunction(function) = call else { return Ok(call.clone()) };
    let mut args = function.args.clone();
    args[0] = text_where(guards, &args[0])?;
    Ok(Expr::ScalarFunction(ScalarFunction { func: Arc::clone(&function.func), args }))
}

/// CASE inside CASE, not one condition of all: AND would look at those that may not be looked at, such as `10 / x > 1`
/// behind `x <> 0`. Of several guards each becomes a number or NULL; as truth values, DataFusion would make AND of them.
fn text_where(guards: &[Vec<Expr>], text: &Expr) -> Result<Expr> {
    let nested = |guard: &[Expr], value: Expr| {
        guard.iter().rev().try_fold(value, |inner, condition| when(condition.clone(), inner).end())
    };
    if let [guard] = guards {
        return nested(guard, text.clone());
    }
    let branch = |guard: &Vec<Expr>| {
        let holds = Expr::IsNotNull(Box::new(nested(guard, lit(1_i8))?));
        Ok((Box::new(holds), Box::new(text.clone())))
    };
    let branches = guards.iter().map(branch).collect::<Result<_>>()?;
    Ok(Expr::Case(Case::new(None, branches, None)))
}

/// Puts columns in the place of calls.
pub(crate) fn replace(expr: Expr, columns: &[(Expr, Column)]) -> Result<Expr> {
    if columns.is_empty() {
        return Ok(expr);
    }
    let replaced = expr.transform_down(|e| match columns.iter().find(|(call, _)| *call == e) {
        Some((_, column)) => Ok(Transformed::new(Expr::Column(column.clone()), true, TreeNodeRecursion::Jump)),
        None => Ok(Transformed::no(e)),
    });
    Ok(replaced?.data)
}
