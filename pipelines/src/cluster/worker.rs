//! A worker: runs the stages of queries that others coordinate.

use std::{
    convert::Infallible,
    fmt,
    net::{SocketAddr, TcpListener},
    num::NonZeroUsize,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use datafusion::{
    common::DataFusionError,
    execution::{
        memory_pool::TrackConsumersPool,
        runtime_env::{RuntimeEnv, RuntimeEnvBuilder},
        session_state::SessionState,
    },
};
use datafusion_distributed::{
    ChannelResolver, DistributedExt, Worker as Engine, WorkerQueryContext, WorkerSessionBuilder,
};
use datafusion_proto::physical_plan::PhysicalExtensionCodec;
use elmo::EmbedderSettings;
use elmo_udfs::{ElmoSession, codec::VERSION};
use futures::{FutureExt, future::BoxFuture};
use http_body::{Frame, SizeHint};
use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::oneshot,
    task::AbortHandle,
};
use tonic::{
    Status,
    body::Body,
    service::interceptor::InterceptedService,
    transport::{Server, ServerTlsConfig, server::TcpIncoming},
};

use super::{
    Address,
    codec::{envelope_codec, whole_codec},
    gate::Gate,
    jobs::Jobs,
    live::{Live, Task},
    model_host::WorkerModels,
    peers::{CALLER_HEADER, CONNECTION_WINDOW, Credentials, PING, Peers, STREAM_WINDOW},
    service::{COLUMNS, COUNT, DESCRIBE, Greeting, Service, UNIT},
};
use crate::{
    error::{Error, Result},
    sql::{SharedPool, StoreRegistry},
    stores::Stores,
};

/// Number of the largest memory consumers that an out-of-memory error lists.
const LISTED_CONSUMERS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4);
/// Threads that move bytes between workers.
const IO_THREADS: usize = 2;
/// HTTP/2 streams of a connection: one per partition that somebody reads.
const MAX_STREAMS: u32 = 1 << 20;
/// Timeout for flushing connections at shutdown.
const LAST_BYTES: Duration = Duration::from_secs(10);
/// Interval at which a worker that is to end looks for tasks under way.
const LOOK: Duration = Duration::from_millis(50);

/// Settings of a worker.
#[derive(Debug)]
pub struct WorkerSettings {
    /// The address to listen on; port 0 for any free port.
    pub bind: Address,
    /// Size of the memory pool in bytes; `None` for no limit.
    pub memory_limit: Option<NonZeroUsize>,
    /// Never open a socket for a model.
    pub offline: bool,
    /// Devices, precision and batch size of the biLM.
    pub engine: EmbedderSettings,
    /// What callers must show, and what this worker shows to others.
    pub credentials: Credentials,
    /// Certificate and key of this worker.
    pub tls: Option<ServerTlsConfig>,
    /// Listen beyond the loopback interface without certificates and token.
    pub insecure: bool,
}

/// A worker that listens.
pub struct Worker {
    address: SocketAddr,
    listener: TcpListener,
    settings: WorkerSettings,
    stores: Stores,
    live: Arc<Live>,
    peers: Arc<Peers>,
    /// Moves bytes and answers pings, also while all threads that compute are busy.
    io: Runtime,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker({})", self.address)
    }
}

impl Worker {
    /// Binds the address.
    ///
    /// # Errors
    /// [`Error::Usage`] if the address cannot be bound, or others could use the worker without being asked who they are;
    /// [`elmo::Error`] if a device does not exist.
    pub fn bind(settings: WorkerSettings, stores: &Stores) -> Result<Self> {
        // Fails now rather than in the first query.
        let devices = elmo::model::resolve_devices(&settings.engine.devices).map_err(elmo::Error::from)?;
        let bind = &settings.bind;
        let cannot_listen = |e: std::io::Error| {
            Error::usage(format!("cannot listen at {bind}: {e}"), "use another --bind, or port 0 for any free port")
        };
        let listener = TcpListener::bind((bind.host.trim_matches(['[', ']']), bind.port)).map_err(cannot_listen)?;
        let address = listener.local_addr().map_err(cannot_listen)?;
        let is_guarded = settings.tls.is_some() && settings.credentials.token.is_some();
        if !address.ip().is_loopback() && !is_guarded && !settings.insecure {
            let help =
                "give --token-file, --tls-cert and --tls-key; or --insecure, in a network that you trust as a whole";
            return Err(Error::usage(
                format!(
                    "{bind}: anybody who reaches this address could read files and models with this worker's rights"
                ),
                help,
            ));
        }
        listener.set_nonblocking(true).map_err(cannot_listen)?;
        let io = Builder::new_multi_thread().worker_threads(IO_THREADS).thread_name("elmo-io").enable_all().build();
        let io = io.map_err(|e| Error::Failed(format!("cannot start threads: {e}")))?;
        let id = uuid::Uuid::new_v4().to_string();
        let peers = Peers::new(&settings.credentials, Some(&id), io.handle().clone());
        let peers =
            Arc::new(peers.map_err(|_| Error::usage("the token has characters that are not printable ASCII", ""))?);
        let live = Arc::new(Live::new(Greeting {
            version: VERSION.to_owned(),
            id,
            devices: devices.iter().map(ToString::to_string).collect(),
            precision: settings.engine.precision.to_string(),
            models: Vec::new(),
            tasks: 0,
            stopping: false,
        }));
        Ok(Self { address, listener, settings, stores: stores.clone(), live, peers, io })
    }

    /// The address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` resolves and the tasks under way have ended.
    ///
    /// # Errors
    /// [`Error::Failed`] if the server cannot run.
    pub async fn serve(self, stop: impl Future<Output = ()>) -> Result<()> {
        let failed = |reason: String| Error::Failed(format!("the worker at {}: {reason}", self.address));
        let runtime = self.runtime().map_err(|e| failed(e.to_string()))?;
        let host = Arc::new(WorkerModels::new(&self.settings, self.address, &self.stores, Arc::clone(&self.live)));
        let sessions = Sessions {
            codec: envelope_codec(whole_codec(
                Arc::clone(&host) as _,
                &self.peers,
                Some(Arc::clone(&self.live)),
                Some(self.stores.clone()),
            )),
            peers: Arc::clone(&self.peers),
        };
        let engine = Engine::from_session_builder(sessions).with_runtime_env(runtime).with_version(VERSION);
        let gate = Gate::new(self.settings.credentials.token.clone());
        let mut server = Server::builder()
            .http2_keepalive_interval(Some(PING))
            .http2_keepalive_timeout(Some(PING))
            .max_concurrent_streams(Some(MAX_STREAMS))
            .initial_stream_window_size(Some(STREAM_WINDOW))
            .initial_connection_window_size(Some(CONNECTION_WINDOW))
            .tcp_nodelay(true);
        if let Some(tls) = self.settings.tls.clone() {
            server = server.tls_config(tls).map_err(|e| failed(e.to_string()))?;
        }
        let jobs = Arc::new(Jobs {
            host,
            stores: self.stores.clone(),
            live: Arc::clone(&self.live),
            memory: self.settings.memory_limit,
        });
        let service = Service { live: Arc::clone(&self.live), jobs };
        let server = server
            .layer(OnCompute { compute: Handle::current(), live: Arc::clone(&self.live) })
            .add_service(InterceptedService::new(engine.into_worker_server(), gate.clone()))
            .add_service(InterceptedService::new(service, gate.for_any_version()));
        // The listener belongs to the runtime that accepts connections.
        let entered = self.io.enter();
        let listener = tokio::net::TcpListener::from_std(self.listener.try_clone().map_err(|e| failed(e.to_string()))?);
        drop(entered);
        let incoming = TcpIncoming::from(listener.map_err(|e| failed(e.to_string()))?).with_nodelay(Some(true));
        let (end, ended) = oneshot::channel::<()>();
        // Resolves when the sender is dropped.
        let ended = async move { drop(ended.await) };
        let mut serving = self.io.spawn(server.serve_with_incoming_shutdown(incoming, ended));
        let aborted = Aborted(serving.abort_handle());
        tokio::select! {
            served = &mut serving => {
                served.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(e.to_string()))?;
            }
            () = self.stopped(stop) => {
                // Responses may still be in the buffers of connections.
                drop(end);
                let _ = tokio::time::timeout(LAST_BYTES, serving).await;
            }
        }
        drop(aborted);
        // Waiting for its threads would block this one.
        self.io.shutdown_background();
        Ok(())
    }

    /// Resolves when the worker was told to end and nothing is under way.
    async fn stopped(&self, stop: impl Future<Output = ()>) {
        stop.await;
        self.live.stop();
        while self.live.tasks() > 0 {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// What all queries share: stores, one memory pool, and no caches, which would serve a file replaced within a second;
    /// see `Sql::new`.
    fn runtime(&self) -> datafusion::common::Result<Arc<RuntimeEnv>> {
        let mut runtime = RuntimeEnvBuilder::new()
            .with_object_store_registry(Arc::new(StoreRegistry(self.stores.clone())))
            .with_metadata_cache_limit(0)
            .with_object_list_cache_limit(0)
            .with_file_statistics_cache_limit(0);
        if let Some(bytes) = self.settings.memory_limit {
            let pool = TrackConsumersPool::new(SharedPool::new(bytes.get()), LISTED_CONSUMERS);
            runtime = runtime.with_memory_pool(Arc::new(pool));
        }
        runtime.build_arc()
    }
}

/// Aborts a task when it is dropped.
struct Aborted(AbortHandle);

impl Drop for Aborted {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Makes a session for each task.
#[derive(Clone)]
struct Sessions {
    codec: Arc<dyn PhysicalExtensionCodec>,
    peers: Arc<Peers>,
}

#[async_trait]
impl WorkerSessionBuilder for Sessions {
    async fn build_session_state(&self, context: WorkerQueryContext) -> Result<SessionState, DataFusionError> {
        let peers = Arc::clone(&self.peers) as Arc<dyn ChannelResolver + Send + Sync>;
        // Functions without models go by name.
        let builder = context.builder.with_elmo(&elmo_udfs::Models::new("", []));
        Ok(builder
            .with_distributed_user_codec_arc(Arc::clone(&self.codec))
            .with_distributed_channel_resolver(peers)
            .build())
    }
}

/// Runs requests on the runtime that computes, and refuses new tasks when the worker is about to end.
#[derive(Clone)]
struct OnCompute {
    compute: Handle,
    live: Arc<Live>,
}

impl<S> tower::Layer<S> for OnCompute {
    type Service = Moved<S>;

    fn layer(&self, inner: S) -> Moved<S> {
        Moved { inner, compute: self.compute.clone(), live: Arc::clone(&self.live) }
    }
}

/// The requests that give a worker a task. Those that read the rows of a task are served to the end.
const NEW_TASKS: [&str; 5] = ["/worker.WorkerService/CoordinatorChannel", DESCRIBE, COLUMNS, COUNT, UNIT];

/// Path prefix of the gRPC service of queries.
const QUERIES: &str = "/worker.WorkerService/";

/// A response body that counts as a running task until it is sent in full.
struct Counted {
    body: Body,
    _task: Task,
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// See [`OnCompute`].
#[derive(Clone)]
struct Moved<S> {
    inner: S,
    compute: Handle,
    live: Arc<Live>,
}

impl<S> tower::Service<http::Request<Body>> for Moved<S>
where
    S: tower::Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        // A COPY sends rows to all workers, also to the one that it runs on.
        let is_own = || request.headers().get(CALLER_HEADER).is_some_and(|id| *id == *self.live.id());
        if self.live.is_stopping() && NEW_TASKS.contains(&request.uri().path()) && !is_own() {
            let refused = Status::unavailable("it is about to end, and takes no new tasks").into_http();
            return std::future::ready(Ok(refused)).boxed();
        }
        let task = request.uri().path().starts_with(QUERIES).then(|| self.live.task());
        // The one that is ready, and not its clone.
        let clone = self.inner.clone();
        let mut ready = std::mem::replace(&mut self.inner, clone);
        let answering = self.compute.spawn(async move { ready.call(request).await });
        let aborted = Aborted(answering.abort_handle());
        Box::pin(async move {
            let answer = answering.await;
            drop(aborted);
            let answer = answer.unwrap_or_else(|panic| {
                Ok(Status::internal(format!("the worker has a defect: {panic}")).into_http())
            })?;
            Ok(match task {
                Some(task) => answer.map(|body| Body::new(Counted { body, _task: task })),
                None => answer,
            })
        })
    }
}
