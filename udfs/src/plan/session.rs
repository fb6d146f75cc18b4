//! Puts functions, rules and operator into a session.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use datafusion::{
    catalog::Session,
    common::{Result, plan_err},
    execution::{context::QueryPlanner, session_state::SessionStateBuilder},
    logical_expr::{
        Expr, ExprSchemable, LogicalPlan, UserDefinedLogicalNode, physical_planning_context::PhysicalPlanningContext,
    },
    optimizer::{Analyzer, Optimizer},
    physical_optimizer::{
        PhysicalOptimizerRule, join_selection::JoinSelection, projection_pushdown::ProjectionPushdown,
    },
    physical_plan::ExecutionPlan,
    physical_planner::{DefaultPhysicalPlanner, ExtensionPlanner, PhysicalPlanner},
    prelude::{SessionConfig, SessionContext},
};

use super::{
    config::ElmoConfig,
    defer::DeferEmbedding,
    exec::{BoundCall, EmbedExec},
    node::Embed,
    order::KeepOrder,
};
use crate::{Models, functions, rewrite::Rewrite};

/// Adds elmo to a session that is being built.
pub trait ElmoSession: Sized {
    /// Adds the functions over `models`, the planner rules, the `Embed` operator and the settings `elmo.*`. Comes after
    /// [`SessionStateBuilder::with_default_features`] and before anything that adds a query planner of its own: that one
    /// needs [`EmbedPlanner`] among its extension planners.
    #[must_use]
    fn with_elmo(self, models: &Models) -> Self;
}

impl ElmoSession for SessionStateBuilder {
    fn with_elmo(mut self, models: &Models) -> Self {
        let scalar = functions::scalar(models).into_iter().map(Arc::new);
        self.scalar_functions().get_or_insert_default().extend(scalar);
        let aggregate = functions::aggregate().into_iter().map(Arc::new);
        self.aggregate_functions().get_or_insert_default().extend(aggregate);
        let table = functions::table(models).into_iter().map(|f| (f.name().to_owned(), Arc::new(f)));
        self.table_functions().get_or_insert_default().extend(table);
        self.analyzer().get_or_insert_with(Analyzer::new).add_function_rewrite(Arc::new(Rewrite));
        let rules = &mut self.optimizer().get_or_insert_with(Optimizer::new).rules;
        rules.insert(0, Arc::new(Rewrite));
        rules.push(Arc::new(DeferEmbedding));
        let config = self.config().get_or_insert_with(SessionConfig::new);
        if config.options().extensions.get::<ElmoConfig>().is_none() {
            config.options_mut().extensions.insert(ElmoConfig::default());
        }
        // Vectors of several kinds in the branches of a union are columns of one type and other fields, of which the two
        // sides of this check keep different parts.
        config.options_mut().execution.skip_physical_aggregate_schema_check = true;
        keep_filters_right(&mut self.physical_optimizers().get_or_insert_default().rules);
        self.with_physical_optimizer_rule(Arc::new(KeepOrder)).with_query_planner(Arc::new(EmbedQueryPlanner))
    }
}

/// DataFusion 55 moves a filter below the wrong side of an outer join whose sides it has changed over, and leaves rows that
/// the filter drops: above such a join is a projection with two columns of one name, through which filters follow names.
/// Projections that are one with their join before filters move have no such columns.
fn keep_filters_right(rules: &mut Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>>) {
    if let Some(selection) = rules.iter().position(|rule| rule.name() == JoinSelection::new().name()) {
        rules.insert(selection + 1, Arc::new(ProjectionPushdown::new()));
    }
}

/// A session with elmo in it, and DataFusion's defaults otherwise.
#[must_use]
pub fn session(models: &Models) -> SessionContext {
    session_with_config(models, SessionConfig::new())
}

/// A session with elmo in it and with these settings.
#[must_use]
pub fn session_with_config(models: &Models, config: SessionConfig) -> SessionContext {
    let builder = SessionStateBuilder::new().with_config(config).with_default_features().with_elmo(models);
    SessionContext::new_with_state(builder.build())
}

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
        for embedded in &embed.calls {
            let Some((function, _)) = functions::text_function(&embedded.function.0) else {
                return plan_err!("Embed of {}, which is no function over a text", embedded.expr());
            };
            let literals: Vec<_> = embedded.options.iter().map(literal).collect();
            calls.push(BoundCall {
                models: function.models.clone(),
                call: function.call(&literals)?,
                shown: embedded.expr().to_string(),
                text: planner.create_physical_expr(&embedded.text, logical.schema(), session, planning_ctx)?,
                field: embedded.expr().alias(&embedded.name).to_field(logical.schema())?.1,
            });
        }
        Ok(Some(Arc::new(EmbedExec::try_new(Arc::clone(input), calls, embed.stops_early)?)))
    }
}

pub(crate) fn literal(expr: &Expr) -> Option<&datafusion::common::ScalarValue> {
    match expr {
        Expr::Literal(value, _) => Some(value),
        _ => None,
    }
}

/// DataFusion's planner, which knows [`Embed`].
struct EmbedQueryPlanner;

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
