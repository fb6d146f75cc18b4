//! What of a query runs on the cluster: what reads files or embeds. What only this process knows, and what is written,
//! stays here.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use ballista_core::optimizer::with_ballista_optimizer_rules;
use datafusion::{
    catalog::Session,
    common::{
        Result, internal_err,
        tree_node::{TreeNode, TreeNodeRecursion},
    },
    datasource::{
        memory::MemorySourceConfig, physical_plan::FileScanConfig, sink::DataSinkExec, source::DataSourceExec,
    },
    execution::{SendableRecordBatchStream, TaskContext, context::QueryPlanner, session_state::SessionStateBuilder},
    logical_expr::LogicalPlan,
    physical_expr::{EquivalenceProperties, PhysicalExpr, ScalarFunctionExpr},
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, Partitioning, PlanProperties,
        coalesce_partitions::CoalescePartitionsExec,
        execution_plan::{Boundedness, EmissionType},
        explain::ExplainExec,
        replace_children_if_necessary,
    },
};

use super::{
    client::{Cluster, ClusterError},
    cut::cuttable,
    scans, session_config,
};
use crate::sql::lines::LinesExec;

/// Plans as `inner` does, and sends what is for the cluster there.
struct ClusterPlanner {
    inner: Arc<dyn QueryPlanner + Send + Sync>,
    cluster: Cluster,
}

impl Cluster {
    /// Lets a session plan for the cluster, when everything else is set.
    pub(crate) fn plan_for(self, mut builder: SessionStateBuilder) -> SessionStateBuilder {
        let rules = &mut builder.optimizer().get_or_insert_default().rules;
        // NOT IN would be a join that has to see all rows at once.
        *rules = with_ballista_optimizer_rules(rules);
        let inner = builder.query_planner().take();
        let config = session_config();
        match inner {
            Some(inner) => {
                builder.with_config(config).with_query_planner(Arc::new(ClusterPlanner { inner, cluster: self }))
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
    async fn create_physical_plan(&self, plan: &LogicalPlan, session: &dyn Session) -> Result<Arc<dyn ExecutionPlan>> {
        let arrays = scans::json_arrays(plan)?;
        let plan = self.inner.create_physical_plan(plan, session).await?;
        placed(plan, &self.cluster, arrays)
    }
}

/// The plan with its part for the cluster sent there, unless it is `known` why that cannot be.
fn placed(
    plan: Arc<dyn ExecutionPlan>,
    cluster: &Cluster,
    known: Option<&'static str>,
) -> Result<Arc<dyn ExecutionPlan>> {
    if plan.is::<ExplainExec>() {
        return Ok(plan);
    }
    if writes(&plan) {
        let inputs: Result<Vec<_>> =
            plan.children().into_iter().map(|input| placed(Arc::clone(input), cluster, known)).collect();
        return replace_children_if_necessary(plan, inputs?);
    }
    if !belongs_there(&plan, known)? {
        return Ok(plan);
    }
    // The parts of a result come one after the other in any case.
    let whole = plan.downcast_ref::<CoalescePartitionsExec>();
    let whole = whole.filter(|whole| whole.fetch().is_none()).map(|whole| Arc::clone(whole.input()));
    Ok(Arc::new(ClusterExec::new(cuttable(whole.unwrap_or(plan))?, cluster.clone())))
}

/// Whether a plan writes, be it to be analysed.
fn writes(plan: &Arc<dyn ExecutionPlan>) -> bool {
    plan.is::<DataSinkExec>() || plan.children().into_iter().any(writes)
}

/// Whether a plan is for the cluster. One that reads no file and embeds nothing is answered sooner here.
///
/// # Errors
/// When it is for the cluster, and reads what only this process has.
fn belongs_there(plan: &Arc<dyn ExecutionPlan>, known: Option<&'static str>) -> Result<bool> {
    let mut work = false;
    let mut local = known.map(|known| format!("a query of {known}"));
    if is_deeper(plan, DEEPEST)? {
        local = Some(format!("a query that nests more than {DEEPEST} operators or operations"));
    }
    plan.apply(|node| {
        if node.fetch().is_some_and(|rows| rows > MOST_ROWS) {
            local = Some(format!("a query with a LIMIT above {MOST_ROWS}"));
        }
        work |= node.name() == elmo_udfs::plan::EXEC_NAME || node.is::<LinesExec>();
        node.apply_expressions(&mut |expr| {
            expr.apply(|part| {
                let call = part.downcast_ref::<ScalarFunctionExpr>();
                work |= call.is_some_and(|call| elmo_udfs::functions::embeds(call.fun()));
                Ok(TreeNodeRecursion::Continue)
            })
        })?;
        if node.children().is_empty() {
            match leaf(node) {
                Leaf::Files(lost) => {
                    work = true;
                    local = local.take().or_else(|| lost.map(|lost| format!("a query of {lost}")));
                }
                Leaf::Rows => {}
                Leaf::Here if node.name() == "StreamingTableExec" => {
                    local = Some("a query of information_schema together with files or texts".to_owned());
                }
                Leaf::Here if node.name() == "WorkTableExec" => local = Some("a recursive query".to_owned()),
                Leaf::Here => local = Some(format!("a query with {}", node.name())),
            }
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    match local {
        Some(name) if work => Err(ClusterError::Local(name).into()),
        _ => Ok(work),
    }
}

/// Limits travel in 32 bits, and would be cut to them.
const MOST_ROWS: usize = u32::MAX as usize;

/// Levels of operators and of operations that a thread's stack surely has room for, in every process on the way.
const DEEPEST: usize = 1000;

/// Whether a plan or one of its expressions has more than so many levels. Looks at no more of them than that.
fn is_deeper(plan: &Arc<dyn ExecutionPlan>, levels: usize) -> Result<bool> {
    fn expr_is_deeper(expr: &Arc<dyn PhysicalExpr>, levels: usize) -> bool {
        levels == 0 || expr.children().into_iter().any(|child| expr_is_deeper(child, levels - 1))
    }
    if levels == 0 {
        return Ok(true);
    }
    let mut deeper = false;
    plan.apply_expressions(&mut |expr| {
        deeper |= expr_is_deeper(expr, levels);
        Ok(TreeNodeRecursion::Continue)
    })?;
    for child in plan.children() {
        deeper = deeper || is_deeper(child, levels - 1)?;
    }
    Ok(deeper)
}

enum Leaf {
    /// Files, which executors read, unless they would read something else.
    Files(Option<&'static str>),
    /// Rows that travel with the plan.
    Rows,
    /// What nobody else has. Several partitions of it would be read by each task.
    Here,
}

fn leaf(node: &Arc<dyn ExecutionPlan>) -> Leaf {
    let Some(scan) = node.downcast_ref::<DataSourceExec>() else {
        let known = ["LinesExec", "EmptyExec", "PlaceholderRowExec", "LazyMemoryExec"].contains(&node.name());
        let single = node.output_partitioning().partition_count() == 1 || node.is::<LinesExec>();
        return if known && single { Leaf::Rows } else { Leaf::Here };
    };
    let source = scan.data_source().as_ref() as &dyn std::any::Any;
    match (source.downcast_ref::<FileScanConfig>(), source.is::<MemorySourceConfig>()) {
        (Some(scan), _) => Leaf::Files(scans::lost(scan)),
        (_, true) => Leaf::Rows,
        _ => Leaf::Here,
    }
}

/// Runs its plan on a cluster.
#[derive(Debug)]
pub(crate) struct ClusterExec {
    plan: Arc<dyn ExecutionPlan>,
    cluster: Cluster,
    properties: Arc<PlanProperties>,
}

impl ClusterExec {
    fn new(plan: Arc<dyn ExecutionPlan>, cluster: Cluster) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(plan.schema()),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Final,
            Boundedness::Bounded,
        );
        Self { plan, cluster, properties: Arc::new(properties) }
    }
}

impl DisplayAs for ClusterExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterExec: scheduler={}", self.cluster.address())
    }
}

impl ExecutionPlan for ClusterExec {
    fn name(&self) -> &'static str {
        "ClusterExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.plan]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Ok([plan]) = <[_; 1]>::try_from(children) else { return internal_err!("ClusterExec has one plan") };
        Ok(Arc::new(Self::new(plan, self.cluster.clone())))
    }

    fn execute(&self, _: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        Ok(self.cluster.run(Arc::clone(&self.plan), context.session_config()))
    }
}
