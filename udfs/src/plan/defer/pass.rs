//! One run of the rule over a plan. The methods for single operators are in `rows`, `groups` and `join`.

use std::{collections::BTreeSet, sync::Arc};

use datafusion::{
    common::{
        Column, DFSchema, Result,
        tree_node::{Transformed, TreeNode},
    },
    logical_expr::{Expr, LogicalPlan, Projection},
};

use super::{
    super::{
        calls::{Extractable, calls_of, extractable_calls, has_calls, replace_exprs, replace_extracted},
        expr::has_subquery,
        node::{Embed, EmbedCall},
    },
    deferred::{Deferred, columns},
    scan::scan_without_calls,
};

/// The prefix of the column names that the rule makes.
pub(super) const COLUMN_PREFIX: &str = "__elmo_";

/// A plan that computes extracted calls.
pub(super) struct Extracted {
    pub(super) plan: LogicalPlan,
    /// The expressions from which calls were extracted, over `plan`.
    pub(super) exprs: Vec<Expr>,
    /// The calls that are computed for all rows, and their columns.
    pub(super) computed: Vec<(Expr, Column)>,
}

/// The state of a run.
///
/// The parameter `stops_early` of the methods says whether an operator above may stop before the last row.
pub(super) struct Pass {
    /// The number of the next column name.
    next: usize,
}

impl Pass {
    /// A run whose column names are numbered from `first`.
    pub(super) fn new(first: usize) -> Self {
        Self { next: first }
    }

    /// A new column name.
    pub(super) fn column_name(&mut self) -> String {
        self.next += 1;
        format!("{COLUMN_PREFIX}{}", self.next - 1)
    }

    /// Defers the calls of a plan.
    pub(super) fn defer(&mut self, plan: LogicalPlan, stops_early: bool) -> Result<Deferred> {
        let plan = plan.map_subqueries(|subquery| self.complete(subquery, false).map(Transformed::yes))?.data;
        match plan {
            LogicalPlan::Projection(projection) => self.projection(projection, stops_early),
            LogicalPlan::Filter(filter) => self.filter(filter, stops_early),
            LogicalPlan::Sort(sort) => self.sort(sort),
            LogicalPlan::Limit(limit) => self.limit(limit),
            LogicalPlan::SubqueryAlias(alias) => self.alias(alias, stops_early),
            LogicalPlan::Join(join) => self.join(join, stops_early),
            LogicalPlan::Aggregate(aggregate) => self.aggregate(aggregate),
            LogicalPlan::Window(window) => self.window(window),
            LogicalPlan::TableScan(scan) => {
                let schema = Arc::clone(&scan.projected_schema);
                let (scan, filters) = scan_without_calls(scan)?;
                let scanned = Deferred::from_plan(LogicalPlan::TableScan(scan));
                Ok(self.filtered(scanned, filters, stops_early)?.truncate(schema))
            }
            plan => self.complete_inputs(plan, stops_early).map(Deferred::from_plan),
        }
    }

    /// Rewrites a plan so that it computes all of its calls.
    fn complete(&mut self, plan: LogicalPlan, stops_early: bool) -> Result<LogicalPlan> {
        let deferred = self.defer(plan, stops_early)?;
        self.finish(deferred, stops_early)
    }

    /// Computes the deferred calls.
    pub(super) fn finish(&mut self, deferred: Deferred, stops_early: bool) -> Result<LogicalPlan> {
        if deferred.is_plan {
            return Ok(deferred.plan);
        }
        let Deferred { plan, outputs, schema, .. } = deferred;
        let extracted = self.extract(plan, outputs, stops_early)?;
        project(extracted.plan, extracted.exprs, &schema)
    }

    /// Completes the inputs of an operator through which calls are not deferred.
    pub(super) fn complete_inputs(&mut self, plan: LogicalPlan, stops_early: bool) -> Result<LogicalPlan> {
        Ok(plan.map_children(|child| self.complete(child, stops_early).map(Transformed::yes))?.data)
    }

    /// Defers the calls of an operator's input. A subquery in `exprs` may refer to columns of the input by name: then
    /// the input is completed.
    pub(super) fn input(&mut self, input: Arc<LogicalPlan>, exprs: &[Expr], stops_early: bool) -> Result<Deferred> {
        let deferred = self.defer(Arc::unwrap_or_clone(input), stops_early)?;
        if deferred.is_plan || !exprs.iter().any(has_subquery) {
            return Ok(deferred);
        }
        Ok(Deferred::from_plan(self.finish(deferred, stops_early)?))
    }

    /// Extracts the calls of expressions over a plan into `Embed` operators above the plan.
    pub(super) fn extract(&mut self, plan: LogicalPlan, exprs: Vec<Expr>, stops_early: bool) -> Result<Extracted> {
        self.extract_where(plan, exprs, None, stops_early, |_| true)
    }

    /// Extracts the calls that fulfil a predicate, which is over the calls with their path conditions. The texts of rows
    /// for which `condition` does not hold are not embedded.
    pub(super) fn extract_where(
        &mut self,
        mut plan: LogicalPlan,
        mut exprs: Vec<Expr>,
        condition: Option<&Expr>,
        stops_early: bool,
        predicate: impl Fn(&Expr) -> bool,
    ) -> Result<Extracted> {
        let mut computed = Vec::new();
        // Each round makes the path conditions of further calls known.
        loop {
            let calls = extractable_calls(&exprs)?.into_iter().filter(|call| predicate(&call.computed));
            let calls = calls.map(|call| call.only_where(condition)).collect::<Result<Vec<_>>>()?;
            if calls.is_empty() {
                return Ok(Extracted { plan, exprs, computed });
            }
            let named = calls.iter().map(|call| EmbedCall::try_new(call.computed.clone(), self.column_name()));
            let embed = Embed::try_new(plan, named.collect::<Result<_>>()?, stops_early)?;
            let columns: Vec<(Extractable, Column)> = calls.into_iter().zip(embed.columns()).collect();
            plan = embed.into_plan();
            exprs = exprs.into_iter().map(|e| replace_extracted(e, &columns)).collect::<Result<_>>()?;
            let unconditional = columns.into_iter().filter(|(call, _)| call.is_unconditional());
            computed.extend(unconditional.map(|(call, column)| (call.call, column)));
        }
    }

    /// Extracts the calls that fulfil a predicate, whatever their path conditions, for the rows for which `condition`
    /// holds. It must hold wherever the expressions are evaluated.
    pub(super) fn extract_all(
        &mut self,
        plan: LogicalPlan,
        exprs: Vec<Expr>,
        condition: Option<&Expr>,
        stops_early: bool,
        predicate: impl Fn(&Expr) -> bool,
    ) -> Result<Extracted> {
        let calls: Vec<Expr> = calls_of(&exprs)?.into_iter().filter(predicate).collect();
        if calls.is_empty() {
            return Ok(Extracted { plan, exprs, computed: Vec::new() });
        }
        let calls = calls.into_iter().map(|call| Extractable::unconditional(call).only_where(condition));
        let calls = calls.collect::<Result<Vec<_>>>()?;
        let named = calls.iter().map(|call| EmbedCall::try_new(call.computed.clone(), self.column_name()));
        let embed = Embed::try_new(plan, named.collect::<Result<_>>()?, stops_early)?;
        let (unconditional, columns): (Vec<bool>, Vec<(Expr, Column)>) = calls
            .into_iter()
            .zip(embed.columns())
            .map(|(call, column)| (call.is_unconditional(), (call.call, column)))
            .unzip();
        let exprs = exprs.into_iter().map(|e| replace_exprs(e, &columns)).collect::<Result<_>>()?;
        let computed =
            columns.into_iter().zip(unconditional).filter_map(|(column, all)| all.then_some(column)).collect();
        Ok(Extracted { plan: embed.into_plan(), exprs, computed })
    }

    /// Computes the deferred outputs that expressions over the schema read, so that later operators read the same
    /// columns.
    pub(super) fn materialise(&mut self, input: Deferred, exprs: &[Expr], stops_early: bool) -> Result<Deferred> {
        let read: BTreeSet<usize> = exprs
            .iter()
            .flat_map(Expr::column_refs)
            .filter_map(|column| input.schema.maybe_index_of_column(column))
            .filter(|index| has_calls(&input.outputs[*index]))
            .collect();
        if read.is_empty() {
            return Ok(input);
        }
        let outputs = read.iter().map(|index| input.outputs[*index].clone()).collect();
        let Extracted { plan, exprs, computed } = self.extract(input.plan.clone(), outputs, stops_early)?;
        // Outputs become columns, not just expressions over columns: DataFusion cannot sort by every expression that it
        // can compute.
        let mut projected = columns(plan.schema());
        let plan_columns = projected.len();
        let mut materialised = Vec::new();
        for (index, output) in read.into_iter().zip(exprs) {
            let column = match output {
                Expr::Column(_) => output,
                output => {
                    let name = self.column_name();
                    projected.push(output.alias(&name));
                    Expr::Column(Column::new_unqualified(name))
                }
            };
            materialised.push((index, column));
        }
        let plan = match projected.len() > plan_columns {
            true => LogicalPlan::Projection(Projection::try_new(projected, Arc::new(plan))?),
            false => plan,
        };
        let mut deferred = input.with_computed(computed, plan)?;
        deferred.is_plan = false;
        for (index, column) in materialised {
            deferred.outputs[index] = column;
        }
        Ok(deferred)
    }
}

/// A projection whose columns have the names of a schema.
pub(super) fn project(plan: LogicalPlan, exprs: Vec<Expr>, schema: &DFSchema) -> Result<LogicalPlan> {
    let named = exprs.into_iter().zip(schema.iter()).map(|(expr, (qualifier, field))| {
        let is_named = expr.qualified_name() == (qualifier.cloned(), field.name().clone());
        if is_named { expr } else { expr.alias_qualified(qualifier.cloned(), field.name()) }
    });
    Ok(LogicalPlan::Projection(Projection::try_new(named.collect(), Arc::new(plan))?))
}
