//! Deferral through joins: texts pass through the join instead of vectors.

use std::sync::Arc;

use datafusion::{
    common::{
        Column, JoinType, Result,
        tree_node::{Transformed, TreeNode},
    },
    logical_expr::{
        Aggregate, Expr, Join, LogicalPlan, Projection,
        utils::{conjunction, split_conjunction_owned},
    },
};

use super::{
    super::{
        calls::{calls_of, has_calls, replace_exprs},
        expr::{has_subquery, is_pure},
    },
    deferred::{Deferred, columns},
    pass::{Extracted, Pass},
};

impl Pass {
    pub(super) fn join(&mut self, join: Join, stops_early: bool) -> Result<Deferred> {
        let exprs: Vec<Expr> =
            join.on.iter().flat_map(|(l, r)| [l.clone(), r.clone()]).chain(join.filter.clone()).collect();
        if exprs.iter().any(has_subquery) || join.join_type == JoinType::RightMark {
            return self.complete_inputs(LogicalPlan::Join(join), stops_early).map(Deferred::from_plan);
        }
        let (left_nullable, right_nullable) = nullable_sides(join.join_type);
        let mut left = self.side(&join.left, left_nullable, stops_early)?;
        let mut right = self.side(&join.right, right_nullable, stops_early)?;
        if left.is_plan && right.is_plan && !exprs.iter().any(has_calls) {
            let (left, right) = (Arc::new(left.plan), Arc::new(right.plan));
            return Ok(Deferred::from_plan(LogicalPlan::Join(Join { left, right, ..join })));
        }
        if join.join_type == JoinType::LeftMark {
            // The name of the mark, which has no qualifier if the right input was renamed, must be unique.
            left = self.rename_columns(left)?;
        }
        // Join keys are computed below the join.
        let mut keys: (Vec<Expr>, Vec<Expr>) = join.on.iter().cloned().unzip();
        (left, keys.0) = self.keys(left, keys.0, stops_early)?;
        (right, keys.1) = self.keys(right, keys.1, stops_early)?;
        let (mut above, mut within) = (Vec::new(), Vec::new());
        let inner = join.join_type == JoinType::Inner;
        for condition in join.filter.clone().map(split_conjunction_owned).unwrap_or_default() {
            if inner && !join.on.is_empty() && has_calls(&resolve(&left, &right, condition.clone())?) {
                // The keys leave few pairs, so the condition becomes a filter above the join.
                above.push(condition);
                continue;
            }
            // Compute deferred outputs once per row below the join, not once per pair.
            left = self.materialise(left, std::slice::from_ref(&condition), stops_early)?;
            right = self.materialise(right, std::slice::from_ref(&condition), stops_early)?;
            within.push(resolve(&left, &right, condition)?);
        }
        if within.iter().any(has_calls) {
            let mut matches = (None, None);
            if !inner && !join.on.is_empty() && !join.null_aware {
                let others = (repeatable_keys(&left, &keys.0), repeatable_keys(&right, &keys.1));
                (left, keys.0, matches.0) = self.mark_matches(left, keys.0, others.1, &mut within, &join)?;
                (right, keys.1, matches.1) = self.mark_matches(right, keys.1, others.0, &mut within, &join)?;
            }
            (left, within) = self.extract_side(left, within, matches.0.as_ref(), stops_early)?;
            (right, within) = self.extract_side(right, within, matches.1.as_ref(), stops_early)?;
        }
        let on = keys.0.into_iter().zip(keys.1).collect();
        let (left_plan, right_plan) = (Arc::new(left.plan), Arc::new(right.plan));
        let joined = Join::try_new(
            left_plan,
            right_plan,
            on,
            conjunction(within),
            join.join_type,
            join.join_constraint,
            join.null_equality,
            join.null_aware,
        )?;
        // Where the join adds NULLs, a call on the joined text may differ from the joined column of the call.
        let left_computed = if left_nullable { Vec::new() } else { left.computed };
        let right_computed = if right_nullable { Vec::new() } else { right.computed };
        let (outputs, computed) = match join.join_type {
            JoinType::LeftSemi | JoinType::LeftAnti => (left.outputs, left_computed),
            JoinType::RightSemi | JoinType::RightAnti => (right.outputs, right_computed),
            JoinType::LeftMark => {
                let mark = joined.schema.columns().pop().map(Expr::Column);
                (left.outputs.into_iter().chain(mark).collect(), left_computed)
            }
            _ => ([left.outputs, right.outputs].concat(), [left_computed, right_computed].concat()),
        };
        let plan = LogicalPlan::Join(joined);
        let deferred = Deferred { plan, outputs, schema: join.schema, computed, is_plan: false };
        self.filtered(deferred, above, stops_early)
    }

    /// Adds a column to an input of a join: whether the other input has a row with the same keys. Only for such rows is
    /// the rest of the join condition evaluated. `other` are the keys of the other input; without them, as they cannot
    /// be computed a second time, no column is added.
    fn mark_matches(
        &mut self,
        side: Deferred,
        keys: Vec<Expr>,
        other: Option<(LogicalPlan, Vec<Expr>)>,
        conditions: &mut [Expr],
        join: &Join,
    ) -> Result<(Deferred, Vec<Expr>, Option<Expr>)> {
        let schema = side.plan.schema();
        let reads_side = |call: &Expr| call.column_refs().into_iter().all(|column| schema.has_column(column));
        let is_needed = calls_of(conditions)?.iter().any(reads_side);
        let Some(other) = other.filter(|_| is_needed) else { return Ok((side, keys, None)) };
        let (side, renamed) = self.rename_columns_with(side)?;
        let keys: Vec<Expr> = keys.into_iter().map(|key| replace_exprs(key, &renamed)).collect::<Result<_>>()?;
        for condition in conditions {
            *condition = replace_exprs(std::mem::take(condition), &renamed)?;
        }
        let (other, other_keys) = self.distinct(other)?;
        let marked = Join::try_new(
            Arc::new(side.plan.clone()),
            Arc::new(other),
            keys.iter().cloned().zip(other_keys).collect(),
            None,
            JoinType::LeftMark,
            join.join_constraint,
            join.null_equality,
            false,
        )?;
        let mut projected = columns(&marked.schema);
        let name = self.column_name();
        if let Some(mark) = projected.pop() {
            projected.push(mark.alias(&name));
        }
        let plan = Projection::try_new(projected, Arc::new(LogicalPlan::Join(marked)))?;
        let side = side.with_plan(LogicalPlan::Projection(plan));
        Ok((side, keys, Some(Expr::Column(Column::new_unqualified(name)))))
    }

    /// The distinct values of expressions over a plan.
    fn distinct(&mut self, (plan, exprs): (LogicalPlan, Vec<Expr>)) -> Result<(LogicalPlan, Vec<Expr>)> {
        let named = exprs.into_iter().map(|expr| expr.alias(self.column_name())).collect();
        let plan = LogicalPlan::Projection(Projection::try_new(named, Arc::new(plan))?);
        let keys = columns(plan.schema());
        let plan = LogicalPlan::Aggregate(Aggregate::try_new(Arc::new(plan), keys.clone(), Vec::new())?);
        Ok((plan, keys))
    }

    /// Defers the calls of an input, under column names that the other input does not have. Calls are not deferred if
    /// the join adds NULLs for missing rows of this input: outputs over these NULLs might not be NULL.
    fn side(&mut self, plan: &LogicalPlan, nullable: bool, stops_early: bool) -> Result<Deferred> {
        let side = self.defer(plan.clone(), stops_early)?;
        match side.is_plan {
            true => Ok(side),
            false if nullable => Ok(Deferred::from_plan(self.finish(side, stops_early)?)),
            false => self.rename_columns(side),
        }
    }

    fn rename_columns(&mut self, deferred: Deferred) -> Result<Deferred> {
        self.rename_columns_with(deferred).map(|(deferred, _)| deferred)
    }

    /// Gives the columns of the plan new names. Also returns the old columns with their new names.
    fn rename_columns_with(&mut self, deferred: Deferred) -> Result<(Deferred, Vec<(Expr, Column)>)> {
        let old = deferred.plan.schema().columns();
        let renamed: Vec<(Expr, Column)> =
            old.into_iter().map(|column| (Expr::Column(column), Column::new_unqualified(self.column_name()))).collect();
        let exprs = renamed.iter().map(|(old, new)| old.clone().alias(&new.name)).collect();
        let plan = LogicalPlan::Projection(Projection::try_new(exprs, Arc::new(deferred.plan.clone()))?);
        let computed = deferred.computed.iter().cloned().map(|(call, column)| {
            let index = renamed.iter().position(|(old, _)| *old == Expr::Column(column.clone()));
            let column = index.map_or(column, |index| renamed[index].1.clone());
            Ok((replace_exprs(call, &renamed)?, column))
        });
        let computed = computed.collect::<Result<_>>()?;
        let deferred = Deferred { plan, computed, is_plan: false, ..deferred.replace(&renamed)? };
        Ok((deferred, renamed))
    }

    /// Computes the join keys of an input.
    fn keys(&mut self, side: Deferred, keys: Vec<Expr>, stops_early: bool) -> Result<(Deferred, Vec<Expr>)> {
        let side = self.materialise(side, &keys, stops_early)?;
        let extracted = self.extract(side.plan.clone(), side.resolve_all(keys)?, stops_early)?;
        Ok((side.with_computed(extracted.computed, extracted.plan)?, extracted.exprs))
    }

    /// Extracts the calls of join conditions that read only this input, for the rows for which `matches` holds.
    fn extract_side(
        &mut self,
        side: Deferred,
        conditions: Vec<Expr>,
        matches: Option<&Expr>,
        stops_early: bool,
    ) -> Result<(Deferred, Vec<Expr>)> {
        let schema = Arc::clone(side.plan.schema());
        let reads_side = |call: &Expr| call.column_refs().into_iter().all(|column| schema.has_column(column));
        let Extracted { plan, exprs, mut computed } =
            self.extract_where(side.plan.clone(), conditions, matches, stops_early, reads_side)?;
        // What remains are calls whose path condition reads the other input, or is unknown.
        let rest = self.extract_all(plan, exprs, matches, stops_early, reads_side)?;
        computed.extend(rest.computed);
        Ok((side.with_computed(computed, rest.plan)?, rest.exprs))
    }
}

/// The plan and the keys of an input of a join, if its rows are the same when it is executed a second time, and if this
/// computes no embeddings.
fn repeatable_keys(side: &Deferred, keys: &[Expr]) -> Option<(LogicalPlan, Vec<Expr>)> {
    // The visitor returns no error.
    let is_unrepeatable = side.plan.exists(|node| Ok(!is_repeatable(node))).unwrap_or(true);
    let is_repeatable = !is_unrepeatable && keys.iter().all(is_pure);
    is_repeatable.then(|| (side.plan.clone(), keys.to_vec()))
}

/// Whether an operator gives the same rows for the same input. Limits and windows depend on the order of rows, and sums
/// of floats on how rows are distributed.
fn is_repeatable(operator: &LogicalPlan) -> bool {
    let is_deterministic = match operator {
        LogicalPlan::TableScan(scan) => scan.fetch.is_none(),
        LogicalPlan::Projection(_)
        | LogicalPlan::Filter(_)
        | LogicalPlan::SubqueryAlias(_)
        | LogicalPlan::Join(_)
        | LogicalPlan::Union(_)
        | LogicalPlan::Values(_)
        | LogicalPlan::EmptyRelation(_) => true,
        _ => false,
    };
    is_deterministic && operator.expressions().iter().all(|expr| is_pure(expr) && !has_calls(expr))
}

/// Converts an expression over the schemas of both inputs into one over their plans.
fn resolve(left: &Deferred, right: &Deferred, expr: Expr) -> Result<Expr> {
    let resolved = expr.transform(|e| match &e {
        Expr::Column(column) => {
            let side = if left.schema.has_column(column) { left } else { right };
            side.resolve(e).map(Transformed::yes)
        }
        _ => Ok(Transformed::no(e)),
    });
    replace_exprs(replace_exprs(resolved?.data, &left.computed)?, &right.computed)
}

/// For which inputs, left and right, the join adds NULLs for missing rows.
fn nullable_sides(join: JoinType) -> (bool, bool) {
    (matches!(join, JoinType::Right | JoinType::Full), matches!(join, JoinType::Left | JoinType::Full))
}
