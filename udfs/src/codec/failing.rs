//! Placeholders for operators and functions that cannot be deserialised. They fail when they are executed.
//!
//! Ballista's executors do not report why a plan cannot be deserialised, but they report why a task fails.

use std::{fmt, sync::Arc};

use datafusion::{
    arrow::datatypes::{DataType, Schema, SchemaRef},
    common::{DataFusionError, Result, internal_err, plan_err, tree_node::TreeNodeRecursion},
    execution::{SendableRecordBatchStream, TaskContext},
    logical_expr::{ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility},
    physical_expr::{EquivalenceProperties, PhysicalExpr},
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties, empty::EmptyExec,
    },
};

/// An operator that would add columns to its input, and fails.
pub(super) fn failing_operator(
    input: &Arc<dyn ExecutionPlan>,
    added: &Schema,
    reason: String,
) -> Result<Arc<dyn ExecutionPlan>> {
    let fields = input.schema().fields().iter().chain(added.fields()).map(Arc::clone).collect::<Vec<_>>();
    let schema: SchemaRef = Arc::new(Schema::new(fields));
    let (partitions, emission) = (input.output_partitioning().clone(), input.pipeline_behavior());
    let properties = PlanProperties::new(EquivalenceProperties::new(schema), partitions, emission, input.boundedness());
    Ok(Arc::new(FailingExec { input: Arc::clone(input), added: added.clone(), reason, properties: properties.into() }))
}

/// A plan without columns that fails with the message of `error` when it is executed.
#[must_use]
pub fn failing(error: DataFusionError) -> Arc<dyn ExecutionPlan> {
    let input: Arc<dyn ExecutionPlan> = Arc::new(EmptyExec::new(Arc::new(Schema::empty())));
    let properties = Arc::clone(input.properties());
    let reason = error.message().into_owned();
    Arc::new(FailingExec { input, added: Schema::empty(), reason, properties })
}

#[derive(Debug)]
struct FailingExec {
    input: Arc<dyn ExecutionPlan>,
    added: Schema,
    reason: String,
    properties: Arc<PlanProperties>,
}

impl DisplayAs for FailingExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FailingExec: {}", self.reason)
    }
}

impl ExecutionPlan for FailingExec {
    fn name(&self) -> &'static str {
        "FailingExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
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
        let [input] = children.as_slice() else { return internal_err!("FailingExec has one input") };
        failing_operator(input, &self.added, self.reason.clone())
    }

    fn execute(&self, _: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        plan_err!("{}", self.reason)
    }
}

/// A function that fails.
pub(super) fn failing_function(name: String, reason: String) -> ScalarUDF {
    ScalarUDF::new_from_impl(FailingFunction { name, reason, signature: Signature::variadic_any(Volatility::Volatile) })
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct FailingFunction {
    name: String,
    reason: String,
    signature: Signature,
}

impl ScalarUDFImpl for FailingFunction {
    fn name(&self) -> &str {
        &self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        plan_err!("{}", self.reason)
    }

    fn invoke_with_args(&self, _: ScalarFunctionArgs) -> Result<ColumnarValue> {
        plan_err!("{}", self.reason)
    }
}
