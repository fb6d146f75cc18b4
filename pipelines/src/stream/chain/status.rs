//! The state of a dataset, without Kafka: what `elmo stream status` shows beside the broker's offsets.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::ObjectMeta;
use serde::Serialize;

use super::{ChainError, Genesis, Hint, HintCheck, end, layout::Layout, objects, parse_genesis};
use crate::{stores::Location, stream::TopicPartition};

/// Concurrent requests.
const REQUESTS: usize = 32;

/// The chain of a partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PartitionStatus {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// The first offset.
    pub start: i64,
    /// The end of the chain: the offset of the next message to be written.
    pub end: i64,
    /// The newest object.
    pub newest: Option<Newest>,
    /// Number of objects.
    pub objects: usize,
    /// Rows of all objects.
    pub rows: u64,
    /// Whether `head.json` names an object and its end.
    pub head: HintCheck,
    /// The same of the consumer group's commit.
    pub hint: HintCheck,
}

/// The newest object of a partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Newest {
    /// Its address within the output.
    pub object: String,
    /// Its size.
    pub bytes: u64,
    /// Its rows.
    pub rows: u64,
    /// When it was written, by the store's clock.
    #[serde(serialize_with = "rfc3339")]
    pub written: DateTime<Utc>,
}

fn rfc3339<S: serde::Serializer>(time: &DateTime<Utc>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&time.to_rfc3339())
}

/// The partitions of a dataset in the order of their names. `hints` is what the consumer group has committed. Reads the
/// footer of every object.
///
/// # Errors
/// [`ChainError::NoDataset`] when there is none, [`ChainError::Damaged`] when an object is not as a stream writes it,
/// [`ChainError::Store`] when the store fails.
pub async fn status(
    output: &Location,
    generation: u32,
    hints: &BTreeMap<TopicPartition, Hint>,
) -> Result<Vec<PartitionStatus>, ChainError> {
    let layout = Layout::new(output, generation);
    check_begun(&layout).await?;
    let mut found = Vec::new();
    for (partition, genesis) in chains(&layout).await? {
        found.push(of_partition(&layout, &partition, &genesis, hints.get(&partition)).await?);
    }
    Ok(found)
}

/// The partitions of a dataset in the order of their names, without a look at their objects.
///
/// # Errors
/// As [`status`], but for objects.
pub async fn partitions(output: &Location, generation: u32) -> Result<Vec<TopicPartition>, ChainError> {
    let layout = Layout::new(output, generation);
    check_begun(&layout).await?;
    let mut found = layout.partitions().await?;
    found.sort();
    Ok(found)
}

async fn check_begun(layout: &Layout) -> Result<(), ChainError> {
    match layout.record().head().await? {
        Some(_) => Ok(()),
        None => Err(ChainError::NoDataset { output: layout.root.to_string() }),
    }
}

/// The partitions of a dataset, and where their chains begin.
async fn chains(layout: &Layout) -> Result<BTreeMap<TopicPartition, Genesis>, ChainError> {
    let mut found = BTreeMap::new();
    for partition in layout.partitions().await? {
        let location = layout.genesis(&partition);
        let bytes = location.get().await?.unwrap_or_default();
        found.insert(partition, parse_genesis(&location, &bytes)?);
    }
    Ok(found)
}

async fn of_partition(
    layout: &Layout,
    partition: &TopicPartition,
    genesis: &Genesis,
    hint: Option<&Hint>,
) -> Result<PartitionStatus, ChainError> {
    let head = end::read_head(layout, partition).await?;
    let head = head.map(|head| Hint { end: head.end, object: head.object });
    let head = end::check_hint(layout, partition, head.as_ref()).await?;
    let end = end::find(layout, partition, genesis.start, hint).await?;
    let folder = layout.folder(partition);
    let listed = objects::list(&folder, None).await?;
    let (objects, newest) = (listed.len(), end.newest.and_then(|start| listed.get(&start)).cloned());
    let rows = rows(&folder, partition, listed.into_values()).await?;
    let newest = newest.zip(end.newest).map(|(meta, start)| Newest {
        object: layout.key(partition, start),
        bytes: meta.size,
        rows: rows.get(&start).copied().unwrap_or(0),
        written: meta.last_modified,
    });
    Ok(PartitionStatus {
        topic: partition.topic.to_string(),
        partition: partition.partition,
        start: genesis.start,
        end: end.offset,
        newest,
        objects,
        rows: rows.values().sum(),
        head,
        hint: end.hint,
    })
}

/// Rows of objects by their starts.
async fn rows(
    folder: &Location,
    partition: &TopicPartition,
    objects: impl Iterator<Item = ObjectMeta>,
) -> Result<BTreeMap<i64, u64>, ChainError> {
    let reads = objects.map(|meta| {
        let location = folder.at(meta.location.clone());
        async move { objects::read_listed(&location, meta, partition).await }
    });
    let found = stream::iter(reads).buffer_unordered(REQUESTS);
    found.try_filter_map(|found| async { Ok(found.map(|found| (found.start, found.rows))) }).try_collect().await
}
