//! The client's side of a job: sends a plan, waits, fetches the rows, and takes the job back when nobody waits any more.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use ballista_core::{
    client::BallistaClient,
    serde::protobuf::{
        CancelJobParams, CleanJobDataParams, ExecuteQueryParams, ExecutorMetadata, GetJobStatusParams, KeyValuePair,
        PartitionLocation, execute_query_failure_result, execute_query_params::Query, execute_query_result,
        job_status::Status, scheduler_grpc_client::SchedulerGrpcClient,
    },
    utils::create_grpc_client_endpoint,
    version::insert_version_header,
};
use datafusion::{
    arrow::{
        array::{RecordBatch, RecordBatchOptions},
        compute::cast,
        datatypes::SchemaRef,
    },
    common::DataFusionError,
    execution::SendableRecordBatchStream,
    physical_plan::{ExecutionPlan, ExecutionPlanProperties, stream::RecordBatchStreamAdapter},
    prelude::SessionConfig,
};
use datafusion_proto::{physical_plan::AsExecutionPlan, protobuf::PhysicalPlanNode};
use elmo_udfs::codec::NoModels;
use futures::{StreamExt, TryStreamExt};
use prost::Message;
use thiserror::Error;
use tokio::{runtime::Handle, time::timeout};
use tonic::{Code, Status as Answer, transport::Channel};

use super::{Address, MESSAGE_BYTES, codec::ClusterCodec, engine, scheduler::NOBODY};
use crate::error::{Error, Exit, Fault};

/// Why a cluster gave no answer.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// No process listens there, or it is no scheduler.
    #[error("the scheduler at {scheduler} does not answer: {reason}")]
    Unreachable {
        /// Its address.
        scheduler: Address,
        /// What the system said.
        reason: String,
    },
    /// The scheduler cannot do anything with the plan.
    #[error("the scheduler at {scheduler} refused the query: {reason}")]
    Refused {
        /// Its address.
        scheduler: Address,
        /// What it said.
        reason: String,
    },
    /// Nobody to run the query.
    #[error("{NOBODY} at {scheduler}")]
    Nobody {
        /// Its address.
        scheduler: Address,
    },
    /// Nobody is left to run the query.
    #[error("all executors of the scheduler at {scheduler} were lost")]
    AllLost {
        /// Its address.
        scheduler: Address,
    },
    /// A part of the query failed on an executor.
    #[error("{message}")]
    Failed {
        /// What the executor said.
        message: String,
        /// Whose fault it is.
        exit: Exit,
        /// What to do next.
        help: Option<String>,
    },
    /// The rows are there and cannot be fetched.
    #[error("the executor at {executor} holds a part of the result, and does not give it: {reason}")]
    Lost {
        /// Its address.
        executor: String,
        /// What the system said.
        reason: String,
    },
    /// The scheduler went away, or removed an executor from its list.
    #[error("the scheduler is gone, or removed the executor at {executor}, of which it had not heard")]
    Evicted {
        /// The executor's address.
        executor: String,
    },
    /// Fewer or more rows came than the executor had counted.
    #[error("the executor at {executor} gave {rows} rows of the {expected} that it had counted")]
    Short {
        /// Its address.
        executor: String,
        /// Rows that came.
        rows: u64,
        /// Rows that should have come.
        expected: u64,
    },
}

impl Fault for ClusterError {
    fn exit(&self) -> Exit {
        match self {
            Self::Unreachable { .. }
            | Self::Evicted { .. }
            | Self::Nobody { .. }
            | Self::AllLost { .. }
            | Self::Lost { .. }
            | Self::Short { .. } => Exit::Storage,
            Self::Refused { .. } => Exit::Usage,
            Self::Failed { exit, .. } => *exit,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            Self::Evicted { .. } => {
                "start it again when the scheduler is there; a supervisor such as systemd can do so".to_owned()
            }
            Self::Unreachable { .. } => "start one by elmo cluster scheduler, or leave out --cluster".to_owned(),
            Self::Nobody { scheduler } | Self::AllLost { scheduler } => {
                format!("start one by elmo cluster executor --scheduler {scheduler}")
            }
            Self::Lost { .. } | Self::Short { .. } => "run the query again: its rows went with the executor".to_owned(),
            Self::Failed { help, .. } => return help.clone(),
            Self::Refused { .. } => return None,
        })
    }
}

impl ClusterError {
    /// What became of a job, in Ballista's words or in those of an executor of ours.
    fn failed(said: &str) -> Self {
        let (message, exit, help) =
            engine::read(said).unwrap_or_else(|| (said.trim_end().to_owned(), Exit::Failed, None));
        Self::Failed { message, exit, help }
    }
}

impl From<ClusterError> for DataFusionError {
    fn from(error: ClusterError) -> Self {
        Self::External(Box::new(Error::from(error)))
    }
}

type Result<T, E = ClusterError> = std::result::Result<T, E>;
type Client = SchedulerGrpcClient<Channel>;

/// How long a query waits for a scheduler that is about to start.
const WAIT_FOR_SCHEDULER: Duration = Duration::from_secs(5);
/// How long the network may take.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a scheduler may take for an answer, which it has at once, and a plan with many rows to reach it.
const ANSWER: Duration = Duration::from_secs(60);
/// How long a query waits for the first executor of a cluster that is about to start.
const WAIT_FOR_EXECUTORS: Duration = Duration::from_secs(30);
/// How long the end of a job may take.
const CLOSE: Duration = Duration::from_secs(2);
/// How long a scheduler may not know a job that it took: one that was started anew never will.
const UNKNOWN: Duration = Duration::from_secs(10);
/// The pause before the scheduler is asked again: short at first, as short queries are many.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// How long an executor may take for the next rows of a result, which it has on its disk.
const NEXT_ROWS: Duration = Duration::from_secs(60);
/// A part of a result is asked for as often.
const FETCHES: u8 = 3;
/// Milliseconds between.
const FETCH_PAUSE: u64 = 500;

/// A cluster, by its scheduler. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cluster {
    address: Address,
    codec: Arc<ClusterCodec>,
}

impl Cluster {
    /// The cluster of the scheduler at `address`; asks nobody yet.
    pub fn new(address: Address) -> Self {
        Self { address, codec: ClusterCodec::new(Arc::new(NoModels("the client"))) }
    }

    /// Where its scheduler is.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The rows of a plan, partition after partition. They begin to come when all of them are computed.
    pub fn run(&self, plan: Arc<dyn ExecutionPlan>, config: &SessionConfig) -> SendableRecordBatchStream {
        let (cluster, schema, config) = (self.clone(), plan.schema(), config.clone());
        let rows = async move {
            let results = Arc::new(cluster.results(plan, &config).await?);
            let partitions = futures::stream::iter(0..results.parts.len()).map(Ok);
            // The job is held until its rows are fetched: dropped before, it is taken back.
            let each = partitions.and_then(move |partition| {
                let results = Arc::clone(&results);
                async move { results.partition(partition).await }
            });
            Ok::<_, DataFusionError>(each.try_flatten())
        };
        Box::pin(RecordBatchStreamAdapter::new(schema, futures::stream::once(rows).try_flatten()))
    }

    /// Computes all partitions of a plan.
    pub(super) async fn results(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        config: &SessionConfig,
    ) -> Result<Results, DataFusionError> {
        let (schema, partitions) = (plan.schema(), plan.output_partitioning().partition_count());
        let mut job = self.submit(plan, config).await?;
        let parts = by_partition(job.finished().await?, partitions)?;
        Ok(Results { _job: job, parts, schema })
    }

    /// Whether a plan can be sent at all.
    pub(super) fn can_send(&self, plan: &Arc<dyn ExecutionPlan>) -> bool {
        PhysicalPlanNode::try_from_physical_plan(Arc::clone(plan), self.codec.as_ref()).is_ok()
    }

    async fn submit(&self, plan: Arc<dyn ExecutionPlan>, config: &SessionConfig) -> Result<Job, DataFusionError> {
        let message = PhysicalPlanNode::try_from_physical_plan(plan, self.codec.as_ref())?;
        // Or a part of one attempt would not have the rows of that part of another.
        let config = config.clone().set_bool("datafusion.execution.enable_file_stream_work_stealing", false);
        let settings = config.options().entries().into_iter();
        let settings = settings.map(|entry| KeyValuePair { key: entry.key, value: entry.value }).collect();
        let session_id = uuid::Uuid::new_v4().to_string();
        let params = ExecuteQueryParams {
            operation_id: session_id.clone(),
            session_id,
            settings,
            query: Some(Query::PhysicalPlan(message.encode_to_vec())),
        };
        let mut scheduler = self.connect().await?;
        let id = self.accepted(&mut scheduler, params).await?;
        let runtime = Handle::current();
        Ok(Job { id, scheduler, runtime, address: self.address.clone(), computed: false })
    }

    /// Waits a little for a scheduler that is about to start.
    async fn connect(&self) -> Result<Client> {
        let unreachable = |reason: String| ClusterError::Unreachable { scheduler: self.address.clone(), reason };
        let endpoint = create_grpc_client_endpoint(format!("http://{}", self.address), None);
        let endpoint = endpoint.map_err(|e| unreachable(e.to_string()))?.connect_timeout(CONNECT);
        let deadline = tokio::time::Instant::now() + WAIT_FOR_SCHEDULER;
        let channel = loop {
            let answered = timeout(CONNECT, endpoint.connect()).await;
            match answered.map_err(|_| unreachable("nothing was said".to_owned()))? {
                Ok(channel) => break channel,
                Err(e) if tokio::time::Instant::now() > deadline => return Err(unreachable(innermost(&e))),
                Err(_) => tokio::time::sleep(LONGEST_PAUSE).await,
            }
        };
        let client = SchedulerGrpcClient::new(channel).max_decoding_message_size(MESSAGE_BYTES as usize);
        Ok(client.max_encoding_message_size(MESSAGE_BYTES as usize))
    }

    fn silent(&self) -> ClusterError {
        ClusterError::Unreachable { scheduler: self.address.clone(), reason: "nothing was said".to_owned() }
    }

    /// Hands the query over, and waits for executors where there are none yet.
    async fn accepted(&self, scheduler: &mut Client, params: ExecuteQueryParams) -> Result<String> {
        let refused = |reason: String| ClusterError::Refused { scheduler: self.address.clone(), reason };
        let deadline = tokio::time::Instant::now() + WAIT_FOR_EXECUTORS;
        let mut waited = false;
        loop {
            let mut request = tonic::Request::new(params.clone());
            insert_version_header(request.metadata_mut());
            let answered = timeout(ANSWER, scheduler.execute_query(request)).await;
            match answered.map_err(|_| self.silent())? {
                Err(status) if status.message().contains(NOBODY) => {
                    if tokio::time::Instant::now() > deadline {
                        return Err(ClusterError::Nobody { scheduler: self.address.clone() });
                    }
                    if !std::mem::replace(&mut waited, true) {
                        tracing::warn!("{NOBODY} at {}; waiting for one", self.address);
                    }
                    tokio::time::sleep(LONGEST_PAUSE).await;
                }
                Err(status) if says_a_scheduler(&status) => return Err(refused(status.message().to_owned())),
                Err(status) => {
                    let reason = format!("what listens there is no scheduler of elmo: {}", status.message());
                    let reason = if status.code() == Code::Unavailable { status.message().to_owned() } else { reason };
                    return Err(ClusterError::Unreachable { scheduler: self.address.clone(), reason });
                }
                Ok(answer) => {
                    return match answer.into_inner().result {
                        Some(execute_query_result::Result::Success(success)) => Ok(success.job_id),
                        Some(execute_query_result::Result::Failure(failure)) => {
                            Err(refused(failure.failure.map_or_else(String::new, unwrapped)))
                        }
                        None => Err(refused("it gave no answer".to_owned())),
                    };
                }
            }
        }
    }
}

/// What was computed, where executors keep it.
pub(super) struct Results {
    /// Held as long as somebody may read.
    _job: Job,
    /// Of each partition the places that have it: more than one where an executor was lost and came back.
    parts: Vec<Vec<PartitionLocation>>,
    schema: SchemaRef,
}

impl Results {
    /// The rows of a partition.
    pub(super) async fn partition(&self, partition: usize) -> Result<SendableRecordBatchStream, DataFusionError> {
        let mut failed = None;
        // The last is the latest.
        for place in self.parts.get(partition).into_iter().flatten().rev() {
            match fetch(place.clone(), Arc::clone(&self.schema)).await {
                Ok(rows) => return Ok(rows),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.unwrap_or_else(|| missing(partition).into()))
    }
}

fn missing(partition: usize) -> ClusterError {
    ClusterError::failed(&format!("the scheduler does not say where part {partition} of the result is"))
}

/// The places of each partition, of which there is one at least.
fn by_partition(places: Vec<PartitionLocation>, partitions: usize) -> Result<Vec<Vec<PartitionLocation>>> {
    let mut parts = vec![Vec::new(); partitions];
    for place in places {
        let partition = place.partition_id.as_ref().map_or(u32::MAX, |id| id.partition_id);
        let Some(part) = parts.get_mut(partition as usize) else {
            return Err(ClusterError::failed(&format!("the scheduler has {partition} as a part of {partitions}")));
        };
        part.push(place);
    }
    match parts.iter().position(Vec::is_empty) {
        Some(partition) => Err(missing(partition)),
        None => Ok(parts),
    }
}

/// A query under way; dropped, it is taken back.
struct Job {
    id: String,
    scheduler: Client,
    runtime: Handle,
    address: Address,
    /// All rows are there.
    computed: bool,
}

impl Job {
    /// Waits until all rows are computed: where they are.
    async fn finished(&mut self) -> Result<Vec<PartitionLocation>> {
        let mut pause = SHORTEST_PAUSE;
        let mut known = tokio::time::Instant::now();
        loop {
            let unreachable = |reason: String| ClusterError::Unreachable { scheduler: self.address.clone(), reason };
            let asked = self.scheduler.get_job_status(GetJobStatusParams { job_id: self.id.clone() });
            let asked = timeout(ANSWER, asked).await.map_err(|_| unreachable("nothing was said".to_owned()))?;
            let answer = asked.map_err(|status| unreachable(status.message().to_owned()))?;
            match answer.into_inner().status.and_then(|status| status.status) {
                Some(Status::Successful(done)) => {
                    self.computed = true;
                    return Ok(done.partition_location);
                }
                // Ballista's words, as it has no code for it.
                Some(Status::Failed(failed)) if failed.error.contains("all executors were lost") => {
                    return Err(ClusterError::AllLost { scheduler: self.address.clone() });
                }
                Some(Status::Failed(failed)) => return Err(ClusterError::failed(&failed.error)),
                None if known.elapsed() > UNKNOWN => {
                    return Err(unreachable("it does not know the query any more; was it started anew?".to_owned()));
                }
                None => {}
                Some(Status::Queued(_) | Status::Running(_)) => known = tokio::time::Instant::now(),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

impl Drop for Job {
    /// Nobody waits for the rows any more, or all were fetched: executors may forget them.
    fn drop(&mut self) {
        UNDER_WAY.fetch_add(1, Ordering::Relaxed);
        let (mut scheduler, job_id, computed) = (self.scheduler.clone(), self.id.clone(), self.computed);
        self.runtime.spawn(async move {
            if !computed && let Err(status) = scheduler.cancel_job(CancelJobParams { job_id: job_id.clone() }).await {
                tracing::debug!(reason = status.message(), "a job was not taken back");
            }
            // A job that failed has results, too, which nobody will fetch.
            let forget = CleanJobDataParams { job_id, remove_stage_ids: Vec::new() };
            if let Err(status) = scheduler.clean_job_data(forget).await {
                tracing::debug!(reason = status.message(), "the results of a job were not given up");
            }
            UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

/// Jobs that are being taken back.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// Waits a little until the scheduler knows of every job that nobody waits for any more. Who ends a process asks for it.
pub(crate) async fn settled() {
    let deadline = tokio::time::Instant::now() + CLOSE;
    while UNDER_WAY.load(Ordering::Relaxed) > 0 && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(SHORTEST_PAUSE).await;
    }
}

/// The rows of a part of the result, as many as were counted when it was written.
async fn fetch(part: PartitionLocation, schema: SchemaRef) -> Result<SendableRecordBatchStream, DataFusionError> {
    let layout = part.layout();
    let (Some(executor), Some(id)) = (part.executor_meta, part.partition_id) else {
        return Err(ClusterError::failed("the scheduler does not say where the result is").into());
    };
    let expected = part.partition_stats.and_then(|stats| u64::try_from(stats.num_rows).ok());
    let ExecutorMetadata { id: name, host, port, .. } = executor;
    let address = format!("{host}:{port}");
    let lost = |reason: String| ClusterError::Lost { executor: address.clone(), reason };
    let port = u16::try_from(port).map_err(|_| lost(format!("{port} is no port")))?;
    let client = BallistaClient::try_new(&host, port, MESSAGE_BYTES as usize, false, None, FETCHES, FETCH_PAUSE, 0, 0);
    let silent = || lost("nothing was said".to_owned());
    let mut client = timeout(NEXT_ROWS, client).await.map_err(|_| silent())?.map_err(|e| lost(e.to_string()))?;
    let id = id.into();
    let rows = client.fetch_partition_proxied(&name, &id, part.file_id, layout, &host, port, true);
    let rows = timeout(NEXT_ROWS, rows).await.map_err(|_| silent())?.map_err(|e| lost(e.to_string()))?;
    let there = Arc::clone(&schema);
    let checked = futures::stream::try_unfold((rows, 0), move |(mut rows, seen)| {
        let (schema, executor) = (Arc::clone(&there), address.clone());
        async move {
            let next = timeout(NEXT_ROWS, rows.next()).await;
            let lost = |reason: String| ClusterError::Lost { executor: executor.clone(), reason };
            match next.map_err(|_| lost("nothing was said".to_owned()))? {
                Some(Ok(batch)) => {
                    let seen = seen + batch.num_rows() as u64;
                    Ok(Some((stamped(&batch, &schema)?, (rows, seen))))
                }
                Some(Err(e)) => Err(lost(e.to_string()).into()),
                None => match expected.filter(|expected| *expected != seen) {
                    Some(expected) => Err(ClusterError::Short { executor, rows: seen, expected }.into()),
                    None => Ok(None),
                },
            }
        }
    });
    Ok(Box::pin(RecordBatchStreamAdapter::new(schema, checked)))
}

/// The batch with the fields that were planned: what DataFusion sends of a function's result is its type alone.
fn stamped(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch, DataFusionError> {
    let columns = batch.columns().iter().zip(schema.fields()).map(|(column, field)| {
        match column.data_type() == field.data_type() {
            true => Ok(Arc::clone(column)),
            false => cast(column, field.data_type()),
        }
    });
    let columns = columns.collect::<std::result::Result<_, _>>()?;
    // Of a result without columns this is all there is.
    let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(Arc::clone(schema), columns, &rows)?)
}

/// Whether this is an answer of Ballista's, and not of whatever else listens on the port.
fn says_a_scheduler(answer: &Answer) -> bool {
    matches!(answer.code(), Code::Internal | Code::InvalidArgument | Code::FailedPrecondition | Code::ResourceExhausted)
        && !answer.message().contains("h2 protocol error")
        && !answer.message().is_empty()
}

/// What a chain of errors ends with.
fn innermost(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), innermost)
}

/// The words of a scheduler that cannot read a plan.
fn unwrapped(failure: execute_query_failure_result::Failure) -> String {
    use execute_query_failure_result::Failure::*;
    match failure {
        SessionNotFound(words) | PlanParsingFailure(words) | SqlParsingFailure(words) => words,
    }
}
