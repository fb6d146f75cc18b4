//! The service `elmo.Worker`, beside that of `datafusion-distributed` on the same port: how a worker is, and what it does for
//! bulk jobs.
//!
//! | method | answer |
//! |---|---|
//! | `Hello` | a [`Greeting`] |
//! | `Describe` | what the columns of a task are |
//! | `Columns` | the columns of a task for texts of the client |
//! | `Count` | the number of rows of a file, and where some of them begin |
//! | `Progress` | what the stages of a query have embedded up to now |
//! | `Unit` | a part of a job: a message each second while it is computed, and at the end what was written |
//!
//! While a worker works, it sends a message each second, so that its silence means that it is lost.
//!
//! Written by hand on tonic instead of from a `.proto` file, so that a build needs no protobuf compiler. Requests and answers
//! are [`Frame`]s: JSON, and for columns Arrow IPC. When the caller drops a call, or dies, the work behind it ends.

use std::{convert::Infallible, future::Ready, sync::Arc, task, time::Duration};

use datafusion_distributed::grpc::BoxCloneSyncChannel;
use elmo::ColumnStats;
use futures::{Stream, StreamExt, future::BoxFuture, stream::BoxStream};
use http::uri::PathAndQuery;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::time::timeout;
use tonic::{Request, Response, Status, body::Body, server::NamedService};
use tonic_prost::ProstCodec;
use url::Url;

use super::{
    envelope,
    error::{ClusterError, of_status},
    gate::ANY_VERSION,
    jobs::{Beat, Jobs, beating},
    live::{Embedded, Live, QueryId},
    peers::{Peers, VERSION_HEADER, name_of},
};
use crate::error::{Error, Exit};

/// A message of the service.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Frame {
    /// What it says, in JSON.
    #[prost(bytes = "vec", tag = "1")]
    json: Vec<u8>,
    /// Columns.
    #[prost(bytes = "vec", tag = "2")]
    pub(super) body: Vec<u8>,
}

impl Frame {
    pub(super) fn new(message: &impl Serialize, body: Vec<u8>) -> Result<Self, Status> {
        let json = serde_json::to_vec(message).map_err(|e| Status::internal(e.to_string()))?;
        Ok(Self { json, body })
    }

    /// # Errors
    /// A status that names the caller's mistake.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T, Status> {
        serde_json::from_slice(&self.json).map_err(|e| Status::invalid_argument(format!("not understood: {e}")))
    }
}

/// An answer, or the error of the work as an [`envelope`]; `None`: the work goes on.
type Answer<T> = Option<Result<T, String>>;

/// A worker says once a second that it works. After such a silence it is taken for lost.
pub(super) const SILENCE: Duration = Duration::from_secs(60);

/// How a worker is, and what it can do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// Its version of elmo.
    pub version: String,
    /// A number of the process. Two addresses with the same one are the same worker.
    pub id: String,
    /// Its devices, such as `cpu` or `cuda:0`.
    pub devices: Vec<String>,
    /// The precision in which it computes, such as `float32`.
    pub precision: String,
    /// The addresses of the models that it has opened.
    pub models: Vec<String>,
    /// Requests of queries and of jobs under way.
    pub tasks: usize,
    /// Whether it ends when these are done.
    pub stopping: bool,
}

const HELLO: &str = "/elmo.Worker/Hello";
pub(super) const DESCRIBE: &str = "/elmo.Worker/Describe";
pub(super) const COLUMNS: &str = "/elmo.Worker/Columns";
pub(super) const COUNT: &str = "/elmo.Worker/Count";
const PROGRESS: &str = "/elmo.Worker/Progress";
pub(super) const UNIT: &str = "/elmo.Worker/Unit";

/// The service.
#[derive(Debug, Clone)]
pub(super) struct Service {
    pub(super) live: Arc<Live>,
    pub(super) jobs: Arc<Jobs>,
}

impl NamedService for Service {
    const NAME: &'static str = "elmo.Worker";
}

impl Service {
    /// The messages of a method. Dropping the stream ends the work.
    fn answers(self, method: &str, request: Frame) -> Result<BoxStream<'static, Result<Frame, Status>>, Status> {
        let (live, jobs) = (self.live, self.jobs);
        Ok(match method {
            DESCRIBE => {
                let task = request.read()?;
                beating(&live, async move { jobs.describe(task).await }).map(plain).boxed()
            }
            COUNT => {
                let plan = request.read()?;
                beating(&live, async move { jobs.count(plan).await }).map(plain).boxed()
            }
            COLUMNS => {
                let task = request.read()?;
                let columns = beating(&live, async move { jobs.columns(task, &request.body).await });
                columns.map(columns_answer).boxed()
            }
            _ => jobs.unit(request.read()?).map(|event| answer(Some(event), Vec::new())).boxed(),
        })
    }
}

fn plain<T: Serialize>(beat: Beat<Result<T, Error>>) -> Result<Frame, Status> {
    match beat {
        Beat::Alive => answer::<T>(None, Vec::new()),
        Beat::Said(said) => answer(Some(said), Vec::new()),
    }
}

fn columns_answer(beat: Beat<Result<(ColumnStats, Vec<u8>), Error>>) -> Result<Frame, Status> {
    match beat {
        Beat::Alive => answer::<ColumnStats>(None, Vec::new()),
        Beat::Said(Ok((stats, columns))) => answer(Some(Ok(stats)), columns),
        Beat::Said(Err(error)) => answer::<ColumnStats>(Some(Err(error)), Vec::new()),
    }
}

fn answer<T: Serialize>(said: Option<Result<T, Error>>, body: Vec<u8>) -> Result<Frame, Status> {
    let answer: Answer<T> = said.map(|said| said.map_err(|error| envelope::encode(&error)));
    Frame::new(&answer, body)
}

/// The service of one method, for tonic.
struct Method {
    service: Service,
    path: String,
}

impl tonic::server::UnaryService<Frame> for Method {
    type Response = Frame;
    type Future = Ready<Result<Response<Frame>, Status>>;

    fn call(&mut self, request: Request<Frame>) -> Self::Future {
        let live = &self.service.live;
        let answer = match self.path.as_str() {
            PROGRESS => request.into_inner().read().and_then(|query| Frame::new(&live.embedded(query), Vec::new())),
            _ => Frame::new(&live.greeting(), Vec::new()),
        };
        std::future::ready(answer.map(Response::new))
    }
}

impl tonic::server::ServerStreamingService<Frame> for Method {
    type Response = Frame;
    type ResponseStream = BoxStream<'static, Result<Frame, Status>>;
    type Future = Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Frame>) -> Self::Future {
        std::future::ready(self.service.clone().answers(&self.path, request.into_inner()).map(Response::new))
    }
}

impl tower::Service<http::Request<Body>> for Service {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> task::Poll<Result<(), Infallible>> {
        task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = Method { service: self.clone(), path: request.uri().path().to_owned() };
        let is_any = request.headers().get(VERSION_HEADER).is_some_and(|version| version == ANY_VERSION);
        // Texts and plans of many files are longer than gRPC's default of 4 MB.
        let codec = ProstCodec::<Frame, Frame>::default();
        let mut server = tonic::server::Grpc::new(codec).max_decoding_message_size(usize::MAX);
        Box::pin(async move {
            Ok(match method.path.as_str() {
                other if is_any && other != HELLO => {
                    Status::failed_precondition("callers of any version may only ask how it is").into_http()
                }
                HELLO | PROGRESS => server.unary(method, request).await,
                DESCRIBE | COLUMNS | COUNT | UNIT => server.server_streaming(method, request).await,
                other => Status::unimplemented(format!("{other} is not known to this version")).into_http(),
            })
        })
    }
}

/// A connection to the service of a worker.
async fn connect(peers: &Peers, url: &Url) -> Result<tonic::client::Grpc<BoxCloneSyncChannel>, ClusterError> {
    let lost = |reason: String| ClusterError::Lost { worker: name_of(url), reason };
    let channel: BoxCloneSyncChannel = peers.channel(url).map_err(|e| lost(e.to_string()))?;
    let mut client = tonic::client::Grpc::new(channel).max_decoding_message_size(usize::MAX);
    client.ready().await.map_err(|e| lost(root_cause(&e)))?;
    Ok(client)
}

/// Asks a worker how it is. With `any_version`, also one of another version.
///
/// # Errors
/// [`ClusterError::Lost`] if it does not answer, [`ClusterError::Refused`] if it does not want to.
pub(super) async fn hello(peers: &Peers, url: &Url, any_version: bool) -> Result<Greeting, ClusterError> {
    let mut request = Request::new(Frame { json: Vec::new(), body: Vec::new() });
    if any_version {
        let any = tonic::metadata::MetadataValue::from_static(ANY_VERSION);
        request.metadata_mut().insert(VERSION_HEADER, any);
    }
    once(peers, url, HELLO, request).await
}

/// Asks a worker what the stages of a query have embedded.
///
/// # Errors
/// As [`hello`].
pub(super) async fn progress(peers: &Peers, url: &Url, query: QueryId) -> Result<Embedded, ClusterError> {
    let failed = |status: Status| of_status(&name_of(url), &status);
    once(peers, url, PROGRESS, Request::new(Frame::new(&query, Vec::new()).map_err(failed)?)).await
}

/// Asks a worker something that it answers at once.
async fn once<T: DeserializeOwned>(
    peers: &Peers,
    url: &Url,
    method: &'static str,
    request: Request<Frame>,
) -> Result<T, ClusterError> {
    let mut client = connect(peers, url).await?;
    let answer = client.unary(request, PathAndQuery::from_static(method), ProstCodec::<Frame, Frame>::default()).await;
    let failed = |status: Status| of_status(&name_of(url), &status);
    answer.map_err(failed)?.into_inner().read().map_err(failed)
}

/// Asks a worker for something; returns its answer and columns. Dropping the future ends its work.
///
/// # Errors
/// [`ClusterError::Lost`] if it does not answer, [`ClusterError::Refused`] if it does not want to, [`ClusterError::Failed`] with its
/// error.
pub(super) async fn ask<T: DeserializeOwned>(
    peers: &Peers,
    url: &Url,
    method: &'static str,
    request: Frame,
) -> Result<(T, Vec<u8>), ClusterError> {
    let lost = |reason: &str| ClusterError::Lost { worker: name_of(url), reason: reason.to_owned() };
    let answers = timeout(SILENCE, call(peers, url, method, request)).await;
    let mut answers = std::pin::pin!(answers.unwrap_or_else(|_| Err(lost("no answer within a minute")))?);
    loop {
        let frame = timeout(SILENCE, answers.next()).await.map_err(|_| lost("no message for a minute"))?;
        let frame = frame.ok_or_else(|| lost("it ended the call without an answer"))??;
        if let Some(answer) = answered(url, &frame)? {
            return Ok((answer, frame.body));
        }
    }
}

/// Gives a worker something to do; returns what it says. Dropping the stream ends its work.
///
/// # Errors
/// As [`ask`].
pub(super) async fn give<T: DeserializeOwned + Send + 'static>(
    peers: &Peers,
    url: &Url,
    method: &'static str,
    request: Frame,
) -> Result<BoxStream<'static, Result<T, ClusterError>>, ClusterError> {
    let (frames, url) = (call(peers, url, method, request).await?, url.clone());
    let said = frames.map(move |frame| answered(&url, &frame?));
    Ok(said.filter_map(|said| std::future::ready(said.transpose())).boxed())
}

async fn call(
    peers: &Peers,
    url: &Url,
    method: &'static str,
    request: Frame,
) -> Result<impl Stream<Item = Result<Frame, ClusterError>> + Send + use<>, ClusterError> {
    let mut client = connect(peers, url).await?;
    let codec = ProstCodec::<Frame, Frame>::default();
    let answer = client.server_streaming(Request::new(request), PathAndQuery::from_static(method), codec).await;
    let worker = name_of(url);
    let frames = answer.map_err(|status| of_status(&worker, &status))?.into_inner();
    Ok(frames.map(move |frame| frame.map_err(|status| of_status(&worker, &status))))
}

fn answered<T: DeserializeOwned>(url: &Url, frame: &Frame) -> Result<Option<T>, ClusterError> {
    let answer: Answer<T> = frame.read().map_err(|status| of_status(&name_of(url), &status))?;
    let failed = |text: String| match envelope::decode(&text) {
        // Such as a disk that is full there.
        Some(error) => error.at(&name_of(url)),
        None => ClusterError::Failed { message: text, exit: Exit::Failed, help: None },
    };
    answer.transpose().map_err(failed)
}

/// The message of the last error in a chain of sources.
fn root_cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), root_cause)
}
