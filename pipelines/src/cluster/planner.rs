//! The query planner of a client: plans as a single process does, then [cuts](super::cut) the plan.

use std::{cell::Cell, fmt, sync::Arc};

use async_trait::async_trait;
use datafusion::{
    catalog::Session,
    common::{Result, format::ExplainFormat},
    datasource::sink::DataSinkExec,
    execution::{SessionState, context::QueryPlanner, session_state::SessionStateBuilder},
    logical_expr::{Explain, LogicalPlan, PlanType},
    physical_plan::{ExecutionPlan, analyze::AnalyzeExec, displayable, explain::ExplainExec},
    prelude::SessionConfig,
};
use datafusion_distributed::{ChannelResolver, DistributedExt};
use datafusion_proto::physical_plan::PhysicalExtensionCodec;
use elmo_udfs::{codec::NoModels, plan::config::ElmoConfig};
use tokio::runtime::Handle;

use super::{
    MIN_SPLIT_BYTES, TARGET_PARTITIONS,
    codec::{envelope_codec, whole_codec},
    cut::{Cutter, windows_are_plain},
    distributable::contains_calls,
    error::ClusterError,
    fleet::Fleet,
    members::{Member, Workers, check_same_kind},
    peers::{Credentials, Peers},
    scans::reads_json_arrays,
    service::Greeting,
    stage_exec::Changed,
};
use crate::{
    error::{Error, Result as ElmoResult},
    sql::Remote,
};

/// Bytes that a client keeps of each partition that it does not read yet.
const BUFFERED_BYTES: usize = 8 << 20;
/// Partitions of a scan per worker.
const PARTITIONS_PER_WORKER: usize = 2;
/// Maximum number of partitions of a scan: each is an HTTP/2 stream.
const MAX_PARTITIONS: usize = 256;
/// Rows of a batch that goes between workers.
const SHUFFLED_ROWS: usize = 1024;

/// A client of workers. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cluster {
    workers: Workers,
    peers: Arc<Peers>,
    codec: Arc<dyn PhysicalExtensionCodec>,
}

impl Cluster {
    /// A client. Does not connect. Requires a Tokio runtime.
    ///
    /// # Errors
    /// [`Error::Usage`] if a header cannot have the token.
    pub fn new(workers: Workers, credentials: &Credentials) -> ElmoResult<Self> {
        let peers = Peers::new(credentials, None, Handle::current());
        let peers =
            peers.map_err(|_| Error::usage("the token has characters that are not printable ASCII", "give another"))?;
        let peers = Arc::new(peers);
        let codec = whole_codec(Arc::new(NoModels("the client")), &peers, None, None);
        Ok(Self { workers, peers, codec })
    }

    /// How the workers are, by address. Those of other versions answer too.
    ///
    /// # Errors
    /// [`ClusterError::List`] if there is no list of workers.
    pub async fn status(&self) -> Result<Vec<(String, Result<Greeting, ClusterError>)>, ClusterError> {
        let answers = self.workers.ask(&self.peers, true).await?;
        Ok(answers.into_iter().map(|(url, answer)| (super::peers::name_of(&url), answer)).collect())
    }

    /// The workers for a bulk job.
    ///
    /// # Errors
    /// As [`Workers::members`].
    pub(super) async fn fleet(&self) -> Result<Arc<Fleet>, ClusterError> {
        Fleet::new(self.workers.clone(), Arc::clone(&self.peers)).await
    }

    async fn members(&self) -> Result<Arc<[Member]>> {
        Ok(self.workers.members(&self.peers).await?)
    }
}

/// Distributes the plans of another planner.
struct ClusterPlanner {
    inner: Arc<dyn QueryPlanner + Send + Sync>,
    cluster: Cluster,
}

impl Remote for Cluster {
    fn extend(&self, mut builder: SessionStateBuilder) -> SessionStateBuilder {
        let Some(inner) = builder.query_planner().take() else { return builder };
        let peers = Arc::clone(&self.peers) as Arc<dyn ChannelResolver + Send + Sync>;
        let mut config = builder.config().take().unwrap_or_default();
        config = config
            .with_target_partitions(TARGET_PARTITIONS)
            .with_repartition_file_min_size(MIN_SPLIT_BYTES)
            // Of a filter that is known only while the query runs, workers would never hear.
            .set_bool("datafusion.optimizer.enable_dynamic_filter_pushdown", false)
            // Both sides of a join are dealt over the workers, however small.
            .set_u64("datafusion.optimizer.hash_join_single_partition_threshold", 0)
            .set_u64("datafusion.optimizer.hash_join_single_partition_threshold_rows", 0);
        config.set_distributed_channel_resolver(peers);
        config.set_distributed_user_codec_arc(envelope_codec(Arc::clone(&self.codec)));
        let buffers = config
            .with_distributed_worker_connection_buffer_budget_bytes(BUFFERED_BYTES)
            .and_then(|config| config.with_distributed_shuffle_batch_size(SHUFFLED_ROWS))
            // Vectors do not compress.
            .and_then(|config| config.with_distributed_compression(None));
        let config = match buffers {
            Ok(config) => config,
            Err(reason) => {
                tracing::error!(%reason, "the cluster cannot be configured");
                return builder.with_query_planner(inner);
            }
        };
        let planner = ClusterPlanner { inner, cluster: self.clone() };
        builder.with_config(config).with_query_planner(Arc::new(planner))
    }
}

impl fmt::Debug for ClusterPlanner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterPlanner({})", self.cluster.workers)
    }
}

#[async_trait]
impl QueryPlanner for ClusterPlanner {
    async fn create_physical_plan(
        &self,
        logical: &LogicalPlan,
        session: &dyn Session,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let Some(state) = session.as_any().downcast_ref::<SessionState>() else {
            return self.inner.create_physical_plan(logical, session).await;
        };
        if let LogicalPlan::Explain(_) = logical {
            let plan = self.inner.create_physical_plan(logical, session).await?;
            let Some(explain) = plan.downcast_ref::<ExplainExec>() else { return Ok(plan) };
            return Ok(self.explain(logical, explain, session).await?.unwrap_or(plan));
        }
        let members = self.cluster.members().await?;
        let state = &divided(state, members.len());
        let plan = self.inner.create_physical_plan(logical, state).await?;
        if contains_calls(&plan) {
            check_same_kind(&members)?;
        }
        let cutter = Cutter {
            members,
            peers: Arc::clone(&self.cluster.peers),
            changed: changed(state.config()),
            codec: self.cluster.codec.as_ref(),
            context: state.task_ctx(),
            can_send_scans: !reads_json_arrays(logical)?,
            analyse: plan.is::<AnalyzeExec>(),
            plain_windows: windows_are_plain(logical)?,
            writing: Cell::new(false),
            writes: writes(&plan).then(|| state.config().get_extension()).flatten(),
        };
        cutter.cut(&plan, state.config_options())
    }
}

/// The session with target partitions for this many workers, unless they were changed with SET.
fn divided(state: &SessionState, workers: usize) -> SessionState {
    let mut state = state.clone();
    let partitions = &mut state.config_mut().options_mut().execution.target_partitions;
    if *partitions == TARGET_PARTITIONS {
        *partitions = (PARTITIONS_PER_WORKER * workers).clamp(TARGET_PARTITIONS, MAX_PARTITIONS);
    }
    state
}

/// Whether a plan writes files.
fn writes(plan: &Arc<dyn ExecutionPlan>) -> bool {
    plan.is::<DataSinkExec>() || (plan.is::<AnalyzeExec>() && plan.children().into_iter().any(writes))
}

impl ClusterPlanner {
    /// EXPLAIN with the plan that is cut in place of the local one. `None` if its format shows no physical plan.
    async fn explain(
        &self,
        logical: &LogicalPlan,
        explain: &ExplainExec,
        session: &dyn Session,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        let LogicalPlan::Explain(Explain { plan, explain_format: ExplainFormat::Indent, .. }) = logical else {
            return Ok(None);
        };
        let mut plans = explain.stringified_plans().to_vec();
        let Some(last) = plans.iter_mut().find(|plan| plan.plan_type == PlanType::FinalPhysicalPlan) else {
            return Ok(None);
        };
        let cut = self.create_physical_plan(plan, session).await?;
        last.plan = Arc::new(displayable(cut.as_ref()).indent(explain.verbose()).to_string());
        Ok(Some(Arc::new(ExplainExec::new(explain.schema(), plans, explain.verbose()))))
    }
}

/// The settings of a session that the session of a worker has not by itself.
fn changed(config: &SessionConfig) -> Changed {
    let by_itself = SessionConfig::new().with_option_extension(ElmoConfig::default());
    let by_itself = by_itself.options().entries();
    // Entries of `datafusion-distributed`, which travel by themselves, have no prefix.
    let is_ours = |name: &str| name.starts_with("datafusion.") || name.starts_with("elmo.");
    let set = config.options().entries().into_iter().filter(|entry| is_ours(&entry.key));
    // The batch size is that of shuffles otherwise.
    let differs = |entry: &datafusion::config::ConfigEntry| {
        let same =
            by_itself.iter().find(|other| other.key == entry.key).is_some_and(|other| other.value == entry.value);
        !same || entry.key == "datafusion.execution.batch_size"
    };
    set.filter(differs).filter_map(|entry| Some((entry.key, entry.value?))).collect()
}
