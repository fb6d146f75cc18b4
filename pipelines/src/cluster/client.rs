//! The client of a cluster: serialises physical plans, submits them to the scheduler, and streams the results.

use std::{sync::Arc, time::Duration};

use ballista_core::{
    serde::protobuf::{
        ExecuteQueryParams, KeyValuePair, execute_query_failure_result, execute_query_params::Query,
        execute_query_result, scheduler_grpc_client::SchedulerGrpcClient,
    },
    utils::create_grpc_client_endpoint,
    version::insert_version_header,
};
use datafusion::{
    common::DataFusionError,
    execution::SendableRecordBatchStream,
    physical_plan::{ExecutionPlan, ExecutionPlanProperties, stream::RecordBatchStreamAdapter},
    prelude::SessionConfig,
};
use datafusion_proto::{
    physical_plan::{AsExecutionPlan, PhysicalExtensionCodec},
    protobuf::PhysicalPlanNode,
};
use elmo_udfs::codec::NoModels;
use futures::{StreamExt, TryStreamExt};
use prost::Message;
use tokio::time::timeout;
use tonic::{Code, Status};

use super::{
    Address, MESSAGE_BYTES, NO_ANSWER, REQUEST_TIMEOUT,
    codec::cluster_codec,
    error::{ClusterError, NO_EXECUTORS},
    job::{Job, SchedulerClient},
    results::Results,
};

type Result<T, E = ClusterError> = std::result::Result<T, E>;

/// How long to retry connecting to a scheduler that may be starting.
const SCHEDULER_DEADLINE: Duration = Duration::from_secs(5);
/// Timeout of one connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the first executor to register.
const EXECUTORS_DEADLINE: Duration = Duration::from_secs(30);
/// Interval between retries.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// A client of a cluster's scheduler. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cluster {
    address: Address,
    codec: Arc<dyn PhysicalExtensionCodec>,
}

impl Cluster {
    /// Creates a client. Does not connect.
    pub fn new(address: Address) -> Self {
        Self { address, codec: cluster_codec(Arc::new(NoModels("the client"))) }
    }

    /// The address of the scheduler.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Runs a plan and streams its rows, partition by partition. The stream yields nothing until all partitions are
    /// computed.
    pub fn run(&self, plan: Arc<dyn ExecutionPlan>, config: &SessionConfig) -> SendableRecordBatchStream {
        let (cluster, schema, config) = (self.clone(), plan.schema(), config.clone());
        let rows = async move {
            let results = Arc::new(cluster.results(plan, &config).await?);
            let partitions = futures::stream::iter(0..results.partition_count()).map(Ok);
            // The stream holds the job until all rows are fetched: dropping it cancels the job.
            let each = partitions.and_then(move |partition| {
                let results = Arc::clone(&results);
                async move { results.partition(partition).await }
            });
            Ok::<_, DataFusionError>(each.try_flatten())
        };
        Box::pin(RecordBatchStreamAdapter::new(schema, futures::stream::once(rows).try_flatten()))
    }

    /// Runs a plan and waits until all partitions are computed.
    pub(super) async fn results(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        config: &SessionConfig,
    ) -> Result<Results, DataFusionError> {
        let (schema, partitions) = (plan.schema(), plan.output_partitioning().partition_count());
        let mut job = self.submit(plan, config).await?;
        let locations = job.wait().await?;
        Ok(Results::try_new(job, locations, partitions, schema)?)
    }

    /// Whether a plan can be serialised.
    pub(super) fn can_send(&self, plan: &Arc<dyn ExecutionPlan>) -> bool {
        PhysicalPlanNode::try_from_physical_plan(Arc::clone(plan), self.codec.as_ref()).is_ok()
    }

    async fn submit(&self, plan: Arc<dyn ExecutionPlan>, config: &SessionConfig) -> Result<Job, DataFusionError> {
        let message = PhysicalPlanNode::try_from_physical_plan(plan, self.codec.as_ref())?;
        // Otherwise the rows of a partition would differ between attempts of its task.
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
        let id = self.submit_query(&mut scheduler, params).await?;
        Ok(Job::new(id, scheduler, self.address.clone()))
    }

    /// Connects to the scheduler; retries for a while if it is starting.
    async fn connect(&self) -> Result<SchedulerClient> {
        let unreachable = |reason: String| ClusterError::Unreachable { scheduler: self.address.clone(), reason };
        let endpoint = create_grpc_client_endpoint(format!("http://{}", self.address), None);
        let endpoint = endpoint.map_err(|e| unreachable(e.to_string()))?.connect_timeout(CONNECT_TIMEOUT);
        let deadline = tokio::time::Instant::now() + SCHEDULER_DEADLINE;
        let channel = loop {
            let answered = timeout(CONNECT_TIMEOUT, endpoint.connect()).await;
            match answered.map_err(|_| unreachable(NO_ANSWER.to_owned()))? {
                Ok(channel) => break channel,
                Err(e) if tokio::time::Instant::now() > deadline => return Err(unreachable(root_cause(&e))),
                Err(_) => tokio::time::sleep(RETRY_INTERVAL).await,
            }
        };
        let client = SchedulerGrpcClient::new(channel).max_decoding_message_size(MESSAGE_BYTES as usize);
        Ok(client.max_encoding_message_size(MESSAGE_BYTES as usize))
    }

    fn timed_out(&self) -> ClusterError {
        ClusterError::Unreachable { scheduler: self.address.clone(), reason: NO_ANSWER.to_owned() }
    }

    /// Submits a query; returns the job id. Retries for a while if no executor is registered yet.
    async fn submit_query(&self, scheduler: &mut SchedulerClient, params: ExecuteQueryParams) -> Result<String> {
        let rejected = |reason: String| ClusterError::Rejected { scheduler: self.address.clone(), reason };
        let deadline = tokio::time::Instant::now() + EXECUTORS_DEADLINE;
        let mut waited = false;
        loop {
            let mut request = tonic::Request::new(params.clone());
            insert_version_header(request.metadata_mut());
            let answered = timeout(REQUEST_TIMEOUT, scheduler.execute_query(request)).await;
            match answered.map_err(|_| self.timed_out())? {
                Err(status) if status.message().contains(NO_EXECUTORS) => {
                    if tokio::time::Instant::now() > deadline {
                        return Err(ClusterError::NoExecutors { scheduler: self.address.clone() });
                    }
                    if !std::mem::replace(&mut waited, true) {
                        tracing::warn!("{NO_EXECUTORS} at {}; waiting for one", self.address);
                    }
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                Err(status) if is_from_scheduler(&status) => return Err(rejected(status.message().to_owned())),
                Err(status) => {
                    let reason = format!("not a scheduler of elmo: {}", status.message());
                    let reason = if status.code() == Code::Unavailable { status.message().to_owned() } else { reason };
                    return Err(ClusterError::Unreachable { scheduler: self.address.clone(), reason });
                }
                Ok(answer) => {
                    return match answer.into_inner().result {
                        Some(execute_query_result::Result::Success(success)) => Ok(success.job_id),
                        Some(execute_query_result::Result::Failure(failure)) => {
                            Err(rejected(failure.failure.map_or_else(String::new, failure_text)))
                        }
                        None => Err(rejected("the answer is empty".to_owned())),
                    };
                }
            }
        }
    }
}

/// Whether a status comes from Ballista's scheduler and not from another server at the address.
fn is_from_scheduler(status: &Status) -> bool {
    matches!(status.code(), Code::Internal | Code::InvalidArgument | Code::FailedPrecondition | Code::ResourceExhausted)
        && !status.message().contains("h2 protocol error")
        && !status.message().is_empty()
}

/// The message of the last error in a chain of sources.
fn root_cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), root_cause)
}

fn failure_text(failure: execute_query_failure_result::Failure) -> String {
    use execute_query_failure_result::Failure::*;
    match failure {
        SessionNotFound(text) | PlanParsingFailure(text) | SqlParsingFailure(text) => text,
    }
}
