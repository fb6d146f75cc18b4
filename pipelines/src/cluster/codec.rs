//! What travels between the processes of a cluster: plans of DataFusion, of Ballista, of elmo-udfs and our own.

use std::sync::Arc;

use ballista_core::serde::BallistaPhysicalExtensionCodec;
use datafusion::{
    common::{DataFusionError, Result, plan_datafusion_err, plan_err},
    execution::TaskContext,
    logical_expr::{AggregateUDF, HigherOrderUDF, ScalarUDF, WindowUDF},
    physical_plan::ExecutionPlan,
};
use datafusion_proto::physical_plan::{PhysicalExtensionCodec, PhysicalProtoConverterExtension};
use elmo_udfs::codec::{
    ElmoCodec, ModelHost, SentModel, VERSION, failing, other_version, spec_from_bytes, spec_to_bytes,
};
use serde::{Deserialize, Serialize};

use super::columns::{Columns, Describe, Place, Work};

/// What messages of this package begin with; see [`elmo_udfs::codec`].
const MAGIC: &[u8] = b"elmo-pipelines\0";

/// The codec of all processes of a cluster.
#[derive(Debug)]
pub(super) struct ClusterCodec {
    inner: ElmoCodec,
    host: Arc<dyn ModelHost>,
}

impl ClusterCodec {
    pub(super) fn new(host: Arc<dyn ModelHost>) -> Arc<Self> {
        let ballista = Arc::new(BallistaPhysicalExtensionCodec::default());
        Arc::new(Self { inner: ElmoCodec::new(ballista, Arc::clone(&host)), host })
    }

    /// An operator of what was sent, or one that says why there is none when it is run.
    fn ours(
        &self,
        sent: Sent,
        operator: impl FnOnce(Work, Place) -> Result<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let work = sent.received(self.host.as_ref());
        match work.and_then(|work| operator(work, Place(Arc::clone(&self.host)))) {
            Err(reason) if self.host.fails_late() => Ok(failing(reason)),
            operator => operator,
        }
    }
}

/// Our own operators.
#[derive(Serialize, Deserialize)]
enum Node {
    Describe(Sent),
    Columns(Sent),
}

#[derive(Serialize, Deserialize)]
struct Sent {
    version: String,
    model: Vec<u8>,
    spec: Vec<u8>,
    expected: Vec<(String, String)>,
}

impl From<&Work> for Sent {
    fn from(work: &Work) -> Self {
        let (model, spec) = (work.model.to_bytes(), spec_to_bytes(&work.spec));
        Self { version: VERSION.to_owned(), model, spec, expected: work.expected.clone() }
    }
}

impl Sent {
    fn received(self, host: &dyn ModelHost) -> Result<Work> {
        if let Some(reason) = other_version(&self.version, host) {
            return plan_err!("{reason}");
        }
        Ok(Work {
            model: SentModel::from_bytes(&self.model)?,
            spec: spec_from_bytes(&self.spec)?,
            expected: self.expected,
        })
    }
}

fn unreadable(error: serde_json::Error) -> DataFusionError {
    plan_datafusion_err!("a plan of elmo cannot be read: {error}; run one version of elmo everywhere")
}

impl PhysicalExtensionCodec for ClusterCodec {
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
        match serde_json::from_slice(bytes).map_err(unreadable)? {
            Node::Describe(sent) => self.ours(sent, |work, place| Ok(Arc::new(Describe::new(work, place)))),
            Node::Columns(sent) => match inputs {
                [input] => {
                    self.ours(sent, |work, place| Ok(Arc::new(Columns::try_new(work, Arc::clone(input), place)?)))
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
            (Some(Describe { work, .. }), _) => Node::Describe(work.into()),
            (_, Some(Columns { work, .. })) => Node::Columns(work.into()),
            _ => return self.inner.try_encode(node, buffer, converter),
        };
        buffer.extend_from_slice(MAGIC);
        serde_json::to_writer(buffer, &node).map_err(unreadable)
    }

    fn try_decode_udf(&self, name: &str, buffer: &[u8]) -> Result<Arc<ScalarUDF>> {
        self.inner.try_decode_udf(name, buffer)
    }

    fn try_encode_udf(&self, function: &ScalarUDF, buffer: &mut Vec<u8>) -> Result<()> {
        self.inner.try_encode_udf(function, buffer)
    }

    fn try_decode_udaf(&self, name: &str, buffer: &[u8]) -> Result<Arc<AggregateUDF>> {
        self.inner.try_decode_udaf(name, buffer)
    }

    fn try_encode_udaf(&self, function: &AggregateUDF, buffer: &mut Vec<u8>) -> Result<()> {
        self.inner.try_encode_udaf(function, buffer)
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
