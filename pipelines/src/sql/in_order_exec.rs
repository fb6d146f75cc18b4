//! [`InOrderExec`] concatenates partitions in order, so that rows keep the order of the files. Each partition
//! computes [`BUFFERED_BATCHES`] batches ahead.

use std::{fmt, sync::Arc};

use datafusion::{
    common::{Result, internal_err},
    execution::{SendableRecordBatchStream, TaskContext},
    physical_expr::{EquivalenceProperties, Partitioning},
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties, common::spawn_buffered,
        stream::RecordBatchStreamAdapter,
    },
};
use futures::StreamExt;

use crate::operator::operator;

type Plan = Arc<dyn ExecutionPlan>;

/// Batches buffered per partition.
const BUFFERED_BATCHES: usize = 2;

/// Concatenates the partitions of its input into one.
#[derive(Debug)]
pub(crate) struct InOrderExec {
    input: Plan,
    properties: Arc<PlanProperties>,
}

impl InOrderExec {
    pub(crate) fn new(input: Plan) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(input.schema()),
            Partitioning::UnknownPartitioning(1),
            input.pipeline_behavior(),
            input.boundedness(),
        );
        Self { input, properties: Arc::new(properties) }
    }
}

impl DisplayAs for InOrderExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InOrderExec")
    }
}

impl ExecutionPlan for InOrderExec {
    operator!("InOrderExec", inputs: [input]);

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Ok([input]) = <[_; 1]>::try_from(children) else { return internal_err!("InOrderExec has one input") };
        Ok(Arc::new(Self::new(input)))
    }

    fn execute(&self, _: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let partitions = 0..self.input.output_partitioning().partition_count();
        let start =
            |partition| Ok(spawn_buffered(self.input.execute(partition, Arc::clone(&context))?, BUFFERED_BATCHES));
        let streams = partitions.map(start).collect::<Result<Vec<_>>>()?;
        let batches = futures::stream::iter(streams).flatten();
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), batches)))
    }
}
