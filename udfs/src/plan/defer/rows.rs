//! Deferral through operators on single rows and their order: projection, filter, sort, limit and alias.

use std::{collections::BTreeSet, sync::Arc};

use datafusion::{
    common::{Column, DFSchemaRef, Result},
    logical_expr::{
        Expr, Filter, Limit, LogicalPlan, Projection, Sort, SortExpr, SubqueryAlias,
        utils::{conjunction, split_conjunction_owned},
    },
};

use super::{
    super::{
        calls::{has_calls, replace_exprs},
        expr::{has_subquery, is_volatile},
    },
    deferred::{Deferred, can_be_deferred},
    pass::{Extracted, Pass, project},
};

impl Pass {
    pub(super) fn projection(&mut self, projection: Projection, stops_early: bool) -> Result<Deferred> {
        let Projection { expr, input, schema, .. } = projection;
        let input = self.input(input, &expr, stops_early)?;
        let was_plan = input.is_plan;
        let outputs = input.resolve_all(expr)?;
        if !input.computed.is_empty() && outputs.iter().all(|e| matches!(e, Expr::Column(_))) {
            return Ok(Deferred { outputs, schema, is_plan: false, ..input });
        }
        if !outputs.iter().any(has_calls) {
            return Ok(Deferred::from_plan(if was_plan {
                LogicalPlan::Projection(Projection::try_new_with_schema(outputs, Arc::new(input.plan), schema)?)
            } else {
                project(input.plan, outputs, &schema)?
            }));
        }
        let unmovable = |e: &Expr| has_calls(e) && (is_volatile(e) || has_subquery(e));
        if outputs.iter().any(unmovable) {
            let deferred = Deferred { outputs, schema, is_plan: false, ..input };
            return Ok(Deferred::from_plan(self.finish(deferred, stops_early)?));
        }
        let outputs: Vec<Expr> = outputs.into_iter().map(|e| e.unalias_nested().data).collect();
        if outputs.iter().all(|e| can_be_deferred(e) || matches!(e, Expr::Column(_))) {
            return Ok(Deferred { outputs, schema, is_plan: false, ..input });
        }
        self.split_outputs(input.plan, outputs, schema)
    }

    /// Computes the outputs that cannot be deferred, beside the columns that the deferred outputs will read.
    fn split_outputs(&mut self, plan: LogicalPlan, outputs: Vec<Expr>, schema: DFSchemaRef) -> Result<Deferred> {
        let (mut projected, mut deferred) = (Vec::new(), Vec::new());
        let mut columns: Vec<(Column, Column)> = Vec::new();
        for output in outputs {
            if can_be_deferred(&output) {
                for column in output.column_refs().into_iter().cloned().collect::<BTreeSet<_>>() {
                    if !columns.iter().any(|(other, _)| *other == column) {
                        let name = self.column_name();
                        projected.push(Expr::Column(column.clone()).alias(&name));
                        columns.push((column, Column::new_unqualified(name)));
                    }
                }
                deferred.push(output);
            } else {
                let name = self.column_name();
                projected.push(output.alias(&name));
                deferred.push(Expr::Column(Column::new_unqualified(name)));
            }
        }
        let renamed: Vec<(Expr, Column)> = columns.into_iter().map(|(from, to)| (Expr::Column(from), to)).collect();
        let outputs =
            deferred.into_iter().map(|o| if can_be_deferred(&o) { replace_exprs(o, &renamed) } else { Ok(o) });
        let outputs = outputs.collect::<Result<_>>()?;
        let plan = LogicalPlan::Projection(Projection::try_new(projected, Arc::new(plan))?);
        Ok(Deferred { plan, outputs, schema, computed: Vec::new(), is_plan: false })
    }

    pub(super) fn filter(&mut self, filter: Filter, stops_early: bool) -> Result<Deferred> {
        let input = self.input(filter.input, std::slice::from_ref(&filter.predicate), stops_early)?;
        self.filtered(input, split_conjunction_owned(filter.predicate), stops_early)
    }

    /// Applies the conditions without calls first, and then those with calls, one after the other. Conditions are over
    /// the schema.
    pub(super) fn filtered(&mut self, input: Deferred, conditions: Vec<Expr>, stops_early: bool) -> Result<Deferred> {
        let mut deferred = input;
        let (mut costly, mut cheap) = (Vec::new(), Vec::new());
        for condition in conditions {
            let resolved = deferred.resolve(condition.clone())?;
            if has_calls(&resolved) { costly.push(condition) } else { cheap.push(resolved) }
        }
        if let Some(predicate) = conjunction(cheap) {
            let plan = LogicalPlan::Filter(Filter::try_new(predicate, Arc::new(deferred.plan.clone()))?);
            deferred = deferred.with_plan(plan);
        }
        for condition in costly {
            deferred = self.materialise(deferred, std::slice::from_ref(&condition), stops_early)?;
            let condition = deferred.resolve(condition)?;
            let Extracted { mut plan, exprs, computed } =
                self.extract(deferred.plan.clone(), vec![condition], stops_early)?;
            for condition in exprs {
                plan = LogicalPlan::Filter(Filter::try_new(condition, Arc::new(plan))?);
            }
            deferred = deferred.with_computed(computed, plan)?;
        }
        Ok(deferred)
    }

    pub(super) fn sort(&mut self, sort: Sort) -> Result<Deferred> {
        let keys: Vec<Expr> = sort.expr.iter().map(|key| key.expr.clone()).collect();
        let input = self.input(sort.input, &keys, false)?;
        let input = self.materialise(input, &keys, false)?;
        let extracted = self.extract(input.plan.clone(), input.resolve_all(keys)?, false)?;
        let expr = extracted.exprs.into_iter().zip(sort.expr).map(|(expr, sort)| SortExpr { expr, ..sort }).collect();
        let plan = LogicalPlan::Sort(Sort { expr, input: Arc::new(extracted.plan), fetch: sort.fetch });
        input.with_computed(extracted.computed, plan)
    }

    pub(super) fn limit(&mut self, limit: Limit) -> Result<Deferred> {
        let input = self.defer(Arc::unwrap_or_clone(limit.input), true)?;
        let limited = Arc::new(input.plan.clone());
        let plan = LogicalPlan::Limit(Limit { skip: limit.skip, fetch: limit.fetch, input: limited });
        Ok(input.with_plan(plan))
    }

    pub(super) fn alias(&mut self, alias: SubqueryAlias, stops_early: bool) -> Result<Deferred> {
        let input = self.defer(Arc::unwrap_or_clone(alias.input), stops_early)?;
        if !input.is_plan {
            return Ok(Deferred { schema: alias.schema, ..input });
        }
        let plan = SubqueryAlias::try_new(Arc::new(input.plan), alias.alias)?;
        Ok(Deferred::from_plan(LogicalPlan::SubqueryAlias(plan)))
    }
}
