//! The consumer: a thread that polls Kafka and sends [`Event`]s to the job over a channel.
//!
//! ```text
//!           thread `kafka`                              job (async)
//!   librdkafka ── poll ──> slots ── Event::Messages ──────> partitions
//!        │ rebalance         │ pauses      <── Permit ────── memory of what is not written yet
//!        ├─ Event::Assign ───┼─────────────────────────────> where does the chain end?
//!        │  <── Starts ──────┼──────────────────────────────
//!        ├─ Event::Revoke ───┼─────────────────────────────> finish, commit
//!        │  <── Reply ───────┼──────────────────────────────
//!        └──────── Ownership (one lock) <── commit ─────────
//! ```
//!
//! A start offset is part of the assignment, so that no message of another position is ever seen. The thread waits for
//! the job only in a rebalance, and not for long; it never waits for room: the channel has no bound of its own, since
//! partitions are paused when their messages exceed the [`Budget`].

mod budget;
mod client;
mod context;
mod deleted;
mod describe;
mod event;
mod faults;
mod logs;
mod member;
mod names;
mod observer;
mod offsets;
mod ownership;
mod pattern;
mod permissions;
mod properties;
mod scrub;
mod settings;
mod slots;
mod statistics;
#[cfg(test)]
mod tests;
mod thread;
mod upstream;

use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Sender, channel},
    },
    time::{Duration, Instant},
};

use rdkafka::{consumer::Consumer as _, error::KafkaError};
use tokio::sync::{
    mpsc::{UnboundedReceiver, unbounded_channel},
    watch,
};

pub(super) use self::observer::Observer;
pub use self::{
    budget::{Budget, Permit},
    client::Client,
    describe::{Offsets, Plan, Topic, describe, offsets as ask_offsets},
    event::{Assigned, Batch, Event, Hint, Reply, Start, Starts},
    logs::Logs,
    observer::first_offsets,
    ownership::{Epoch, NotCommitted, Ownership},
    settings::{Given, Settings},
    statistics::{PartitionStatistics, Statistics},
    upstream::Upstream,
};
use self::{
    context::{Context, Setup, Shared},
    ownership::Consumer,
    thread::Command,
};
use crate::stream::{StreamError, TopicPartition};

/// What tests of the job need to be a consumer.
#[cfg(test)]
pub(super) mod testing {
    use super::Epoch;
    pub(in crate::stream) use super::event::{Answer, reply};

    pub(in crate::stream) fn epoch(number: u64) -> Epoch {
        Epoch(number)
    }
}

/// A member of a consumer group. Dropping it stops the member without waiting.
pub struct Source {
    shared: Arc<Shared>,
    commands: Sender<Command>,
    /// Ends with the thread.
    ended: watch::Receiver<()>,
}

impl Source {
    /// Joins the group. The events end after [`Source::stop`] or a fatal error.
    ///
    /// # Errors
    /// [`StreamError::Settings`] when librdkafka refuses a setting, [`StreamError::Broker`] when it refuses the topics.
    pub fn start(settings: &Settings, budget: Budget) -> Result<(Self, UnboundedReceiver<Event>), StreamError> {
        let (events, receiver) = unbounded_channel();
        let config = settings.consumer(budget.limit());
        let context = Context(Arc::new(
            Setup {
                budget,
                scrub: settings.scrubber(),
                events,
                brokers: settings.brokers().to_owned(),
                group: settings.group().to_owned(),
                max_poll_interval: settings.max_poll_interval(),
                consumer_protocol: settings.uses_consumer_protocol(),
                named: settings.named_topics(),
            }
            .shared(),
        ));
        let consumer: Consumer =
            config.create_with_context(context.clone()).map_err(|error| settings.refused(&error))?;
        let failed = |error: &KafkaError| {
            faults::kafka(format!("topics {}", settings.topics().join(", ")), error, &context.0.scrub)
        };
        consumer.subscribe(&settings.subscription()).map_err(|error| failed(&error))?;
        let consumer = Arc::new(consumer);
        context.0.ownership.open(Arc::clone(&consumer));
        let shared = Arc::clone(&context.0);
        let (commands, received) = channel();
        let (alive, ended) = watch::channel(());
        let run = move || {
            thread::run(&context, consumer, &received);
            drop(alive);
        };
        std::thread::Builder::new().name("kafka".into()).spawn(run).map_err(|error| StreamError::Broker {
            what: "the consumer's thread".into(),
            reason: error.to_string(),
            help: None,
        })?;
        Ok((Self { shared, commands, ended }, receiver))
    }

    /// The partitions of this process, and commits.
    pub fn ownership(&self) -> Ownership {
        self.shared.ownership.clone()
    }

    /// Questions to the brokers.
    pub fn client(&self) -> Client {
        Client(Arc::clone(&self.shared))
    }

    /// The newest statistics of librdkafka.
    pub fn statistics(&self) -> watch::Receiver<Arc<Statistics>> {
        self.shared.statistics.subscribe()
    }

    /// Counts since the start.
    pub fn counters(&self) -> Counters {
        let counts = &self.shared.counts;
        let count = |counter: &AtomicU64| counter.load(Relaxed);
        Counters {
            assigned: counts.assigned.load(Relaxed),
            paused: counts.paused.load(Relaxed),
            rebalances: count(&counts.rebalances),
            messages: count(&counts.messages),
            bytes: count(&counts.bytes),
            commits: self.shared.ownership.commits(),
            commits_refused: count(&counts.commits_refused),
        }
    }

    /// The partitions that are paused now.
    pub fn paused(&self) -> HashSet<TopicPartition> {
        self.shared.slots.lock().paused_partitions().cloned().collect()
    }

    /// Reads a partition from elsewhere, unless it was revoked since `epoch`. [`Event::Sought`] says when this took
    /// effect. It also starts a partition that had no answer to [`Event::Assign`].
    pub fn seek(&self, partition: &TopicPartition, epoch: Epoch, start: Start) {
        self.command(Command::Seek(partition.clone(), epoch, start));
    }

    /// Pauses all partitions, also those assigned later, or ends that pause. Other pauses stay.
    pub fn pause_all(&self, pause: bool) {
        self.command(Command::PauseAll(pause));
    }

    /// Pauses a partition until it is resumed or revoked, or ends that pause. Other pauses stay.
    pub fn pause(&self, partition: &TopicPartition, pause: bool) {
        self.command(Command::Pause(partition.clone(), pause));
    }

    fn command(&self, command: Command) {
        // After a fatal error nobody receives it, and the job has been told.
        let _ = self.commands.send(command);
    }

    /// Leaves the group and waits for that, at most for `limit`. Offsets can no longer be committed, so the job finishes
    /// its partitions first. No [`Event::Revoke`] follows. A static member stays in the group until its session ends.
    pub async fn stop(&self, limit: Duration) {
        self.shared.leave_by.lock().get_or_insert_with(|| Instant::now() + limit);
        self.shared.stopping.store(true, Relaxed);
        let mut ended = self.ended.clone();
        // The thread may wait for brokers that do not answer. It ends with the process.
        let _ = tokio::time::timeout(limit, async { while ended.changed().await.is_ok() {} }).await;
    }

    #[cfg(test)]
    fn stall(&self, time: std::time::Duration) {
        self.command(Command::Stall(time));
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Relaxed);
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("group", &self.shared.group).field("counters", &self.counters()).finish()
    }
}

/// Counts of a [`Source`], for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Partitions that are assigned now.
    pub assigned: usize,
    /// Partitions that are paused now.
    pub paused: usize,
    /// Assignments and revocations.
    pub rebalances: u64,
    /// Messages read.
    pub messages: u64,
    /// Bytes of their keys and values.
    pub bytes: u64,
    /// Commits that were sent to the brokers.
    pub commits: u64,
    /// Those of them that were refused.
    pub commits_refused: u64,
}
