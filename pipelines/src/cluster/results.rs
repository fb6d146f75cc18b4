//! The result of a job: fetches its partitions from the executors that hold them.

use std::{sync::Arc, time::Duration};

use ballista_core::{
    client::BallistaClient,
    serde::protobuf::{ExecutorMetadata, PartitionLocation},
};
use datafusion::{
    arrow::{
        array::{RecordBatch, RecordBatchOptions},
        compute::cast,
        datatypes::SchemaRef,
    },
    common::DataFusionError,
    execution::SendableRecordBatchStream,
    physical_plan::stream::RecordBatchStreamAdapter,
};
use futures::StreamExt;
use tokio::time::timeout;

use super::{MESSAGE_BYTES, NO_ANSWER, error::ClusterError, job::Job};

/// Timeout of an executor for the next batch of a result, which it reads from its disk.
const FETCH_TIMEOUT: Duration = Duration::from_secs(60);
/// Attempts to fetch a partition.
const FETCH_ATTEMPTS: u8 = 3;
/// Milliseconds between attempts.
const FETCH_RETRY_MILLIS: u64 = 500;

/// The locations of a job's partitions.
pub(super) struct Results {
    /// Keeps the results on the executors.
    _job: Job,
    /// The locations of each partition. A partition has several if its executor was lost and came back.
    partitions: Vec<Vec<PartitionLocation>>,
    schema: SchemaRef,
}

impl Results {
    /// Groups the locations by partition.
    ///
    /// # Errors
    /// If a partition has no location or is out of range.
    pub(super) fn try_new(
        job: Job,
        locations: Vec<PartitionLocation>,
        partition_count: usize,
        schema: SchemaRef,
    ) -> Result<Self, ClusterError> {
        let mut partitions = vec![Vec::new(); partition_count];
        for location in locations {
            let index = location.partition_id.as_ref().map_or(u32::MAX, |id| id.partition_id);
            let Some(partition) = partitions.get_mut(index as usize) else {
                let reason = format!("the scheduler returned partition {index} of {partition_count}");
                return Err(ClusterError::of_job(&reason));
            };
            partition.push(location);
        }
        match partitions.iter().position(Vec::is_empty) {
            Some(partition) => Err(no_location(partition)),
            None => Ok(Self { _job: job, partitions, schema }),
        }
    }

    pub(super) fn partition_count(&self) -> usize {
        self.partitions.len()
    }

    /// Streams the rows of a partition.
    pub(super) async fn partition(&self, partition: usize) -> Result<SendableRecordBatchStream, DataFusionError> {
        let mut failed = None;
        // The most recent location comes last.
        for location in self.partitions.get(partition).into_iter().flatten().rev() {
            match fetch(location.clone(), Arc::clone(&self.schema)).await {
                Ok(rows) => return Ok(rows),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.unwrap_or_else(|| no_location(partition).into()))
    }
}

fn no_location(partition: usize) -> ClusterError {
    ClusterError::of_job(&format!("the scheduler returned no location for partition {partition} of the result"))
}

/// Streams the rows of a partition from one location. The stream fails if the number of rows differs from the number
/// that the executor wrote.
async fn fetch(location: PartitionLocation, schema: SchemaRef) -> Result<SendableRecordBatchStream, DataFusionError> {
    let layout = location.layout();
    let (Some(executor), Some(id)) = (location.executor_meta, location.partition_id) else {
        return Err(ClusterError::of_job("the scheduler returned an incomplete location of a result").into());
    };
    let expected = location.partition_stats.and_then(|stats| u64::try_from(stats.num_rows).ok());
    let ExecutorMetadata { id: name, host, port, .. } = executor;
    let address = format!("{host}:{port}");
    let lost = |reason: String| ClusterError::ResultLost { executor: address.clone(), reason };
    let timed_out = || lost(NO_ANSWER.to_owned());
    let port = u16::try_from(port).map_err(|_| lost(format!("invalid port {port}")))?;
    let client = BallistaClient::try_new(
        &host,
        port,
        MESSAGE_BYTES as usize,
        false,
        None,
        FETCH_ATTEMPTS,
        FETCH_RETRY_MILLIS,
        0,
        0,
    );
    let mut client = timeout(FETCH_TIMEOUT, client).await.map_err(|_| timed_out())?.map_err(|e| lost(e.to_string()))?;
    let id = id.into();
    let rows = client.fetch_partition_proxied(&name, &id, location.file_id, layout, &host, port, true);
    let rows = timeout(FETCH_TIMEOUT, rows).await.map_err(|_| timed_out())?.map_err(|e| lost(e.to_string()))?;
    let checked = check_rows(rows, Arc::clone(&schema), address, expected);
    Ok(Box::pin(RecordBatchStreamAdapter::new(schema, checked)))
}

/// Casts batches to the planned schema and compares the number of rows with `expected` at the end.
fn check_rows(
    rows: SendableRecordBatchStream,
    schema: SchemaRef,
    executor: String,
    expected: Option<u64>,
) -> impl futures::Stream<Item = Result<RecordBatch, DataFusionError>> + Send {
    futures::stream::try_unfold((rows, 0), move |(mut rows, seen)| {
        let (schema, executor) = (Arc::clone(&schema), executor.clone());
        async move {
            let next = timeout(FETCH_TIMEOUT, rows.next()).await;
            let lost = |reason: String| ClusterError::ResultLost { executor: executor.clone(), reason };
            match next.map_err(|_| lost(NO_ANSWER.to_owned()))? {
                Some(Ok(batch)) => {
                    let seen = seen + batch.num_rows() as u64;
                    Ok(Some((with_schema(&batch, &schema)?, (rows, seen))))
                }
                Some(Err(e)) => Err(lost(e.to_string()).into()),
                None => match expected.filter(|expected| *expected != seen) {
                    Some(expected) => Err(ClusterError::RowCount { executor, rows: seen, expected }.into()),
                    None => Ok(None),
                },
            }
        }
    })
}

/// The batch with the planned fields. Plans carry the data type of a function's result, but not its nullability and
/// metadata.
fn with_schema(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch, DataFusionError> {
    let columns = batch.columns().iter().zip(schema.fields()).map(|(column, field)| {
        match column.data_type() == field.data_type() {
            true => Ok(Arc::clone(column)),
            false => cast(column, field.data_type()),
        }
    });
    let columns = columns.collect::<std::result::Result<_, _>>()?;
    // The row count of a result without columns.
    let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(Arc::clone(schema), columns, &rows)?)
}
