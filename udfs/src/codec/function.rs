//! Serialisation of functions.

use std::sync::Arc;

use datafusion::{
    common::{Result, plan_datafusion_err, plan_err},
    logical_expr::{AggregateUDF, ScalarUDF},
};

use super::{
    message::FunctionNode,
    model::{sent_mixes, sent_models},
    physical::ElmoCodec,
    version::{VERSION, other_version},
};
use crate::{functions, text_function::TextFunction};

impl ElmoCodec {
    pub(super) fn scalar_to_node(&self, function: &ScalarUDF) -> Result<FunctionNode> {
        let of_text = functions::text_function(function).map(|(function, _)| function);
        let is_score = of_text.is_some_and(|function| function.kind.is_score());
        let models = functions::models(function).map(|models| sent_models(models, None, is_score));
        Ok(FunctionNode {
            version: VERSION.to_owned(),
            name: function.name().to_owned(),
            volatile: of_text.is_some_and(TextFunction::is_volatile),
            models: models.transpose()?.unwrap_or_default(),
            mixes: functions::models(function).map(sent_mixes).unwrap_or_default(),
        })
    }

    pub(super) fn scalar_from_node(&self, node: FunctionNode) -> Result<Arc<ScalarUDF>> {
        if let Some(reason) = other_version(&node.version, self.host.as_ref()) {
            return plan_err!("{reason}");
        }
        let all = functions::scalar(&self.models(node.models, node.mixes)?);
        let found = all.into_iter().chain(functions::internal()).find(|function| function.name() == node.name);
        let function = found.ok_or_else(|| plan_datafusion_err!("there is no function {}", node.name))?;
        Ok(Arc::new(match functions::text_function(&function) {
            Some((of_text, constructor)) if node.volatile => constructor(of_text.volatile()),
            _ => function,
        }))
    }

    pub(super) fn aggregate_to_node(&self, function: &AggregateUDF) -> FunctionNode {
        let name = function.name().to_owned();
        FunctionNode { version: VERSION.to_owned(), name, ..FunctionNode::default() }
    }

    pub(super) fn aggregate_from_node(&self, node: &FunctionNode) -> Result<Arc<AggregateUDF>> {
        if let Some(reason) = other_version(&node.version, self.host.as_ref()) {
            return plan_err!("{reason}");
        }
        let found = functions::aggregate().into_iter().find(|function| function.name() == node.name);
        found.map(Arc::new).ok_or_else(|| plan_datafusion_err!("there is no function {}", node.name))
    }
}
