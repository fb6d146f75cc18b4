//! The scheduler: divides jobs into tasks and assigns them to executors. It opens no models and reads no files.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
};

use ballista_core::config::TaskSchedulingPolicy;
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

use super::{
    Address, EXECUTOR_TIMEOUT_SECONDS, HEARTBEAT_SECONDS, MESSAGE_BYTES, RESULT_TTL_SECONDS,
    codec::cluster_codec,
    error::{NO_EXECUTORS, ballista_error},
    session_config,
};
use crate::error::{Error, Result};

/// Seconds that the state of a finished job is kept. It contains the plan with in-memory rows; clients poll the state
/// several times a second.
const JOB_STATE_TTL_SECONDS: u64 = 60;

/// A scheduler whose port is bound.
#[derive(Debug)]
pub struct Scheduler {
    listener: TcpListener,
    address: SocketAddr,
    host: String,
}

impl Scheduler {
    /// Binds an address. `host` is the name under which executors reach this machine.
    ///
    /// # Errors
    /// [`Error::Usage`] if the address cannot be bound, or is unspecified (`0.0.0.0`) while `host` is `None`.
    pub async fn bind(bind: &Address, host: Option<&str>) -> Result<Self> {
        let listener = TcpListener::bind((bind.host.trim_matches(['[', ']']), bind.port)).await;
        let listener =
            listener.map_err(|e| Error::usage(format!("cannot listen at {bind}: {e}"), "use another --bind"))?;
        let address = listener.local_addr().map_err(|e| Error::Failed(format!("cannot listen at {bind}: {e}")))?;
        if host.is_none() && address.ip().is_unspecified() {
            return Err(Error::usage(
                format!("executors cannot reach {}", address.ip()),
                "add --host with the name under which they reach this machine",
            ));
        }
        let host = host.map_or_else(|| bind.host.clone(), str::to_owned);
        Ok(Self { listener, address, host })
    }

    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until it fails.
    ///
    /// # Errors
    /// [`Error::Failed`] with Ballista's error.
    pub async fn serve(self) -> Result<()> {
        let executors = Arc::new(OnceLock::new());
        let codec = cluster_codec(Arc::new(NoModels("the scheduler")));
        let config = SchedulerConfig {
            external_host: self.host.clone(),
            bind_host: self.address.ip().to_string(),
            bind_port: self.address.port(),
            scheduling_policy: TaskSchedulingPolicy::PushStaged,
            executor_timeout_seconds: EXECUTOR_TIMEOUT_SECONDS,
            expire_dead_executor_interval_seconds: HEARTBEAT_SECONDS,
            // Clients release results after fetching them. This is for clients that have died.
            finished_job_data_clean_up_interval_seconds: RESULT_TTL_SECONDS,
            finished_job_state_clean_up_interval_seconds: JOB_STATE_TTL_SECONDS,
            no_executors_grace_period_seconds: EXECUTOR_TIMEOUT_SECONDS,
            grpc_server_max_decoding_message_size: MESSAGE_BYTES,
            grpc_server_max_encoding_message_size: MESSAGE_BYTES,
            grpc_client_max_message_size: MESSAGE_BYTES,
            override_config_producer: Some(Arc::new(session_config)),
            override_session_builder: Some(session_builder(Arc::clone(&executors))),
            override_physical_codec: Some(codec),
            ..SchedulerConfig::default()
        };
        let cluster = BallistaCluster::new_from_config(&config).await.map_err(ballista_error)?;
        // Set once, before the first query.
        let _ = executors.set(cluster.cluster_state());
        let server = create_scheduler::<LogicalPlanNode, PhysicalPlanNode>(cluster, Arc::new(config)).await;
        start_grpc_service_with_listener(self.listener, server.map_err(ballista_error)?).await.map_err(ballista_error)
    }
}

/// Creates the session of a query. Fails while no executor is registered; Ballista would queue the query without a
/// timeout.
fn session_builder(executors: Arc<OnceLock<Arc<dyn ClusterState>>>) -> SessionBuilder {
    Arc::new(move |config| {
        // The cluster's state is in memory, so the future is ready.
        let registered = executors.get().and_then(|state| state.registered_executor_metadata().now_or_never());
        match registered.is_some_and(|executors| executors.is_empty()) {
            true => exec_err!("{NO_EXECUTORS}"),
            false => session(config),
        }
    })
}

/// Empty stores. Decoding a plan looks its stores up, but the scheduler reads no files.
#[derive(Debug)]
struct EmptyStores;

impl ObjectStoreRegistry for EmptyStores {
    fn register_store(&self, _: &Url, _: Arc<dyn ObjectStore>) -> Option<Arc<dyn ObjectStore>> {
        None
    }

    fn get_store(&self, _: &Url) -> PlanResult<Arc<dyn ObjectStore>> {
        Ok(Arc::new(InMemory::new()))
    }
}

/// A session that decodes physical plans.
fn session(config: SessionConfig) -> PlanResult<SessionState> {
    let runtime = RuntimeEnvBuilder::new().with_object_store_registry(Arc::new(EmptyStores)).build_arc()?;
    let models = elmo_udfs::Models::new("", []);
    let builder = SessionStateBuilder::new().with_config(config).with_runtime_env(runtime).with_default_features();
    Ok(builder.with_elmo(&models).build())
}
