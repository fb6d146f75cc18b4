//! What the operators of this crate have in common.

use std::sync::Arc;

use datafusion::{
    execution::{TaskContext, runtime_env::RuntimeEnv},
    prelude::SessionConfig,
};

/// A copy of a task context with another configuration and runtime.
pub(crate) fn copied(context: &TaskContext, config: SessionConfig, runtime: Arc<RuntimeEnv>) -> Arc<TaskContext> {
    Arc::new(TaskContext::new(
        context.task_id(),
        context.session_id(),
        config,
        context.scalar_functions().clone(),
        context.higher_order_functions().clone(),
        context.aggregate_functions().clone(),
        context.window_functions().clone(),
        runtime,
    ))
}

/// The methods of [`datafusion::physical_plan::ExecutionPlan`] for an operator with this name, with a field `properties`, without
/// expressions, and with these fields, or the result of this method, as its inputs.
macro_rules! operator {
    ($name:expr, inputs: [$($input:ident),*]) => {
        fn children(&self) -> Vec<&std::sync::Arc<dyn datafusion::physical_plan::ExecutionPlan>> {
            vec![$(&self.$input),*]
        }

        crate::operator::operator!($name);
    };
    ($name:expr, input: $method:ident()) => {
        fn children(&self) -> Vec<&std::sync::Arc<dyn datafusion::physical_plan::ExecutionPlan>> {
            vec![self.$method()]
        }

        crate::operator::operator!($name);
    };
    ($name:expr) => {
        fn name(&self) -> &'static str {
            $name
        }

        fn properties(&self) -> &std::sync::Arc<datafusion::physical_plan::PlanProperties> {
            &self.properties
        }

        fn apply_expressions(
            &self,
            _: &mut dyn FnMut(
                &std::sync::Arc<dyn datafusion::physical_expr::PhysicalExpr>,
            ) -> datafusion::common::Result<datafusion::common::tree_node::TreeNodeRecursion>,
        ) -> datafusion::common::Result<datafusion::common::tree_node::TreeNodeRecursion> {
            Ok(datafusion::common::tree_node::TreeNodeRecursion::Continue)
        }
    };
}
pub(crate) use operator;
