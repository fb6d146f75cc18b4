//! What of a query runs on the cluster: all that embeds, and what leaves many rows of files out. The rest, and what is
//! written, stays in the process that asks.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use datafusion::{
    catalog::Session,
    common::{Result, format::ExplainFormat},
    execution::{SessionState, context::QueryPlanner, session_state::SessionStateBuilder},
    logical_expr::{Explain, LogicalPlan, PlanType},
    physical_plan::{
        ExecutionPlan, ExecutionPlanProperties,
        analyze::AnalyzeExec,
        coalesce_partitions::CoalescePartitionsExec,
        coop::CooperativeExec,
        displayable,
        explain::ExplainExec,
        filter::FilterExec,
        limit::{GlobalLimitExec, LocalLimitExec},
        projection::ProjectionExec,
        replace_children_if_necessary,
        scalar_subquery::ScalarSubqueryExec,
        sorts::{sort::SortExec, sort_preserving_merge::SortPreservingMergeExec},
        union::UnionExec,
    },
};

use crate::sql::Remote;

use super::{
    client::Cluster,
    order::InOrderExec,
    part::ClusterExec,
    rows::ClusterRowsExec,
    scans, session_config,
    travel::{
        Plan, first_rows, has_calls, has_calls_within, in_one_task, is_part, is_row_by_row, is_too_deep, reduces,
        spreads,
    },
};

/// Plans as `inner` does, and sends what is for the cluster there.
struct ClusterPlanner {
    inner: Arc<dyn QueryPlanner + Send + Sync>,
    cluster: Cluster,
}

impl Remote for Cluster {
    fn extend(&self, mut builder: SessionStateBuilder) -> SessionStateBuilder {
        let inner = builder.query_planner().take();
        let config = session_config();
        match inner {
            Some(inner) => {
                let cluster = self.clone();
                builder.with_config(config).with_query_planner(Arc::new(ClusterPlanner { inner, cluster }))
            }
            None => builder,
        }
    }
}

impl fmt::Debug for ClusterPlanner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterPlanner({})", self.cluster.address())
    }
}

#[async_trait]
impl QueryPlanner for ClusterPlanner {
    async fn create_physical_plan(
        &self,
        logical: &LogicalPlan,
        session: &dyn Session,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let files_travel = !scans::reads_json_arrays(logical)?;
        let plan = match session.as_any().downcast_ref::<SessionState>().filter(|_| !files_travel) {
            Some(state) => self.inner.create_physical_plan(logical, &uncut(state)).await?,
            None => self.inner.create_physical_plan(logical, session).await?,
        };
        match plan.downcast_ref::<ExplainExec>() {
            Some(explained) => match self.explained(logical, explained, session).await? {
                Some(explained) => Ok(Arc::new(explained)),
                None => Ok(plan),
            },
            None => Ok(in_order(Placing { cluster: &self.cluster, files_travel }.place(&plan, None)?)),
        }
    }
}

/// The session, without files that are cut into parts: DataFusion 55 cuts JSON arrays, and cannot read the parts.
fn uncut(state: &SessionState) -> SessionState {
    let mut state = state.clone();
    state.config_mut().options_mut().optimizer.repartition_file_scans = false;
    state
}

impl ClusterPlanner {
    /// What EXPLAIN tells, with the plan as it is run in place of that of a single process. `None` where it tells none.
    async fn explained(
        &self,
        logical: &LogicalPlan,
        explained: &ExplainExec,
        session: &dyn Session,
    ) -> Result<Option<ExplainExec>> {
        let LogicalPlan::Explain(Explain { plan, explain_format: ExplainFormat::Indent, .. }) = logical else {
            return Ok(None);
        };
        let mut told = explained.stringified_plans().to_vec();
        let Some(last) = told.iter_mut().find(|plan| plan.plan_type == PlanType::FinalPhysicalPlan) else {
            return Ok(None);
        };
        let placed = self.create_physical_plan(plan, session).await?;
        last.plan = Arc::new(displayable(placed.as_ref()).indent(explained.verbose()).to_string());
        Ok(Some(ExplainExec::new(explained.schema(), told, explained.verbose())))
    }
}

/// Puts operators that run elsewhere into a plan.
struct Placing<'a> {
    cluster: &'a Cluster,
    /// Executors would read the files of the query as it does.
    files_travel: bool,
}

impl Placing<'_> {
    /// The plan with its parts and rows sent to the cluster. `wanted`: no more rows of each partition are asked for.
    fn place(&self, plan: &Plan, wanted: Option<usize>) -> Result<Plan> {
        if let Some(sent) = self.part(plan, wanted) {
            return Ok(sent);
        }
        if let Some(Chain { length, filters, input }) = row_by_row(plan) {
            let (unplaced, stops_early) = (Arc::clone(input), wanted.is_some());
            let rows = ClusterRowsExec::try_new(plan, length, unplaced, stops_early, self.cluster.clone())?;
            if self.can_send(rows.chain()) {
                // Of rows that are left out below, more are needed.
                let input = self.place(input, wanted.filter(|_| !filters))?;
                return replace_children_if_necessary(Arc::new(rows), vec![input]);
            }
        }
        let wanted = wanted_below(plan, wanted);
        let inputs = plan.children().into_iter().map(|input| match self.first_rows(plan, input) {
            Some(sent) => Ok(sent),
            None => self.place(input, wanted),
        });
        let inputs: Vec<Plan> = inputs.collect::<Result<_>>()?;
        let gathers = plan.is::<CoalescePartitionsExec>() && plan.fetch().is_none();
        match &inputs[..] {
            [input] if gathers && has_sent(input) => Ok(in_order(Arc::clone(input))),
            _ => replace_children_if_necessary(Arc::clone(plan), inputs),
        }
    }

    /// The plan on the cluster, if it is a part, and that is worth it.
    fn part(&self, plan: &Plan, wanted: Option<usize>) -> Option<Plan> {
        // Operators tell their numbers only to one that is where they are.
        let analysed = plan.downcast_ref::<AnalyzeExec>().map(AnalyzeExec::input);
        let part = analysed.unwrap_or(plan);
        let is_worth_it = || match has_calls_within(part) {
            true => analysed.is_some() || spreads(part),
            false => analysed.is_none() && reduces(part),
        };
        if !self.files_travel || !is_part(part) || !is_worth_it() {
            return None;
        }
        let sent = match (analysed, wanted) {
            (Some(part), _) => replace_children_if_necessary(Arc::clone(plan), vec![in_one_task(part).ok()?]).ok()?,
            (None, Some(rows)) => Arc::new(LocalLimitExec::new(Arc::clone(plan), rows)),
            (None, None) => Arc::clone(plan),
        };
        self.sent(sent, plan)
    }

    /// Below a sort that wants the first rows, each task of a part gives its own. The sort is done here once more.
    fn first_rows(&self, plan: &Plan, input: &Plan) -> Option<Plan> {
        let each = plan.downcast_ref::<SortExec>().filter(|_| self.files_travel);
        let each = first_rows(each?, input)?;
        let is_worth_it = if has_calls_within(&each) { spreads(&each) } else { reduces(&each) };
        if is_worth_it { self.sent(each, input) } else { None }
    }

    /// A part where others know it as `known`.
    fn sent(&self, part: Plan, known: &Plan) -> Option<Plan> {
        let properties = Arc::clone(known.properties());
        self.can_send(&part).then(|| Arc::new(ClusterExec::new(part, properties, self.cluster.clone())) as Plan)
    }

    fn can_send(&self, plan: &Plan) -> bool {
        !is_too_deep(plan) && self.cluster.can_send(plan)
    }
}

/// What the cluster has a share in, in one partition, and in order where there is one. Where there is none, partitions would
/// only wait for each other.
fn in_order(plan: Plan) -> Plan {
    match plan.output_partitioning().partition_count() > 1 && has_sent(&plan) {
        true if has_order_of_files(&plan) => Arc::new(InOrderExec::new(plan)),
        true => Arc::new(CoalescePartitionsExec::new(plan)),
        false => plan,
    }
}

fn has_sent(plan: &Plan) -> bool {
    plan.is::<ClusterExec>() || plan.is::<ClusterRowsExec>() || plan.children().into_iter().any(has_sent)
}

/// Whether partitions one after the other are in the order of files.
fn has_order_of_files(plan: &Plan) -> bool {
    let keeps = plan.is::<ProjectionExec>()
        || plan.is::<FilterExec>()
        || plan.is::<UnionExec>()
        || plan.is::<CooperativeExec>()
        || plan.is::<ScalarSubqueryExec>()
        || plan.is::<ClusterRowsExec>();
    let mut inputs = plan.children();
    if plan.is::<ScalarSubqueryExec>() {
        // The others give one value each.
        inputs.truncate(1);
    }
    plan.is::<ClusterExec>() || inputs.is_empty() || (keeps && inputs.into_iter().all(has_order_of_files))
}

/// Operators that work row by row, one above the other, of which the lowest embeds.
struct Chain<'p> {
    length: usize,
    /// One of them leaves rows out.
    filters: bool,
    /// Of the lowest.
    input: &'p Plan,
}

/// The longest chain from an operator on.
fn row_by_row(plan: &Plan) -> Option<Chain<'_>> {
    let (mut found, mut length, mut filters, mut next) = (None, 0, false, plan);
    while is_row_by_row(next)
        && let [input] = next.children()[..]
    {
        length += 1;
        filters |= next.is::<FilterExec>();
        if has_calls(next) {
            found = Some(Chain { length, filters, input });
        }
        next = input;
    }
    found
}

/// Rows that an operator asks of each partition of its input, when so many are asked of itself.
fn wanted_below(plan: &Plan, wanted: Option<usize>) -> Option<usize> {
    let least = |a: Option<usize>, b: Option<usize>| a.into_iter().chain(b).min();
    if let Some(limit) = plan.downcast_ref::<GlobalLimitExec>() {
        return least(limit.fetch(), wanted).map(|rows| rows.saturating_add(limit.skip()));
    }
    let passes_on = plan.is::<LocalLimitExec>()
        || plan.is::<CoalescePartitionsExec>()
        || plan.is::<SortPreservingMergeExec>()
        || plan.is::<ProjectionExec>()
        || plan.is::<CooperativeExec>()
        || plan.is::<UnionExec>();
    if passes_on { least(plan.fetch(), wanted) } else { None }
}
