//! Plans that are serialised and deserialised return the same rows.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{ArrayRef, RecordBatch, StringArray},
        datatypes::{DataType, Field},
    },
    common::{
        DataFusionError,
        tree_node::{TreeNode, TreeNodeRecursion},
    },
    execution::TaskContext,
    physical_plan::{ExecutionPlan, collect, displayable},
    prelude::SessionContext,
};
use datafusion_proto::{
    physical_plan::{
        AsExecutionPlan, DefaultPhysicalExtensionCodec, DefaultPhysicalProtoConverter, PhysicalExtensionCodec,
    },
    protobuf::PhysicalPlanNode,
};
use elmo::{
    Elmo, EmbedSpec,
    mix::ScalarMix,
    spec::{Layers, Level, OnError, StateMode},
};

use prost::Message;

use super::{
    frame::{MAGIC, write},
    message::{EmbedNode, FunctionNode},
    *,
};
use crate::{
    models::{Card, ModelError, ModelSource, Models},
    plan::{exec::EmbedExec, session::session},
    statement::sql,
};

fn mix(first: f32) -> ScalarMix {
    ScalarMix { scalars: vec![first, 0.0, 0.5], gamma: 1.5, layer_norm: true }
}

fn elmo() -> Elmo {
    let data = elmo::ModelData { mix: Some(mix(1.0)), ..elmo::ModelData::tiny() };
    Elmo::from_data(data, &elmo::EmbedderSettings::default()).unwrap()
}

/// The built-in model, with an address and a scalar mix in its folder.
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
struct Here;

impl ModelHost for Here {
    fn open(&self, model: &SentModel) -> Result<Elmo, ModelError> {
        assert_eq!(model.address, "tiny");
        Ok(elmo())
    }

    fn name(&self) -> String {
        "this test".to_owned()
    }
}

fn codec() -> ElmoCodec {
    ElmoCodec::new(Arc::new(DefaultPhysicalExtensionCodec {}), Arc::new(Here))
}

fn context() -> SessionContext {
    let models = Models::lazy("small", [("small".to_owned(), Arc::new(Tiny) as Arc<dyn ModelSource>)]);
    let models = models.with_mix("half", mix(0.5)).unwrap();
    let context = session(&models);
    let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("It rained."), None, Some("We stayed in.")]));
    context.register_batch("t", RecordBatch::try_from_iter([("text", texts)]).unwrap()).unwrap();
    context
}

async fn plan(query: &str) -> (Arc<dyn ExecutionPlan>, Arc<TaskContext>) {
    let context = context();
    let plan = sql(&context, query).await.unwrap().create_physical_plan().await.unwrap();
    (plan, context.task_ctx())
}

fn round_trip(plan: Arc<dyn ExecutionPlan>, tasks: &TaskContext) -> Arc<dyn ExecutionPlan> {
    let bytes = PhysicalPlanNode::try_from_physical_plan(plan, &codec()).unwrap().encode_to_vec();
    let node = PhysicalPlanNode::try_decode(&bytes).unwrap();
    // Twice: what was decoded can be encoded again.
    let received = node.try_into_physical_plan(tasks, &codec()).unwrap();
    let again = PhysicalPlanNode::try_from_physical_plan(received, &codec()).unwrap();
    again.try_into_physical_plan(tasks, &codec()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deserialised_plan_returns_the_same_rows() {
    for query in [
        "SELECT elmo_embed(text, layers => 'top', state => 'warm') AS v, elmo_tokens(text) AS t FROM t",
        "SELECT try_elmo_embed(text, model => 'small') AS v FROM t",
        "SELECT elmo_embed('a constant') AS v",
        "SELECT elmo_word(text, 0, 2) AS v, elmo_similarity(text, 'It rained.') AS s FROM t",
        "SELECT elmo_word(text, 'rained') AS v, elmo_words(text, 'in') AS w FROM t",
        "SELECT elmo_word(text, 3, 9, unit => 'characters', normalize => 'l2', max_tokens => 2) AS v FROM t",
        "SELECT elmo_embed(text, layers => 'mix') AS v, elmo_embed(text, layers => 'half') AS w FROM t",
        "SELECT elmo_embed('a constant', layers => 'mix') AS v, elmo_embed('a constant', layers => 'half') AS w",
        "SELECT elmo_centroid(elmo_embed(text)) AS v FROM t",
    ] {
        let (plan, tasks) = plan(query).await;
        let received = round_trip(Arc::clone(&plan), &tasks);
        let show = |plan: &Arc<dyn ExecutionPlan>| displayable(plan.as_ref()).indent(true).to_string();
        assert_eq!(show(&received), show(&plan), "{query}");
        let (local, remote) = (collect(plan, Arc::clone(&tasks)).await, collect(received, tasks).await);
        let columns = |batches: Vec<RecordBatch>| -> Vec<Vec<ArrayRef>> {
            batches.iter().map(|batch| batch.columns().to_vec()).collect()
        };
        assert_eq!(columns(local.unwrap()), columns(remote.unwrap()), "{query}");
    }
}

/// DataFusion does not serialise the metadata of a function's field, which names the model. The operator does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_keep_their_metadata() {
    let (plan, tasks) = plan("SELECT elmo_embed(text) AS v FROM t").await;
    assert_eq!(round_trip(Arc::clone(&plan), &tasks).schema(), plan.schema());
    assert!(plan.schema().field(0).metadata().contains_key("elmo.fingerprint"));
}

#[test]
fn settings_are_restored() {
    let mix = ScalarMix { scalars: vec![0.1, -2.5, 1e-30], gamma: 0.7, layer_norm: true };
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

/// An operator that another version of elmo serialised.
async fn of_version(version: &str) -> (Vec<u8>, Arc<dyn ExecutionPlan>, Arc<TaskContext>) {
    let (plan, tasks) = plan("SELECT elmo_embed(text) AS v FROM t").await;
    let mut found = None;
    plan.apply(|node| {
        if let Some(exec) = node.downcast_ref::<EmbedExec>() {
            let converter = DefaultPhysicalProtoConverter {};
            let node = codec().operator_to_node(exec, &converter)?;
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
async fn another_version_is_rejected_with_both_versions() {
    let (bytes, input, tasks) = of_version("9.9.9").await;
    let converter = DefaultPhysicalProtoConverter {};
    let assert_message = |error: DataFusionError| {
        let message = error.to_string();
        let expected = format!("planned by elmo 9.9.9, and this test is elmo {VERSION}");
        assert!(message.contains(&expected), "{message}");
    };
    let inputs = [input];
    assert_message(codec().try_decode(&bytes, &inputs, &tasks, &converter).unwrap_err());
    let node = FunctionNode { version: "9.9.9".to_owned(), name: "elmo_embed".to_owned(), ..Default::default() };
    let mut bytes = Vec::new();
    write(&mut bytes, &node).unwrap();
    assert_message(codec().try_decode_udf("elmo_embed", &bytes).unwrap_err());
}

#[test]
fn truncated_messages_are_errors() {
    let mut bytes = Vec::new();
    let model = SentModel::of("small", &Tiny).unwrap();
    let models = vec![model.to_node(true)];
    let node =
        FunctionNode { version: VERSION.to_owned(), name: "elmo_embed".to_owned(), models, ..Default::default() };
    write(&mut bytes, &node).unwrap();
    assert!(codec().try_decode_udf("elmo_embed", &bytes).is_ok());
    for length in MAGIC.len()..bytes.len() {
        // Truncated between two fields the message may be valid. It must not panic.
        let _ = codec().try_decode_udf("elmo_embed", &bytes[..length]);
    }
    assert!(codec().try_decode_udf("elmo_embed", b"elmo\0\xff\xff").is_err());
    let field = Field::new("v", DataType::Utf8, true);
    assert!(SentModel::from_bytes(field.name().as_bytes()).is_err());
}

/// Other processes cannot find a model without an address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_without_an_address_is_not_sent() {
    let context = session(&Models::from(elmo()));
    let plan = sql(&context, "SELECT elmo_embed('a')").await.unwrap().create_physical_plan().await.unwrap();
    let error = PhysicalPlanNode::try_from_physical_plan(plan, &codec()).unwrap_err();
    assert!(error.to_string().contains("was opened by this program"), "{error}");
}
