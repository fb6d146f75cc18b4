//! The codec of the plans of a cluster: elmo-udfs's around one for the operators of this crate around that of
//! `datafusion-distributed`.

use std::sync::{Arc, Weak};

use arrow::datatypes::SchemaRef;
use datafusion::{
    common::{
        DataFusionError, Result, internal_datafusion_err, plan_datafusion_err, plan_err,
        tree_node::{Transformed, TreeNode, TreeNodeRecursion},
    },
    execution::TaskContext,
    physical_plan::{ExecutionPlan, SortOrderPushdownResult, replace_children_if_necessary, sorts::sort::SortExec},
};
use datafusion_distributed::DistributedCodec;
use datafusion_proto::physical_plan::{PhysicalExtensionCodec, PhysicalProtoConverterExtension};
use elmo_udfs::codec::{ElmoCodec, ModelHost};
use serde::{Deserialize, Serialize};

use super::{
    live::{Live, QueryId},
    peers::Peers,
    rows_exec::{Received, RowsExec},
    scan_exec::{Restored, ScanExec},
    sent::{EnvelopeCodec, from_bytes, to_bytes},
    stage_exec::{Changed, StageExec, with_settings},
};
use crate::{
    sql::{InOrderExec, OnWorker, SinkOptions, SinkSettings, StageFilesExec},
    stores::Stores,
};

type Plan = Arc<dyn ExecutionPlan>;

/// The first bytes of messages of this package; see [`elmo_udfs::codec`].
const MAGIC: &[u8] = b"elmo-operator\0";

/// The codec of whole plans. On a worker, `live` counts tasks under way, and COPY writes to `stores`.
pub(super) fn whole_codec(
    host: Arc<dyn ModelHost>,
    peers: &Arc<Peers>,
    live: Option<Arc<Live>>,
    stores: Option<Stores>,
) -> Arc<dyn PhysicalExtensionCodec> {
    Arc::new_cyclic(|whole: &Weak<ElmoCodec>| {
        let whole = Weak::clone(whole);
        let operators = OperatorCodec { inner: DistributedCodec, whole, peers: Arc::clone(peers), live, stores };
        ElmoCodec::new(Arc::new(operators), host)
    })
}

/// The codec that `datafusion-distributed` is given.
pub(super) fn envelope_codec(whole: Arc<dyn PhysicalExtensionCodec>) -> Arc<dyn PhysicalExtensionCodec> {
    Arc::new(EnvelopeCodec { whole })
}

/// Encodes the operators of this crate.
#[derive(Debug)]
struct OperatorCodec {
    inner: DistributedCodec,
    /// The codec around this one, for plans inside operators.
    whole: Weak<ElmoCodec>,
    /// The connections of this process.
    peers: Arc<Peers>,
    live: Option<Arc<Live>>,
    stores: Option<Stores>,
}

impl OperatorCodec {
    fn whole(&self) -> Result<Arc<ElmoCodec>> {
        self.whole.upgrade().ok_or_else(|| internal_datafusion_err!("the codec of a plan was dropped"))
    }
}

/// An operator of this crate, without its input.
#[derive(Serialize, Deserialize)]
enum Node {
    Stage { schema: Vec<u8>, changed: Vec<(String, String)>, query: QueryId },
    Scan(Restored),
    InOrder,
    StageFiles { settings: SinkSettings, options: SinkOptions, ends: bool },
    Rows { chain: Vec<u8>, received: Received },
}

impl PhysicalExtensionCodec for OperatorCodec {
    fn try_decode(
        &self,
        buffer: &[u8],
        inputs: &[Plan],
        context: &TaskContext,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Plan> {
        let Some(bytes) = buffer.strip_prefix(MAGIC) else {
            return self.inner.try_decode(buffer, inputs, context, converter);
        };
        let [input] = inputs else { return plan_err!("an operator of elmo has one input") };
        let input = Arc::clone(input);
        Ok(match serde_json::from_slice(bytes).map_err(invalid_message)? {
            Node::Stage { schema, changed, query } => {
                let (schema, changed) = (schema_from_bytes(&schema)?, Changed::from(changed));
                let context = with_settings(context, &changed)?;
                let input = match context.session_config().options().optimizer.enable_sort_pushdown {
                    true => with_sort_hints(input)?,
                    false => input,
                };
                Arc::new(StageExec::received(input, schema, changed, query, self.live.as_ref()))
            }
            Node::Scan(restored) => Arc::new(ScanExec::received(&input, restored)?),
            Node::InOrder => Arc::new(InOrderExec::new(input)),
            Node::Rows { chain, received } => {
                let chain = from_bytes(&chain, context, self.whole()?.as_ref())?;
                Arc::new(RowsExec::received(&chain, input, received, &self.peers)?)
            }
            Node::StageFiles { settings, options, ends } => {
                let worker = self.stores.clone().zip(self.live.clone());
                let worker = worker.map(|(stores, live)| OnWorker { stores, tasks: Arc::new(live) });
                Arc::new(StageFilesExec::new(options.restored(&input)?, settings, ends, worker))
            }
        })
    }

    fn try_encode(
        &self,
        node: Plan,
        buffer: &mut Vec<u8>,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<()> {
        let node = if let Some(stage) = node.downcast_ref::<StageExec>() {
            let (schema, changed, query) = stage.parts();
            Node::Stage { schema: schema_to_bytes(schema)?, changed: changed.to_vec(), query }
        } else if let Some(scan) = node.downcast_ref::<ScanExec>() {
            Node::Scan(scan.restored.clone())
        } else if node.is::<InOrderExec>() {
            Node::InOrder
        } else if let Some(rows) = node.downcast_ref::<RowsExec>() {
            Node::Rows { chain: to_bytes(rows.chain(), self.whole()?.as_ref())?, received: rows.sent() }
        } else if let Some(files) = node.downcast_ref::<StageFilesExec>() {
            let (settings, ends) = files.settings();
            let Some(options) = files.children().first().and_then(|sink| SinkOptions::of(sink)) else {
                return plan_err!("a sink of this format cannot be sent");
            };
            Node::StageFiles { settings: settings.clone(), options, ends }
        } else {
            return self.inner.try_encode(node, buffer, converter);
        };
        buffer.extend_from_slice(MAGIC);
        serde_json::to_writer(buffer, &node).map_err(invalid_message)
    }
}

/// Tells the scans of a decoded plan the order of the sorts above them, in which Parquet scans read their row groups approximately.
/// `datafusion-proto` 55 leaves this hint out. The rule [`PushdownSort`](datafusion::physical_optimizer::pushdown_sort::PushdownSort),
/// by which the client planned it, could also add and remove operators.
fn with_sort_hints(plan: Plan) -> Result<Plan> {
    let hinted = plan.transform_down(|node| {
        let Some(sort) = node.downcast_ref::<SortExec>() else { return Ok(Transformed::no(node)) };
        match sort.input().try_pushdown_sort(sort.expr())? {
            SortOrderPushdownResult::Inexact { inner } => {
                let sort = replace_children_if_necessary(node, vec![inner])?;
                Ok(Transformed::new(sort, true, TreeNodeRecursion::Jump))
            }
            _ => Ok(Transformed::no(node)),
        }
    });
    hinted.map(|hinted| hinted.data)
}

fn invalid_message(error: serde_json::Error) -> DataFusionError {
    plan_datafusion_err!("cannot decode an operator of elmo: {error}; run the same version of elmo in all processes")
}

/// A schema as an Arrow IPC stream without batches, which keeps all metadata.
fn schema_to_bytes(schema: &SchemaRef) -> Result<Vec<u8>> {
    Ok(arrow::ipc::writer::StreamWriter::try_new(Vec::new(), schema)?.into_inner()?)
}

fn schema_from_bytes(bytes: &[u8]) -> Result<SchemaRef> {
    Ok(arrow::ipc::reader::StreamReader::try_new(bytes, None)?.schema())
}
