//! What stands in the place of an operator or a function of another version: it fails when it is run.
//!
//! Ballista's executors throw the reason away when a plan cannot be read; what a task says when it fails reaches the user.

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

/// An operator that adds columns, and fails.
pub(super) fn operator(
    input: &Arc<dyn ExecutionPlan>,
    added: &Schema,
    reason: String,
) -> Result<Arc<dyn ExecutionPlan>> {
    let fields = input.schema().fields().iter().chain(added.fields()).map(Arc::clone).collect::<Vec<_>>();
    let schema: SchemaRef = Arc::new(Schema::new(fields));
    let (partitions, emission) = (input.output_partitioning().clone(), input.pipeline_behavior());
    let properties = PlanProperties::new(EquivalenceProperties::new(schema), partitions, emission, input.boundedness());
    Ok(Arc::new(RefusedExec { input: Arc::clone(input), added: added.clone(), reason, properties: properties.into() }))
}

/// A plan of no columns that fails with `error` when it is run.
#[must_use]
pub fn failing(error: DataFusionError) -> Arc<dyn ExecutionPlan> {
    let nothing = Schema::empty();
    let input: Arc<dyn ExecutionPlan> = Arc::new(EmptyExec::new(Arc::new(nothing.clone())));
    let properties = Arc::clone(input.properties());
    let reason = error.message().into_owned();
    Arc::new(RefusedExec { input, added: nothing, reason, properties })
}

#[derive(Debug)]
struct RefusedExec {
    input: Arc<dyn ExecutionPlan>,
    added: Schema,
    reason: String,
    properties: Arc<PlanProperties>,
}

impl DisplayAs for RefusedExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RefusedExec: {}", self.reason)
    }
}

impl ExecutionPlan for RefusedExec {
    fn name(&self) -> &'static str {
        "RefusedExec"
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
        let [input] = children.as_slice() else { return internal_err!("RefusedExec has one input") };
        operator(input, &self.added, self.reason.clone())
    }

    fn execute(&self, _: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        plan_err!("{}", self.reason)
    }
}

/// A function that fails.
pub(super) fn function(name: String, reason: String) -> ScalarUDF {
    ScalarUDF::new_from_impl(Refused { name, reason, signature: Signature::variadic_any(Volatility::Volatile) })
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Refused {
    name: String,
    reason: String,
    signature: Signature,
}

impl ScalarUDFImpl for Refused {
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
