//! An executor: runs tasks of the scheduler and serves their results.

use std::{
    fmt,
    net::TcpListener,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use ballista_core::{config::TaskSchedulingPolicy, error::BallistaError, registry::BallistaFunctionRegistry};
use ballista_executor::{
    executor_process::{ExecutorProcessConfig, start_executor_process},
    health::ExecutorHealth,
};
use datafusion::execution::{runtime_env::RuntimeEnvBuilder, session_state::SessionStateBuilder};
use elmo::EmbedderSettings;
use elmo_udfs::ElmoSession;
use tokio::runtime::Handle;

use super::{
    Address, HEARTBEAT_SECONDS, MESSAGE_BYTES, RESULT_TTL_SECONDS, codec::cluster_codec, engine::Engine,
    error::ballista_error, model_host::ExecutorModels, session_config,
};
use crate::{
    error::{Error, Result},
    sql::StoreRegistry,
    stores::Stores,
};

/// Settings of an executor.
#[derive(Debug)]
pub struct ExecutorSettings {
    /// The address of the scheduler.
    pub scheduler: Address,
    /// The address that serves results; port 0 for any free port.
    pub bind: Address,
    /// The port on which the scheduler submits tasks; 0 for any free port.
    pub control_port: u16,
    /// The host name under which others reach this executor. Defaults to the address that the scheduler sees.
    pub host: Option<String>,
    /// Number of tasks to run concurrently.
    pub slots: usize,
    /// The parent of the executor's folder for results and spill files. Defaults to the system's temporary folder.
    pub work_dir: Option<PathBuf>,
    /// Size of the memory pool in bytes. Defaults to 70 % of the machine's memory.
    pub memory_limit: Option<u64>,
    /// Never open a socket for a model.
    pub offline: bool,
    /// Devices, precision and batch size of the biLM.
    pub engine: EmbedderSettings,
}

/// A configured executor.
pub struct Executor {
    config: ExecutorProcessConfig,
    /// Results and spill files; deleted when the executor ends.
    folder: tempfile::TempDir,
    /// Reserve the two ports until Ballista binds them.
    ports: (TcpListener, TcpListener),
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executor({}:{})", self.config.bind_host, self.config.port)
    }
}

impl Executor {
    /// Reserves ports and creates the work folder.
    ///
    /// # Errors
    /// [`Error::Usage`] if an address cannot be bound or the folder cannot be created; [`elmo::Error`] if a device does
    /// not exist.
    pub fn new(settings: ExecutorSettings, stores: &Stores) -> Result<Self> {
        // Fails now rather than in the first query.
        elmo::model::resolve_devices(&settings.engine.devices).map_err(elmo::Error::from)?;
        let ExecutorSettings { scheduler, bind, control_port, host, slots, work_dir, memory_limit, offline, engine } =
            settings;
        // Both are bound at the same time, so that the ports differ.
        let (results, control) = (listen(&bind)?, listen(&Address { port: control_port, ..bind.clone() })?);
        let (port, grpc_port) = (port_of(&results, &bind)?, port_of(&control, &bind)?);
        // Ballista forms addresses as HOST:PORT; the address that the scheduler sees has no brackets around IPv6.
        let bound = ip_of(&results, &bind)?;
        let host = host.or_else(|| bound.starts_with('[').then(|| bound.clone()));
        let name = format!("the executor at {}:{port}", host.as_deref().unwrap_or(&bind.host));
        let runtime = Handle::current();
        let execution_engine = Engine::new(&name);
        let models =
            ExecutorModels { name, offline, stores: stores.clone(), engine, runtime, models: Mutex::default() };
        let codec = cluster_codec(Arc::new(models));
        // Ballista deletes the contents of its folder, so it gets a new one.
        let created = match &work_dir {
            Some(dir) => std::fs::create_dir_all(dir).and_then(|()| work_folder().tempdir_in(dir)),
            None => work_folder().tempdir(),
        };
        let parent = work_dir.unwrap_or_else(std::env::temp_dir);
        let folder = created
            .map_err(|e| Error::usage(format!("--work-dir {}: {e}", parent.display()), "use a writable folder"))?;
        let dir = folder.path().to_string_lossy().into_owned();
        let (files, spill) = (stores.clone(), dir.clone());
        let config = ExecutorProcessConfig {
            bind_host: bound,
            external_host: host,
            port,
            grpc_port,
            scheduler_host: scheduler.host,
            scheduler_port: scheduler.port,
            vcores: slots,
            task_scheduling_policy: TaskSchedulingPolicy::PushStaged,
            work_dir: Some(dir),
            job_data_ttl_seconds: RESULT_TTL_SECONDS,
            job_data_clean_up_interval_seconds: 3600,
            grpc_max_decoding_message_size: MESSAGE_BYTES,
            grpc_max_encoding_message_size: MESSAGE_BYTES,
            executor_heartbeat_interval_seconds: HEARTBEAT_SECONDS,
            memory_pool_size: memory_limit,
            override_execution_engine: Some(Arc::new(execution_engine)),
            override_function_registry: Some(Arc::new(functions())),
            override_runtime_producer: Some(Arc::new(move |_| {
                // Caches are off: they would serve a file replaced within a second. See `Sql::new`.
                RuntimeEnvBuilder::new()
                    .with_object_store_registry(Arc::new(StoreRegistry(files.clone())))
                    .with_temp_file_path(spill.clone())
                    .with_metadata_cache_limit(0)
                    .with_object_list_cache_limit(0)
                    .with_file_statistics_cache_limit(0)
                    .build_arc()
            })),
            override_config_producer: Some(Arc::new(session_config)),
            override_physical_codec: Some(codec),
            ..ExecutorProcessConfig::default()
        };
        Ok(Self { config, folder, ports: (results, control) })
    }

    /// The address that serves results.
    pub fn address(&self) -> Address {
        Address {
            host: self.config.external_host.clone().unwrap_or_else(|| self.config.bind_host.clone()),
            port: self.config.port,
        }
    }

    /// Waits until the scheduler's port accepts connections.
    ///
    /// # Errors
    /// [`Error::Failed`] after 30 seconds.
    pub async fn wait_for_scheduler(&self) -> Result<()> {
        wait_for_port(&self.scheduler()).await
    }

    fn scheduler(&self) -> String {
        format!("{}:{}", self.config.scheduler_host, self.config.scheduler_port)
    }

    /// Runs until a signal or the scheduler stops it; completes running tasks first. Calls `ready` when the executor
    /// has registered with the scheduler.
    ///
    /// # Errors
    /// [`Error::Failed`] with Ballista's error.
    pub async fn serve(self, ready: impl FnOnce()) -> Result<()> {
        let (scheduler, health) = (self.scheduler(), self.config.health.clone());
        let Self { config, folder: _folder, ports } = self;
        drop(ports);
        let serving = start_executor_process(Arc::new(config));
        tokio::pin!(serving);
        let served = tokio::select! {
            served = &mut serving => served,
            () = is_ready(&health) => {
                ready();
                serving.await
            }
        };
        served.map_err(|e| match health.is_ready() {
            true => ballista_error(e),
            false => Error::Failed(format!("cannot register with the scheduler at {scheduler}: {}", short_message(&e))),
        })
    }
}

fn work_folder() -> tempfile::Builder<'static, 'static> {
    let mut folder = tempfile::Builder::new();
    folder.prefix("elmo-executor-");
    folder
}

/// How long to wait for a scheduler that may be starting.
const SCHEDULER_DEADLINE: Duration = Duration::from_secs(30);

/// Retries to connect until a port accepts connections.
async fn wait_for_port(scheduler: &str) -> Result<()> {
    let deadline = tokio::time::Instant::now() + SCHEDULER_DEADLINE;
    let mut warned = false;
    loop {
        let connected = tokio::time::timeout_at(deadline, tokio::net::TcpStream::connect(scheduler)).await;
        match connected.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())) {
            Ok(_) => return Ok(()),
            Err(e) if tokio::time::Instant::now() >= deadline => {
                return Err(Error::Failed(format!("the scheduler at {scheduler} does not answer: {e}")));
            }
            Err(reason) => {
                if !std::mem::replace(&mut warned, true) {
                    tracing::warn!(%reason, "waiting for the scheduler at {scheduler}");
                }
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
        }
    }
}

/// Ballista's message without the debug output of its sources.
fn short_message(error: &BallistaError) -> String {
    let message = error.to_string();
    let message = message.split(", source:").next().unwrap_or_default();
    message.split("tonic::transport::Error").next().unwrap_or_default().trim_end_matches([' ', ':', ',']).to_owned()
}

async fn is_ready(health: &ExecutorHealth) {
    while !health.is_ready() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Binds an address.
fn listen(address: &Address) -> Result<TcpListener> {
    let listener = TcpListener::bind((address.host.trim_matches(['[', ']']), address.port));
    listener
        .map_err(|e| Error::usage(format!("cannot listen at {address}: {e}"), "use another --bind or --control-port"))
}

/// The IP address of a listener, with brackets around IPv6.
fn ip_of(listener: &TcpListener, address: &Address) -> Result<String> {
    let bound = listener.local_addr().map_err(|e| Error::Failed(format!("cannot listen at {address}: {e}")))?;
    Ok(if bound.is_ipv6() { format!("[{}]", bound.ip()) } else { bound.ip().to_string() })
}

fn port_of(listener: &TcpListener, address: &Address) -> Result<u16> {
    let address = listener.local_addr().map_err(|e| Error::Failed(format!("cannot listen at {address}: {e}")))?;
    Ok(address.port())
}

/// The functions that plans refer to by name: all of DataFusion's, including the nested ones that Ballista's default
/// lacks, and ours that need no model. Plans contain the other functions together with their models.
fn functions() -> BallistaFunctionRegistry {
    let models = elmo_udfs::Models::new("", []);
    (&SessionStateBuilder::new().with_default_features().with_elmo(&models).build()).into()
}
