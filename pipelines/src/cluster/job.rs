//! A job of the scheduler: waits for its completion, and cancels it when it is dropped.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use ballista_core::serde::protobuf::{
    CancelJobParams, CleanJobDataParams, GetJobStatusParams, PartitionLocation, job_status::Status,
    scheduler_grpc_client::SchedulerGrpcClient,
};
use tokio::{
    runtime::Handle,
    time::{Instant, timeout},
};
use tonic::transport::Channel;

use super::{Address, NO_ANSWER, REQUEST_TIMEOUT, error::ClusterError};

pub(super) type SchedulerClient = SchedulerGrpcClient<Channel>;

/// How long the scheduler may report an accepted job as unknown. A restarted scheduler has lost its jobs.
const UNKNOWN_JOB_TIMEOUT: Duration = Duration::from_secs(10);
/// First interval between status requests. It doubles up to [`MAX_POLL_INTERVAL`], so that short queries end early.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(10);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Timeout of [`release_jobs`].
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// A running job; dropping it cancels the job and deletes its results.
pub(super) struct Job {
    id: String,
    scheduler: SchedulerClient,
    runtime: Handle,
    address: Address,
    /// Whether the job has ended successfully.
    computed: bool,
}

impl Job {
    /// A job that was submitted. Must be called in the context of a Tokio runtime, where the job is released later.
    pub(super) fn new(id: String, scheduler: SchedulerClient, address: Address) -> Self {
        Self { id, scheduler, runtime: Handle::current(), address, computed: false }
    }

    /// Waits until the job has ended; returns the locations of its partitions.
    pub(super) async fn wait(&mut self) -> Result<Vec<PartitionLocation>, ClusterError> {
        let mut interval = MIN_POLL_INTERVAL;
        let mut last_known = Instant::now();
        loop {
            let unreachable = |reason: String| ClusterError::Unreachable { scheduler: self.address.clone(), reason };
            let request = self.scheduler.get_job_status(GetJobStatusParams { job_id: self.id.clone() });
            let answer = timeout(REQUEST_TIMEOUT, request).await.map_err(|_| unreachable(NO_ANSWER.to_owned()))?;
            let answer = answer.map_err(|status| unreachable(status.message().to_owned()))?;
            match answer.into_inner().status.and_then(|status| status.status) {
                Some(Status::Successful(done)) => {
                    self.computed = true;
                    return Ok(done.partition_location);
                }
                // Ballista has no code for this failure.
                Some(Status::Failed(failed)) if failed.error.contains("all executors were lost") => {
                    return Err(ClusterError::AllExecutorsLost { scheduler: self.address.clone() });
                }
                Some(Status::Failed(failed)) => return Err(ClusterError::of_job(&failed.error)),
                None if last_known.elapsed() > UNKNOWN_JOB_TIMEOUT => {
                    return Err(unreachable("the job is unknown; the scheduler may have been restarted".to_owned()));
                }
                None => {}
                Some(Status::Queued(_) | Status::Running(_)) => last_known = Instant::now(),
            }
            tokio::time::sleep(interval).await;
            interval = (interval * 2).min(MAX_POLL_INTERVAL);
        }
    }
}

impl Drop for Job {
    /// Cancels the job if it is running, and lets executors delete its results.
    fn drop(&mut self) {
        RELEASING.fetch_add(1, Ordering::Relaxed);
        let (mut scheduler, job_id, computed) = (self.scheduler.clone(), self.id.clone(), self.computed);
        self.runtime.spawn(async move {
            if !computed && let Err(status) = scheduler.cancel_job(CancelJobParams { job_id: job_id.clone() }).await {
                tracing::debug!(reason = status.message(), "a job was not cancelled");
            }
            // A failed or cancelled job has partial results, which are not fetched.
            let clean = CleanJobDataParams { job_id, remove_stage_ids: Vec::new() };
            if let Err(status) = scheduler.clean_job_data(clean).await {
                tracing::debug!(reason = status.message(), "the results of a job were not deleted");
            }
            RELEASING.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

/// Number of dropped jobs of which the scheduler has not been told yet.
static RELEASING: AtomicUsize = AtomicUsize::new(0);

/// Waits, for a limited time, until the scheduler knows of all dropped jobs. Call it before the process exits.
pub(crate) async fn release_jobs() {
    let deadline = Instant::now() + RELEASE_TIMEOUT;
    while RELEASING.load(Ordering::Relaxed) > 0 && Instant::now() < deadline {
        tokio::time::sleep(MIN_POLL_INTERVAL).await;
    }
}
