//! Deferral through operators on groups of rows: aggregates and window functions.

use std::{collections::BTreeSet, sync::Arc};

use datafusion::{
    common::{
        Column, Result,
        tree_node::{TreeNode, TreeNodeRecursion},
    },
    logical_expr::{Aggregate, Expr, LogicalPlan, Projection, Window},
};

use super::{
    super::{calls::has_calls, expr::is_volatile},
    deferred::{Deferred, columns},
    first_value::Aggregates,
    pass::{Extracted, Pass},
};

impl Pass {
    pub(super) fn aggregate(&mut self, aggregate: Aggregate) -> Result<Deferred> {
        let Aggregate { input, group_expr, aggr_expr, schema, .. } = aggregate;
        let groups = group_expr.len();
        let has_sets = group_expr.iter().any(|key| matches!(key, Expr::GroupingSet(_)));
        let mut exprs = [group_expr, aggr_expr].concat();
        let mut input = self.input(input, &exprs, false)?;
        if has_sets && !input.is_plan {
            // Aliases of one column would become the same grouping set.
            input = Deferred::from_plan(self.finish(input, false)?);
        }
        if input.is_plan && !exprs.iter().any(has_calls) {
            let aggr_expr = exprs.split_off(groups);
            let aggregate = Aggregate::try_new_with_schema(Arc::new(input.plan), exprs, aggr_expr, schema)?;
            return Ok(Deferred::from_plan(LogicalPlan::Aggregate(aggregate)));
        }
        let input = self.materialise(input, &sort_keys(&exprs), false)?;
        let mut keys = input.resolve_all(exprs)?;
        let aggr_expr = keys.split_off(groups);
        // A group of a grouping set or of no keys may have no rows.
        let has_rows = groups > 0 && !has_sets;
        let Aggregates { exprs, names, outputs } = self.aggregates(&keys, aggr_expr, has_rows)?;
        let Extracted { plan, exprs: mut keys, .. } = self.extract(input.plan, [keys, exprs].concat(), false)?;
        let mut exprs = keys.split_off(groups);
        exprs.iter_mut().for_each(remove_repeated_sort_keys);
        // Column names are derived from expressions, and expressions over different aliases may have become equal.
        let (plan, keys) = self.unique_group_keys(plan, keys, &exprs)?;
        let exprs: Vec<Expr> = exprs.into_iter().zip(names).map(|(expr, name)| expr.alias(name)).collect();
        let count = exprs.len();
        let plan = LogicalPlan::Aggregate(Aggregate::try_new(Arc::new(plan), keys, exprs)?);
        let mut all = columns(plan.schema());
        all.truncate(all.len() - count);
        all.extend(outputs);
        Ok(Deferred { plan, outputs: all, schema, computed: Vec::new(), is_plan: false })
    }

    /// Gives the keys unique names with a projection, unless they have them. `others` are the other expressions that
    /// the aggregate reads.
    fn unique_group_keys(
        &mut self,
        plan: LogicalPlan,
        keys: Vec<Expr>,
        others: &[Expr],
    ) -> Result<(LogicalPlan, Vec<Expr>)> {
        // Compare schema names, which do not include casts.
        let names: BTreeSet<String> = keys.iter().map(|key| key.schema_name().to_string()).collect();
        if names.len() == keys.len() || keys.iter().any(|key| matches!(key, Expr::GroupingSet(_))) {
            return Ok((plan, keys));
        }
        let (mut projected, mut columns) = (Vec::new(), Vec::new());
        for key in keys {
            let name = self.column_name();
            projected.push(key.alias(&name));
            columns.push(Expr::Column(Column::new_unqualified(name)));
        }
        let read: BTreeSet<Column> = others.iter().flat_map(Expr::column_refs).cloned().collect();
        projected.extend(read.into_iter().map(Expr::Column));
        Ok((LogicalPlan::Projection(Projection::try_new(projected, Arc::new(plan))?), columns))
    }

    pub(super) fn window(&mut self, window: Window) -> Result<Deferred> {
        let Window { input, window_expr, schema } = window;
        let input = self.input(input, &window_expr, false)?;
        let is_unchanged = input.is_plan && !window_expr.iter().any(has_calls);
        let input = self.materialise(input, &window_expr, false)?;
        let Extracted { plan, exprs, computed } =
            self.extract(input.plan.clone(), input.resolve_all(window_expr)?, false)?;
        let plan = Arc::new(plan);
        if is_unchanged {
            return Ok(Deferred::from_plan(LogicalPlan::Window(Window::try_new_with_schema(exprs, plan, schema)?)));
        }
        // The plan may have an equal window expression under another name. DataFusion does not allow it twice, unless
        // it is volatile: then the values differ.
        let (mut missing, mut outputs) = (Vec::new(), Vec::new());
        for expr in exprs.into_iter().map(Expr::unalias) {
            outputs.push(Expr::Column(match window_column(&plan, &expr) {
                Some(column) => column,
                None => {
                    let name = self.column_name();
                    missing.push(expr.alias(&name));
                    Column::new_unqualified(name)
                }
            }));
        }
        let plan = match missing.is_empty() {
            true => Arc::unwrap_or_clone(plan),
            false => LogicalPlan::Window(Window::try_new(missing, plan)?),
        };
        let input = input.with_computed(computed, plan)?;
        Ok(Deferred { outputs: [input.outputs, outputs].concat(), schema, is_plan: false, ..input })
    }
}

/// The sort keys of aggregate functions without FILTER, which are evaluated for all rows.
fn sort_keys(exprs: &[Expr]) -> Vec<Expr> {
    let mut keys = Vec::new();
    for expr in exprs {
        // The visitor returns no error.
        let _ = expr.apply(|e| {
            if let Expr::AggregateFunction(aggregate) = e
                && aggregate.params.filter.is_none()
            {
                keys.extend(aggregate.params.order_by.iter().map(|key| key.expr.clone()));
            }
            Ok(TreeNodeRecursion::Continue)
        });
    }
    keys
}

/// Removes the sort keys of an aggregate function that repeat an earlier one, for which `first_value` panics in
/// DataFusion 55. Keys over different aliases may have become equal.
fn remove_repeated_sort_keys(expr: &mut Expr) {
    let Expr::AggregateFunction(aggregate) = expr else { return };
    let mut seen: Vec<Expr> = Vec::new();
    aggregate.params.order_by.retain(|key| {
        let is_new = !seen.contains(&key.expr);
        seen.push(key.expr.clone());
        is_new
    });
}

/// The column of a window expression that one of the topmost window operators of a plan computes.
fn window_column(plan: &LogicalPlan, expr: &Expr) -> Option<Column> {
    let LogicalPlan::Window(window) = plan else { return None };
    if is_volatile(expr) {
        return None;
    }
    let inputs = window.input.schema().fields().len();
    let index = window.window_expr.iter().position(|other| other.clone().unalias() == *expr);
    match index {
        Some(index) => window.schema.columns().into_iter().nth(inputs + index),
        None => window_column(&window.input, expr),
    }
}
