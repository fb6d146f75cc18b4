//! Serialisation of the operator that embeds.

use std::sync::Arc;

use datafusion::{
    arrow::datatypes::{FieldRef, Schema},
    common::{DataFusionError, Result, internal_datafusion_err, plan_err},
    physical_plan::ExecutionPlan,
};
use datafusion_proto::physical_plan::{PhysicalPlanDecodeContext, PhysicalProtoConverterExtension};
use elmo::EmbedSpec;

use super::{
    message::{CallNode, EmbedNode, ModelNode, SpecNode},
    model::sent_models,
    physical::ElmoCodec,
    version::{VERSION, other_version},
};
use crate::{
    args::EmbedOptions,
    call::{Call, Kind},
    functions,
    plan::exec::{BoundCall, EmbedExec},
};

impl ElmoCodec {
    pub(super) fn operator_to_node(
        &self,
        exec: &EmbedExec,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<EmbedNode> {
        let mut models = Vec::new();
        let mut calls = Vec::new();
        for bound in exec.calls() {
            let name = bound.call.options.model.as_deref().unwrap_or_else(|| bound.models.default_name());
            let of_call = sent_models(&bound.models, Some(name), bound.call.kind.is_score())?;
            calls.push(CallNode {
                function: bound.call.function.to_owned(),
                kind: kind_name(bound.call.kind),
                model: bound.call.options.model.clone(),
                spec: Some(SpecNode::from(&bound.call.options.spec)),
                display: bound.display.clone(),
                text: Some(converter.physical_expr_to_proto(&bound.text, self)?),
                models: of_call.iter().map(|node| index_of(&mut models, node)).collect(),
            });
        }
        let fields: Vec<FieldRef> = exec.calls().iter().map(|bound| Arc::clone(&bound.field)).collect();
        let fields = (&Schema::new(fields)).try_into().map_err(|e| internal_datafusion_err!("{e}"))?;
        let stops_early = exec.stops_early();
        Ok(EmbedNode { version: VERSION.to_owned(), fields: Some(fields), stops_early, calls, models })
    }

    pub(super) fn operator_from_node(
        &self,
        node: &EmbedNode,
        input: &Arc<dyn ExecutionPlan>,
        context: &PhysicalPlanDecodeContext<'_>,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let fields = node.fields.as_ref().ok_or_else(|| missing("fields"))?;
        let fields: Schema = fields.try_into().map_err(|e| internal_datafusion_err!("{e}"))?;
        if let Some(reason) = other_version(&node.version, self.host.as_ref()) {
            return plan_err!("{reason}");
        }
        let mut calls = Vec::new();
        for (call, field) in node.calls.iter().zip(fields.fields()) {
            let models = call.models.iter().filter_map(|index| node.models.get(*index as usize)).cloned().collect();
            let text = call.text.as_ref().ok_or_else(|| missing("a text"))?;
            calls.push(BoundCall {
                // The settings of a call contain its mix.
                models: self.models(models, Vec::new())?,
                call: call_from_node(call)?,
                display: call.display.clone(),
                text: converter.proto_to_physical_expr(text, &input.schema(), context)?,
                field: Arc::clone(field),
            });
        }
        Ok(Arc::new(EmbedExec::try_new(Arc::clone(input), calls, node.stops_early)?))
    }
}

fn call_from_node(node: &CallNode) -> Result<Call> {
    let function = functions::NAMES.iter().find(|name| **name == node.function);
    let kind = Kind::NAMED.iter().find(|(name, _)| *name == node.kind);
    let (Some(function), Some((_, kind))) = (function, kind) else { return Err(missing("a known function")) };
    let spec: EmbedSpec = node.spec.as_ref().ok_or_else(|| missing("settings"))?.try_into()?;
    Ok(Call { function, kind: *kind, options: EmbedOptions { model: node.model.clone(), spec } })
}

/// The index of a model in a list without duplicates. Appends the model if necessary.
fn index_of(models: &mut Vec<ModelNode>, node: &ModelNode) -> u32 {
    let index = models.iter().position(|other| other == node).unwrap_or_else(|| {
        models.push(node.clone());
        models.len() - 1
    });
    u32::try_from(index).unwrap_or(u32::MAX)
}

fn kind_name(kind: Kind) -> String {
    Kind::NAMED.iter().find(|(_, other)| *other == kind).map(|(name, _)| (*name).to_owned()).unwrap_or_default()
}

fn missing(part: &str) -> DataFusionError {
    internal_datafusion_err!("a serialised operator of elmo without {part}")
}
