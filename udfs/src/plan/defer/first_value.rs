//! Deferral through `first_value` and `last_value`, which return the value of one row per group. DataFusion executes
//! `DISTINCT ON` as such calls.
//!
//! `first_value(elmo_embed(text) ORDER BY id)` becomes `elmo_embed(first_value(text ORDER BY id))`, which embeds one
//! text per group.

use std::{any::Any, collections::BTreeSet};

use datafusion::{
    common::{
        Column, Result,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion::Jump},
    },
    functions::core::expr_fn::{get_field, named_struct},
    functions_aggregate::first_last::{FirstValue, LastValue},
    logical_expr::{
        Expr,
        expr::{AggregateFunction, NullTreatment},
        lit,
    },
};

use super::{
    super::{
        calls::{extractable_calls, replace_exprs},
        expr::{has_subquery, is_volatile},
    },
    deferred::can_be_deferred,
    pass::Pass,
};

/// The expressions of an aggregate operator.
pub(super) struct Aggregates {
    pub(super) exprs: Vec<Expr>,
    /// The column names of `exprs`.
    pub(super) names: Vec<String>,
    /// The values that the operators above read: expressions over the columns.
    pub(super) outputs: Vec<Expr>,
}

impl Aggregates {
    /// The column of an aggregate expression. Equal expressions share a column, unless they are volatile.
    fn column(&mut self, pass: &mut Pass, expr: Expr) -> Column {
        let known = self.exprs.iter().position(|other| *other == expr).filter(|_| !is_volatile(&expr));
        let index = known.unwrap_or(self.exprs.len());
        if known.is_none() {
            self.exprs.push(expr);
            self.names.push(pass.column_name());
        }
        Column::new_unqualified(&self.names[index])
    }
}

impl Pass {
    /// Defers the values of `first_value` and `last_value` with calls. `has_rows`: whether every group has rows. A
    /// value over the columns of no row might not be NULL.
    pub(super) fn aggregates(&mut self, keys: &[Expr], aggregates: Vec<Expr>, has_rows: bool) -> Result<Aggregates> {
        let exprs: Vec<Expr> = aggregates.into_iter().map(Expr::unalias).collect();
        let values: Vec<Option<Expr>> = exprs.iter().map(|expr| deferrable_value(expr).filter(|_| has_rows)).collect();
        // Calls that are computed for all rows anyway.
        let others = exprs.iter().zip(&values).flat_map(|(expr, value)| match value {
            Some(_) => order_by(expr),
            None => vec![expr.clone()],
        });
        let others: Vec<Expr> = keys.iter().cloned().chain(others).collect();
        let needed: Vec<Expr> = extractable_calls(&others)?.into_iter().map(|extractable| extractable.call).collect();
        let mut all = Aggregates { exprs: Vec::new(), names: Vec::new(), outputs: Vec::new() };
        for (expr, value) in exprs.into_iter().zip(values) {
            let output = match value {
                Some(value) if !has_one_of(&value, &needed)? => self.deferred_value(&mut all, &expr, value)?,
                _ => Expr::Column(all.column(self, expr)),
            };
            all.outputs.push(output);
        }
        Ok(all)
    }

    /// The value over the columns of the row that an aggregate selects. Several columns are selected as one struct:
    /// among rows that are equal in the order, two calls might select different rows.
    fn deferred_value(&mut self, all: &mut Aggregates, aggregate: &Expr, value: Expr) -> Result<Expr> {
        let read: BTreeSet<Column> = value.column_refs().into_iter().cloned().collect();
        let read: Vec<Expr> = read.into_iter().map(Expr::Column).collect();
        if let [column] = read.as_slice() {
            let selected = all.column(self, with_argument(aggregate, column.clone()));
            return replace_exprs(value, &[(column.clone(), selected)]);
        }
        let members = read.iter().enumerate().flat_map(|(index, column)| [lit(index.to_string()), column.clone()]);
        let row = Expr::Column(all.column(self, with_argument(aggregate, named_struct(members.collect()))));
        let replaced = value.transform_down(|e| match read.iter().position(|column| *column == e) {
            Some(index) => Ok(Transformed::new(get_field(row.clone(), index.to_string()), true, Jump)),
            None => Ok(Transformed::no(e)),
        });
        Ok(replaced?.data)
    }
}

/// The value of `first_value` or `last_value` if it has calls and can be computed after the row is selected.
fn deferrable_value(aggregate: &Expr) -> Option<Expr> {
    let Expr::AggregateFunction(AggregateFunction { func, params }) = aggregate else { return None };
    let inner = func.inner().as_ref() as &dyn Any;
    let selects_row = inner.is::<FirstValue>() || inner.is::<LastValue>();
    // With IGNORE NULLS the vector decides which row is selected, and with FILTER a group may have no row.
    let ignores_nulls = params.null_treatment == Some(NullTreatment::IgnoreNulls);
    if !selects_row || params.distinct || params.filter.is_some() || ignores_nulls || is_volatile(aggregate) {
        return None;
    }
    let [value] = params.args.as_slice() else { return None };
    let value = value.clone().unalias_nested().data;
    (can_be_deferred(&value) && !has_subquery(&value)).then_some(value)
}

fn with_argument(aggregate: &Expr, arg: Expr) -> Expr {
    let Expr::AggregateFunction(mut function) = aggregate.clone() else { return aggregate.clone() };
    function.params.args = vec![arg];
    Expr::AggregateFunction(function)
}

fn order_by(aggregate: &Expr) -> Vec<Expr> {
    let Expr::AggregateFunction(function) = aggregate else { return Vec::new() };
    function.params.order_by.iter().map(|key| key.expr.clone()).collect()
}

/// Whether an expression has one of these calls.
fn has_one_of(expr: &Expr, calls: &[Expr]) -> Result<bool> {
    let own = extractable_calls(std::slice::from_ref(expr))?;
    Ok(own.iter().any(|extractable| calls.contains(&extractable.call)))
}
