//! Deferral through joins: texts pass through the join instead of vectors.

use std::sync::Arc;

use datafusion::{
    common::{
        Column, JoinType, Result,
        tree_node::{Transformed, TreeNode},
    },
    logical_expr::{
        Expr, Join, LogicalPlan, Projection,
        utils::{conjunction, split_conjunction_owned},
    },
};

use super::{
    super::{
        calls::{has_calls, replace_exprs},
        expr::has_subquery,
    },
    deferred::Deferred,
    pass::Pass,
};

impl Pass {
    pub(super) fn join(&mut self, join: Join, stops_early: bool) -> Result<Deferred> {
        let exprs: Vec<Expr> =
            join.on.iter().flat_map(|(l, r)| [l.clone(), r.clone()]).chain(join.filter.clone()).collect();
        if exprs.iter().any(has_subquery) || matches!(join.join_type, JoinType::LeftMark | JoinType::RightMark) {
            return self.complete_inputs(LogicalPlan::Join(join), stops_early).map(Deferred::from_plan);
        }
        let (left_nullable, right_nullable) = nullable_sides(join.join_type);
        let mut left = self.side(&join.left, left_nullable, stops_early)?;
        let mut right = self.side(&join.right, right_nullable, stops_early)?;
        if left.is_plan && right.is_plan && !exprs.iter().any(has_calls) {
            let (left, right) = (Arc::new(left.plan), Arc::new(right.plan));
            return Ok(Deferred::from_plan(LogicalPlan::Join(Join { left, right, ..join })));
        }
        // Join keys are computed below the join.
        let mut keys: (Vec<Expr>, Vec<Expr>) = join.on.iter().cloned().unzip();
        (left, keys.0) = self.keys(left, keys.0, stops_early)?;
        (right, keys.1) = self.keys(right, keys.1, stops_early)?;
        let (mut above, mut within) = (Vec::new(), Vec::new());
        let inner = join.join_type == JoinType::Inner;
        for condition in join.filter.map(split_conjunction_owned).unwrap_or_default() {
            if inner && !join.on.is_empty() && has_calls(&resolve(&left, &right, condition.clone())?) {
                // The keys leave few pairs, so the condition becomes a filter above the join.
                above.push(condition);
                continue;
            }
            // Compute deferred outputs once per row below the join, not once per pair.
            left = self.materialise(left, std::slice::from_ref(&condition), stops_early)?;
            right = self.materialise(right, std::slice::from_ref(&condition), stops_early)?;
            let mut condition = vec![resolve(&left, &right, condition)?];
            if inner && condition.iter().any(has_calls) {
                (left, condition) = self.extract_side(left, condition, stops_early)?;
                (right, condition) = self.extract_side(right, condition, stops_early)?;
            }
            within.extend(condition);
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
            _ => ([left.outputs, right.outputs].concat(), [left_computed, right_computed].concat()),
        };
        let plan = LogicalPlan::Join(joined);
        let deferred = Deferred { plan, outputs, schema: join.schema, computed, is_plan: false };
        self.filtered(deferred, above, stops_early)
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
        Ok(Deferred { plan, computed, ..deferred.replace(&renamed)? })
    }

    /// Computes the join keys of an input.
    fn keys(&mut self, side: Deferred, keys: Vec<Expr>, stops_early: bool) -> Result<(Deferred, Vec<Expr>)> {
        let side = self.materialise(side, &keys, stops_early)?;
        let extracted = self.extract(side.plan.clone(), side.resolve_all(keys)?, stops_early)?;
        Ok((side.with_computed(extracted.computed, extracted.plan)?, extracted.exprs))
    }

    /// Extracts the calls of a join condition that read only this input.
    fn extract_side(
        &mut self,
        side: Deferred,
        condition: Vec<Expr>,
        stops_early: bool,
    ) -> Result<(Deferred, Vec<Expr>)> {
        let schema = Arc::clone(side.plan.schema());
        let reads_side = |call: &Expr| call.column_refs().into_iter().all(|column| schema.has_column(column));
        let extracted = self.extract_if(side.plan.clone(), condition, stops_early, reads_side)?;
        Ok((side.with_computed(extracted.computed, extracted.plan)?, extracted.exprs))
    }
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
