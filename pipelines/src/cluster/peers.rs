//! Connections to workers.
//!
//! Those of `datafusion-distributed` wait for ever on a worker that stands still or is cut off, and let one slow partition
//! hold up the others: all partitions of a task come in one stream, and all streams share the small flow-control window of
//! a connection. Here
//!
//! - HTTP/2 pings find a silent worker in [`PING`] twice;
//! - windows are large, and each partition has a stream of its own, so that an operator may read partitions one after the
//!   other;
//! - streams begin at once, not when they are first read. A worker forgets a task that nobody asks for;
//! - errors name the worker.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arrow::array::RecordBatch;
use async_trait::async_trait;
use datafusion::{
    common::{DataFusionError, Result, exec_datafusion_err, runtime::SpawnedTask},
    execution::TaskContext,
    physical_plan::metrics::ExecutionPlanMetricsSet,
};
use datafusion_distributed::{
    ChannelResolver, CoordinatorToWorkerMsg, ExecuteTaskRequest, GetWorkerInfoRequest, GetWorkerInfoResponse,
    MaybeEncoded, SetPlanRequest, WorkerChannel, WorkerToCoordinatorMsg,
    grpc::{BoxCloneSyncChannel, create_worker_client},
};
use elmo_udfs::codec::VERSION;
use futures::{StreamExt, TryStreamExt, stream::BoxStream};
use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};
use tokio::{runtime::Handle, sync::mpsc};
use tonic::{
    body::Body,
    transport::{ClientTlsConfig, Endpoint},
};
use tower::util::MapRequest;
use url::{Host, Url};

use super::{error::named, sent::SentPlan};

/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of HTTP/2 pings, and how long to wait for their answer.
pub(super) const PING: Duration = Duration::from_secs(10);
/// HTTP/2 flow-control window of a stream, in bytes.
pub(super) const STREAM_WINDOW: u32 = 4 << 20;
/// HTTP/2 flow-control window of a connection, in bytes: the maximum.
pub(super) const CONNECTION_WINDOW: u32 = i32::MAX as u32;

/// The header with the caller's version.
pub(super) const VERSION_HEADER: &str = "x-elmo-version";

/// The header with the id of the calling worker, that of its [`Greeting`](super::service::Greeting).
pub(super) const CALLER_HEADER: &str = "x-elmo-caller";

/// How a process proves to workers that it may use them, and encrypts what it sends.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    /// Sent as `authorization: Bearer TOKEN`.
    pub token: Option<Arc<str>>,
    /// Certificates; without them the connection is not encrypted.
    pub tls: Option<ClientTlsConfig>,
}

/// The connections of a process, one per worker.
pub(super) struct Peers {
    tls: Option<ClientTlsConfig>,
    authorization: Option<HeaderValue>,
    /// See [`CALLER_HEADER`].
    caller: Option<HeaderValue>,
    /// The runtime that moves the bytes.
    io: Handle,
    channels: Mutex<HashMap<Url, BoxCloneSyncChannel>>,
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Peers")
    }
}

impl Peers {
    /// `caller` is the number of the process if it is a worker.
    ///
    /// # Errors
    /// If the token has characters that a header cannot have.
    pub(super) fn new(
        credentials: &Credentials,
        caller: Option<&str>,
        io: Handle,
    ) -> Result<Self, http::header::InvalidHeaderValue> {
        let authorization = credentials.token.as_ref().map(|token| HeaderValue::from_str(&format!("Bearer {token}")));
        let mut authorization = authorization.transpose()?;
        if let Some(value) = &mut authorization {
            value.set_sensitive(true);
        }
        let caller = caller.map(HeaderValue::from_str).transpose()?;
        Ok(Self { tls: credentials.tls.clone(), authorization, caller, io, channels: Mutex::default() })
    }

    /// Whether connections are encrypted.
    pub(super) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// The connection to a worker, which is established when it is used, and again after an error.
    pub(super) fn channel(&self, url: &Url) -> Result<BoxCloneSyncChannel> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(url) {
            return Ok(channel.clone());
        }
        if self.authorization.is_some() && self.tls.is_none() && !is_loopback(url) {
            tracing::warn!("the token is sent to {} without encryption; give --tls-ca", name_of(url));
        }
        let invalid = |e: tonic::transport::Error| exec_datafusion_err!("{url}: {e}");
        let io = self.io.clone();
        let mut endpoint = Endpoint::from_shared(url.to_string())
            .map_err(invalid)?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PING)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .executor(OnHandle(io));
        if let Some(tls) = &self.tls {
            endpoint = endpoint.tls_config(tls.clone().timeout(CONNECT_TIMEOUT)).map_err(invalid)?;
        }
        let (authorization, caller) = (self.authorization.clone(), self.caller.clone());
        let with_headers = move |mut request: http::Request<Body>| {
            let headers = request.headers_mut();
            // `elmo cluster status` asks workers of any version, and has set it.
            headers.entry(VERSION_HEADER).or_insert(HeaderValue::from_static(VERSION));
            if let Some(caller) = &caller {
                headers.insert(CALLER_HEADER, caller.clone());
            }
            if let Some(authorization) = &authorization {
                headers.insert(AUTHORIZATION, authorization.clone());
            }
            request
        };
        let channel = BoxCloneSyncChannel::new(MapRequest::new(endpoint.connect_lazy(), with_headers));
        channels.insert(url.clone(), channel.clone());
        Ok(channel)
    }
}

/// Runs the tasks of a connection on a runtime.
#[derive(Clone)]
struct OnHandle(Handle);

impl<F: Future<Output: Send + 'static> + Send + 'static> hyper::rt::Executor<F> for OnHandle {
    fn execute(&self, task: F) {
        drop(self.0.spawn(task));
    }
}

/// Whether what is sent to an address does not leave this machine.
fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

/// The address of a worker in messages: `HOST:PORT`.
pub(super) fn name_of(url: &Url) -> String {
    format!("{}:{}", url.host_str().unwrap_or_default(), url.port_or_known_default().unwrap_or_default())
}

#[async_trait]
impl ChannelResolver for Peers {
    async fn get_worker_client_for_url(&self, url: &Url) -> Result<Box<dyn WorkerChannel>, DataFusionError> {
        Ok(Box::new(Peer { channel: self.channel(url)?, name: name_of(url).into() }))
    }
}

/// One worker.
struct Peer {
    channel: BoxCloneSyncChannel,
    name: Arc<str>,
}

#[async_trait]
impl WorkerChannel for Peer {
    async fn coordinator_channel(
        &mut self,
        headers: HeaderMap,
        mut request: SetPlanRequest,
        messages: BoxStream<'static, CoordinatorToWorkerMsg>,
        metrics: ExecutionPlanMetricsSet,
        context: &Arc<TaskContext>,
    ) -> Result<BoxStream<'static, Result<WorkerToCoordinatorMsg>>> {
        request.plan = match request.plan {
            MaybeEncoded::Decoded(plan) => MaybeEncoded::Decoded(Arc::new(SentPlan::new(plan))),
            encoded @ MaybeEncoded::Encoded(_) => encoded,
        };
        let mut client = create_worker_client(self.channel.clone());
        let answers = client.coordinator_channel(headers, request, messages, metrics, context).await;
        let name = Arc::clone(&self.name);
        Ok(answers.map_err(|e| named(&self.name, e))?.map_err(move |e| named(&name, e)).boxed())
    }

    async fn execute_task(
        &mut self,
        headers: HeaderMap,
        request: ExecuteTaskRequest,
        metrics: ExecutionPlanMetricsSet,
        context: &Arc<TaskContext>,
    ) -> Result<Vec<BoxStream<'static, Result<RecordBatch>>>> {
        let mut partitions = Vec::new();
        for partition in request.target_partition_start..request.target_partition_end {
            let one = ExecuteTaskRequest {
                task_key: request.task_key,
                target_partition_start: partition,
                target_partition_end: partition + 1,
                producer_head: request.producer_head.clone(),
            };
            let mut client = create_worker_client(self.channel.clone());
            let streams = client.execute_task(headers.clone(), one, metrics.clone(), context).await;
            for rows in streams.map_err(|e| named(&self.name, e))? {
                let name = Arc::clone(&self.name);
                partitions.push(begun(rows.map_err(move |e| named(&name, e)).boxed()));
            }
        }
        Ok(partitions)
    }

    async fn get_worker_info(&mut self, request: GetWorkerInfoRequest) -> Result<GetWorkerInfoResponse> {
        create_worker_client(self.channel.clone()).get_worker_info(request).await
    }
}

/// Reads a stream from now on, one batch ahead. A panic while reading is an error, and not the end of the stream.
fn begun(mut rows: BoxStream<'static, Result<RecordBatch>>) -> BoxStream<'static, Result<RecordBatch>> {
    let (sender, receiver) = mpsc::channel(1);
    let task = SpawnedTask::spawn(async move {
        while let Some(batch) = rows.next().await {
            if sender.send(batch).await.is_err() {
                break;
            }
        }
    });
    let next = |(mut receiver, task): (mpsc::Receiver<_>, Option<SpawnedTask<()>>)| async move {
        if let Some(batch) = receiver.recv().await {
            return Some((batch, (receiver, task)));
        }
        match task?.join().await {
            Ok(()) => None,
            Err(panic) => Some((Err(DataFusionError::ExecutionJoin(Box::new(panic))), (receiver, None))),
        }
    };
    futures::stream::unfold((receiver, Some(task)), next).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine() {
        let is_ours = |url: &str| is_loopback(&url.parse().unwrap());
        for own in ["http://localhost:1", "http://127.0.0.1:1", "http://127.9.0.1:1", "http://[::1]:1"] {
            assert!(is_ours(own), "{own}");
        }
        for other in ["http://gpu-1:1", "http://10.0.0.7:1", "http://[fe80::1]:1", "http://localhost.example:1"] {
            assert!(!is_ours(other), "{other}");
        }
    }
}
