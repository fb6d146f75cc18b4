//! Callbacks of librdkafka: rebalances, errors, statistics, logs. All run on the consumer's thread, inside of `poll`.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rdkafka::{
    ClientContext, Offset, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext, RebalanceProtocol},
    error::{KafkaError, KafkaResult, RDKafkaErrorCode as Code},
    types::RDKafkaRespErr,
};
use tokio::sync::{mpsc::UnboundedSender, watch};

use super::{
    budget::Budget,
    deleted::{self, Doubts},
    event::{Assigned, Event, Hint, Start, Starts, reply},
    faults::{self, Health, Verdict},
    logs,
    member::membership,
    offsets,
    ownership::{Consumer, Epoch, Ownership},
    scrub::Scrubber,
    slots::Slots,
    statistics::Statistics,
};
use crate::stream::{StreamError, TopicPartition};

/// How long the group is asked for its offsets in a rebalance.
const HINTS: Duration = Duration::from_secs(5);
/// How long brokers are asked for their topics in a rebalance.
const TOPICS: Duration = Duration::from_secs(2);

/// What the callbacks, the thread and the job's handles share.
pub(super) struct Shared {
    pub(super) ownership: Ownership,
    pub(super) slots: Mutex<Slots>,
    pub(super) health: Mutex<Health>,
    pub(super) scrub: Scrubber,
    pub(super) counts: Counts,
    pub(super) stopping: AtomicBool,
    /// When a consumer that stops gives up leaving the group.
    pub(super) leave_by: Mutex<Option<Instant>>,
    /// Some offset is out of the range of its partition.
    pub(super) out_of_range: AtomicBool,
    /// A thread finds out which.
    pub(super) asks_for_ranges: AtomicBool,
    /// Which topics may have been deleted.
    pub(super) doubts: Doubts,
    pub(super) events: UnboundedSender<Event>,
    pub(super) statistics: watch::Sender<Arc<Statistics>>,
    pub(super) brokers: String,
    pub(super) group: String,
    /// How long a rebalance waits for an answer.
    pub(super) patience: Duration,
    /// `group.protocol=consumer` (KIP-848).
    pub(super) consumer_protocol: bool,
    /// The group has given this process partitions, perhaps none, at least once.
    pub(super) was_member: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) epoch: AtomicU64,
    pub(super) rebalances: AtomicU64,
    pub(super) messages: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) commits_refused: AtomicU64,
    pub(super) assigned: AtomicUsize,
    pub(super) paused: AtomicUsize,
}

/// The context of the consumer.
#[derive(Clone)]
pub(super) struct Context(pub(super) Arc<Shared>);

impl Shared {
    /// An event for the job. When it no longer listens, the consumer stops.
    pub(super) fn send(&self, event: Event) {
        if self.events.send(event).is_err() {
            self.stopping.store(true, Relaxed);
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    /// Whether an answer in a rebalance comes too late: the stream stops, or the group has removed this process. Then the job
    /// may wait for this callback itself, since librdkafka cannot join the group again before it has returned, and only a
    /// member may begin or end a partition with a transaction.
    fn is_in_vain(&self, consumer: &Consumer) -> bool {
        self.is_stopping() || membership(consumer).is_none()
    }

    /// The brokers answer.
    pub(super) fn up(&self) {
        if self.health.lock().up() {
            self.send(Event::Connected);
        }
    }

    pub(super) fn budget_changed(&self) {
        let slots = self.slots.lock();
        self.counts.assigned.store(slots.len(), Relaxed);
        self.counts.paused.store(slots.paused(), Relaxed);
    }

    fn report(&self, code: Code, reason: &str) {
        let mut health = self.health.lock();
        let verdict = health.judge(code, reason, self.was_member.load(Relaxed));
        let last = health.last_failure.clone();
        drop(health);
        match verdict {
            Verdict::Ignore => tracing::debug!(code = ?code, reason = %self.scrub.scrub(reason), "librdkafka"),
            Verdict::OutOfRange => self.out_of_range.store(true, Relaxed),
            Verdict::TopicGone => {
                tracing::debug!(code = ?code, reason = %self.scrub.scrub(reason), "librdkafka");
                let slots = self.slots.lock();
                self.doubts.add(slots.iter().map(|slot| &slot.partition));
            }
            Verdict::Report { fatal } => self.send(Event::Error { error: self.error(code, reason, last), fatal }),
        }
    }

    /// librdkafka logs why an offset was refused. Of commits that nobody waits for, this version of rdkafka tells nothing
    /// else: it never calls `commit_callback`.
    fn commit_failed(&self, message: &str) {
        self.counts.commits_refused.fetch_add(1, Relaxed);
        if message.contains("Group authorization failed") {
            return self.report(Code::GroupAuthorizationFailed, message);
        }
        // The next commit replaces this one. After a rebalance the broker is right to refuse it.
        tracing::debug!(target: "librdkafka", "{message}");
    }

    fn error(&self, code: Code, reason: &str, last_failure: Option<String>) -> StreamError {
        // "1/1 brokers are down" says less than why the last connection failed.
        let reason = match last_failure {
            Some(last) if code == Code::AllBrokersDown => format!("{reason}; the last reason: {last}"),
            _ => reason.to_owned(),
        };
        let what = match code {
            Code::GroupAuthorizationFailed
            | Code::InconsistentGroupProtocol
            | Code::FencedInstanceId
            | Code::UnreleasedInstanceId
            | Code::InvalidSessionTimeout
            | Code::InvalidGroupId
            | Code::GroupMaxSizeReached
            | Code::PollExceeded => format!("group {}", self.group),
            _ => format!("brokers {}", self.brokers),
        };
        faults::broker(what, Some(code), &reason, &self.scrub)
    }
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        let message = self.0.scrub.scrub(message);
        if facility == "COMMITFAIL" {
            return self.0.commit_failed(&message);
        }
        logs::write(level, facility, &message);
    }

    fn stats_raw(&self, json: &[u8]) {
        match Statistics::parse(json) {
            Ok(statistics) => {
                if statistics.brokers_up > 0 {
                    self.0.up();
                }
                self.0.statistics.send_replace(Arc::new(statistics));
            }
            Err(error) => tracing::debug!(%error, "the statistics of librdkafka cannot be parsed"),
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.0.report(error.rdkafka_error_code().unwrap_or(Code::Unknown), reason);
    }
}

impl ConsumerContext for Context {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, code: RDKafkaRespErr, list: &mut TopicPartitionList) {
        self.0.ownership.note_rebalance(true);
        // The job may have to wait for long, and messages that were read must not look as if there were none.
        let collected = self.0.slots.lock().take_all();
        collected.into_iter().for_each(|batch| self.0.send(Event::Messages(batch)));
        match code {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => self.assign(consumer, list),
            _ => self.revoke(consumer, list),
        }
        self.0.ownership.note_poll();
        self.0.ownership.note_rebalance(false);
        self.0.budget_changed();
    }
}

impl Context {
    fn assign(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        let shared = &*self.0;
        let partitions = offsets::partitions(list);
        shared.was_member.store(true, Relaxed);
        if partitions.is_empty() {
            // A member without partitions has got its answer, too.
            let (reply, _) = reply::<Starts>();
            let epoch = Epoch(shared.counts.epoch.load(Relaxed));
            shared.send(Event::Assign { partitions: Vec::new(), epoch, reply });
            return self.finish("assignment", add(consumer, list));
        }
        shared.counts.rebalances.fetch_add(1, Relaxed);
        let epoch = Epoch(shared.counts.epoch.fetch_add(1, Relaxed) + 1);
        let assigned = self.look_up(consumer, &partitions);
        shared.ownership.add(&partitions, epoch);
        shared.doubts.settle(&partitions);
        let (reply, answer) = reply::<Starts>();
        shared.send(Event::Assign { partitions: assigned, epoch, reply });
        let starts = answer.wait(shared.patience, || shared.is_in_vain(consumer));
        if starts.is_none() {
            shared.slots.lock().unanswered.push((answer, epoch));
        }
        let starts = starts.unwrap_or_default();
        // Nothing is fetched from the end until it is resumed. librdkafka asks the broker where the end is, and asks again half
        // a second after an answer that came too late, which would move a partition that is assigned again by then. So a
        // partition that is about to be lost gets an offset that needs no question.
        let unknown = if shared.is_in_vain(consumer) { Offset::Offset(0) } else { Offset::End };
        let mut slots = shared.slots.lock();
        for partition in partitions {
            let start = starts.get(&partition).and_then(|start| self.resolve(consumer, &partition, *start));
            if let Some(mut element) = list.find_partition(&partition.topic, partition.partition) {
                let _ = element.set_offset(start.unwrap_or(unknown));
            }
            let unresolved = starts.get(&partition).copied().filter(|_| start.is_none());
            slots.add(partition.clone(), epoch, start);
            if let Some(slot) = slots.find(&partition, epoch) {
                slot.seek = unresolved;
            }
        }
        drop(slots);
        self.finish("assignment", add(consumer, list));
        // Before the next poll, so that a partition without a start hands out nothing.
        self.apply_pauses(consumer);
    }

    /// What the group has committed for partitions that were assigned.
    fn look_up(&self, consumer: &BaseConsumer<Self>, partitions: &[TopicPartition]) -> Vec<Assigned> {
        let hints = offsets::committed(consumer, partitions, HINTS);
        let mut assigned = Vec::with_capacity(partitions.len());
        for (at, partition) in partitions.iter().enumerate() {
            let committed = match &hints {
                Ok(hints) => hints[at].clone(),
                Err(error) => {
                    let what = format!("offsets of group {}", self.0.group);
                    Hint::Unknown(faults::offsets(what, error, &self.0.scrub).to_string())
                }
            };
            assigned.push(Assigned { partition: partition.clone(), committed });
        }
        assigned
    }

    /// The offset for librdkafka; `None` when a time cannot be looked up now.
    pub(super) fn resolve(
        &self,
        consumer: &BaseConsumer<Self>,
        partition: &TopicPartition,
        start: Start,
    ) -> Option<Offset> {
        match start {
            Start::At(offset) => Some(Offset::Offset(offset)),
            Start::Beginning => Some(Offset::Beginning),
            Start::End => Some(Offset::End),
            Start::Timestamp(time) => {
                let found = offsets::at_time(consumer, std::slice::from_ref(partition), time, HINTS);
                found
                    .ok()
                    .and_then(|found| found.first().copied())
                    .map(|offset| offset.map_or(Offset::End, Offset::Offset))
            }
        }
    }

    fn revoke(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        let shared = &*self.0;
        let partitions = offsets::partitions(list);
        let mut lost = consumer.assignment_lost();
        if lost {
            shared.ownership.remove(&partitions);
            lost = !are_deleted(consumer, &partitions);
        }
        if !shared.is_stopping() {
            shared.doubts.add(&partitions);
        }
        let gone = shared.slots.lock().remove(&partitions.iter().collect::<Vec<_>>());
        if !gone.is_empty() && !shared.is_stopping() {
            shared.counts.rebalances.fetch_add(1, Relaxed);
            let (reply, answer) = reply();
            shared.send(Event::Revoke { partitions: gone, lost, reply });
            if !lost {
                answer.wait(shared.patience, || shared.is_in_vain(consumer));
            }
        }
        shared.ownership.remove(&partitions);
        let result = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_unassign(list),
            _ => consumer.unassign(),
        };
        self.finish("revocation", result);
    }

    fn finish(&self, what: &str, result: KafkaResult<()>) {
        if let Err(error) = result {
            // librdkafka joins the group again.
            tracing::debug!(%error, "a rebalance failed in its {what}");
        }
    }

    /// Tells librdkafka which partitions are paused and which are not.
    pub(super) fn apply_pauses(&self, consumer: &BaseConsumer<Self>) {
        let Some(changes) = self.0.slots.lock().changes() else { return };
        for (list, result) in
            [(&changes.pause, consumer.pause(&changes.pause)), (&changes.resume, consumer.resume(&changes.resume))]
        {
            if let Err(error) = result {
                tracing::debug!(%error, partitions = list.count(), "a pause failed");
            }
        }
        self.0.budget_changed();
    }
}

/// Whether a member lost partitions because their topics were deleted. Nobody else will read them, so what was read of them is
/// to be published.
fn are_deleted(consumer: &BaseConsumer<Context>, partitions: &[TopicPartition]) -> bool {
    if membership(consumer).is_none() {
        return false;
    }
    let topics: HashSet<&Arc<str>> = partitions.iter().map(|partition| &partition.topic).collect();
    let answer = consumer.fetch_metadata(None, TOPICS);
    answer.is_ok_and(|metadata| topics.into_iter().all(|topic| deleted::is_missing(&metadata, topic)))
}

fn add(consumer: &BaseConsumer<Context>, list: &TopicPartitionList) -> KafkaResult<()> {
    match consumer.rebalance_protocol() {
        RebalanceProtocol::Cooperative => consumer.incremental_assign(list),
        _ => consumer.assign(list),
    }
}

/// The state of a new consumer.
pub(super) struct Setup {
    pub(super) budget: Budget,
    pub(super) scrub: Scrubber,
    pub(super) events: UnboundedSender<Event>,
    pub(super) brokers: String,
    pub(super) group: String,
    pub(super) max_poll_interval: Duration,
    pub(super) consumer_protocol: bool,
    /// The topics that are read by their names.
    pub(super) named: HashSet<Arc<str>>,
}

impl Setup {
    pub(super) fn shared(self) -> Shared {
        /// Time to close a file and upload it, and far below the five minutes of `max.poll.interval.ms`.
        const PATIENCE: Duration = Duration::from_secs(30);
        Shared {
            ownership: Ownership::new(self.max_poll_interval),
            slots: Mutex::new(Slots::new(self.budget)),
            health: Mutex::default(),
            scrub: self.scrub,
            counts: Counts::default(),
            stopping: AtomicBool::new(false),
            leave_by: Mutex::default(),
            out_of_range: AtomicBool::new(false),
            asks_for_ranges: AtomicBool::new(false),
            doubts: Doubts::new(self.named),
            events: self.events,
            statistics: watch::Sender::new(Arc::default()),
            brokers: self.brokers,
            group: self.group,
            // A revocation and an assignment may follow each other without a poll.
            patience: PATIENCE.min(self.max_poll_interval / 3),
            consumer_protocol: self.consumer_protocol,
            was_member: AtomicBool::new(false),
        }
    }
}
