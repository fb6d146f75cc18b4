//! The partitions that this process owns, and commits of their offsets.
//!
//! One lock guards both. So no offset is committed for a partition after its revocation: the consumer removes a revoked
//! partition under the lock before it tells the group that it has given it up.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rdkafka::{
    Offset, TopicPartitionList,
    consumer::{BaseConsumer, CommitMode, Consumer as _},
};
use thiserror::Error;

use super::context::Context;
use crate::stream::TopicPartition;

pub(super) type Consumer = BaseConsumer<Context>;

/// Counts the assignments of this process. Each partition has the epoch of the assignment that gave it to us, and keeps
/// it until it is revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub(super) u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why an offset was not committed. None of these is a failure of the stream: the offset is a hint.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotCommitted {
    /// The partition was revoked, or revoked and assigned again.
    #[error("the partition is no longer assigned to this process")]
    NotOwned,
    /// The consumer has not polled for `max.poll.interval.ms`: the group has given its partitions away, and this process
    /// has not heard of it yet.
    #[error("the consumer has not polled for {0:?}, so that another process may own the partition")]
    Stalled(Duration),
    /// The consumer has stopped.
    #[error("the consumer has stopped")]
    Stopped,
    /// librdkafka did not accept it.
    #[error("{0}")]
    Refused(String),
}

/// Which partitions this process owns. Clones share it.
#[derive(Clone)]
pub struct Ownership(Arc<Inner>);

struct Inner {
    owned: Mutex<Owned>,
    max_poll_interval: Duration,
    start: Instant,
    /// When the consumer polled last, in milliseconds after `start`.
    polled: AtomicU64,
    /// The consumer waits for an answer in a rebalance, and cannot poll.
    rebalancing: AtomicBool,
    commits: AtomicU64,
}

#[derive(Default)]
struct Owned {
    consumer: Option<Arc<Consumer>>,
    epochs: HashMap<TopicPartition, Epoch>,
}

impl Ownership {
    pub(super) fn new(max_poll_interval: Duration) -> Self {
        Self(Arc::new(Inner {
            owned: Mutex::default(),
            max_poll_interval,
            start: Instant::now(),
            polled: AtomicU64::new(0),
            rebalancing: AtomicBool::new(false),
            commits: AtomicU64::new(0),
        }))
    }

    /// The epoch of a partition that this process owns.
    pub fn epoch(&self, partition: &TopicPartition) -> Option<Epoch> {
        self.0.owned.lock().epochs.get(partition).copied()
    }

    /// All partitions that this process owns.
    pub fn partitions(&self) -> Vec<(TopicPartition, Epoch)> {
        self.0.owned.lock().epochs.iter().map(|(partition, epoch)| (partition.clone(), *epoch)).collect()
    }

    /// Commits `offset`, the next one to read, to the group, if this process still owns the partition since `epoch`.
    ///
    /// It does not wait for the broker, which may still refuse it, as it does between two generations of a group:
    /// [`Counters`](super::Counters) has the number of refusals. A broker that does not answer delays it.
    ///
    /// # Errors
    /// [`NotCommitted`].
    pub fn commit(
        &self,
        partition: &TopicPartition,
        epoch: Epoch,
        offset: i64,
        metadata: &str,
    ) -> Result<(), NotCommitted> {
        let mut list = TopicPartitionList::with_capacity(1);
        let mut element = list.add_partition(&partition.topic, partition.partition);
        element.set_offset(Offset::Offset(offset)).map_err(|error| NotCommitted::Refused(error.to_string()))?;
        element.set_metadata(metadata);
        let sent = self.while_owned(&[(partition, epoch)], |consumer| consumer.commit(&list, CommitMode::Async))?;
        sent.map_err(|error| NotCommitted::Refused(error.to_string()))?;
        self.0.commits.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Runs `action` while it is certain that this process owns all of these partitions: a revocation waits for it. So
    /// `action` must be short.
    ///
    /// # Errors
    /// [`NotCommitted`], without a call of `action`.
    pub(super) fn while_owned<T>(
        &self,
        partitions: &[(&TopicPartition, Epoch)],
        action: impl FnOnce(&Consumer) -> T,
    ) -> Result<T, NotCommitted> {
        let owned = self.0.owned.lock();
        let consumer = owned.consumer.as_ref().ok_or(NotCommitted::Stopped)?;
        if partitions.iter().any(|(partition, epoch)| owned.epochs.get(*partition) != Some(epoch)) {
            return Err(NotCommitted::NotOwned);
        }
        let silent = self.since_poll();
        if silent >= self.0.max_poll_interval {
            return Err(NotCommitted::Stalled(silent));
        }
        Ok(action(consumer))
    }

    /// Time since the consumer polled last. It polls several times a second, except while it waits for an answer to
    /// [`Event::Assign`](super::Event::Assign) or [`Event::Revoke`](super::Event::Revoke).
    pub fn since_poll(&self) -> Duration {
        self.0.start.elapsed().saturating_sub(Duration::from_millis(self.0.polled.load(Relaxed)))
    }

    /// Whether the consumer polls, or waits for an answer in a rebalance. For `/livez`.
    pub fn is_alive(&self) -> bool {
        let stopped = self.0.owned.lock().consumer.is_none();
        !stopped && (self.0.rebalancing.load(Relaxed) || self.since_poll() < self.0.max_poll_interval.min(STALLED))
    }

    pub(super) fn commits(&self) -> u64 {
        self.0.commits.load(Relaxed)
    }

    pub(super) fn note_poll(&self) {
        let now = self.0.start.elapsed().as_millis();
        self.0.polled.store(u64::try_from(now).unwrap_or(u64::MAX), Relaxed);
    }

    pub(super) fn note_rebalance(&self, under_way: bool) {
        self.0.rebalancing.store(under_way, Relaxed);
    }

    pub(super) fn open(&self, consumer: Arc<Consumer>) {
        self.note_poll();
        self.0.owned.lock().consumer = Some(consumer);
    }

    /// Forgets the consumer and all partitions.
    pub(super) fn close(&self) {
        *self.0.owned.lock() = Owned::default();
    }

    pub(super) fn consumer(&self) -> Option<Arc<Consumer>> {
        self.0.owned.lock().consumer.clone()
    }

    pub(super) fn add(&self, partitions: &[TopicPartition], epoch: Epoch) {
        self.0.owned.lock().epochs.extend(partitions.iter().map(|partition| (partition.clone(), epoch)));
    }

    pub(super) fn remove(&self, partitions: &[TopicPartition]) {
        let mut owned = self.0.owned.lock();
        for partition in partitions {
            owned.epochs.remove(partition);
        }
    }
}

/// A consumer that has not polled for so long is stuck.
const STALLED: Duration = Duration::from_secs(60);

impl fmt::Debug for Ownership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ownership").field("partitions", &self.partitions()).finish()
    }
}
