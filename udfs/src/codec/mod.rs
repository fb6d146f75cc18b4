//! Plans that travel: physical plans with our operator and functions as bytes, for the executors of a cluster.
//!
//! A function travels with the models that the query named: where each of them is, and what it was when the query was
//! planned. The process that receives them opens none before the first row is embedded, and then compares.
//! The field of a result travels too, as DataFusion sends of a function's result nothing but its type.

mod message;
mod refused;

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex},
};

use datafusion::{
    arrow::datatypes::{FieldRef, Schema},
    common::{DataFusionError, Result, exec_datafusion_err, internal_datafusion_err, plan_datafusion_err, plan_err},
    execution::TaskContext,
    logical_expr::{AggregateUDF, HigherOrderUDF, ScalarUDF, WindowUDF},
    physical_plan::ExecutionPlan,
};
use datafusion_proto::physical_plan::{
    PhysicalExtensionCodec, PhysicalPlanDecodeContext, PhysicalProtoConverterExtension,
};
use elmo::{EmbedSpec, ModelOptions, embedder::Precision};
use prost::Message;

use self::message::{CallNode, EmbedNode, FunctionNode, ModelNode, SpecNode, word};
use crate::{
    Card, ModelError, ModelFailed, ModelSource, Models, functions,
    models::lock,
    plan::exec::{BoundCall, EmbedExec},
    text_function::{Call, Kind, TextFunction},
};
pub use refused::failing;

/// The version that both ends must have: what travels may mean something else in another.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What our messages begin with. No message of protobuf does: field 12 of a message with numbers of 4 bytes is nobody's.
const MAGIC: &[u8] = b"elmo\0";

/// Models of several plans that are kept, so that the tasks of a query share what they opened and remember.
const KEPT: usize = 16;

/// A model that a plan from elsewhere names.
#[derive(Debug, Clone)]
pub struct SentModel {
    /// What it is called in the query.
    pub name: String,
    /// Where it is: what [`ModelSource::address`] said.
    pub address: String,
    /// What it was when the query was planned.
    pub card: Card,
    /// The precision that vectors are to have.
    pub precision: Precision,
}

impl SentModel {
    /// A model for executors; described, not opened.
    ///
    /// # Errors
    /// When it cannot be described, or was opened by this program and has no address.
    pub fn of(name: &str, source: &dyn ModelSource) -> Result<Self> {
        let card = source.describe().map_err(|e| plan_datafusion_err!("{e}"))?;
        Self::known(name, source, card)
    }

    fn known(name: &str, source: &dyn ModelSource, card: Card) -> Result<Self> {
        let address = source.address().ok_or_else(|| {
            plan_datafusion_err!("the model {name} was opened by this program, and has no address for executors")
        })?;
        Ok(Self { name: name.to_owned(), address, card, precision: source.precision() })
    }

    /// Opens the model where `host` finds it, and compares it with what was sent.
    ///
    /// # Errors
    /// A sentence for the user: the model is not there, cannot be opened, is another one, or gives other numbers.
    pub fn open(&self, host: &dyn ModelHost) -> Result<elmo::Elmo, ModelError> {
        let Self { name, card, precision, .. } = self;
        let here = host.name();
        let elmo = host.open(self).map_err(|e| format!("{here} cannot open the model {name}: {e}"))?;
        if elmo.fingerprint() != &card.fingerprint {
            let (location, there, planned) = (&card.location, elmo.fingerprint(), &card.fingerprint);
            return Err(format!(
                "{here} has another model at {location}: its fingerprint is {there}, and the query was planned with \
                 {planned}"
            )
            .into());
        }
        if elmo.precision() != *precision {
            let there = elmo.precision();
            return Err(format!(
                "{here} computes in {there}, and the query asks for {precision}: start all with the same --precision"
            )
            .into());
        }
        Ok(elmo)
    }

    /// The model as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        ModelNode::new(self, true).encode_to_vec()
    }

    /// The model that [`SentModel::to_bytes`] wrote.
    ///
    /// # Errors
    /// When the bytes are of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        read::<ModelNode>(bytes)?.received()
    }
}

/// Settings as bytes.
#[must_use]
pub fn spec_to_bytes(spec: &EmbedSpec) -> Vec<u8> {
    SpecNode::from(spec).encode_to_vec()
}

/// The settings that [`spec_to_bytes`] wrote.
///
/// # Errors
/// When the bytes are of another version.
pub fn spec_from_bytes(bytes: &[u8]) -> Result<EmbedSpec> {
    (&read::<SpecNode>(bytes)?).try_into()
}

/// Where a process finds the models that plans from elsewhere name.
pub trait ModelHost: fmt::Debug + Send + Sync {
    /// Opens a model. Asked when the first row is to be embedded, and again only after an error.
    ///
    /// # Errors
    /// A sentence for the user: the model is not there, cannot be opened, or is another one.
    fn open(&self, model: &SentModel) -> Result<elmo::Elmo, ModelError>;

    /// What this process calls itself in errors, such as `the executor at 10.0.0.7:50051`.
    fn name(&self) -> String;

    /// Whether a plan that cannot be understood fails when it is run, and not at once: where the reason would get lost.
    fn fails_late(&self) -> bool {
        false
    }
}

/// For whoever only sends plans, or hands them on: opens nothing.
#[derive(Debug)]
pub struct NoModels(
    /// What this process calls itself.
    pub &'static str,
);

impl ModelHost for NoModels {
    fn open(&self, model: &SentModel) -> Result<elmo::Elmo, ModelError> {
        Err(format!("{} opens no models, and was asked for {}", self.0, model.name).into())
    }

    fn name(&self) -> String {
        self.0.to_owned()
    }
}

/// Our operator and functions as bytes; all else is `inner`'s.
#[derive(Debug)]
pub struct ElmoCodec {
    inner: Arc<dyn PhysicalExtensionCodec>,
    host: Arc<dyn ModelHost>,
    /// Models of the plans that came last.
    known: Mutex<VecDeque<(Vec<ModelNode>, Models)>>,
}

impl ElmoCodec {
    /// A codec that asks `inner` for what is not ours.
    #[must_use]
    pub fn new(inner: Arc<dyn PhysicalExtensionCodec>, host: Arc<dyn ModelHost>) -> Self {
        Self { inner, host, known: Mutex::default() }
    }

    fn models(&self, nodes: Vec<ModelNode>) -> Result<Models> {
        let mut known = lock(&self.known);
        if let Some((_, models)) = known.iter().find(|(there, _)| *there == nodes) {
            return Ok(models.clone());
        }
        let default = nodes.iter().find(|node| node.is_default).map(|node| node.name.clone()).unwrap_or_default();
        let models: Vec<_> = nodes.iter().map(|node| self.model(node)).collect::<Result<_>>()?;
        let models = Models::lazy(default, models);
        for node in &nodes {
            // Handed on from here, they are models that a query has named.
            let card = models.card(Some(&node.name));
            card.map_err(|reason| DataFusionError::External(Box::new(ModelFailed(reason))))?;
        }
        if known.len() == KEPT {
            known.pop_front();
        }
        known.push_back((nodes, models.clone()));
        Ok(models)
    }

    fn model(&self, node: &ModelNode) -> Result<(String, Arc<dyn ModelSource>)> {
        let model = Remote { model: node.received()?, host: Arc::clone(&self.host) };
        Ok((node.name.clone(), Arc::new(model)))
    }

    fn embed_node(&self, exec: &EmbedExec, converter: &dyn PhysicalProtoConverterExtension) -> Result<EmbedNode> {
        let (bound, stops_early) = exec.parts();
        let mut models = Vec::new();
        let mut calls = Vec::new();
        for bound in bound {
            let name = bound.call.options.model.as_deref().unwrap_or_else(|| bound.models.default_name());
            let set: Vec<ModelNode> = sent(&bound.models, Some(name), bound.call.kind.is_score())?;
            calls.push(CallNode {
                function: bound.call.function.to_owned(),
                kind: kind_name(bound.call.kind),
                model: bound.call.options.model.clone(),
                spec: Some(SpecNode::from(&bound.call.options.spec)),
                shown: bound.shown.clone(),
                text: Some(converter.physical_expr_to_proto(&bound.text, self)?),
                models: set.iter().map(|node| position(&mut models, node)).collect(),
            });
        }
        let fields: Vec<FieldRef> = bound.iter().map(|bound| Arc::clone(&bound.field)).collect();
        let fields = (&Schema::new(fields)).try_into().map_err(|e| internal_datafusion_err!("{e}"))?;
        Ok(EmbedNode { version: VERSION.to_owned(), fields: Some(fields), stops_early, calls, models })
    }

    fn embed_exec(
        &self,
        node: &EmbedNode,
        input: &Arc<dyn ExecutionPlan>,
        context: &PhysicalPlanDecodeContext<'_>,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let fields = node.fields.as_ref().ok_or_else(|| missing("fields"))?;
        let fields: Schema = fields.try_into().map_err(|e| internal_datafusion_err!("{e}"))?;
        if let Some(reason) = other_version(&node.version, self.host.as_ref()) {
            return match self.host.fails_late() {
                true => refused::operator(input, &fields, reason),
                false => plan_err!("{reason}"),
            };
        }
        let mut calls = Vec::new();
        for (call, field) in node.calls.iter().zip(fields.fields()) {
            let models = call.models.iter().filter_map(|at| node.models.get(*at as usize)).cloned().collect();
            let text = call.text.as_ref().ok_or_else(|| missing("text"))?;
            calls.push(BoundCall {
                models: self.models(models)?,
                call: call.received()?,
                shown: call.shown.clone(),
                text: converter.proto_to_physical_expr(text, &input.schema(), context)?,
                field: Arc::clone(field),
            });
        }
        Ok(Arc::new(EmbedExec::try_new(Arc::clone(input), calls, node.stops_early)?))
    }

    fn function(&self, node: FunctionNode) -> Result<Arc<ScalarUDF>> {
        if let Some(reason) = other_version(&node.version, self.host.as_ref()) {
            return match self.host.fails_late() {
                true => Ok(Arc::new(refused::function(node.name, reason))),
                false => plan_err!("{reason}"),
            };
        }
        let all = functions::scalar(&self.models(node.models)?);
        let found = all.into_iter().find(|function| function.name() == node.name);
        let function = found.ok_or_else(|| plan_datafusion_err!("there is no function {}", node.name))?;
        Ok(Arc::new(match functions::text_function(&function) {
            Some((text, make)) if node.at_run_time => make(text.at_run_time()),
            _ => function,
        }))
    }
}

/// Why a message of this version cannot be understood here.
#[must_use]
pub fn other_version(version: &str, here: &dyn ModelHost) -> Option<String> {
    (version != VERSION).then(|| {
        format!(
            "the query was planned by elmo {version}, and {} is elmo {VERSION}: run one version on the client, the \
             scheduler and all executors",
            here.name()
        )
    })
}

/// The models of a function that queries have named, or the one that is named here. Whoever does not score needs no LM
/// head, and is not to be told of another one.
fn sent(models: &Models, only: Option<&str>, scores: bool) -> Result<Vec<ModelNode>> {
    let names = models.names().filter(|name| only.is_none_or(|only| only == *name));
    let known = names.filter_map(|name| models.known(name).map(|(source, card)| (name, source, card)));
    let sent = known.map(|(name, source, card)| {
        let model = SentModel::known(name, source, card.as_ref().clone())?;
        let node = ModelNode::new(&model, name == models.default_name());
        Ok(ModelNode { lm_head: node.lm_head.filter(|_| scores), ..node })
    });
    sent.collect()
}

/// The place of a model in a list that has each once.
fn position(all: &mut Vec<ModelNode>, node: &ModelNode) -> u32 {
    let place = all.iter().position(|there| there == node).unwrap_or_else(|| {
        all.push(node.clone());
        all.len() - 1
    });
    u32::try_from(place).unwrap_or(u32::MAX)
}

fn kind_name(kind: Kind) -> String {
    Kind::NAMED.iter().find(|(_, there)| *there == kind).map(|(name, _)| (*name).to_owned()).unwrap_or_default()
}

fn missing(what: &str) -> DataFusionError {
    internal_datafusion_err!("a message of elmo without {what}")
}

impl ModelNode {
    fn new(model: &SentModel, is_default: bool) -> Self {
        let SentModel { name, address, card, precision } = model;
        Self {
            name: name.clone(),
            address: address.clone(),
            options: card.options.canonical_json(),
            fingerprint: card.fingerprint.to_string(),
            untrained: card.untrained,
            lm_head: card.lm_head.clone(),
            is_default,
            location: card.location.clone(),
            precision: precision.to_string(),
        }
    }

    fn received(&self) -> Result<SentModel> {
        let options = ModelOptions::from_json(self.options.as_bytes(), &self.address);
        let fingerprint = self.fingerprint.parse().map_err(|e| internal_datafusion_err!("{}: {e}", self.address))?;
        let card = Card {
            options: options.map_err(|e| internal_datafusion_err!("{e}"))?,
            fingerprint,
            untrained: self.untrained,
            lm_head: self.lm_head.clone(),
            location: self.location.clone(),
        };
        let precision = word(&self.precision)?;
        Ok(SentModel { name: self.name.clone(), address: self.address.clone(), card, precision })
    }
}

impl CallNode {
    fn received(&self) -> Result<Call> {
        let function = functions::NAMES.iter().find(|name| **name == self.function);
        let kind = Kind::NAMED.iter().find(|(name, _)| *name == self.kind);
        let (Some(function), Some((_, kind))) = (function, kind) else { return Err(missing("a known function")) };
        let spec: EmbedSpec = self.spec.as_ref().ok_or_else(|| missing("settings"))?.try_into()?;
        Ok(Call { function, kind: *kind, options: crate::args::EmbedOptions { model: self.model.clone(), spec } })
    }
}

/// A model that is described by a plan, and opened by the process that runs it.
#[derive(Debug)]
struct Remote {
    model: SentModel,
    host: Arc<dyn ModelHost>,
}

impl ModelSource for Remote {
    fn describe(&self) -> Result<Card, ModelError> {
        Ok(self.model.card.clone())
    }

    fn address(&self) -> Option<String> {
        Some(self.model.address.clone())
    }

    fn place(&self) -> Option<String> {
        Some(self.host.name())
    }

    fn open(&self) -> Result<elmo::Elmo, ModelError> {
        self.model.open(self.host.as_ref())
    }

    fn precision(&self) -> Precision {
        self.model.precision
    }
}

/// The rest of a message of ours.
fn ours(buffer: &[u8]) -> Option<&[u8]> {
    buffer.strip_prefix(MAGIC)
}

fn write(buffer: &mut Vec<u8>, message: &impl Message) -> Result<()> {
    buffer.extend_from_slice(MAGIC);
    message.encode(buffer).map_err(|e| exec_datafusion_err!("a plan cannot be written: {e}"))
}

fn read<T: Message + Default>(bytes: &[u8]) -> Result<T> {
    T::decode(bytes).map_err(|e| plan_datafusion_err!("a plan of elmo cannot be read: {e}"))
}

impl PhysicalExtensionCodec for ElmoCodec {
    fn try_decode(
        &self,
        buffer: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        context: &TaskContext,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let Some(bytes) = ours(buffer) else { return self.inner.try_decode(buffer, inputs, context, converter) };
        let [input] = inputs else { return plan_err!("EmbedExec has one input") };
        let context = PhysicalPlanDecodeContext::new(context, self);
        self.embed_exec(&read(bytes)?, input, &context, converter)
    }

    fn try_encode(
        &self,
        node: Arc<dyn ExecutionPlan>,
        buffer: &mut Vec<u8>,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<()> {
        match node.downcast_ref::<EmbedExec>() {
            Some(exec) => write(buffer, &self.embed_node(exec, converter)?),
            None => self.inner.try_encode(node, buffer, converter),
        }
    }

    fn try_decode_udf(&self, name: &str, buffer: &[u8]) -> Result<Arc<ScalarUDF>> {
        match ours(buffer) {
            Some(bytes) => self.function(read(bytes)?),
            None => self.inner.try_decode_udf(name, buffer),
        }
    }

    fn try_encode_udf(&self, function: &ScalarUDF, buffer: &mut Vec<u8>) -> Result<()> {
        let name = function.name();
        let models = functions::models(function);
        if models.is_none() && !functions::NAMES.contains(&name) {
            return self.inner.try_encode_udf(function, buffer);
        }
        let of_text = functions::text_function(function).map(|(function, _)| function);
        let scores = of_text.is_some_and(|function| function.kind.is_score());
        let models = models.map(|models| sent(models, None, scores)).transpose()?.unwrap_or_default();
        let at_run_time = of_text.is_some_and(TextFunction::is_at_run_time);
        write(buffer, &FunctionNode { version: VERSION.to_owned(), name: name.to_owned(), at_run_time, models })
    }

    fn try_decode_udaf(&self, name: &str, buffer: &[u8]) -> Result<Arc<AggregateUDF>> {
        let Some(bytes) = ours(buffer) else { return self.inner.try_decode_udaf(name, buffer) };
        let node: FunctionNode = read(bytes)?;
        if let Some(reason) = other_version(&node.version, self.host.as_ref()) {
            return plan_err!("{reason}");
        }
        let found = functions::aggregate().into_iter().find(|function| function.name() == node.name);
        found.map(Arc::new).ok_or_else(|| plan_datafusion_err!("there is no function {}", node.name))
    }

    fn try_encode_udaf(&self, function: &AggregateUDF, buffer: &mut Vec<u8>) -> Result<()> {
        if !functions::NAMES.contains(&function.name()) {
            return self.inner.try_encode_udaf(function, buffer);
        }
        let name = function.name().to_owned();
        write(buffer, &FunctionNode { version: VERSION.to_owned(), name, ..FunctionNode::default() })
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

#[cfg(test)]
mod tests {
    use datafusion::{
        arrow::{
            array::{ArrayRef, RecordBatch, StringArray},
            datatypes::{DataType, Field},
        },
        common::tree_node::{TreeNode, TreeNodeRecursion},
        execution::TaskContext,
        physical_plan::{collect, displayable},
        prelude::SessionContext,
    };
    use datafusion_proto::{
        physical_plan::{AsExecutionPlan, DefaultPhysicalExtensionCodec},
        protobuf::PhysicalPlanNode,
    };
    use elmo::{
        Elmo,
        spec::{Layers, Level, OnError, StateMode},
    };

    use super::*;

    fn elmo() -> Elmo {
        Elmo::from_data(elmo::ModelData::tiny(), &elmo::EmbedderSettings::default()).unwrap()
    }

    /// The built-in model, by an address.
    #[derive(Debug)]
    struct Tiny;

    impl ModelSource for Tiny {
        fn describe(&self) -> Result<Card, ModelError> {
            elmo().describe()
        }

        fn address(&self) -> Option<String> {
            Some("tiny".to_owned())
        }

        fn open(&self) -> Result<Elmo, ModelError> {
            Ok(elmo())
        }
    }

    #[derive(Debug)]
    struct Here {
        late: bool,
    }

    impl ModelHost for Here {
        fn open(&self, model: &SentModel) -> Result<Elmo, ModelError> {
            assert_eq!(model.address, "tiny");
            Ok(elmo())
        }

        fn name(&self) -> String {
            "this test".to_owned()
        }

        fn fails_late(&self) -> bool {
            self.late
        }
    }

    fn codec(late: bool) -> ElmoCodec {
        ElmoCodec::new(Arc::new(DefaultPhysicalExtensionCodec {}), Arc::new(Here { late }))
    }

    fn context() -> SessionContext {
        let models = Models::lazy("small", [("small".to_owned(), Arc::new(Tiny) as Arc<dyn ModelSource>)]);
        let context = crate::session(&models);
        let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("It rained."), None, Some("We stayed in.")]));
        context.register_batch("t", RecordBatch::try_from_iter([("text", texts)]).unwrap()).unwrap();
        context
    }

    async fn plan(query: &str) -> (Arc<dyn ExecutionPlan>, Arc<TaskContext>) {
        let context = context();
        let plan = crate::sql(&context, query).await.unwrap().create_physical_plan().await.unwrap();
        (plan, context.task_ctx())
    }

    fn travelled(plan: Arc<dyn ExecutionPlan>, tasks: &TaskContext) -> Arc<dyn ExecutionPlan> {
        let bytes = PhysicalPlanNode::try_from_physical_plan(plan, &codec(false)).unwrap().encode_to_vec();
        let node = PhysicalPlanNode::try_decode(&bytes).unwrap();
        // Twice, as the scheduler hands it on.
        let there = node.try_into_physical_plan(tasks, &codec(false)).unwrap();
        let again = PhysicalPlanNode::try_from_physical_plan(there, &codec(false)).unwrap();
        again.try_into_physical_plan(tasks, &codec(true)).unwrap()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_plan_that_travelled_gives_the_same() {
        for query in [
            "SELECT elmo_embed(text, layers => 'top', state => 'warm') AS v, elmo_tokens(text) AS t FROM t",
            "SELECT try_elmo_embed(text, model => 'small') AS v FROM t",
            "SELECT elmo_embed('a constant') AS v",
            "SELECT elmo_word(text, 0, 2) AS v, elmo_similarity(text, 'It rained.') AS s FROM t",
            "SELECT elmo_centroid(elmo_embed(text)) AS v FROM t",
        ] {
            let (plan, tasks) = plan(query).await;
            let there = travelled(Arc::clone(&plan), &tasks);
            let show = |plan: &Arc<dyn ExecutionPlan>| displayable(plan.as_ref()).indent(true).to_string();
            assert_eq!(show(&there), show(&plan), "{query}");
            let (here, there) = (collect(plan, Arc::clone(&tasks)).await, collect(there, tasks).await);
            let columns = |batches: Vec<RecordBatch>| -> Vec<Vec<ArrayRef>> {
                batches.iter().map(|batch| batch.columns().to_vec()).collect()
            };
            assert_eq!(columns(here.unwrap()), columns(there.unwrap()), "{query}");
        }
    }

    /// What functions of DataFusion lose on the way, the operator keeps: which model a column comes from.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn fields_keep_what_they_say() {
        let (plan, tasks) = plan("SELECT elmo_embed(text) AS v FROM t").await;
        assert_eq!(travelled(Arc::clone(&plan), &tasks).schema(), plan.schema());
        assert!(plan.schema().field(0).metadata().contains_key("elmo.fingerprint"));
    }

    #[test]
    fn settings_come_back() {
        let mix = elmo::mix::ScalarMix { scalars: vec![0.1, -2.5, 1e-30], gamma: 0.7, layer_norm: true };
        let spec = EmbedSpec {
            level: Level::Token,
            layers: Layers::Mix(mix),
            boundaries: true,
            state: StateMode::Carry,
            batch_rows: Some(7),
            max_tokens: 3,
            on_error: OnError::Skip,
            ..EmbedSpec::default()
        };
        for spec in [spec, EmbedSpec::default(), EmbedSpec { layers: Layers::One(2), ..EmbedSpec::default() }] {
            assert_eq!(spec_from_bytes(&spec_to_bytes(&spec)).unwrap(), spec);
        }
    }

    /// An operator that another version of elmo wrote.
    async fn of_version(version: &str) -> (Vec<u8>, Arc<dyn ExecutionPlan>, Arc<TaskContext>) {
        let (plan, tasks) = plan("SELECT elmo_embed(text) AS v FROM t").await;
        let mut found = None;
        plan.apply(|node| {
            if let Some(exec) = node.downcast_ref::<EmbedExec>() {
                let converter = datafusion_proto::physical_plan::DefaultPhysicalProtoConverter {};
                let node = codec(false).embed_node(exec, &converter)?;
                found = Some((EmbedNode { version: version.to_owned(), ..node }, Arc::clone(exec.children()[0])));
            }
            Ok(TreeNodeRecursion::Continue)
        })
        .unwrap();
        let (node, input) = found.unwrap();
        let mut bytes = Vec::new();
        write(&mut bytes, &node).unwrap();
        (bytes, input, tasks)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn another_version_is_refused_with_both_names() {
        let (bytes, input, tasks) = of_version("9.9.9").await;
        let converter = datafusion_proto::physical_plan::DefaultPhysicalProtoConverter {};
        let says = |error: DataFusionError| {
            let said = error.to_string();
            let expected = format!("planned by elmo 9.9.9, and this test is elmo {VERSION}");
            assert!(said.contains(&expected), "{said}");
        };
        let inputs = [input];
        says(codec(false).try_decode(&bytes, &inputs, &tasks, &converter).unwrap_err());
        let refused = codec(true).try_decode(&bytes, &inputs, &tasks, &converter).unwrap();
        assert_eq!(refused.schema().fields().len(), inputs[0].schema().fields().len() + 1);
        says(collect(refused, tasks).await.unwrap_err());
        let node = FunctionNode { version: "9.9.9".to_owned(), name: "elmo_embed".to_owned(), ..Default::default() };
        let mut bytes = Vec::new();
        write(&mut bytes, &node).unwrap();
        says(codec(false).try_decode_udf("elmo_embed", &bytes).unwrap_err());
        assert_eq!(codec(true).try_decode_udf("elmo_embed", &bytes).unwrap().name(), "elmo_embed");
    }

    #[test]
    fn torn_messages_are_errors() {
        let mut bytes = Vec::new();
        let model = SentModel::of("small", &Tiny).unwrap();
        let models = vec![ModelNode::new(&model, true)];
        let node =
            FunctionNode { version: VERSION.to_owned(), name: "elmo_embed".to_owned(), models, ..Default::default() };
        write(&mut bytes, &node).unwrap();
        assert!(codec(false).try_decode_udf("elmo_embed", &bytes).is_ok());
        for length in MAGIC.len()..bytes.len() {
            // Cut between two fields it may be a message; it is none of a panic.
            let _ = codec(false).try_decode_udf("elmo_embed", &bytes[..length]);
        }
        assert!(codec(false).try_decode_udf("elmo_embed", b"elmo\0\xff\xff").is_err());
        let field = Field::new("v", DataType::Utf8, true);
        assert!(SentModel::from_bytes(field.name().as_bytes()).is_err());
    }

    /// A model that only this program has cannot be found by others.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_model_without_an_address_stays_here() {
        let context = crate::session(&Models::from(elmo()));
        let plan = crate::sql(&context, "SELECT elmo_embed('a')").await.unwrap().create_physical_plan().await.unwrap();
        let error = PhysicalPlanNode::try_from_physical_plan(plan, &codec(false)).unwrap_err();
        assert!(error.to_string().contains("was opened by this program"), "{error}");
    }
}
