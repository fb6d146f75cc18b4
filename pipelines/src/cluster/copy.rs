//! COPY and INSERT on workers: the sink runs where the rows are.
//!
//! | rows | sinks |
//! |---|---|
//! | of several tasks, into a folder | one in each task |
//! | into one file, or behind an operator that needs all of them | one, in a task that gathers the rows from the others |
//! | of the client, or with operators that only it can run | in the client |
//!
//! An operator that embeds above one that needs all rows, such as a limit, is a [`RowsExec`] in that one task, which sends the rows
//! to all workers.

use std::sync::Arc;

use datafusion::{
    common::{Result, config::ConfigOptions},
    datasource::sink::DataSinkExec,
    physical_optimizer::{PhysicalOptimizerRule, sanity_checker::SanityCheckPlan},
    physical_plan::{
        ExecutionPlan,
        aggregates::{AggregateExec, AggregateMode},
        coalesce_partitions::CoalescePartitionsExec,
        coop::CooperativeExec,
        filter::FilterExec,
        limit::{GlobalLimitExec, LocalLimitExec},
        projection::ProjectionExec,
        replace_children_if_necessary,
        sorts::sort::SortExec,
        union::UnionExec,
    },
};
use datafusion_distributed::NetworkCoalesceExec;

use super::{
    cluster_exec::ClusterExec,
    cut::{Cutter, Part, gathers, is_window},
    distributable::{is_serialisable, is_too_deep},
    publish_exec::PublishExec,
    rows_exec::RowsExec,
    stage_exec::StageExec,
};
use crate::sql::{Described, StageFilesExec, Writes, described};

type Plan = Arc<dyn ExecutionPlan>;

impl Cutter<'_> {
    /// The plan that runs a sink on workers. `None` if `plan` is not a sink, or the client must run it.
    pub(super) fn copy(&self, plan: &Plan) -> Result<Option<Plan>> {
        let (Some(writes), Some(sink)) = (&self.writes, plan.downcast_ref::<DataSinkExec>()) else { return Ok(None) };
        let Some((config, _)) = described(sink) else { return Ok(None) };
        // HTTP has no multipart uploads that another process can complete.
        let is_web = config.object_store_url.as_str().starts_with("http");
        let Some(path) = config.table_paths.first().filter(|_| !is_web) else { return Ok(None) };
        let is_folder = !config.file_output_mode.single_file_output(path) || !config.table_partition_cols.is_empty();
        let input = sink.input();
        if is_folder
            && gathers(input)
            && input.fetch().is_none()
            && let [below] = input.children()[..]
            && let Part::Split(split) = self.part(below, false)?
            && self.is_worth_writing(below)
        {
            let gathered = replace_children_if_necessary(Arc::clone(input), vec![split.sent])?;
            return self.published(writes, plan, gathered, split.tasks);
        }
        // Sends subplans that would not be worth sending without the sink.
        self.writing.set(self.is_worth_writing(input));
        let part = self.part(input, false);
        self.writing.set(false);
        let gathered = match part? {
            Part::Split(split) if self.is_worth_writing(input) => Some(split.sent),
            Part::Split(_) => None,
            Part::Whole(whole) => self.on_one_worker(&whole)?,
        };
        match gathered {
            Some(gathered) => self.published(writes, plan, gathered, 1),
            None => Ok(None),
        }
    }

    /// Runs the sink in each of `tasks` tasks. `None` if the plan cannot be serialised.
    fn published(&self, writes: &Writes, sink: &Plan, rows: Plan, tasks: usize) -> Result<Option<Plan>> {
        let sink = replace_children_if_necessary(Arc::clone(sink), vec![rows])?;
        let files = Arc::new(StageFilesExec::new(sink, writes.settings.clone(), self.analyse, None));
        let stage: Plan = Arc::new(StageExec::new(files, Arc::clone(&self.changed)));
        if is_too_deep(&stage) {
            return Ok(None);
        }
        // Network boundaries have fewer properties, such as orderings, than the operators that they replace.
        let is_sane = SanityCheckPlan::new().optimize(Arc::clone(&stage), &ConfigOptions::new());
        if let Err(reason) = is_sane.map(drop).and_then(|()| self.check(&stage)) {
            tracing::debug!(%reason, "the client writes the files");
            return Ok(None);
        }
        let boundary = Arc::new(NetworkCoalesceExec::try_new(stage, tasks, 1)?);
        let gathered = Arc::new(CoalescePartitionsExec::new(boundary));
        let records = Arc::new(self.on_workers(gathered));
        Ok(Some(Arc::new(PublishExec::new(records, tasks, writes.stores.clone(), self.analyse))))
    }

    /// The plan for a single worker that gathers rows from the others instead of the client. `None` if the subplan reads rows of
    /// the client or has operators that only the client can run.
    fn on_one_worker(&self, plan: &Plan) -> Result<Option<Plan>> {
        if let Some(cluster) = plan.downcast_ref::<ClusterExec>() {
            return Ok(Some(Arc::clone(cluster.plan())));
        }
        let inputs = plan.children();
        let can_run = runs_once(plan) || (is_window(plan) && self.plain_windows);
        if inputs.is_empty() || !can_run || !is_serialisable(plan) {
            return Ok(None);
        }
        let inputs = inputs.into_iter().map(|input| self.on_one_worker(input)).collect::<Result<Option<Vec<_>>>>()?;
        inputs.map(|inputs| replace_children_if_necessary(Arc::clone(plan), inputs)).transpose()
    }
}

/// Whether an operator gives the same rows when it runs in a single task on a worker.
fn runs_once(plan: &Plan) -> bool {
    if let Some(aggregate) = plan.downcast_ref::<AggregateExec>() {
        let is_last = matches!(aggregate.mode(), AggregateMode::Final | AggregateMode::Single);
        return is_last && super::cut::is_plain(aggregate);
    }
    gathers(plan)
        || plan.is::<SortExec>()
        || plan.is::<ProjectionExec>()
        || plan.is::<FilterExec>()
        || plan.is::<GlobalLimitExec>()
        || plan.is::<LocalLimitExec>()
        || plan.is::<CooperativeExec>()
        || plan.is::<UnionExec>()
        || plan.is::<RowsExec>()
}

/// The configurations of the sinks of a plan, which the displayed plan does not show in full.
pub(super) fn sinks(plan: &Plan) -> Vec<Option<Described>> {
    let below = plan.children().into_iter().flat_map(sinks);
    let here = plan.downcast_ref::<DataSinkExec>().map(|sink| described(sink).map(|(_, described)| described));
    here.into_iter().chain(below).collect()
}
