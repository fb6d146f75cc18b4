//! The codec of a cluster's plans: elmo-udfs's around one for the operators of this crate around Ballista's.

use std::sync::Arc;

use ballista_core::serde::BallistaPhysicalExtensionCodec;
use datafusion::{
    common::{DataFusionError, Result, plan_datafusion_err, plan_err},
    execution::TaskContext,
    physical_plan::ExecutionPlan,
};
use datafusion_proto::physical_plan::{PhysicalExtensionCodec, PhysicalProtoConverterExtension};
use elmo_udfs::codec::{
    ElmoCodec, ModelHost, SentModel, VERSION, failing, other_version, spec_from_bytes, spec_to_bytes,
};
use serde::{Deserialize, Serialize};

use super::bulk_exec::{ColumnsExec, DescribeExec, EmbedTask, Host};

/// The first bytes of messages of this package; see [`elmo_udfs::codec`].
const MAGIC: &[u8] = b"elmo-pipelines\0";

/// The codec that all processes of a cluster use.
pub(super) fn cluster_codec(host: Arc<dyn ModelHost>) -> Arc<dyn PhysicalExtensionCodec> {
    let bulk = BulkCodec { inner: BallistaPhysicalExtensionCodec::default(), host: Arc::clone(&host) };
    Arc::new(ElmoCodec::new(Arc::new(bulk), host))
}

/// Serialises the operators of a bulk job. Ballista's codec has no functions, so only operators are delegated.
#[derive(Debug)]
struct BulkCodec {
    inner: BallistaPhysicalExtensionCodec,
    host: Arc<dyn ModelHost>,
}

impl BulkCodec {
    /// Builds an operator from a message. If that fails on a host that [`ModelHost::fails_late`], returns an operator
    /// that raises the error when it is executed.
    fn build(
        &self,
        message: TaskMessage,
        operator: impl FnOnce(EmbedTask, Host) -> Result<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let task = message.decode(self.host.as_ref());
        match task.and_then(|task| operator(task, Host(Arc::clone(&self.host)))) {
            Err(reason) if self.host.fails_late() => Ok(failing(reason)),
            operator => operator,
        }
    }
}

/// A serialised operator of this crate.
#[derive(Serialize, Deserialize)]
enum Node {
    Describe(TaskMessage),
    Columns(TaskMessage),
}

/// A serialised [`EmbedTask`].
#[derive(Serialize, Deserialize)]
struct TaskMessage {
    version: String,
    model: Vec<u8>,
    spec: Vec<u8>,
    expected: Vec<(String, String)>,
}

impl From<&EmbedTask> for TaskMessage {
    fn from(task: &EmbedTask) -> Self {
        let (model, spec) = (task.model.to_bytes(), spec_to_bytes(&task.spec));
        Self { version: VERSION.to_owned(), model, spec, expected: task.expected.clone() }
    }
}

impl TaskMessage {
    fn decode(self, host: &dyn ModelHost) -> Result<EmbedTask> {
        if let Some(reason) = other_version(&self.version, host) {
            return plan_err!("{reason}");
        }
        Ok(EmbedTask {
            model: SentModel::from_bytes(&self.model)?,
            spec: spec_from_bytes(&self.spec)?,
            expected: self.expected,
        })
    }
}

fn invalid_message(error: serde_json::Error) -> DataFusionError {
    plan_datafusion_err!("cannot decode a plan of elmo: {error}; run the same version of elmo in all processes")
}

impl PhysicalExtensionCodec for BulkCodec {
    fn try_decode(
        &self,
        buffer: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        context: &TaskContext,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let Some(bytes) = buffer.strip_prefix(MAGIC) else {
            return self.inner.try_decode(buffer, inputs, context, converter);
        };
        match serde_json::from_slice(bytes).map_err(invalid_message)? {
            Node::Describe(message) => self.build(message, |task, host| Ok(Arc::new(DescribeExec::new(task, host)))),
            Node::Columns(message) => match inputs {
                [input] => {
                    self.build(message, |task, host| Ok(Arc::new(ColumnsExec::try_new(task, Arc::clone(input), host)?)))
                }
                _ => plan_err!("ColumnsExec has one input"),
            },
        }
    }

    fn try_encode(
        &self,
        node: Arc<dyn ExecutionPlan>,
        buffer: &mut Vec<u8>,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<()> {
        let node = match (node.downcast_ref(), node.downcast_ref()) {
            (Some(DescribeExec { task, .. }), _) => Node::Describe(task.into()),
            (_, Some(ColumnsExec { task, .. })) => Node::Columns(task.into()),
            _ => return self.inner.try_encode(node, buffer, converter),
        };
        buffer.extend_from_slice(MAGIC);
        serde_json::to_writer(buffer, &node).map_err(invalid_message)
    }
}
