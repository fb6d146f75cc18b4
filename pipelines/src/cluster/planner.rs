//! The query planner of a cluster's client: sends subplans that embed, or that reduce large files, to the cluster. All
//! other operators and all writes run in the client.

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
    cluster_exec::ClusterExec,
    cluster_rows_exec::ClusterRowsExec,
    distributable::{
        Plan, contains_calls, has_calls, in_one_task, is_parallel, is_row_by_row, is_subplan, is_too_deep,
        partition_top_k, reduces,
    },
    scans, session_config,
};
use crate::sql::InOrderExec;

/// Distributes the plans of another planner.
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
        let can_send_scans = !scans::reads_json_arrays(logical)?;
        let plan = match session.as_any().downcast_ref::<SessionState>().filter(|_| !can_send_scans) {
            Some(state) => self.inner.create_physical_plan(logical, &without_file_splits(state)).await?,
            None => self.inner.create_physical_plan(logical, session).await?,
        };
        match plan.downcast_ref::<ExplainExec>() {
            Some(explain) => match self.explain(logical, explain, session).await? {
                Some(explain) => Ok(Arc::new(explain)),
                None => Ok(plan),
            },
            None => {
                let distributor = Distributor { cluster: &self.cluster, can_send_scans };
                Ok(single_partition(distributor.distribute(&plan, None)?))
            }
        }
    }
}

/// The session with file splitting disabled. DataFusion 55 splits JSON arrays, and cannot read the splits.
fn without_file_splits(state: &SessionState) -> SessionState {
    let mut state = state.clone();
    state.config_mut().options_mut().optimizer.repartition_file_scans = false;
    state
}

impl ClusterPlanner {
    /// EXPLAIN with the distributed plan in place of the local one. `None` if its format shows no physical plan.
    async fn explain(
        &self,
        logical: &LogicalPlan,
        explain: &ExplainExec,
        session: &dyn Session,
    ) -> Result<Option<ExplainExec>> {
        let LogicalPlan::Explain(Explain { plan, explain_format: ExplainFormat::Indent, .. }) = logical else {
            return Ok(None);
        };
        let mut plans = explain.stringified_plans().to_vec();
        let Some(last) = plans.iter_mut().find(|plan| plan.plan_type == PlanType::FinalPhysicalPlan) else {
            return Ok(None);
        };
        let distributed = self.create_physical_plan(plan, session).await?;
        last.plan = Arc::new(displayable(distributed.as_ref()).indent(explain.verbose()).to_string());
        Ok(Some(ExplainExec::new(explain.schema(), plans, explain.verbose())))
    }
}

/// Replaces the distributable parts of a plan by operators that run on a cluster.
struct Distributor<'a> {
    cluster: &'a Cluster,
    /// Whether executors would read the files of the query as the client does.
    can_send_scans: bool,
}

impl Distributor<'_> {
    /// Distributes a plan. `limit` is the number of rows that the operators above need from each partition.
    fn distribute(&self, plan: &Plan, limit: Option<usize>) -> Result<Plan> {
        if let Some(sent) = self.send_subplan(plan, limit) {
            return Ok(sent);
        }
        if let Some(Chain { length, filters, input }) = row_by_row(plan) {
            let (local, stops_early) = (Arc::clone(input), limit.is_some());
            let rows = ClusterRowsExec::try_new(plan, length, local, stops_early, self.cluster.clone())?;
            if self.can_send(rows.chain()) {
                // A filter needs more rows than it returns.
                let input = self.distribute(input, limit.filter(|_| !filters))?;
                return replace_children_if_necessary(Arc::new(rows), vec![input]);
            }
        }
        let limit = input_limit(plan, limit);
        let inputs = plan.children().into_iter().map(|input| match self.send_top_k(plan, input) {
            Some(sent) => Ok(sent),
            None => self.distribute(input, limit),
        });
        let inputs: Vec<Plan> = inputs.collect::<Result<_>>()?;
        let gathers = plan.is::<CoalescePartitionsExec>() && plan.fetch().is_none();
        match &inputs[..] {
            [input] if gathers && is_distributed(input) => Ok(single_partition(Arc::clone(input))),
            _ => replace_children_if_necessary(Arc::clone(plan), inputs),
        }
    }

    /// Sends a plan, if it is a subplan and worth sending.
    fn send_subplan(&self, plan: &Plan, limit: Option<usize>) -> Option<Plan> {
        // ANALYZE runs in the task of its subplan, as metrics are not sent.
        let analysed = plan.downcast_ref::<AnalyzeExec>().map(AnalyzeExec::input);
        let subplan = analysed.unwrap_or(plan);
        let is_worth_sending = || match contains_calls(subplan) {
            true => analysed.is_some() || is_parallel(subplan),
            false => analysed.is_none() && reduces(subplan),
        };
        if !self.can_send_scans || !is_subplan(subplan) || !is_worth_sending() {
            return None;
        }
        let sent = match (analysed, limit) {
            (Some(input), _) => replace_children_if_necessary(Arc::clone(plan), vec![in_one_task(input).ok()?]).ok()?,
            (None, Some(rows)) => Arc::new(LocalLimitExec::new(Arc::clone(plan), rows)),
            (None, None) => Arc::clone(plan),
        };
        self.send(sent, plan)
    }

    /// Sends a subplan below a sort with a limit together with a copy of the sort. The sort in the client merges the
    /// rows of all tasks.
    fn send_top_k(&self, plan: &Plan, input: &Plan) -> Option<Plan> {
        let sort = plan.downcast_ref::<SortExec>().filter(|_| self.can_send_scans);
        let top_k = partition_top_k(sort?, input)?;
        let is_worth_sending = if contains_calls(&top_k) { is_parallel(&top_k) } else { reduces(&top_k) };
        if is_worth_sending { self.send(top_k, input) } else { None }
    }

    /// Sends a subplan in place of `replaced`, with the plan properties of the latter.
    fn send(&self, subplan: Plan, replaced: &Plan) -> Option<Plan> {
        let properties = Arc::clone(replaced.properties());
        self.can_send(&subplan).then(|| Arc::new(ClusterExec::new(subplan, properties, self.cluster.clone())) as Plan)
    }

    fn can_send(&self, plan: &Plan) -> bool {
        !is_too_deep(plan) && self.cluster.can_send(plan)
    }
}

/// Gathers the partitions of a distributed plan into one: in file order if the partitions have one, else as they come.
fn single_partition(plan: Plan) -> Plan {
    match plan.output_partitioning().partition_count() > 1 && is_distributed(&plan) {
        true if has_file_order(&plan) => Arc::new(InOrderExec::new(plan)),
        true => Arc::new(CoalescePartitionsExec::new(plan)),
        false => plan,
    }
}

/// Whether a part of the plan runs on the cluster.
fn is_distributed(plan: &Plan) -> bool {
    plan.is::<ClusterExec>() || plan.is::<ClusterRowsExec>() || plan.children().into_iter().any(is_distributed)
}

/// Whether the concatenated partitions of a plan are in file order.
fn has_file_order(plan: &Plan) -> bool {
    let keeps = plan.is::<ProjectionExec>()
        || plan.is::<FilterExec>()
        || plan.is::<UnionExec>()
        || plan.is::<CooperativeExec>()
        || plan.is::<ScalarSubqueryExec>()
        || plan.is::<ClusterRowsExec>();
    let mut inputs = plan.children();
    if plan.is::<ScalarSubqueryExec>() {
        // The other children are the subqueries.
        inputs.truncate(1);
    }
    plan.is::<ClusterExec>() || inputs.is_empty() || (keeps && inputs.into_iter().all(has_file_order))
}

/// A chain of row-by-row operators, the lowest of which needs a model.
struct Chain<'p> {
    length: usize,
    /// Whether one of the operators is a filter.
    filters: bool,
    /// The input of the lowest operator.
    input: &'p Plan,
}

/// The longest chain that starts at an operator.
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

/// The number of rows that an operator needs from each partition of its input to return `limit` rows; `None` for all.
fn input_limit(plan: &Plan, limit: Option<usize>) -> Option<usize> {
    let least = |a: Option<usize>, b: Option<usize>| a.into_iter().chain(b).min();
    if let Some(node) = plan.downcast_ref::<GlobalLimitExec>() {
        return least(node.fetch(), limit).map(|rows| rows.saturating_add(node.skip()));
    }
    let passes_on = plan.is::<LocalLimitExec>()
        || plan.is::<CoalescePartitionsExec>()
        || plan.is::<SortPreservingMergeExec>()
        || plan.is::<ProjectionExec>()
        || plan.is::<CooperativeExec>()
        || plan.is::<UnionExec>();
    if passes_on { least(plan.fetch(), limit) } else { None }
}
