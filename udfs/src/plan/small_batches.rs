//! Lets a nested loop join that compares vectors use all partitions, and be cancelled.
//!
//! DataFusion assigns whole batches to partitions, and the join evaluates its condition on all pairs of a batch before
//! it returns to the scheduler. Comparing two vectors takes a hundred times longer than comparing two numbers: one batch
//! of 8,192 rows against as many is minutes of work on one core.

use std::{fmt, sync::Arc};

use datafusion::{
    arrow::array::RecordBatch,
    common::{
        Result,
        config::ConfigOptions,
        internal_err,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    execution::{SendableRecordBatchStream, TaskContext},
    physical_expr::{PhysicalExpr, ScalarFunctionExpr},
    physical_optimizer::PhysicalOptimizerRule,
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties, joins::NestedLoopJoinExec,
        replace_children_if_necessary, stream::RecordBatchStreamAdapter,
    },
};
use futures::{StreamExt, TryStreamExt};

use crate::functions::{elmo_cosine, elmo_dot, elmo_l2};

/// Rows per batch.
const BATCH_ROWS: usize = 256;

/// Puts a [`SmallBatchesExec`] on the side of a nested loop join that is read batch by batch.
#[derive(Debug, Default)]
pub(super) struct SmallBatches;

impl PhysicalOptimizerRule for SmallBatches {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        let rewritten = plan.transform_up(|node| {
            let Some(join) = node.downcast_ref::<NestedLoopJoinExec>() else { return Ok(Transformed::no(node)) };
            let is_split = join.right().is::<SmallBatchesExec>();
            if is_split || !join.filter().is_some_and(|filter| compares_vectors(filter.expression())) {
                return Ok(Transformed::no(node));
            }
            let right = Arc::new(SmallBatchesExec { input: Arc::clone(join.right()) });
            let children = vec![Arc::clone(join.left()), right as Arc<dyn ExecutionPlan>];
            replace_children_if_necessary(node, children).map(Transformed::yes)
        });
        rewritten.map(|rewritten| rewritten.data)
    }

    fn name(&self) -> &str {
        "elmo_small_batches"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

fn compares_vectors(condition: &Arc<dyn PhysicalExpr>) -> bool {
    let names = [elmo_cosine::NAME, elmo_dot::NAME, elmo_l2::NAME];
    let is_measure = |expr: &Arc<dyn PhysicalExpr>| {
        expr.downcast_ref::<ScalarFunctionExpr>().is_some_and(|call| names.contains(&call.fun().name()))
    };
    // The visitor returns no error.
    condition.exists(|expr| Ok(is_measure(expr))).unwrap_or(false)
}

/// Returns the rows of its input in small batches, in their order. Its number of rows is unknown to the planner, which
/// therefore distributes the batches over all partitions.
#[derive(Debug)]
struct SmallBatchesExec {
    input: Arc<dyn ExecutionPlan>,
}

impl DisplayAs for SmallBatchesExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SmallBatchesExec: rows={BATCH_ROWS}")
    }
}

impl ExecutionPlan for SmallBatchesExec {
    fn name(&self) -> &'static str {
        "SmallBatchesExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.input.properties()
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let Ok([input]) = <[_; 1]>::try_from(children) else { return internal_err!("{} has one input", self.name()) };
        Ok(Arc::new(Self { input }))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let batches = self.input.execute(partition, context)?;
        let batches = batches.map_ok(|batch| futures::stream::iter(slices(&batch)).map(Ok)).try_flatten();
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), batches)))
    }
}

fn slices(batch: &RecordBatch) -> Vec<RecordBatch> {
    let rows = batch.num_rows();
    (0..rows).step_by(BATCH_ROWS).map(|start| batch.slice(start, BATCH_ROWS.min(rows - start))).collect()
}
