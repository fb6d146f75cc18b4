//! Computes embeddings as late as possible: after filters, sorts, limits and joins that do not need them.
//!
//! A plan is rebuilt from its leaves. Of each operator there is a *deferred* form: a plan without embeddings, and for each
//! output column an expression over that plan, in which calls may stand. A projection that embeds thus becomes nothing
//! but such expressions; a sort, a limit or a filter goes below them, unless it needs a vector itself. Where a vector is
//! needed at last, an [`Embed`] node is put above what there is by then, and everything above reads its column.
//!
//! The rule runs behind DataFusion's own, which push filters down and prune columns as if calls were cheap; what they
//! duplicated on the way becomes one call again.

use std::sync::Arc;

use datafusion::{
    common::{
        Column, DFSchema, DFSchemaRef, JoinType, Result, internal_err,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    logical_expr::{
        Aggregate, Expr, Filter, Join, Limit, LogicalPlan, Projection, Sort, SortExpr, SubqueryAlias,
        TableProviderFilterPushDown, TableScan, TableScanBuilder, Window, WriteOp,
        utils::{conjunction, split_conjunction_owned},
    },
    optimizer::{OptimizerConfig, OptimizerRule},
};

use super::{
    calls::{Liftable, can_wait, has_calls, is_random, liftable, put, replace},
    config::ElmoConfig,
    node::{Embed, EmbedCall},
};
use crate::rewrite::to_run_time;

/// What the names of columns begin with that this rule makes.
const PREFIX: &str = "__elmo_";

/// The rule; [`crate::plan::session`] puts it behind DataFusion's own.
#[derive(Debug, Default)]
pub struct DeferEmbedding;

impl OptimizerRule for DeferEmbedding {
    fn name(&self) -> &str {
        "elmo_defer_embedding"
    }

    fn rewrite(&self, plan: LogicalPlan, config: &dyn OptimizerConfig) -> Result<Transformed<LogicalPlan>> {
        // DataFusion evaluates calls on literals when it plans; merging projections can make new ones.
        let plan = plan.transform_up_with_subqueries(|node| {
            node.map_expressions(|expr| expr.transform_up(|e| Ok(to_run_time(e))))
        })?;
        if !ElmoConfig::of(&config.options()).rules || !needs_work(&plan.data)? {
            return Ok(plan);
        }
        let mut pass = Pass { next: last_name(&plan.data)? + 1 };
        let schema = Arc::clone(plan.data.schema());
        let deferred = pass.defer(plan.data, false)?;
        let done = pass.finish(deferred, false)?;
        if !schema.logically_equivalent_names_and_types(done.schema()) {
            return internal_err!("deferring embeddings changed the columns of the plan");
        }
        Ok(Transformed::yes(done))
    }
}

/// Whether a plan has calls outside [`Embed`] nodes.
fn needs_work(plan: &LogicalPlan) -> Result<bool> {
    let mut found = false;
    plan.apply_with_subqueries(|node| {
        if reads_its_input(node) {
            return Ok(TreeNodeRecursion::Stop);
        }
        if !matches!(node, LogicalPlan::Extension(_)) {
            node.apply_expressions(|expr| {
                found |= has_calls(expr);
                Ok(TreeNodeRecursion::Continue)
            })?;
        }
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

/// DELETE and UPDATE hand the expressions of their input to the table instead of running it: they are not for us.
fn reads_its_input(plan: &LogicalPlan) -> bool {
    let LogicalPlan::Dml(statement) = plan else { return false };
    !matches!(statement.op, WriteOp::Insert(_) | WriteOp::Ctas)
}

/// The highest number that a name of ours has in a plan: an earlier pass may have left some.
fn last_name(plan: &LogicalPlan) -> Result<usize> {
    let mut last = 0;
    plan.apply_with_subqueries(|node| {
        let names =
            node.schema().fields().iter().filter_map(|field| field.name().strip_prefix(PREFIX)?.parse::<u32>().ok());
        last = names.fold(last, |last, name| last.max(name as usize));
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(last)
}

/// A plan whose embeddings are still to be computed.
struct Deferred {
    plan: LogicalPlan,
    /// Per column of `schema`, an expression over `plan`.
    outputs: Vec<Expr>,
    /// What everybody above knows the columns as.
    schema: DFSchemaRef,
    /// Calls over `plan` that it has computed, for every row, in columns. None of a plain one.
    known: Vec<(Expr, Column)>,
    /// The outputs are the columns of `plan`, and `schema` is its schema.
    plain: bool,
}

impl Deferred {
    fn plain(plan: LogicalPlan) -> Self {
        let schema = Arc::clone(plan.schema());
        Self { plan, outputs: columns(&schema), schema, known: Vec::new(), plain: true }
    }

    /// An expression over the columns that everybody above knows, over `plan`.
    fn resolve(&self, expr: Expr) -> Result<Expr> {
        if self.plain {
            return Ok(expr);
        }
        let resolved = expr.transform(|e| match &e {
            Expr::Column(column) => match self.schema.maybe_index_of_column(column) {
                Some(index) => Ok(Transformed::yes(self.outputs[index].clone())),
                None => internal_err!("no column {column} in {}", self.schema),
            },
            _ => Ok(Transformed::no(e)),
        });
        replace(resolved?.data, &self.known)
    }

    fn resolve_all(&self, exprs: Vec<Expr>) -> Result<Vec<Expr>> {
        exprs.into_iter().map(|e| self.resolve(e)).collect()
    }

    fn replace(mut self, columns: &[(Expr, Column)]) -> Result<Self> {
        if !columns.is_empty() {
            self.outputs = self.outputs.into_iter().map(|output| replace(output, columns)).collect::<Result<_>>()?;
        }
        Ok(self)
    }

    /// Its first columns, as many as a schema has.
    fn first(mut self, schema: DFSchemaRef) -> Self {
        if self.schema == schema {
            return self;
        }
        self.outputs.truncate(schema.fields().len());
        Self { schema, plain: false, ..self }
    }

    /// The same columns over another plan, which has at least all of this one.
    fn over(self, plan: LogicalPlan) -> Self {
        let plain = self.plain && plan.schema() == &self.schema;
        Self { plan, plain, ..self }
    }

    /// The same columns over a plan that has these calls as columns by now.
    fn replace_and_keep(self, known: Vec<(Expr, Column)>, plan: LogicalPlan) -> Result<Self> {
        let mut child = self.replace(&known)?.over(plan);
        child.plain &= known.is_empty();
        child.known.extend(known);
        Ok(child)
    }
}

/// Whether an expression is to wait: it has calls, and it can be told for which rows. Else its calls stay in their places,
/// and it is evaluated once.
fn is_late(expr: &Expr) -> bool {
    has_calls(expr) && can_wait(expr)
}

fn columns(schema: &DFSchema) -> Vec<Expr> {
    schema.columns().into_iter().map(Expr::Column).collect()
}

/// A plan with the columns of some calls.
struct Lifted {
    plan: LogicalPlan,
    /// The expressions of the operator that needed them, over the plan.
    exprs: Vec<Expr>,
    /// Calls whose columns have a value in every row, for whoever comes later.
    whole: Vec<(Expr, Column)>,
}

struct Pass {
    /// Number of the next name.
    next: usize,
}

impl Pass {
    fn name(&mut self) -> String {
        self.next += 1;
        format!("{PREFIX}{}", self.next - 1)
    }

    /// The deferred form of a plan. `stops_early`: somebody above may not want all rows.
    fn defer(&mut self, plan: LogicalPlan, stops_early: bool) -> Result<Deferred> {
        let plan = plan.map_subqueries(|subquery| self.whole(subquery, false).map(Transformed::yes))?.data;
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
                let (scan, left_out) = scan_without_calls(scan)?;
                let filtered = self.filtered(Deferred::plain(LogicalPlan::TableScan(scan)), left_out, stops_early)?;
                Ok(filtered.first(schema))
            }
            plan => self.others(plan, stops_early).map(Deferred::plain),
        }
    }

    /// A plan with the same columns, whose embeddings are computed.
    fn whole(&mut self, plan: LogicalPlan, stops_early: bool) -> Result<LogicalPlan> {
        let deferred = self.defer(plan, stops_early)?;
        self.finish(deferred, stops_early)
    }

    /// Computes what is still to be computed.
    fn finish(&mut self, deferred: Deferred, stops_early: bool) -> Result<LogicalPlan> {
        if deferred.plain {
            return Ok(deferred.plan);
        }
        let Deferred { plan, outputs, schema, .. } = deferred;
        let lifted = self.lift(plan, outputs, stops_early)?;
        project(lifted.plan, lifted.exprs, &schema)
    }

    /// For operators that embeddings do not go through.
    fn others(&mut self, plan: LogicalPlan, stops_early: bool) -> Result<LogicalPlan> {
        Ok(plan.map_children(|child| self.whole(child, stops_early).map(Transformed::yes))?.data)
    }

    /// The input of an operator. A subquery in its expressions may read columns by their names, so they are computed.
    fn input(&mut self, input: Arc<LogicalPlan>, exprs: &[Expr], stops_early: bool) -> Result<Deferred> {
        let deferred = self.defer(Arc::unwrap_or_clone(input), stops_early)?;
        if deferred.plain || !exprs.iter().any(has_subquery) {
            return Ok(deferred);
        }
        Ok(Deferred::plain(self.finish(deferred, stops_early)?))
    }

    /// Puts [`Embed`]s above a plan for the calls of expressions that are evaluated there.
    fn lift(&mut self, plan: LogicalPlan, exprs: Vec<Expr>, stops_early: bool) -> Result<Lifted> {
        self.lift_those(plan, exprs, stops_early, |_| true)
    }

    /// The same for some of the calls only.
    fn lift_those(
        &mut self,
        mut plan: LogicalPlan,
        mut exprs: Vec<Expr>,
        stops_early: bool,
        wanted: impl Fn(&Expr) -> bool,
    ) -> Result<Lifted> {
        let mut whole = Vec::new();
        loop {
            let calls: Vec<Liftable> = liftable(&exprs)?.into_iter().filter(|there| wanted(&there.computed)).collect();
            if calls.is_empty() {
                return Ok(Lifted { plan, exprs, whole });
            }
            let named = calls.iter().map(|there| EmbedCall::try_new(there.computed.clone(), self.name()));
            let embed = Embed::try_new(plan, named.collect::<Result<_>>()?, stops_early)?;
            let columns: Vec<(Liftable, Column)> = calls.into_iter().zip(embed.columns()).collect();
            plan = embed.into_plan();
            exprs = exprs.into_iter().map(|e| put(e, &columns)).collect::<Result<_>>()?;
            whole.extend(
                columns.into_iter().filter(|(call, _)| call.is_whole()).map(|(call, column)| (call.call, column)),
            );
        }
    }

    fn projection(&mut self, projection: Projection, stops_early: bool) -> Result<Deferred> {
        let Projection { expr, input, schema, .. } = projection;
        let child = self.input(input, &expr, stops_early)?;
        let plain = child.plain;
        let outputs = child.resolve_all(expr)?;
        if !child.known.is_empty() && outputs.iter().all(|e| matches!(e, Expr::Column(_))) {
            return Ok(Deferred { outputs, schema, plain: false, ..child });
        }
        if !outputs.iter().any(has_calls) {
            return Ok(Deferred::plain(if plain {
                LogicalPlan::Projection(Projection::try_new_with_schema(outputs, Arc::new(child.plan), schema)?)
            } else {
                project(child.plan, outputs, &schema)?
            }));
        }
        let unmovable = |e: &Expr| has_calls(e) && (is_random(e) || has_subquery(e));
        if outputs.iter().any(unmovable) {
            let here = Deferred { outputs, schema, plain: false, ..child };
            return Ok(Deferred::plain(self.finish(here, stops_early)?));
        }
        let outputs: Vec<Expr> = outputs.into_iter().map(|e| e.unalias_nested().data).collect();
        if outputs.iter().all(|e| is_late(e) || matches!(e, Expr::Column(_))) {
            return Ok(Deferred { outputs, schema, plain: false, ..child });
        }
        self.split(child.plan, outputs, schema)
    }

    /// Computes the outputs without calls now, beside the columns that the others will read.
    fn split(&mut self, plan: LogicalPlan, outputs: Vec<Expr>, schema: DFSchemaRef) -> Result<Deferred> {
        let (mut below, mut late) = (Vec::new(), Vec::new());
        let mut columns: Vec<(Column, Column)> = Vec::new();
        for output in outputs {
            if is_late(&output) {
                for column in output.column_refs().into_iter().cloned().collect::<std::collections::BTreeSet<_>>() {
                    if !columns.iter().any(|(there, _)| *there == column) {
                        let name = self.name();
                        below.push(Expr::Column(column.clone()).alias(&name));
                        columns.push((column, Column::new_unqualified(name)));
                    }
                }
                late.push(output);
            } else {
                let name = self.name();
                below.push(output.alias(&name));
                late.push(Expr::Column(Column::new_unqualified(name)));
            }
        }
        let moved: Vec<(Expr, Column)> = columns.into_iter().map(|(from, to)| (Expr::Column(from), to)).collect();
        let outputs = late.into_iter().map(|o| if is_late(&o) { replace(o, &moved) } else { Ok(o) });
        let outputs = outputs.collect::<Result<_>>()?;
        let plan = LogicalPlan::Projection(Projection::try_new(below, Arc::new(plan))?);
        Ok(Deferred { plan, outputs, schema, known: Vec::new(), plain: false })
    }

    fn filter(&mut self, filter: Filter, stops_early: bool) -> Result<Deferred> {
        let child = self.input(filter.input, std::slice::from_ref(&filter.predicate), stops_early)?;
        self.filtered(child, split_conjunction_owned(filter.predicate), stops_early)
    }

    /// First the conditions that need no vector; then, one after the other, those that do. Conditions are over the columns
    /// that everybody knows.
    fn filtered(&mut self, mut child: Deferred, conjuncts: Vec<Expr>, stops_early: bool) -> Result<Deferred> {
        let (mut costly, mut cheap) = (Vec::new(), Vec::new());
        for condition in conjuncts {
            let resolved = child.resolve(condition.clone())?;
            if has_calls(&resolved) { costly.push(condition) } else { cheap.push(resolved) }
        }
        if let Some(predicate) = conjunction(cheap) {
            let plan = LogicalPlan::Filter(Filter::try_new(predicate, Arc::new(child.plan.clone()))?);
            child = child.over(plan);
        }
        for condition in costly {
            child = self.settle(child, std::slice::from_ref(&condition), stops_early)?;
            let condition = child.resolve(condition)?;
            let Lifted { mut plan, exprs, whole } = self.lift(child.plan.clone(), vec![condition], stops_early)?;
            for condition in exprs {
                plan = LogicalPlan::Filter(Filter::try_new(condition, Arc::new(plan))?);
            }
            child = child.replace_and_keep(whole, plan)?;
        }
        Ok(child)
    }

    /// Computes the columns that expressions read, as far as they are still to be computed: whoever comes later reads the
    /// same. Expressions are over the columns that everybody knows.
    fn settle(&mut self, mut child: Deferred, exprs: &[Expr], stops_early: bool) -> Result<Deferred> {
        let read: std::collections::BTreeSet<usize> = exprs
            .iter()
            .flat_map(Expr::column_refs)
            .filter_map(|column| child.schema.maybe_index_of_column(column))
            .filter(|index| has_calls(&child.outputs[*index]))
            .collect();
        if read.is_empty() {
            return Ok(child);
        }
        let outputs = read.iter().map(|index| child.outputs[*index].clone()).collect();
        let Lifted { plan, exprs, whole } = self.lift(child.plan.clone(), outputs, stops_early)?;
        // What was a column stays one: DataFusion cannot sort by every expression that it can compute.
        let mut below = columns(plan.schema());
        let there = below.len();
        let mut settled = Vec::new();
        for (index, output) in read.into_iter().zip(exprs) {
            settled.push((
                index,
                match output {
                    Expr::Column(_) => output,
                    output => {
                        let name = self.name();
                        below.push(output.alias(&name));
                        Expr::Column(Column::new_unqualified(name))
                    }
                },
            ));
        }
        let plan = match below.len() > there {
            true => LogicalPlan::Projection(Projection::try_new(below, Arc::new(plan))?),
            false => plan,
        };
        child = child.replace_and_keep(whole, plan)?;
        child.plain = false;
        for (index, output) in settled {
            child.outputs[index] = output;
        }
        Ok(child)
    }

    fn sort(&mut self, sort: Sort) -> Result<Deferred> {
        let keys: Vec<Expr> = sort.expr.iter().map(|key| key.expr.clone()).collect();
        let child = self.input(sort.input, &keys, false)?;
        let child = self.settle(child, &keys, false)?;
        let lifted = self.lift(child.plan.clone(), child.resolve_all(keys)?, false)?;
        let expr = lifted.exprs.into_iter().zip(sort.expr).map(|(expr, sort)| SortExpr { expr, ..sort }).collect();
        let plan = LogicalPlan::Sort(Sort { expr, input: Arc::new(lifted.plan), fetch: sort.fetch });
        child.replace_and_keep(lifted.whole, plan)
    }

    fn limit(&mut self, limit: Limit) -> Result<Deferred> {
        let child = self.defer(Arc::unwrap_or_clone(limit.input), true)?;
        let input = Arc::new(child.plan.clone());
        let plan = LogicalPlan::Limit(Limit { skip: limit.skip, fetch: limit.fetch, input });
        Ok(child.over(plan))
    }

    fn alias(&mut self, alias: SubqueryAlias, stops_early: bool) -> Result<Deferred> {
        let child = self.defer(Arc::unwrap_or_clone(alias.input), stops_early)?;
        if !child.plain {
            return Ok(Deferred { schema: alias.schema, ..child });
        }
        let plan = SubqueryAlias::try_new(Arc::new(child.plan), alias.alias)?;
        Ok(Deferred::plain(LogicalPlan::SubqueryAlias(plan)))
    }

    fn aggregate(&mut self, aggregate: Aggregate) -> Result<Deferred> {
        let Aggregate { input, group_expr, aggr_expr, schema, .. } = aggregate;
        let groups = group_expr.len();
        let sets = group_expr.iter().any(|key| matches!(key, Expr::GroupingSet(_)));
        let exprs = [group_expr, aggr_expr].concat();
        let mut child = self.input(input, &exprs, false)?;
        if sets && !child.plain {
            // Sets of columns that are the same under other names would fall together.
            child = Deferred::plain(self.finish(child, false)?);
        }
        let plain = child.plain && !exprs.iter().any(has_calls);
        let child = self.settle(child, &orders(&exprs), false)?;
        let exprs = child.resolve_all(exprs)?;
        let Lifted { plan: below, mut exprs, .. } = self.lift(child.plan, exprs, false)?;
        let aggr_expr = exprs.split_off(groups);
        if plain {
            let same = Aggregate::try_new_with_schema(Arc::new(below), exprs, aggr_expr, schema)?;
            return Ok(Deferred::plain(LogicalPlan::Aggregate(same)));
        }
        // What had names of its own may be the same column now, and names come from expressions.
        let (below, group_expr) = self.group_keys(below, exprs, &aggr_expr)?;
        let aggr_expr = aggr_expr.into_iter().map(|e| e.unalias().alias(self.name())).collect();
        let plan = LogicalPlan::Aggregate(Aggregate::try_new(Arc::new(below), group_expr, aggr_expr)?);
        let outputs = columns(plan.schema());
        Ok(Deferred { plan, outputs, schema, known: Vec::new(), plain: false })
    }

    /// Keys to group by under names of their own, and the plan that has them.
    fn group_keys(&mut self, plan: LogicalPlan, keys: Vec<Expr>, others: &[Expr]) -> Result<(LogicalPlan, Vec<Expr>)> {
        // By their names, in which casts do not show.
        let names: std::collections::BTreeSet<String> = keys.iter().map(|key| key.schema_name().to_string()).collect();
        if names.len() == keys.len() || keys.iter().any(|key| matches!(key, Expr::GroupingSet(_))) {
            return Ok((plan, keys));
        }
        let (mut below, mut columns) = (Vec::new(), Vec::new());
        for key in keys {
            let name = self.name();
            below.push(key.alias(&name));
            columns.push(Expr::Column(Column::new_unqualified(name)));
        }
        let read: std::collections::BTreeSet<Column> = others.iter().flat_map(Expr::column_refs).cloned().collect();
        below.extend(read.into_iter().map(Expr::Column));
        Ok((LogicalPlan::Projection(Projection::try_new(below, Arc::new(plan))?), columns))
    }

    fn window(&mut self, window: Window) -> Result<Deferred> {
        let Window { input, window_expr, schema } = window;
        let child = self.input(input, &window_expr, false)?;
        let plain = child.plain && !window_expr.iter().any(has_calls);
        let child = self.settle(child, &window_expr, false)?;
        let Lifted { plan: below, exprs, whole } =
            self.lift(child.plan.clone(), child.resolve_all(window_expr)?, false)?;
        let input = Arc::new(below);
        if plain {
            return Ok(Deferred::plain(LogicalPlan::Window(Window::try_new_with_schema(exprs, input, schema)?)));
        }
        // Under other names the input may have the same column already, and DataFusion cannot do with two.
        let (mut fresh, mut computed) = (Vec::new(), Vec::new());
        for expr in exprs.into_iter().map(Expr::unalias) {
            computed.push(Expr::Column(match window_column(&input, &expr) {
                Some(column) => column,
                None => {
                    let name = self.name();
                    fresh.push(expr.alias(&name));
                    Column::new_unqualified(name)
                }
            }));
        }
        let plan = match fresh.is_empty() {
            true => Arc::unwrap_or_clone(input),
            false => LogicalPlan::Window(Window::try_new(fresh, input)?),
        };
        let child = child.replace_and_keep(whole, plan)?;
        Ok(Deferred { outputs: [child.outputs, computed].concat(), schema, plain: false, ..child })
    }

    fn join(&mut self, join: Join, stops_early: bool) -> Result<Deferred> {
        let exprs: Vec<Expr> =
            join.on.iter().flat_map(|(l, r)| [l.clone(), r.clone()]).chain(join.filter.clone()).collect();
        if exprs.iter().any(has_subquery) || matches!(join.join_type, JoinType::LeftMark | JoinType::RightMark) {
            return self.others(LogicalPlan::Join(join), stops_early).map(Deferred::plain);
        }
        let mut left = self.side(&join.left, makes_nulls_left(join.join_type), stops_early)?;
        let mut right = self.side(&join.right, makes_nulls_right(join.join_type), stops_early)?;
        if left.plain && right.plain && !exprs.iter().any(has_calls) {
            let (left, right) = (Arc::new(left.plan), Arc::new(right.plan));
            return Ok(Deferred::plain(LogicalPlan::Join(Join { left, right, ..join })));
        }
        // Keys that are vectors must be there before the join.
        let mut keys: (Vec<Expr>, Vec<Expr>) = join.on.iter().cloned().unzip();
        (left, keys.0) = self.keys(left, keys.0, stops_early)?;
        (right, keys.1) = self.keys(right, keys.1, stops_early)?;
        let (mut above, mut within) = (Vec::new(), Vec::new());
        let inner = join.join_type == JoinType::Inner;
        for conjunct in join.filter.map(split_conjunction_owned).unwrap_or_default() {
            if inner && !join.on.is_empty() && has_calls(&resolve_both(&left, &right, conjunct.clone())?) {
                // Pairs are few: their vectors are computed, if need be, when it is known which pairs there are.
                above.push(conjunct);
                continue;
            }
            // What is computed in a column is computed once, not for every pair.
            left = self.settle(left, std::slice::from_ref(&conjunct), stops_early)?;
            right = self.settle(right, std::slice::from_ref(&conjunct), stops_early)?;
            let mut conjunct = vec![resolve_both(&left, &right, conjunct)?];
            if inner && conjunct.iter().any(has_calls) {
                (left, conjunct) = self.one_side(left, conjunct, stops_early)?;
                (right, conjunct) = self.one_side(right, conjunct, stops_early)?;
            }
            within.extend(conjunct);
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
        // Where the join fills in NULLs, a call may have another value than its column.
        let (makes_left, makes_right) = (makes_nulls_left(join.join_type), makes_nulls_right(join.join_type));
        let known = |side: Vec<_>, makes_nulls| if makes_nulls { Vec::new() } else { side };
        let (left_known, right_known) = (known(left.known, makes_left), known(right.known, makes_right));
        let (outputs, known) = match join.join_type {
            JoinType::LeftSemi | JoinType::LeftAnti => (left.outputs, left_known),
            JoinType::RightSemi | JoinType::RightAnti => (right.outputs, right_known),
            _ => ([left.outputs, right.outputs].concat(), [left_known, right_known].concat()),
        };
        let deferred = Deferred { plan: LogicalPlan::Join(joined), outputs, schema: join.schema, known, plain: false };
        self.filtered(deferred, above, stops_early)
    }

    /// A side of a join, under names that no other side has. Where the join fills in NULLs for missing rows, expressions
    /// over them would not be NULL, so they are computed before.
    fn side(&mut self, plan: &LogicalPlan, makes_nulls: bool, stops_early: bool) -> Result<Deferred> {
        let side = self.defer(plan.clone(), stops_early)?;
        match side.plain {
            true => Ok(side),
            false if makes_nulls => Ok(Deferred::plain(self.finish(side, stops_early)?)),
            false => self.rename(side),
        }
    }

    fn rename(&mut self, deferred: Deferred) -> Result<Deferred> {
        let old = deferred.plan.schema().columns();
        let renamed: Vec<(Expr, Column)> =
            old.into_iter().map(|column| (Expr::Column(column), Column::new_unqualified(self.name()))).collect();
        let exprs = renamed.iter().map(|(old, new)| old.clone().alias(&new.name)).collect();
        let plan = LogicalPlan::Projection(Projection::try_new(exprs, Arc::new(deferred.plan.clone()))?);
        let known = deferred.known.iter().cloned().map(|(call, column)| {
            let place = renamed.iter().position(|(old, _)| *old == Expr::Column(column.clone()));
            let column = place.map_or(column, |place| renamed[place].1.clone());
            Ok((replace(call, &renamed)?, column))
        });
        let known = known.collect::<Result<_>>()?;
        Ok(Deferred { plan, known, ..deferred.replace(&renamed)? })
    }

    fn keys(&mut self, side: Deferred, keys: Vec<Expr>, stops_early: bool) -> Result<(Deferred, Vec<Expr>)> {
        let side = self.settle(side, &keys, stops_early)?;
        let lifted = self.lift(side.plan.clone(), side.resolve_all(keys)?, stops_early)?;
        Ok((side.replace_and_keep(lifted.whole, lifted.plan)?, lifted.exprs))
    }

    /// Lifts those calls of a join's condition that read one side only.
    fn one_side(&mut self, side: Deferred, condition: Vec<Expr>, stops_early: bool) -> Result<(Deferred, Vec<Expr>)> {
        let schema = Arc::clone(side.plan.schema());
        let reads_side = |call: &Expr| call.column_refs().into_iter().all(|column| schema.has_column(column));
        let lifted = self.lift_those(side.plan.clone(), condition, stops_early, reads_side)?;
        Ok((side.replace_and_keep(lifted.whole, lifted.plan)?, lifted.exprs))
    }
}

/// What aggregate functions sort all rows by. One with FILTER computes it for those that it lets through.
fn orders(exprs: &[Expr]) -> Vec<Expr> {
    let mut orders = Vec::new();
    for expr in exprs {
        // Visiting cannot fail when the visitor does not.
        let _ = expr.apply(|e| {
            if let Expr::AggregateFunction(aggregate) = e
                && aggregate.params.filter.is_none()
            {
                orders.extend(aggregate.params.order_by.iter().map(|key| key.expr.clone()));
            }
            Ok(TreeNodeRecursion::Continue)
        });
    }
    orders
}

/// The column of a window expression in a plan that consists of windows on top.
fn window_column(plan: &LogicalPlan, expr: &Expr) -> Option<Column> {
    let LogicalPlan::Window(window) = plan else { return None };
    let inputs = window.input.schema().fields().len();
    let there = window.window_expr.iter().position(|there| there.clone().unalias() == *expr);
    match there {
        Some(place) => window.schema.columns().into_iter().nth(inputs + place),
        None => window_column(&window.input, expr),
    }
}

/// The filter of a join, over both plans.
fn resolve_both(left: &Deferred, right: &Deferred, expr: Expr) -> Result<Expr> {
    let resolved = expr.transform(|e| match &e {
        Expr::Column(column) => {
            let side = if left.schema.has_column(column) { left } else { right };
            side.resolve(e).map(Transformed::yes)
        }
        _ => Ok(Transformed::no(e)),
    });
    replace(replace(resolved?.data, &left.known)?, &right.known)
}

fn makes_nulls_left(join: JoinType) -> bool {
    matches!(join, JoinType::Right | JoinType::Full)
}

fn makes_nulls_right(join: JoinType) -> bool {
    matches!(join, JoinType::Left | JoinType::Full)
}

fn has_subquery(expr: &Expr) -> bool {
    let is_subquery = |e: &Expr| {
        matches!(e, Expr::ScalarSubquery(_) | Expr::Exists(_) | Expr::InSubquery(_) | Expr::SetComparison(_))
    };
    expr.exists(|e| Ok(is_subquery(e))).unwrap_or(true)
}

/// A projection whose columns have the names of a schema.
fn project(plan: LogicalPlan, exprs: Vec<Expr>, schema: &DFSchema) -> Result<LogicalPlan> {
    let named = exprs.into_iter().zip(schema.iter()).map(|(expr, (qualifier, field))| {
        let is_named = expr.qualified_name() == (qualifier.cloned(), field.name().clone());
        if is_named { expr } else { expr.alias_qualified(qualifier.cloned(), field.name()) }
    });
    Ok(LogicalPlan::Projection(Projection::try_new(named.collect(), Arc::new(plan))?))
}

/// Takes calls out of what a table was asked to filter by: it would embed inside the scan, or when the query is planned.
/// What it promised to leave out comes back, to be left out above it; columns that this reads and nobody else come last.
fn scan_without_calls(mut scan: TableScan) -> Result<(TableScan, Vec<Expr>)> {
    let (costly, cheap): (Vec<Expr>, Vec<Expr>) = scan.filters.iter().cloned().partition(has_calls);
    if costly.is_empty() {
        return Ok((scan, Vec::new()));
    }
    let answers = scan.source.supports_filters_pushdown(&costly.iter().collect::<Vec<_>>())?;
    let exact = costly.into_iter().zip(answers).filter(|(_, answer)| *answer == TableProviderFilterPushDown::Exact);
    let exact: Vec<Expr> = exact.map(|(filter, _)| filter).collect();
    if exact.is_empty() {
        scan.filters = cheap;
        return Ok((scan, exact));
    }
    let mut columns = match &scan.projection {
        Some(columns) => columns.clone(),
        None => (0..scan.source.schema().fields().len()).collect(),
    };
    for column in exact.iter().flat_map(Expr::column_refs) {
        let column = scan.source.schema().index_of(&column.name)?;
        if !columns.contains(&column) {
            columns.push(column);
        }
    }
    // So many rows are wanted of those that are left, which the table does not know any more; the limit is above, too.
    let scan = TableScanBuilder::new(scan.table_name, scan.source).with_projection(Some(columns));
    Ok((scan.with_filters(cheap).build()?, exact))
}
