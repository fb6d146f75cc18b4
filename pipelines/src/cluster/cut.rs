//! Cuts the physical plan of one process into stages for workers.
//!
//! A subplan is *split* if it may run as several tasks, each on some of its partitions: a scan, and operators above it that
//! process each partition on its own. Where rows are dealt over partitions by their keys, the split subplan becomes a stage,
//! whose rows another stage takes over the network; both sides of a join, or the second phase of an aggregation. Where an
//! operator needs all partitions together, the operator gathers the rows of the stage in the client, and everything above it
//! runs there.
//!
//! The planner of `datafusion-distributed` is not used. It deals files over tasks without regard for their order, cuts
//! compressed files and CSV files with line breaks in cells, and runs operators in every task that must run once, such as a
//! sort above a scan of one partition. What may be split is an allow-list here.

use std::{cell::Cell, sync::Arc};

use datafusion::{
    common::{
        Result,
        config::ConfigOptions,
        plan_err,
        tree_node::{TreeNode, TreeNodeRecursion},
    },
    datasource::{
        listing::PartitionedFile,
        physical_plan::{FileGroup, FileScanConfig},
    },
    execution::TaskContext,
    logical_expr::{Expr, LogicalPlan},
    physical_expr::{Partitioning, aggregate::AggregateFunctionExpr},
    physical_optimizer::{PhysicalOptimizerRule, sanity_checker::SanityCheckPlan},
    physical_plan::{
        ExecutionPlan, ExecutionPlanProperties, InputOrderMode,
        aggregates::{AggregateExec, AggregateMode},
        coalesce_partitions::CoalescePartitionsExec,
        coop::CooperativeExec,
        displayable,
        filter::FilterExec,
        joins::{HashJoinExec, PartitionMode},
        limit::{GlobalLimitExec, LocalLimitExec},
        placeholder_row::PlaceholderRowExec,
        projection::ProjectionExec,
        repartition::RepartitionExec,
        replace_children_if_necessary,
        sorts::{sort::SortExec, sort_preserving_merge::SortPreservingMergeExec},
        union::UnionExec,
        windows::{BoundedWindowAggExec, WindowAggExec},
    },
};
use datafusion_distributed::{DistributedLeafExec, NetworkCoalesceExec, NetworkShuffleExec};
use datafusion_proto::physical_plan::PhysicalExtensionCodec;
use elmo_udfs::plan::EXEC_NAME;

use super::{
    MIN_SPLIT_BYTES,
    cluster_exec::ClusterExec,
    copy::sinks,
    distributable::{contains_calls, has_calls, is_partition_local, is_row_by_row, is_serialisable, is_too_deep},
    members::Member,
    peers::Peers,
    rows_exec::{RowsExec, Workers},
    scan_exec::{ScanExec, can_send, files_of},
    sent::{from_bytes, to_bytes},
    stage_exec::{Changed, StageExec},
};
use crate::sql::{InOrderExec, Writes};

type Plan = Arc<dyn ExecutionPlan>;

/// Cuts plans for the workers of a query.
pub(super) struct Cutter<'a> {
    pub(super) members: Arc<[Member]>,
    pub(super) peers: Arc<Peers>,
    /// The settings of the session.
    pub(super) changed: Changed,
    pub(super) codec: &'a dyn PhysicalExtensionCodec,
    /// The functions of the session.
    pub(super) context: Arc<TaskContext>,
    /// Whether workers would read the files of the query as the client does.
    pub(super) can_send_scans: bool,
    /// Whether the plan is to be shown with the metrics of all workers after it was executed.
    pub(super) analyse: bool,
    /// Whether no window of the query has properties that are not encoded; see [`windows_are_plain`].
    pub(super) plain_windows: bool,
    /// What the statement writes, if it does.
    pub(super) writes: Option<Arc<Writes>>,
    /// Whether the subplan being cut is the input of a sink that is worth running on workers.
    pub(super) writing: Cell<bool>,
}

/// A subplan.
pub(super) enum Part {
    /// It runs once.
    Whole(Plan),
    Split(Split),
}

/// A subplan that may run as several tasks.
pub(super) struct Split {
    /// As it was planned.
    pub(super) original: Plan,
    /// What the tasks run.
    pub(super) sent: Plan,
    pub(super) tasks: usize,
}

impl Cutter<'_> {
    /// The plan with parts that run on the workers. It is unchanged if nothing is worth sending.
    pub(super) fn cut(&self, plan: &Plan, options: &ConfigOptions) -> Result<Plan> {
        let cut = match self.part(plan, false)? {
            Part::Whole(whole) => whole,
            Part::Split(split) => self.gathered(split)?,
        };
        // A decoded boundary has fewer plan properties, such as the order of its rows, than the subplan that it replaces.
        match SanityCheckPlan::new().optimize(Arc::clone(&cut), options) {
            Ok(checked) => Ok(checked),
            Err(reason) => {
                tracing::debug!(%reason, "a plan runs in the client");
                Ok(Arc::clone(plan))
            }
        }
    }

    /// `limited` says that operators above need only the first rows.
    pub(super) fn part(&self, plan: &Plan, limited: bool) -> Result<Part> {
        if let Some(copy) = self.copy(plan)? {
            return Ok(Part::Whole(copy));
        }
        if !limited && let Some(embedded) = embedded_before_merge(plan)? {
            return self.part(&embedded, limited);
        }
        if let Some(split) = self.leaf(plan)? {
            return Ok(Part::Split(split));
        }
        if let Some(split) = self.shuffled(plan)? {
            return Ok(Part::Split(split));
        }
        let limited = limits_input(plan, limited);
        let mut parts: Vec<Part> =
            plan.children().into_iter().map(|input| self.part(input, limited)).collect::<Result<_>>()?;
        if deals_in_turn(plan)
            && let [Part::Split(_)] = &parts[..]
            && let Some(Part::Split(split)) = parts.pop()
        {
            // Round-robin repartitioning would gather the rows in the client. The tasks already run in parallel.
            return Ok(Part::Split(Split { original: Arc::clone(plan), ..split }));
        }
        if let Some(tasks) = common_tasks(&parts)
            && (self.is_local(plan) || (tasks == 1 && self.sorts_small_partition(plan)))
            && is_serialisable(plan)
        {
            let inputs = parts.iter().filter_map(Part::sent).map(Arc::clone).collect();
            let sent = replace_children_if_necessary(Arc::clone(plan), inputs)?;
            return Ok(Part::Split(Split { original: Arc::clone(plan), sent, tasks }));
        }
        if let [Part::Split(_)] = &parts[..]
            && gathers(plan)
            && let Some(Part::Split(split)) = parts.pop()
        {
            return self.gathered_by(plan, split).map(Part::Whole);
        }
        let inputs = parts.into_iter().map(|part| match part {
            Part::Whole(whole) => Ok(whole),
            Part::Split(split) => self.gathered(split),
        });
        let inputs: Vec<Plan> = inputs.collect::<Result<_>>()?;
        if let [input] = &inputs[..]
            && let Some(rows) = self.rows(plan, input, limited)?
        {
            return Ok(Part::Whole(rows));
        }
        replace_children_if_necessary(Arc::clone(plan), inputs).map(Part::Whole)
    }

    /// Rows dealt over partitions by their keys, which another stage takes.
    fn shuffled(&self, plan: &Plan) -> Result<Option<Split>> {
        let Some(repartition) = plan.downcast_ref::<RepartitionExec>() else { return Ok(None) };
        let Partitioning::Hash(keys, partitions) = repartition.partitioning() else { return Ok(None) };
        // Keys are encoded without their models.
        if repartition.preserve_order() || !is_serialisable(plan) || has_calls(plan) {
            return Ok(None);
        }
        let Part::Split(split) = self.part(repartition.input(), false)? else { return Ok(None) };
        let tasks = self.members.len();
        let stage: Plan = Arc::new(StageExec::new(split.sent, Arc::clone(&self.changed)));
        let partitioning = Partitioning::Hash(keys.clone(), partitions.div_ceil(tasks));
        let dealt = Arc::new(RepartitionExec::try_new(stage, partitioning)?);
        let sent = Arc::new(NetworkShuffleExec::try_new(dealt, split.tasks)?);
        Ok(Some(Split { original: Arc::clone(plan), sent, tasks }))
    }

    /// An operator that needs a model, over rows of the client, on the workers; or a row-by-row operator above such a one.
    fn rows(&self, plan: &Plan, input: &Plan, stops_early: bool) -> Result<Option<Plan>> {
        if !is_row_by_row(plan) {
            return Ok(None);
        }
        let workers = Workers::new(Arc::clone(&self.members), &self.peers, &self.changed);
        let rows = match input.downcast_ref::<RowsExec>() {
            Some(rows) => rows.under(plan, stops_early)?,
            None if has_calls(plan) => RowsExec::try_new(plan, 1, Arc::clone(input), stops_early, workers)?,
            None => return Ok(None),
        };
        let can_send = !is_too_deep(rows.chain()) && to_bytes(rows.chain(), self.codec).is_ok();
        Ok(can_send.then(|| Arc::new(rows) as Plan))
    }

    /// Whether an operator processes each partition of its inputs on its own, with the same result on a worker.
    fn is_local(&self, plan: &Plan) -> bool {
        if let Some(aggregate) = plan.downcast_ref::<AggregateExec>() {
            return is_plain_aggregate(aggregate);
        }
        if let Some(join) = plan.downcast_ref::<HashJoinExec>() {
            return *join.partition_mode() == PartitionMode::Partitioned && !join.null_aware;
        }
        if let Some(sort) = plan.downcast_ref::<SortExec>() {
            return sort.preserve_partitioning();
        }
        is_partition_local(plan) || (is_window(plan) && self.plain_windows)
    }

    /// Whether a plan below a sink sorts the only partition of its input, which is not worth dividing.
    fn sorts_small_partition(&self, plan: &Plan) -> bool {
        let is_one = |sort: &SortExec| sort.input().output_partitioning().partition_count() == 1;
        self.writing.get() && plan.downcast_ref().is_some_and(is_one) && bytes(plan) <= MIN_SPLIT_BYTES as u64
    }

    /// A leaf that workers can run.
    fn leaf(&self, plan: &Plan) -> Result<Option<Split>> {
        if let Some(files) = files_of(plan).filter(|files| self.can_send_scans && can_send(files)) {
            let groups = files.file_groups.iter().filter(|group| !group.is_empty()).count();
            let tasks = groups.clamp(1, self.members.len());
            let sent = sliced(plan, files, tasks)?;
            return Ok(Some(Split { original: Arc::clone(plan), sent, tasks }));
        }
        if plan.is::<PlaceholderRowExec>() {
            return Ok(Some(Split { original: Arc::clone(plan), sent: Arc::clone(plan), tasks: 1 }));
        }
        Ok(None)
    }

    /// A split subplan below an operator that gathers its partitions.
    fn gathered_by(&self, operator: &Plan, split: Split) -> Result<Plan> {
        let Some(boundary) = self.boundary(&split)? else {
            return replace_children_if_necessary(Arc::clone(operator), vec![split.original]);
        };
        let gathered = replace_children_if_necessary(Arc::clone(operator), vec![boundary])?;
        Ok(Arc::new(self.on_workers(gathered)))
    }

    /// A split subplan whose partitions the operator above does not gather: one partition of all rows, in their order if
    /// they have one.
    fn gathered(&self, split: Split) -> Result<Plan> {
        let Some(boundary) = self.boundary(&split)? else { return Ok(split.original) };
        let gathered: Plan = match split.original.properties().output_ordering() {
            Some(ordering) => Arc::new(SortPreservingMergeExec::new(ordering.clone(), boundary)),
            None if keeps_file_order(&split.original) => Arc::new(InOrderExec::new(boundary)),
            None => Arc::new(CoalescePartitionsExec::new(boundary)),
        };
        Ok(Arc::new(self.on_workers(gathered)))
    }

    /// Stages below an operator that gathers their rows.
    pub(super) fn on_workers(&self, gathered: Plan) -> ClusterExec {
        let embeds = contains_calls(&gathered);
        ClusterExec::new(gathered, Arc::clone(&self.members), self.analyse).watched(&self.peers, embeds)
    }

    /// # Errors
    /// If a worker could not decode a stage, or would run another plan.
    pub(super) fn check(&self, stage: &Plan) -> Result<()> {
        // Variants of a leaf are not encoded by themselves.
        let sent = first_task(stage)?;
        let received = from_bytes(&to_bytes(&sent, self.codec)?, &self.context, self.codec)?;
        let shown = |plan: &Plan| displayable(plan.as_ref()).indent(true).to_string();
        let (sent_text, received_text) = (shown(&sent), shown(&received));
        if sent_text != received_text || sent.schema() != received.schema() {
            return plan_err!("a worker would run another plan\n{received_text}\nthan\n{sent_text}");
        }
        let (sent, received) = (sinks(&sent), sinks(&received));
        match sent == received {
            true => Ok(()),
            false => plan_err!("a worker would write other files\n{received:?}\nthan\n{sent:?}"),
        }
    }

    fn is_worth_sending(&self, plan: &Plan) -> bool {
        let is_large = || bytes(plan) > MIN_SPLIT_BYTES as u64;
        contains_calls(plan) || self.writing.get() || (reduces(plan) && is_large())
    }

    /// Whether it is worth running a sink on the workers that compute its input.
    pub(super) fn is_worth_writing(&self, plan: &Plan) -> bool {
        contains_calls(plan) || bytes(plan) > MIN_SPLIT_BYTES as u64
    }

    /// The rows of a split subplan from the workers. `None` if it should stay in the client.
    fn boundary(&self, split: &Split) -> Result<Option<Plan>> {
        let Split { original, sent, tasks } = split;
        if !self.is_worth_sending(original) || is_too_deep(original) {
            return Ok(None);
        }
        let stage: Plan = Arc::new(StageExec::new(Arc::clone(sent), Arc::clone(&self.changed)));
        if let Err(reason) = self.check(&stage) {
            tracing::debug!(%reason, "a subplan cannot be sent");
            return Ok(None);
        }
        Ok(Some(Arc::new(NetworkCoalesceExec::try_new(stage, *tasks, 1)?)))
    }
}

impl Part {
    fn sent(&self) -> Option<&Plan> {
        match self {
            Self::Whole(_) => None,
            Self::Split(split) => Some(&split.sent),
        }
    }
}

/// The number of tasks of all inputs of an operator. `None` if it differs, or one of them is not split.
fn common_tasks(parts: &[Part]) -> Option<usize> {
    let tasks = |part: &Part| match part {
        Part::Whole(_) => None,
        Part::Split(split) => Some(split.tasks),
    };
    let (first, others) = parts.split_first()?;
    tasks(first).filter(|first| others.iter().all(|other| tasks(other) == Some(*first)))
}

/// Whether the phase of an aggregation does not depend on the order of rows.
fn is_plain_aggregate(aggregate: &AggregateExec) -> bool {
    let is_split = matches!(
        aggregate.mode(),
        AggregateMode::Partial | AggregateMode::FinalPartitioned | AggregateMode::SinglePartitioned
    );
    is_split && is_plain(aggregate)
}

/// Whether an aggregation depends neither on the order of rows nor on anything that is not encoded.
pub(super) fn is_plain(aggregate: &AggregateExec) -> bool {
    let is_plain = |function: &Arc<AggregateFunctionExpr>| {
        function.order_bys().is_empty() && !function.is_reversed() && !function.ignore_nulls()
    };
    *aggregate.input_order_mode() == InputOrderMode::Linear
        && aggregate.limit_options().is_none()
        && !aggregate.group_expr().has_grouping_set()
        && aggregate.aggr_expr().iter().all(is_plain)
}

pub(super) fn is_window(plan: &Plan) -> bool {
    plan.is::<WindowAggExec>() || plan.is::<BoundedWindowAggExec>()
}

/// Whether a subplan returns fewer rows than it reads, or makes more of them.
fn reduces(plan: &Plan) -> bool {
    plan.is::<FilterExec>()
        || plan.is::<AggregateExec>()
        || plan.is::<SortExec>()
        || plan.is::<HashJoinExec>()
        || plan.children().into_iter().any(reduces)
}

/// The number of bytes that the scans of a subplan read.
fn bytes(plan: &Plan) -> u64 {
    let Some(files) = files_of(plan) else { return plan.children().into_iter().map(bytes).sum() };
    let size = |file: &PartitionedFile| match &file.range {
        Some(range) => (range.end - range.start).unsigned_abs(),
        None => file.object_meta.size,
    };
    files.file_groups.iter().flat_map(FileGroup::files).map(size).sum()
}

/// Whether an operator makes one partition of several.
pub(super) fn gathers(plan: &Plan) -> bool {
    plan.is::<InOrderExec>() || plan.is::<CoalescePartitionsExec>() || plan.is::<SortPreservingMergeExec>()
}

/// Whether an operator is a round-robin repartitioning without an order to preserve.
fn deals_in_turn(plan: &Plan) -> bool {
    plan.downcast_ref::<RepartitionExec>().is_some_and(|repartition| {
        !repartition.preserve_order() && matches!(repartition.partitioning(), Partitioning::RoundRobinBatch(_))
    })
}

/// Swaps an EmbedExec with the SortPreservingMergeExec below it, so that it runs on all sorted partitions in parallel. `None` for
/// other plans.
fn embedded_before_merge(plan: &Plan) -> Result<Option<Plan>> {
    let [input] = plan.children()[..] else { return Ok(None) };
    let Some(merge) = input.downcast_ref::<SortPreservingMergeExec>() else { return Ok(None) };
    if plan.name() != EXEC_NAME || plan.fetch().is_some() || merge.fetch().is_some() {
        return Ok(None);
    }
    // EmbedExec appends columns, so the indices of the sort keys stay valid.
    let embedded = replace_children_if_necessary(Arc::clone(plan), vec![Arc::clone(merge.input())])?;
    Ok(Some(Arc::new(SortPreservingMergeExec::new(merge.expr().clone(), embedded))))
}

/// Whether an operator needs only the first rows of its input.
fn limits_input(plan: &Plan, limited: bool) -> bool {
    let passes_on = plan.is::<CoalescePartitionsExec>()
        || plan.is::<CooperativeExec>()
        || plan.is::<FilterExec>()
        || plan.is::<GlobalLimitExec>()
        || plan.is::<InOrderExec>()
        || plan.is::<LocalLimitExec>()
        || plan.is::<ProjectionExec>()
        || plan.is::<SortPreservingMergeExec>()
        || plan.is::<UnionExec>()
        || is_row_by_row(plan);
    passes_on && (limited || plan.fetch().is_some())
}

/// Whether a scan keeps files in their partitions because the rows are to be in the order of the files.
fn keeps_file_order(plan: &Plan) -> bool {
    match files_of(plan) {
        Some(files) => files.preserve_order,
        None => plan.children().into_iter().all(keeps_file_order),
    }
}

/// Consecutive groups of files for every task. All tasks have the same number of partitions; the last ones may be empty.
fn sliced(scan: &Plan, files: &FileScanConfig, tasks: usize) -> Result<Plan> {
    let all = files.file_groups.len();
    let each = all.div_ceil(tasks).max(1);
    let variants = (0..tasks).map(|task| {
        let own = task * all / tasks..(task + 1) * all / tasks;
        let groups = files.file_groups[own].iter().cloned();
        let none = std::iter::repeat_with(|| FileGroup::new(Vec::new()));
        let mut part = files.clone();
        part.file_groups = groups.chain(none).take(each).collect();
        Arc::new(ScanExec::new(part)) as Plan
    });
    Ok(Arc::new(DistributedLeafExec::try_new(Arc::clone(scan), variants)?))
}

/// Whether no window of a query has a FILTER or ignores NULLs, which `datafusion-proto` 55 leaves out. Physical plans show
/// neither.
///
/// # Errors
/// None that callers need to know: as [`TreeNode::apply`].
pub(super) fn windows_are_plain(plan: &LogicalPlan) -> Result<bool> {
    let mut plain = true;
    plan.apply_with_subqueries(|node| {
        node.apply_expressions(|expr| {
            expr.apply(|expr| {
                if let Expr::WindowFunction(window) = expr {
                    plain &= window.params.filter.is_none() && window.params.null_treatment.is_none();
                }
                Ok(TreeNodeRecursion::Continue)
            })
        })
    })?;
    Ok(plain)
}

/// What the first task of a stage runs.
fn first_task(plan: &Plan) -> Result<Plan> {
    if let Some(leaf) = plan.downcast_ref::<DistributedLeafExec>() {
        return Ok(leaf.variants().first().map_or_else(|| Arc::clone(leaf.original()), Arc::clone));
    }
    let inputs = plan.children().into_iter().map(first_task).collect::<Result<_>>()?;
    replace_children_if_necessary(Arc::clone(plan), inputs)
}
