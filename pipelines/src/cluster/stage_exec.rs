//! [`StageExec`] is the top operator of every stage: what a worker does with the rows of a task before they are sent.
//!
//! - It runs the stage with the settings of the client's session. A worker gets none of them otherwise.
//! - It returns batches with the planned schema. A decoded plan knows the types of function results, but neither whether
//!   they can be NULL nor their metadata.
//! - It cuts batches to [`MESSAGE_BYTES`]. A batch is one gRPC message, whose length is limited to 4 GiB.
//! - It turns a panic into an error. `datafusion-distributed` takes a stream whose task panicked for one that has ended, and
//!   the rows that it has read so far for all.
//! - It puts an error into an [`envelope`], once, so that exit code and hint reach the client.

use std::{fmt, panic::AssertUnwindSafe, sync::Arc};

use arrow::{
    array::{RecordBatch, RecordBatchOptions},
    compute::cast,
    datatypes::SchemaRef,
};
use datafusion::{
    common::{DataFusionError, Result, exec_datafusion_err, internal_err, plan_datafusion_err},
    execution::{SendableRecordBatchStream, TaskContext},
    physical_expr::EquivalenceProperties,
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
        metrics::{BaselineMetrics, ExecutionPlanMetricsSet, MetricsSet},
        stream::RecordBatchStreamAdapter,
    },
};
use futures::{StreamExt, TryStreamExt, stream};

use super::{
    envelope,
    live::{Live, QueryId, Running},
};
use crate::{
    operator::{copied, operator},
    sql::{STAGE_EXEC, to_sql_error},
};

type Plan = Arc<dyn ExecutionPlan>;

/// Most bytes of a batch that is sent.
const MESSAGE_BYTES: usize = 16 << 20;

/// Settings of a session: names and values.
pub(super) type Changed = Arc<[(String, String)]>;

/// See the module.
#[derive(Debug)]
pub(super) struct StageExec {
    input: Plan,
    /// The schema that the client planned.
    schema: SchemaRef,
    /// What the client's session has set.
    changed: Changed,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
    /// The query it belongs to, while that is executed.
    query: QueryId,
    /// On a worker: where it is known while it exists.
    live: Option<(Arc<Live>, Running)>,
}

impl StageExec {
    pub(super) fn new(input: Plan, changed: Changed) -> Self {
        let (schema, properties) = (input.schema(), Arc::clone(input.properties()));
        Self { input, schema, changed, properties, metrics: ExecutionPlanMetricsSet::new(), query: 0, live: None }
    }

    /// The operator in an execution of a query.
    pub(super) fn of_query(&self, query: QueryId) -> Self {
        Self {
            query,
            schema: Arc::clone(&self.schema),
            ..Self::new(Arc::clone(&self.input), Arc::clone(&self.changed))
        }
    }

    /// The operator that a worker has decoded.
    pub(super) fn received(
        input: Plan,
        schema: SchemaRef,
        changed: Changed,
        query: QueryId,
        live: Option<&Arc<Live>>,
    ) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(Arc::clone(&schema)),
            input.output_partitioning().clone(),
            input.pipeline_behavior(),
            input.boundedness(),
        );
        let properties = Arc::new(properties);
        let live = live.map(|live| (Arc::clone(live), live.run(query, &input)));
        Self { input, schema, changed, properties, metrics: ExecutionPlanMetricsSet::new(), query, live }
    }

    pub(super) fn parts(&self) -> (&SchemaRef, &Changed, QueryId) {
        (&self.schema, &self.changed, self.query)
    }
}

impl DisplayAs for StageExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(STAGE_EXEC)
    }
}

impl ExecutionPlan for StageExec {
    operator!(STAGE_EXEC, inputs: [input]);

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Plan>) -> Result<Plan> {
        let Ok([input]) = <[_; 1]>::try_from(children) else { return internal_err!("StageExec has one input") };
        let changed = Arc::clone(&self.changed);
        // The partition count of the input may have changed.
        let live = self.live.as_ref().map(|(live, _)| (Arc::clone(live), live.run(self.query, &input)));
        let stage = Self::new(input, changed);
        Ok(Arc::new(Self { schema: Arc::clone(&self.schema), query: self.query, live, ..stage }))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let enveloped = |error: DataFusionError| DataFusionError::Execution(envelope::encode(&to_sql_error(&error)));
        let context = with_settings(&context, &self.changed)?;
        let metrics = BaselineMetrics::new(&self.metrics, partition);
        let schema = Arc::clone(&self.schema);
        // Nothing of the stream is used after a panic.
        let begun = std::panic::catch_unwind(AssertUnwindSafe(|| self.input.execute(partition, context)));
        let rows = begun.unwrap_or_else(|panic| Err(panicked(panic.as_ref()))).map_err(enveloped)?;
        let rows = AssertUnwindSafe(rows).catch_unwind();
        let rows = rows.map(|caught| caught.unwrap_or_else(|panic| Err(panicked(panic.as_ref()))));
        let rows = rows.map(move |batch| with_schema(&batch?, &schema)).map_err(enveloped);
        let rows = rows.map_ok(|batch| stream::iter(pieces(batch).map(Ok))).try_flatten();
        let rows = rows.inspect_ok(move |batch| metrics.record_output(batch.num_rows()));
        Ok(Box::pin(RecordBatchStreamAdapter::new(Arc::clone(&self.schema), rows)))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}

/// What a panic says, which the panic hook of the worker has already logged with its place.
fn panicked(panic: &(dyn std::any::Any + Send)) -> DataFusionError {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    exec_datafusion_err!("the worker has a defect (panic): {}", text.unwrap_or("no message"))
}

/// A copy of a task context with settings of another session.
pub(super) fn with_settings(context: &TaskContext, changed: &[(String, String)]) -> Result<Arc<TaskContext>> {
    let mut config = context.session_config().clone();
    for (name, value) in changed {
        let set = config.options_mut().set(name, value);
        set.map_err(|e| plan_datafusion_err!("cannot set {name} to {value} as in the client's session: {e}"))?;
    }
    Ok(copied(context, config, context.runtime_env()))
}

/// The batch with the planned fields.
fn with_schema(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch> {
    let columns = batch.columns().iter().zip(schema.fields()).map(|(column, field)| {
        match column.data_type() == field.data_type() {
            true => Ok(Arc::clone(column)),
            false => cast(column, field.data_type()),
        }
    });
    let columns = columns.collect::<Result<_, _>>()?;
    // The row count of a result without columns.
    let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(Arc::clone(schema), columns, &rows)?)
}

/// The rows of a batch in slices of about [`MESSAGE_BYTES`].
fn pieces(batch: RecordBatch) -> impl Iterator<Item = RecordBatch> {
    let all = batch.num_rows();
    let count = batch.get_array_memory_size().div_ceil(MESSAGE_BYTES).clamp(1, all.max(1));
    let rows = all.div_ceil(count).max(1);
    // A batch without rows is sent too.
    (0..all.max(1)).step_by(rows).map(move |at| batch.slice(at, rows.min(all - at)))
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int64Array, StringArray};

    use super::*;

    #[test]
    fn pieces_have_all_rows_in_order() {
        let text: StringArray = (0..100).map(|_| Some("x".repeat(1 << 20))).collect();
        let id = Int64Array::from_iter_values(0..100);
        let batch = RecordBatch::try_from_iter([("id", Arc::new(id) as _), ("text", Arc::new(text) as _)]).unwrap();
        let sent: Vec<_> = pieces(batch.clone()).collect();
        assert!(sent.len() >= 6 && sent.iter().all(|piece| piece.num_rows() <= 17), "{}", sent.len());
        assert_eq!(arrow::compute::concat_batches(&batch.schema(), &sent).unwrap(), batch);
        assert_eq!(pieces(batch.slice(0, 0)).map(|piece| piece.num_rows()).collect::<Vec<_>>(), [0]);
    }
}
