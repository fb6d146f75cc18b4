//! An executor: reads files, opens models, embeds rows, and keeps results until somebody fetches them.

use std::{
    collections::HashMap,
    fmt,
    net::TcpListener,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ballista_core::{config::TaskSchedulingPolicy, error::BallistaError, registry::BallistaFunctionRegistry};
use ballista_executor::{
    executor_process::{ExecutorProcessConfig, start_executor_process},
    health::ExecutorHealth,
};
use datafusion::execution::{runtime_env::RuntimeEnvBuilder, session_state::SessionStateBuilder};
use elmo::{Elmo, EmbedderSettings, Fingerprint};
use elmo_udfs::{
    ElmoSession, ModelError, ModelSource,
    codec::{ModelHost, SentModel},
};
use tokio::runtime::Handle;

use super::{
    Address, HEARTBEAT, MESSAGE_BYTES, RESULT_SECONDS, codec::ClusterCodec, engine::Engine, scheduler::failed,
    session_config,
};
use crate::{
    error::{Error, Result},
    models::{LazyModel, ModelSpec},
    sql::Registry,
    stores::Stores,
};

/// What an executor is and may use.
#[derive(Debug)]
pub struct ExecutorSettings {
    /// The scheduler that gives it tasks.
    pub scheduler: Address,
    /// Where others fetch results; port 0 for any that is free.
    pub bind: Address,
    /// Where the scheduler gives tasks; 0 for any port that is free.
    pub control_port: u16,
    /// What others call this machine; what the scheduler sees, by default.
    pub host: Option<String>,
    /// Partitions at once.
    pub slots: usize,
    /// Where its folder of results is made; among the temporary ones by default.
    pub work_dir: Option<PathBuf>,
    /// Bytes for sorts, joins, groups and vectors on their way; 70 % of the machine's by default.
    pub memory_limit: Option<u64>,
    /// Never open a socket for a model.
    pub offline: bool,
    /// Where and how the biLM runs.
    pub engine: EmbedderSettings,
}

/// An executor that is about to run.
pub struct Executor {
    config: ExecutorProcessConfig,
    /// Results and what sorts put aside; goes with the executor.
    folder: tempfile::TempDir,
    /// Holds the ports until the executor takes them.
    ports: (TcpListener, TcpListener),
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executor({}:{})", self.config.bind_host, self.config.port)
    }
}

impl Executor {
    /// Settles ports and folders.
    ///
    /// # Errors
    /// [`Error::Usage`] when an address is none of this machine's or taken, or the folder cannot be made; [`Error::Elmo`]
    /// when a device is not there.
    pub fn new(settings: ExecutorSettings, stores: &Stores) -> Result<Self> {
        // Devices that are not there are missed now, and not by the first query.
        elmo::model::resolve_devices(&settings.engine.devices).map_err(elmo::Error::from)?;
        let ExecutorSettings { scheduler, bind, control_port, host, slots, work_dir, memory_limit, offline, engine } =
            settings;
        // Both are held until both are known, or the same might be found twice.
        let (results, control) = (free(&bind)?, free(&Address { port: control_port, ..bind.clone() })?);
        let (port, grpc_port) = (port_of(&results, &bind)?, port_of(&control, &bind)?);
        // What the scheduler sees of IPv6 has no brackets, and is then no address.
        let bound = numbered(&results, &bind)?;
        let host = host.or_else(|| bound.starts_with('[').then(|| bound.clone()));
        let name = format!("the executor at {}:{port}", host.as_deref().unwrap_or(&bind.host));
        let runtime = Handle::current();
        let engine_of_tasks = Engine::new(&name);
        let models = Host { name, offline, stores: stores.clone(), engine, runtime, open: Mutex::default() };
        let codec = ClusterCodec::new(Arc::new(models));
        // Of its own in any case: Ballista empties the folder that it is given.
        let made = match &work_dir {
            Some(dir) => std::fs::create_dir_all(dir).and_then(|()| own_folder().tempdir_in(dir)),
            None => own_folder().tempdir(),
        };
        let parent = work_dir.unwrap_or_else(std::env::temp_dir);
        let folder = made.map_err(|e| {
            Error::usage(format!("--work-dir {}: {e}", parent.display()), "give a folder that can be written to")
        })?;
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
            job_data_ttl_seconds: RESULT_SECONDS,
            job_data_clean_up_interval_seconds: 3600,
            grpc_max_decoding_message_size: MESSAGE_BYTES,
            grpc_max_encoding_message_size: MESSAGE_BYTES,
            executor_heartbeat_interval_seconds: HEARTBEAT,
            memory_pool_size: memory_limit,
            override_execution_engine: Some(Arc::new(engine_of_tasks)),
            override_function_registry: Some(Arc::new(functions())),
            override_runtime_producer: Some(Arc::new(move |_| {
                // What DataFusion remembers of files goes by their size and time, and stores tell times in whole seconds.
                RuntimeEnvBuilder::new()
                    .with_object_store_registry(Arc::new(Registry(files.clone())))
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

    /// Where others fetch results.
    pub fn address(&self) -> Address {
        Address {
            host: self.config.external_host.clone().unwrap_or_else(|| self.config.bind_host.clone()),
            port: self.config.port,
        }
    }

    /// Waits until somebody listens where the scheduler is to be.
    ///
    /// # Errors
    /// [`Error::Failed`] when nobody does for half a minute.
    pub async fn wait_for_scheduler(&self) -> Result<()> {
        listens(&self.scheduler()).await
    }

    fn scheduler(&self) -> String {
        format!("{}:{}", self.config.scheduler_host, self.config.scheduler_port)
    }

    /// Works until a signal or the scheduler ends it: tasks at hand are finished first. `ready` is called when the
    /// scheduler knows it.
    ///
    /// # Errors
    /// [`Error::Failed`] with what Ballista says.
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
            true => failed(e),
            false => Error::Failed(format!("this executor could not join the scheduler at {scheduler}: {}", words(&e))),
        })
    }
}

fn own_folder() -> tempfile::Builder<'static, 'static> {
    let mut folder = tempfile::Builder::new();
    folder.prefix("elmo-executor-");
    folder
}

/// How long an executor waits for a scheduler that is about to start.
const WAIT_FOR_SCHEDULER: Duration = Duration::from_secs(30);

/// Waits until somebody listens there.
async fn listens(scheduler: &str) -> Result<()> {
    let deadline = tokio::time::Instant::now() + WAIT_FOR_SCHEDULER;
    let mut told = false;
    loop {
        let connected = tokio::time::timeout_at(deadline, tokio::net::TcpStream::connect(scheduler)).await;
        match connected.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())) {
            Ok(_) => return Ok(()),
            Err(e) if tokio::time::Instant::now() >= deadline => {
                return Err(Error::Failed(format!("the scheduler at {scheduler} does not answer: {e}")));
            }
            Err(reason) => {
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!(%reason, "waiting for the scheduler at {scheduler}");
                }
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
        }
    }
}

/// What Ballista says, without what Rust prints of its sources.
fn words(error: &BallistaError) -> String {
    let said = error.to_string();
    let plain = said.split(", source:").next().unwrap_or_default();
    plain.split("tonic::transport::Error").next().unwrap_or_default().trim_end_matches([' ', ':', ',']).to_owned()
}

async fn is_ready(health: &ExecutorHealth) {
    while !health.is_ready() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A port of this machine that nobody has.
fn free(address: &Address) -> Result<TcpListener> {
    let listener = TcpListener::bind((address.host.trim_matches(['[', ']']), address.port));
    listener.map_err(|e| Error::usage(format!("cannot listen at {address}: {e}"), "give another --bind or port"))
}

/// The number of the address it listens at, as Ballista wants it.
fn numbered(listener: &TcpListener, address: &Address) -> Result<String> {
    let there = listener.local_addr().map_err(|e| Error::Failed(format!("cannot listen at {address}: {e}")))?;
    Ok(if there.is_ipv6() { format!("[{}]", there.ip()) } else { there.ip().to_string() })
}

fn port_of(listener: &TcpListener, address: &Address) -> Result<u16> {
    let address = listener.local_addr().map_err(|e| Error::Failed(format!("cannot listen at {address}: {e}")))?;
    Ok(address.port())
}

/// Every function of DataFusion, the nested ones too, which Ballista's default leaves out, and those of ours that need no
/// model; the others travel with theirs.
fn functions() -> BallistaFunctionRegistry {
    let models = elmo_udfs::Models::new("", []);
    (&SessionStateBuilder::new().with_default_features().with_elmo(&models).build()).into()
}

/// The models of this process: opened when the first row is to be embedded, and kept.
struct Host {
    name: String,
    offline: bool,
    stores: Stores,
    engine: EmbedderSettings,
    runtime: Handle,
    open: Mutex<HashMap<(String, Fingerprint), Slot>>,
}

/// Who comes while a model is opened waits for it.
type Slot = Arc<Mutex<Option<Elmo>>>;

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Host {
    fn opened(&self) -> MutexGuard<'_, HashMap<(String, Fingerprint), Slot>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ModelHost for Host {
    fn open(&self, model: &SentModel) -> Result<Elmo, ModelError> {
        let key = (model.address.clone(), model.card.fingerprint.clone());
        let slot = Arc::clone(self.opened().entry(key.clone()).or_default());
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        // The head is no part of the fingerprint: it may have been put beside the weights, or replaced, since then.
        let wanted = &model.card.lm_head;
        let has_head = |elmo: &&Elmo| wanted.is_none() || elmo.lm_head_digest().is_ok_and(|there| there == *wanted);
        if let Some(elmo) = slot.as_ref().filter(has_head) {
            return Ok(elmo.clone());
        }
        let lazy = LazyModel {
            spec: ModelSpec::from_address(&model.address)?,
            offline: self.offline,
            stores: self.stores.clone(),
            settings: self.engine.clone(),
            runtime: self.runtime.clone(),
            elsewhere: false,
            read: Mutex::default(),
        };
        let opened = lazy.open()?;
        if opened.fingerprint() == &model.card.fingerprint {
            *slot = Some(opened.clone());
            // What was at this address before cannot be opened again; who still computes with it holds it.
            self.opened().retain(|there, _| there.0 != key.0 || there.1 == key.1);
        }
        Ok(opened)
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    /// Ballista does not hand on why a plan cannot be read.
    fn fails_late(&self) -> bool {
        true
    }
}
