//! The scheduler: cuts parts into tasks, and gives them to executors. It opens no model and reads no file.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
};

use ballista_core::{config::TaskSchedulingPolicy, error::BallistaError};
use ballista_scheduler::{
    cluster::{BallistaCluster, ClusterState},
    config::SchedulerConfig,
    scheduler_process::{create_scheduler, start_grpc_service_with_listener},
    scheduler_server::SessionBuilder,
};
use datafusion::{
    common::{Result as PlanResult, exec_err},
    execution::{
        SessionState, object_store::ObjectStoreRegistry, runtime_env::RuntimeEnvBuilder,
        session_state::SessionStateBuilder,
    },
    prelude::SessionConfig,
};
use datafusion_proto::protobuf::{LogicalPlanNode, PhysicalPlanNode};
use elmo_udfs::{ElmoSession, codec::NoModels};
use futures::FutureExt;
use object_store::{ObjectStore, memory::InMemory};
use tokio::net::TcpListener;
use url::Url;

use super::{Address, EXECUTOR_TIMEOUT, HEARTBEAT, MESSAGE_BYTES, RESULT_SECONDS, codec::ClusterCodec, session_config};
use crate::error::{Error, Result};

/// What a query is told while there is nobody to run it; clients wait for a while when they hear it.
pub(super) const NOBODY: &str = "no executor is connected to the scheduler";

/// Seconds that it is remembered how a query ended.
const STATE_SECONDS: u64 = 60;

/// A scheduler that listens.
#[derive(Debug)]
pub struct Scheduler {
    listener: TcpListener,
    address: SocketAddr,
    host: String,
}

impl Scheduler {
    /// Takes the port; `host` is what executors call this machine.
    ///
    /// # Errors
    /// [`Error::Usage`] when the address is none of this machine's, or taken, or stands for all of them and `host` is not
    /// given.
    pub async fn bind(bind: &Address, host: Option<&str>) -> Result<Self> {
        let listener = TcpListener::bind((bind.host.trim_matches(['[', ']']), bind.port)).await;
        let listener =
            listener.map_err(|e| Error::usage(format!("cannot listen at {bind}: {e}"), "give another --bind"))?;
        let address = listener.local_addr().map_err(|e| Error::Failed(format!("cannot listen at {bind}: {e}")))?;
        if host.is_none() && address.ip().is_unspecified() {
            return Err(Error::usage(
                format!("executors cannot reach {}", address.ip()),
                "say by --host what they call this machine",
            ));
        }
        let host = host.map_or_else(|| bind.host.clone(), str::to_owned);
        Ok(Self { listener, address, host })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until it fails.
    ///
    /// # Errors
    /// [`Error::Failed`] with what Ballista says.
    pub async fn serve(self) -> Result<()> {
        let executors = Arc::new(OnceLock::new());
        let codec = ClusterCodec::new(Arc::new(NoModels("the scheduler")));
        let config = SchedulerConfig {
            external_host: self.host.clone(),
            bind_host: self.address.ip().to_string(),
            bind_port: self.address.port(),
            scheduling_policy: TaskSchedulingPolicy::PushStaged,
            executor_timeout_seconds: EXECUTOR_TIMEOUT,
            expire_dead_executor_interval_seconds: HEARTBEAT,
            // Clients say when they have fetched a result; this is for those that died.
            finished_job_data_clean_up_interval_seconds: RESULT_SECONDS,
            // It holds the plans, with the rows that travelled; clients hear within a second that a query is done.
            finished_job_state_clean_up_interval_seconds: STATE_SECONDS,
            no_executors_grace_period_seconds: EXECUTOR_TIMEOUT,
            grpc_server_max_decoding_message_size: MESSAGE_BYTES,
            grpc_server_max_encoding_message_size: MESSAGE_BYTES,
            grpc_client_max_message_size: MESSAGE_BYTES,
            override_config_producer: Some(Arc::new(session_config)),
            override_session_builder: Some(sessions(Arc::clone(&executors))),
            override_physical_codec: Some(codec),
            ..SchedulerConfig::default()
        };
        let cluster = BallistaCluster::new_from_config(&config).await.map_err(failed)?;
        // Said once, before the first query.
        let _ = executors.set(cluster.cluster_state());
        let server = create_scheduler::<LogicalPlanNode, PhysicalPlanNode>(cluster, Arc::new(config)).await;
        start_grpc_service_with_listener(self.listener, server.map_err(failed)?).await.map_err(failed)
    }
}

pub(super) fn failed(error: BallistaError) -> Error {
    Error::Failed(error.to_string())
}

/// Sessions of queries: refused as long as nobody could run them, where Ballista would let them wait forever.
fn sessions(executors: Arc<OnceLock<Arc<dyn ClusterState>>>) -> SessionBuilder {
    Arc::new(move |config| {
        // The state of a cluster is in memory, so the answer is there at once.
        let registered = executors.get().and_then(|state| state.registered_executor_metadata().now_or_never());
        match registered.is_some_and(|executors| executors.is_empty()) {
            true => exec_err!("{NOBODY}"),
            false => session(config),
        }
    })
}

/// Plans name stores, and to read a plan is to get hold of them: here of empty ones, as nobody reads a file.
#[derive(Debug)]
struct NoFiles;

impl ObjectStoreRegistry for NoFiles {
    fn register_store(&self, _: &Url, _: Arc<dyn ObjectStore>) -> Option<Arc<dyn ObjectStore>> {
        None
    }

    fn get_store(&self, _: &Url) -> PlanResult<Arc<dyn ObjectStore>> {
        Ok(Arc::new(InMemory::new()))
    }
}

/// A session that plans nothing: it only reads plans.
fn session(config: SessionConfig) -> PlanResult<SessionState> {
    let runtime = RuntimeEnvBuilder::new().with_object_store_registry(Arc::new(NoFiles)).build_arc()?;
    let models = elmo_udfs::Models::new("", []);
    let builder = SessionStateBuilder::new().with_config(config).with_runtime_env(runtime).with_default_features();
    Ok(builder.with_elmo(&models).build())
}
