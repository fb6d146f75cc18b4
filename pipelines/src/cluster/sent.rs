//! A plan on its way to a worker.
//!
//! `datafusion-distributed` encodes plans by a composition of codecs that sends functions by name alone. A plan is
//! therefore put into [`SentPlan`], a leaf, which [`EnvelopeCodec`] encodes with our own codec: functions go with their
//! models, and scans with the properties that `datafusion-proto` leaves out. On the worker the envelope decodes to the plan
//! itself.

use std::{fmt, sync::Arc};

use datafusion::{
    common::{Result, internal_err, plan_err},
    execution::{SendableRecordBatchStream, TaskContext},
    physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties},
};
use datafusion_proto::{
    bytes::{physical_plan_from_bytes_with_proto_converter, physical_plan_to_bytes_with_proto_converter},
    physical_plan::{DeduplicatingProtoConverter, PhysicalExtensionCodec, PhysicalProtoConverterExtension},
};
use elmo_udfs::codec::VERSION;

use crate::operator::operator;

type Plan = Arc<dyn ExecutionPlan>;

/// The first bytes of an envelope.
const MAGIC: &[u8] = b"elmo-plan\0";

/// See the module. It is never executed.
#[derive(Debug)]
pub(super) struct SentPlan {
    plan: Plan,
    properties: Arc<PlanProperties>,
}

impl SentPlan {
    pub(super) fn new(plan: Plan) -> Self {
        let properties = Arc::clone(plan.properties());
        Self { plan, properties }
    }
}

impl DisplayAs for SentPlan {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SentPlan")
    }
}

impl ExecutionPlan for SentPlan {
    operator!("SentPlan", inputs: []);

    fn with_new_children(self: Arc<Self>, _: Vec<Plan>) -> Result<Plan> {
        Ok(self)
    }

    fn execute(&self, _: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        internal_err!("a plan on its way to a worker was executed")
    }
}

/// Encodes [`SentPlan`]s.
#[derive(Debug)]
pub(super) struct EnvelopeCodec {
    /// The codec of the plan inside.
    pub(super) whole: Arc<dyn PhysicalExtensionCodec>,
}

impl PhysicalExtensionCodec for EnvelopeCodec {
    fn try_encode(&self, node: Plan, buffer: &mut Vec<u8>, _: &dyn PhysicalProtoConverterExtension) -> Result<()> {
        let Some(sent) = node.downcast_ref::<SentPlan>() else {
            return internal_err!("{} has no envelope", node.name());
        };
        buffer.extend_from_slice(MAGIC);
        buffer.extend_from_slice(&to_bytes(&sent.plan, self.whole.as_ref())?);
        Ok(())
    }

    fn try_decode(
        &self,
        buffer: &[u8],
        _: &[Plan],
        context: &TaskContext,
        _: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Plan> {
        match buffer.strip_prefix(MAGIC) {
            Some(bytes) => from_bytes(bytes, context, self.whole.as_ref()),
            None => plan_err!("this is not a plan of elmo {VERSION}"),
        }
    }
}

/// A plan as bytes.
///
/// # Errors
/// If an operator or an expression cannot be encoded.
pub(super) fn to_bytes(plan: &Plan, codec: &dyn PhysicalExtensionCodec) -> Result<Vec<u8>> {
    let converter = DeduplicatingProtoConverter::default();
    let bytes = physical_plan_to_bytes_with_proto_converter(Arc::clone(plan), codec, &converter)?;
    Ok(bytes.into())
}

/// The plan of [`to_bytes`].
///
/// # Errors
/// If the bytes are those of another version, or name what this process does not have.
pub(super) fn from_bytes(bytes: &[u8], context: &TaskContext, codec: &dyn PhysicalExtensionCodec) -> Result<Plan> {
    physical_plan_from_bytes_with_proto_converter(bytes, context, codec, &DeduplicatingProtoConverter::default())
}
