//! Adds the functions, the planner rules and the operator to a DataFusion session.

use std::sync::Arc;

use datafusion::{
    execution::session_state::SessionStateBuilder,
    optimizer::{Analyzer, Optimizer},
    physical_optimizer::{
        PhysicalOptimizerRule, ensure_requirements::EnsureRequirements, join_selection::JoinSelection,
        projection_pushdown::ProjectionPushdown,
    },
    prelude::{SessionConfig, SessionContext},
};

use super::{
    config::ElmoConfig, defer::DeferEmbedding, order::PreserveOrder, planner::EmbedQueryPlanner, rewrite::Rewrite,
    small_batches::SmallBatches,
};
use crate::{functions, models::Models};

/// Adds elmo to a session that is being built.
pub trait ElmoSession: Sized {
    /// Adds the functions over `models`, the planner rules, the operator and the settings `elmo.*`.
    ///
    /// Call it after [`SessionStateBuilder::with_default_features`]. It sets the query planner; a query planner that is
    /// set later needs [`EmbedPlanner`](super::EmbedPlanner) among its extension planners.
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
        // In a union, vectors with different options have the same type but different field metadata. The logical and
        // the physical schema keep the metadata of different branches, and the check would fail.
        config.options_mut().execution.skip_physical_aggregate_schema_check = true;
        let physical_rules = &mut self.physical_optimizers().get_or_insert_default().rules;
        merge_projections_into_joins(physical_rules);
        // The rule that distributes batches over partitions comes next.
        if let Some(next) = physical_rules.iter().position(|rule| rule.name() == EnsureRequirements::new().name()) {
            physical_rules.insert(next, Arc::new(SmallBatches));
        }
        self.with_physical_optimizer_rule(Arc::new(PreserveOrder)).with_query_planner(Arc::new(EmbedQueryPlanner))
    }
}

/// Works around a defect of DataFusion 55: after it swaps the inputs of an outer join, it may push a filter to the
/// wrong input and return rows that the filter should drop.
///
/// The swap puts a projection above the join, and filter pushdown follows columns through it by name. If two columns
/// have the same name, the filter follows the wrong one. An additional [`ProjectionPushdown`] merges these projections
/// into their joins before filters are pushed down.
fn merge_projections_into_joins(rules: &mut Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>>) {
    if let Some(selection) = rules.iter().position(|rule| rule.name() == JoinSelection::new().name()) {
        rules.insert(selection + 1, Arc::new(ProjectionPushdown::new()));
    }
}

/// A session with elmo, and DataFusion's defaults otherwise.
#[must_use]
pub fn session(models: &Models) -> SessionContext {
    session_with_config(models, SessionConfig::new())
}

/// A session with elmo and the given settings.
#[must_use]
pub fn session_with_config(models: &Models, config: SessionConfig) -> SessionContext {
    let builder = SessionStateBuilder::new().with_config(config).with_default_features().with_elmo(models);
    SessionContext::new_with_state(builder.build())
}
