//! The codec of physical plans. Messages that are not ours are passed to an inner codec.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use datafusion::{
    common::{DataFusionError, Result, plan_datafusion_err, plan_err},
    execution::TaskContext,
    logical_expr::{AggregateUDF, HigherOrderUDF, ScalarUDF, WindowUDF},
    physical_plan::ExecutionPlan,
};
use datafusion_proto::physical_plan::{
    PhysicalExtensionCodec, PhysicalPlanDecodeContext, PhysicalProtoConverterExtension,
};
use elmo::{Elmo, engine::Precision};

use super::{
    frame::{read, strip, write},
    message::{ModelNode, NamedMixNode},
    model::{ModelHost, SentModel},
};
use crate::{
    functions,
    models::{Card, ModelError, ModelFailed, ModelSource, Models},
    plan::exec::EmbedExec,
    sync::lock,
};

/// Maximum number of model sets that are kept. Tasks of one query share a set, and so its open models and its cache.
const MAX_MODEL_SETS: usize = 16;

/// Serialises this crate's operator and functions. Uses an inner codec for everything else.
#[derive(Debug)]
pub struct ElmoCodec {
    inner: Arc<dyn PhysicalExtensionCodec>,
    pub(super) host: Arc<dyn ModelHost>,
    /// The model sets of recent plans, the oldest first.
    model_sets: Mutex<VecDeque<(Vec<ModelNode>, Models)>>,
}

impl ElmoCodec {
    /// A codec for the process `host`.
    #[must_use]
    pub fn new(inner: Arc<dyn PhysicalExtensionCodec>, host: Arc<dyn ModelHost>) -> Self {
        Self { inner, host, model_sets: Mutex::default() }
    }

    /// The models and the scalar mixes of a message.
    pub(super) fn models(&self, nodes: Vec<ModelNode>, mixes: Vec<NamedMixNode>) -> Result<Models> {
        let named = mixes.into_iter().filter_map(|node| Some((node.name, node.mix?)));
        named.into_iter().try_fold(self.model_set(nodes)?, |models, (name, mix)| {
            models.with_mix(name, (&mix).into()).map_err(|reason| plan_datafusion_err!("{reason}"))
        })
    }

    fn model_set(&self, nodes: Vec<ModelNode>) -> Result<Models> {
        let mut model_sets = lock(&self.model_sets);
        if let Some((_, models)) = model_sets.iter().find(|(other, _)| *other == nodes) {
            return Ok(models.clone());
        }
        let default = nodes.iter().find(|node| node.is_default).map(|node| node.name.clone()).unwrap_or_default();
        let sources: Vec<_> = nodes.iter().map(|node| self.source(node)).collect::<Result<_>>()?;
        let models = Models::lazy(default, sources);
        for node in &nodes {
            // If this process serialises the plan again, it sends the models that have been described.
            let card = models.card(Some(&node.name));
            card.map_err(|reason| DataFusionError::External(Box::new(ModelFailed(reason))))?;
        }
        if model_sets.len() == MAX_MODEL_SETS {
            model_sets.pop_front();
        }
        model_sets.push_back((nodes, models.clone()));
        Ok(models)
    }

    fn source(&self, node: &ModelNode) -> Result<(String, Arc<dyn ModelSource>)> {
        let source = ReceivedModel { model: SentModel::from_node(node)?, host: Arc::clone(&self.host) };
        Ok((node.name.clone(), Arc::new(source)))
    }
}

/// A model that a plan describes and this process opens.
#[derive(Debug)]
struct ReceivedModel {
    model: SentModel,
    host: Arc<dyn ModelHost>,
}

impl ModelSource for ReceivedModel {
    fn describe(&self) -> Result<Card, ModelError> {
        Ok(self.model.card.clone())
    }

    fn address(&self) -> Option<String> {
        Some(self.model.address.clone())
    }

    fn process(&self) -> Option<String> {
        Some(self.host.name())
    }

    fn open(&self) -> Result<Elmo, ModelError> {
        self.model.open(self.host.as_ref())
    }

    fn precision(&self) -> Precision {
        self.model.precision
    }
}

impl PhysicalExtensionCodec for ElmoCodec {
    fn try_decode(
        &self,
        buffer: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        context: &TaskContext,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let Some(bytes) = strip(buffer) else { return self.inner.try_decode(buffer, inputs, context, converter) };
        let [input] = inputs else { return plan_err!("EmbedExec has one input") };
        let context = PhysicalPlanDecodeContext::new(context, self);
        self.operator_from_node(&read(bytes)?, input, &context, converter)
    }

    fn try_encode(
        &self,
        node: Arc<dyn ExecutionPlan>,
        buffer: &mut Vec<u8>,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<()> {
        match node.downcast_ref::<EmbedExec>() {
            Some(exec) => write(buffer, &self.operator_to_node(exec, converter)?),
            None => self.inner.try_encode(node, buffer, converter),
        }
    }

    fn try_decode_udf(&self, name: &str, buffer: &[u8]) -> Result<Arc<ScalarUDF>> {
        match strip(buffer) {
            Some(bytes) => self.scalar_from_node(read(bytes)?),
            None => self.inner.try_decode_udf(name, buffer),
        }
    }

    fn try_encode_udf(&self, function: &ScalarUDF, buffer: &mut Vec<u8>) -> Result<()> {
        if functions::models(function).is_none() && !functions::is_ours(function.name()) {
            return self.inner.try_encode_udf(function, buffer);
        }
        write(buffer, &self.scalar_to_node(function)?)
    }

    fn try_decode_udaf(&self, name: &str, buffer: &[u8]) -> Result<Arc<AggregateUDF>> {
        match strip(buffer) {
            Some(bytes) => self.aggregate_from_node(&read(bytes)?),
            None => self.inner.try_decode_udaf(name, buffer),
        }
    }

    fn try_encode_udaf(&self, function: &AggregateUDF, buffer: &mut Vec<u8>) -> Result<()> {
        if !functions::NAMES.contains(&function.name()) {
            return self.inner.try_encode_udaf(function, buffer);
        }
        write(buffer, &self.aggregate_to_node(function))
    }

    fn try_decode_udwf(&self, name: &str, buffer: &[u8]) -> Result<Arc<WindowUDF>> {
        self.inner.try_decode_udwf(name, buffer)
    }

    fn try_encode_udwf(&self, function: &WindowUDF, buffer: &mut Vec<u8>) -> Result<()> {
        self.inner.try_encode_udwf(function, buffer)
    }

    fn try_decode_higher_order_function(&self, name: &str, buffer: &[u8]) -> Result<Arc<HigherOrderUDF>> {
        self.inner.try_decode_higher_order_function(name, buffer)
    }

    fn try_encode_higher_order_function(&self, function: &HigherOrderUDF, buffer: &mut Vec<u8>) -> Result<()> {
        self.inner.try_encode_higher_order_function(function, buffer)
    }
}
