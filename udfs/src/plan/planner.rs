//! Converts the logical operator [`Embed`] into the physical operator [`EmbedExec`].

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use datafusion::{
    catalog::Session,
    common::{Result, plan_err},
    execution::context::QueryPlanner,
    logical_expr::{
        ExprSchemable, LogicalPlan, UserDefinedLogicalNode, physical_planning_context::PhysicalPlanningContext,
    },
    physical_plan::ExecutionPlan,
    physical_planner::{DefaultPhysicalPlanner, ExtensionPlanner, PhysicalPlanner},
};

use super::{
    exec::{BoundCall, EmbedExec},
    node::Embed,
};
use crate::{args::literal_expr, functions};

/// Plans [`Embed`] nodes.
#[derive(Debug, Default)]
pub struct EmbedPlanner;

#[async_trait]
impl ExtensionPlanner for EmbedPlanner {
    async fn plan_extension(
        &self,
        planner: &dyn PhysicalPlanner,
        node: &dyn UserDefinedLogicalNode,
        logical_inputs: &[&LogicalPlan],
        physical_inputs: &[Arc<dyn ExecutionPlan>],
        session: &dyn Session,
        planning_ctx: &PhysicalPlanningContext,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        let Some(embed) = node.as_any().downcast_ref::<Embed>() else { return Ok(None) };
        let ([input], [logical]) = (physical_inputs, logical_inputs) else { return plan_err!("Embed has one input") };
        let mut calls = Vec::new();
        for call in &embed.calls {
            let Some((function, _)) = functions::text_function(&call.function.0) else {
                return plan_err!("Embed: {} is not a call of a function over a text", call.expr());
            };
            let literals: Vec<_> = call.options.iter().map(literal_expr).collect();
            calls.push(BoundCall {
                models: function.models.clone(),
                call: function.call(&literals)?,
                display: call.expr().to_string(),
                text: planner.create_physical_expr(&call.text, logical.schema(), session, planning_ctx)?,
                field: call.expr().alias(&call.name).to_field(logical.schema())?.1,
            });
        }
        Ok(Some(Arc::new(EmbedExec::try_new(Arc::clone(input), calls, embed.stops_early)?)))
    }
}

/// DataFusion's query planner with [`EmbedPlanner`].
pub(super) struct EmbedQueryPlanner;

impl fmt::Debug for EmbedQueryPlanner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EmbedQueryPlanner")
    }
}

#[async_trait]
impl QueryPlanner for EmbedQueryPlanner {
    async fn create_physical_plan(&self, plan: &LogicalPlan, session: &dyn Session) -> Result<Arc<dyn ExecutionPlan>> {
        let planner = DefaultPhysicalPlanner::with_extension_planners(vec![Arc::new(EmbedPlanner)]);
        planner.create_physical_plan(plan, session).await
    }
}
