//! The offset chain: Parquet objects that hold every message of a partition exactly once, without a database.
//!
//! An object is named after the offset at which its messages begin, and says in its footer where they end. It is created
//! by one conditional request. The invariant:
//!
//! > An object that begins at `s` is created only by a writer that knows that the object before it ends at `s`.
//!
//! The store lets one creation per name succeed, so by induction the objects of a partition tile its offsets, without a
//! gap and without an overlap, whoever writes them. A process that is slow, or does not know that its partition was
//! assigned to another one, cannot do harm: it either publishes the next object itself, or learns from the one that exists
//! where to continue. Files are closed when the clock says so; nothing has to be repeated alike.
//!
//! | event | what is left | the next owner |
//! |---|---|---|
//! | crash before the request | nothing | computes the rows again |
//! | the answer is lost | the object, or not | creates it again: by its writer and number it knows its own |
//! | crash after the request | the object, and an old hint | finds the object by listing |
//! | a process without the partition publishes | its object | continues at its end |
//! | the hint is lost or reset | | finds the end by `head.json`, or by listing |
//!
//! | file | |
//! |---|---|
//! | `layout` | names of objects |
//! | `identity` | to whom an output belongs |
//! | `starts` | where partitions begin that have no chain yet |
//! | `span` | what a footer says |
//! | `end` | finds the end of a chain |
//! | `file` | the open file, and the encoded file |
//! | `publish` | [`Chain`]: the request that extends it |
//! | `patience` | requests that are repeated during an outage |
//! | `position` | where to read, given the end of a chain and what the broker has |
//! | `tiling` | whether objects tile the offsets |
//! | `status` | the state of all partitions |

mod end;
mod error;
mod file;
mod identity;
pub(crate) mod layout;
mod objects;
mod patience;
mod position;
mod publish;
mod span;
mod starts;
mod status;
pub(crate) mod tiling;

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, atomic::AtomicU64},
};

use futures::future::try_join_all;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

#[cfg(feature = "kafka")]
pub(super) use self::patience::jittered;
pub use self::{
    end::{Hint, HintCheck},
    error::ChainError,
    file::{ChainId, EncodedFile, FileFormat, OpenFile, Spill},
    identity::Identity,
    patience::Patience,
    position::{OnGap, Position, position},
    publish::{Chain, Published},
    span::{Rejected, Span},
    status::{Newest, PartitionStatus, partitions, status},
    tiling::{ChainCheck, ChainProblem, PartitionCheck},
};
use self::{file::Writer, layout::Layout, patience::outlast, starts::Starts};
use super::TopicPartition;
use crate::stores::{
    Location,
    create_once::{self, Created},
};

/// Objects that the probe creates, each several times at once.
const PROBES: usize = 3;
/// Files on the local disk that are in memory at once while they are sent.
const LOADS: usize = 4;

/// A dataset that this process writes.
#[derive(Debug, Clone)]
pub struct Dataset {
    layout: Layout,
    fingerprint: String,
    writer: Arc<Writer>,
    patience: Patience,
    loads: Arc<Semaphore>,
    begun: HashSet<Arc<str>>,
    starts: Starts,
}

/// Where a chain begins. Created once, so that all writers begin at the same offset.
#[derive(Debug, Serialize, Deserialize)]
struct Genesis {
    start: i64,
    fingerprint: String,
    /// The id of the topic; absent if nobody said it, and in the output of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    topic_id: Option<String>,
}

impl Dataset {
    /// Opens or begins the dataset in `output` for writing. Costs some requests, since the store is probed.
    ///
    /// # Errors
    /// [`ChainError::Store`] when the store fails or does not honour conditional requests, [`ChainError::Foreign`] or
    /// [`ChainError::NoFolder`] when the output is or holds something else, [`ChainError::Differs`] when it was begun with
    /// another identity.
    pub async fn open(output: &Location, identity: &Identity, generation: u32) -> Result<Self, ChainError> {
        let layout = Layout::new(output, generation);
        let id = uuid::Uuid::new_v4().simple().to_string();
        probe(output, &layout, &id).await?;
        identity::claim(&layout, identity).await?;
        layout.sweep().await;
        let starts = Starts::read(&layout).await?;
        let chains = layout.partitions().await?.into_iter().map(|partition| partition.topic);
        let begun = chains.chain(starts.topics()).collect();
        let patience = Patience::default();
        Ok(Self {
            layout: layout.retrying_for(patience.request),
            fingerprint: identity.fingerprint(),
            writer: Arc::new(Writer { id, attempts: AtomicU64::new(0) }),
            patience,
            loads: Arc::new(Semaphore::new(LOADS)),
            begun,
            starts,
        })
    }

    /// Checks what [`Dataset::open`] checks, and leaves nothing behind. Returns whether the output was begun.
    ///
    /// # Errors
    /// As [`Dataset::open`].
    pub async fn check(output: &Location, identity: &Identity, generation: u32) -> Result<bool, ChainError> {
        let layout = Layout::new(output, generation);
        probe(output, &layout, &uuid::Uuid::new_v4().simple().to_string()).await?;
        identity::compare(&layout, identity).await
    }

    /// The same dataset, whose requests are repeated in this way.
    #[must_use]
    pub fn with_patience(self, patience: Patience) -> Self {
        Self { layout: self.layout.retrying_for(patience.request), patience, ..self }
    }

    /// The id of this process in footers.
    pub fn writer(&self) -> &str {
        &self.writer.id
    }

    /// The topics that had begun when the dataset was opened: a partition of theirs had a chain, or a recorded start.
    pub fn begun(&self) -> &HashSet<Arc<str>> {
        &self.begun
    }

    /// Records where partitions begin, all or none of them. If another process records others first, `is_new` is asked with
    /// the topics that have begun by then whether a partition still begins where this process says.
    ///
    /// # Errors
    /// [`ChainError::Store`] when the store fails, [`ChainError::Damaged`] when another process's record cannot be parsed.
    pub async fn record_starts(
        &mut self,
        starts: impl IntoIterator<Item = (TopicPartition, i64)>,
        mut is_new: impl FnMut(&HashSet<Arc<str>>, &TopicPartition) -> bool,
    ) -> Result<(), ChainError> {
        let new: BTreeMap<_, _> =
            starts.into_iter().filter(|(partition, _)| self.starts.of(partition).is_none()).collect();
        let begun = self.begun.clone();
        let is_new =
            |recorded: &HashSet<_>, partition: &_| is_new(&begun.union(recorded).cloned().collect(), partition);
        self.starts.record(&self.layout, new, is_new).await
    }

    /// Opens the chain of a partition, and finds its end. A chain that does not exist yet begins where that was recorded, or
    /// else at the offset that `start` gives, unless another process begins it at the same moment. Requests are repeated for as
    /// long as the store fails.
    ///
    /// # Errors
    /// Those of `start`; [`ChainError::Damaged`] when an object is not as a stream writes it, [`ChainError::Differs`] when
    /// the chain was begun with another identity, [`ChainError::Store`] when a failure cannot go away.
    pub async fn chain<F, E>(
        &self,
        partition: &TopicPartition,
        start: impl FnOnce() -> F,
        hint: Option<&Hint>,
    ) -> Result<Chain, E>
    where
        F: Future<Output = Result<i64, E>>,
        E: From<ChainError>,
    {
        self.chain_of_topic(partition, None, start, hint).await
    }

    /// As [`chain`](Self::chain), of the topic with this id. A chain that was begun with another one is refused: its topic was
    /// deleted, and made again under its name.
    ///
    /// # Errors
    /// As [`chain`](Self::chain); [`ChainError::OtherTopic`].
    pub async fn chain_of_topic<F, E>(
        &self,
        partition: &TopicPartition,
        topic_id: Option<String>,
        start: impl FnOnce() -> F,
        hint: Option<&Hint>,
    ) -> Result<Chain, E>
    where
        F: Future<Output = Result<i64, E>>,
        E: From<ChainError>,
    {
        let begun = |start| Genesis { start, fingerprint: self.fingerprint.clone(), topic_id: topic_id.clone() };
        let (genesis, is_new) = match (self.recorded_genesis(partition).await?, self.starts.of(partition)) {
            (Some(genesis), _) => (genesis, false),
            // The stream has begun, whenever the first message is read: one that the broker deletes meanwhile is lost.
            (None, Some(start)) => (self.begin(partition, begun(start)).await?.0, false),
            (None, None) => {
                let start = start().await?;
                self.begin(partition, begun(start)).await?
            }
        };
        self.check_genesis(partition, &genesis, topic_id)?;
        let location = self.layout.folder(partition);
        let end = outlast(self.patience, &location, || async {
            let end = end::find(&self.layout, partition, genesis.start, hint).await?;
            if let Some(newest) = end.newest {
                // Its writer may have been stopped before it synced it.
                publish::sync(&self.layout.object(partition, newest)).await?;
            }
            Ok(end)
        });
        let end = end.await?;
        if let HintCheck::Disagrees(reason) = &end.hint {
            tracing::warn!(%partition, reason, end = end.offset, "the committed offset is not used");
        }
        Ok(Chain {
            id: Arc::new(ChainId {
                partition: partition.clone(),
                layout: self.layout.clone(),
                writer: Arc::clone(&self.writer),
            }),
            end: end.offset,
            newest: end.newest,
            is_new: is_new && end.newest.is_none(),
            found: end.hint,
            patience: self.patience,
            loads: Arc::clone(&self.loads),
        })
    }

    async fn recorded_genesis(&self, partition: &TopicPartition) -> Result<Option<Genesis>, ChainError> {
        let location = self.layout.genesis(partition);
        let found = outlast(self.patience, &location, || async { Ok(location.get().await?) }).await?;
        found.map(|bytes| parse_genesis(&location, &bytes)).transpose()
    }

    /// Begins a chain. Returns where it begins, and whether this process has begun it.
    async fn begin(&self, partition: &TopicPartition, genesis: Genesis) -> Result<(Genesis, bool), ChainError> {
        let location = self.layout.genesis(partition);
        // Numbers and strings are always serialised.
        let bytes = bytes::Bytes::from(serde_json::to_vec(&genesis).unwrap_or_default());
        let create = || async { Ok(create_once::create(&location, bytes.clone()).await?) };
        match outlast(self.patience, &location, create).await? {
            Created::Ours => Ok((genesis, true)),
            Created::Existed(found) => Ok((parse_genesis(&location, &found)?, false)),
        }
    }

    fn check_genesis(
        &self,
        partition: &TopicPartition,
        genesis: &Genesis,
        topic_id: Option<String>,
    ) -> Result<(), ChainError> {
        if genesis.fingerprint == self.fingerprint {
            return match genesis.topic_id.clone().zip(topic_id).filter(|(was, now)| was != now) {
                Some((was, now)) => Err(ChainError::OtherTopic { partition: partition.clone(), was, now }),
                None => Ok(()),
            };
        }
        let difference =
            format!("  {partition}: its settings had fingerprint {}, now {}", genesis.fingerprint, self.fingerprint);
        Err(ChainError::Differs { output: self.layout.root.to_string(), differences: vec![difference] })
    }
}

/// Checks that the output belongs to nothing else, and then, so that nothing is written into the output of a job, that the
/// store honours conditional requests.
async fn probe(output: &Location, layout: &Layout, id: &str) -> Result<(), ChainError> {
    identity::check_owner(output, layout).await?;
    // Each process has its own objects: several may start at once.
    let probes: Vec<Location> = (0..PROBES).map(|number| layout.probe(id, number)).collect();
    try_join_all(probes.iter().map(create_once::probe_create)).await?;
    Ok(())
}

fn parse_genesis(location: &Location, bytes: &[u8]) -> Result<Genesis, ChainError> {
    elmo::json::from_slice(bytes).map_err(|reason| ChainError::Damaged { file: location.to_string(), reason })
}
