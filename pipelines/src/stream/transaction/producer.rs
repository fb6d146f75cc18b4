//! Transactions of Kafka: rows and the offsets they came from become visible together, or not at all.
//!
//! A transaction begins when its rows are complete, so that it is short. When it must be aborted, the same rows are sent
//! again, which are kept until then: nothing is read or embedded twice.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rdkafka::{
    ClientConfig, ClientContext, Offset, TopicPartitionList,
    consumer::ConsumerGroupMetadata,
    error::{KafkaError, RDKafkaErrorCode as Code},
    message::{DeliveryResult, Header, OwnedHeaders},
    producer::{BaseProducer, BaseRecord, Producer, ProducerContext},
};

use super::refusal::{Place, Verdict, judge};
use crate::{
    crash::stream as crash,
    stream::{
        StreamError, TopicPartition,
        finished::Rows,
        metrics::{Metrics, TransactionEnd},
        source::Epoch,
    },
};

/// How long one request of a transaction may take before it is tried again.
const REQUEST: Duration = Duration::from_secs(30);
/// The same for the end of a failed one, between whose attempts the reports of its records are taken.
const ABORT: Duration = Duration::from_millis(500);
/// How long the broker keeps the transaction of a process that was killed, in milliseconds. Until then, the partitions of
/// that process cannot be read on. A transaction begins when its rows are complete, so it takes far less.
const TRANSACTION_TIMEOUT: &str = "20000";
/// The pause before an aborted transaction is repeated, doubled each time.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];
/// How often a transaction is repeated for an error of which it is not known whether it passes.
const REPEATS: u32 = 10;
/// After a transaction that was committed, more records may be in one batch again.
const GROWTH: usize = 8;

/// A message that is to be written.
#[derive(Debug, Clone)]
pub(in crate::stream) struct Record {
    pub(in crate::stream) topic: Arc<str>,
    pub(in crate::stream) key: Option<Vec<u8>>,
    pub(in crate::stream) value: Option<Vec<u8>>,
    pub(in crate::stream) headers: Vec<(String, Option<Vec<u8>>)>,
    pub(in crate::stream) timestamp: Option<i64>,
    /// The row that it stands for; `None` for a dead letter.
    pub(in crate::stream) row: Option<usize>,
    /// It already stands for a message that was refused.
    pub(in crate::stream) last_resort: bool,
}

/// The rows of one partition that are committed together.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) source: TopicPartition,
    /// Its place among the owners of the rows, before those of lost partitions were taken out.
    pub(super) owner: usize,
    /// Of the assignment in which the rows were read.
    pub(super) epoch: Epoch,
    pub(super) records: Vec<Record>,
    /// What the records were made of; `None` where a partition begins.
    pub(super) rows: Option<Rows>,
    /// Behind the last message.
    pub(super) end: i64,
}

/// The consumer whose offsets are committed.
pub(in crate::stream) trait Group: Send {
    /// Its member and generation, by which the broker refuses the offsets of a member that was replaced; `None` while it has
    /// none. Without them, a broker would accept the offsets.
    fn metadata(&self) -> Option<ConsumerGroupMetadata>;

    /// Whether the partition still belongs to this process, in this assignment.
    fn owns(&self, source: &TopicPartition, epoch: Epoch) -> bool;

    /// What the group has committed for each partition.
    fn committed(&self, sources: &[TopicPartition]) -> Result<Vec<Option<i64>>, StreamError>;
}

/// What became of a transaction.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Everything is visible.
    Committed,
    /// Nothing is: the broker refuses these records, each for itself.
    Refused(Vec<(Place, Code)>),
}

/// Collects which records were not delivered.
#[derive(Debug, Default)]
struct Deliveries {
    failed: Mutex<Vec<(Place, KafkaError)>>,
}

impl Deliveries {
    fn failed(&self) -> MutexGuard<'_, Vec<(Place, KafkaError)>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientContext for Deliveries {}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = Box<Place>;

    fn delivery(&self, result: &DeliveryResult<'_>, place: Self::DeliveryOpaque) {
        if let Err((error, _)) = result {
            self.failed().push((*place, error.clone()));
        }
    }
}

/// A producer with transactions.
pub(in crate::stream) struct Transactions {
    config: ClientConfig,
    producer: BaseProducer<Deliveries>,
    /// The brokers accept nothing more of the producer: its transaction took too long, or another process has its id.
    lost: bool,
    metrics: Arc<Metrics>,
    /// Bytes after which the records that were queued are delivered before more follow, so that no batch is larger. A broker
    /// refuses a whole batch, for one of its records or because the batch is too large.
    batch: usize,
}

impl Transactions {
    /// Connects, and fences an older producer with the same transactional id.
    ///
    /// # Errors
    /// [`StreamError::Broker`] when the brokers cannot be reached or refuse.
    pub(in crate::stream) fn new(config: &ClientConfig, id: &str, metrics: Arc<Metrics>) -> Result<Self, StreamError> {
        let mut config = config.clone();
        config.set("transactional.id", id).set("enable.idempotence", "true");
        if config.get("transaction.timeout.ms").is_none() {
            config.set("transaction.timeout.ms", TRANSACTION_TIMEOUT);
        }
        let producer = connect(&config)?;
        Ok(Self { config, producer, lost: false, metrics, batch: usize::MAX })
    }

    /// Writes the records of `parts` and commits their offsets in one transaction. Parts that no longer belong to this
    /// process are taken out: their new owner reads their messages.
    ///
    /// # Errors
    /// [`StreamError::Broker`] for an error that cannot heal.
    pub(super) fn commit(&mut self, parts: &mut Vec<Part>, group: &dyn Group) -> Result<Outcome, StreamError> {
        let (mut pause, mut repeats) = (PAUSES[0], 0);
        loop {
            // First, so that the offsets of a partition that is lost in between are refused with this generation.
            let metadata = group.metadata();
            parts.retain(|part| group.owns(&part.source, part.epoch));
            if parts.is_empty() {
                return Ok(Outcome::Committed);
            }
            if self.lost {
                self.replace(parts, group)?;
                continue;
            }
            // A member that the group has removed: its consumer joins again, and hears what became of the partitions.
            let Some(metadata) = metadata else {
                std::thread::sleep(PAUSES[0]);
                continue;
            };
            let Err(error) = self.attempt(parts, &metadata) else {
                self.metrics.transaction(TransactionEnd::Committed);
                self.batch = self.batch.saturating_mul(GROWTH);
                return Ok(Outcome::Committed);
            };
            let aborted = self.abort(&error);
            let failed = std::mem::take(&mut *self.producer.context().failed());
            let (verdict, reason) = (judge(&error, &failed), crate::redact::redact(&error.to_string()));
            if let Verdict::Final { place, error } = verdict {
                return Err(refused(parts, place, &error));
            }
            if aborted.is_err() {
                tracing::warn!(
                    reason,
                    "the producer of transactions is replaced, as the brokers ended its transaction"
                );
                self.lost = true;
                // If another process has our place in the group, the group says so by then.
                std::thread::sleep(PAUSES[1]);
                continue;
            }
            self.metrics.transaction(TransactionEnd::Aborted);
            match verdict {
                Verdict::Final { .. } => {}
                Verdict::Refused(records) => return Ok(Outcome::Refused(records)),
                Verdict::InDoubt(places) => {
                    let bytes: usize = places.iter().map(|(part, record)| parts[*part].records[*record].bytes()).sum();
                    self.batch = (bytes / 2).max(1);
                    continue;
                }
                Verdict::Unknown if repeats >= REPEATS => return Err(broken("write a transaction", &error)),
                Verdict::Unknown => repeats += 1,
                Verdict::Passing => repeats = 0,
            }
            tracing::warn!(reason, "a transaction was aborted, and is repeated");
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES[1]);
        }
    }

    /// Replaces a producer that can do nothing any more. Takes out the parts that its last transaction has committed, which
    /// it may not have heard of.
    fn replace(&mut self, parts: &mut Vec<Part>, group: &dyn Group) -> Result<(), StreamError> {
        // What the old one had begun is ended now, one way or the other.
        self.producer = connect(&self.config)?;
        self.lost = false;
        while !parts.is_empty() {
            let sources: Vec<_> = parts.iter().map(|part| part.source.clone()).collect();
            match group.committed(&sources) {
                Ok(ends) => {
                    let mut ends = ends.into_iter();
                    parts.retain(|part| ends.next().flatten().is_none_or(|end| end < part.end));
                    break;
                }
                Err(reason) => tracing::debug!(%reason, "asking the group for its offsets again"),
            }
            std::thread::sleep(PAUSES[0]);
            parts.retain(|part| group.owns(&part.source, part.epoch));
        }
        Ok(())
    }

    fn attempt(&self, parts: &[Part], metadata: &ConsumerGroupMetadata) -> Result<(), KafkaError> {
        self.producer.context().failed().clear();
        crash::before_transaction();
        self.producer.begin_transaction()?;
        let mut queued: usize = 0;
        for (p, part) in parts.iter().enumerate() {
            for (r, record) in part.records.iter().enumerate() {
                if queued > 0 && queued.saturating_add(record.bytes()) > self.batch {
                    self.deliver()?;
                    queued = 0;
                }
                self.send(record, (p, r))?;
                queued += record.bytes();
            }
        }
        self.deliver()?;
        crash::in_transaction();
        let mut offsets = TopicPartitionList::new();
        let ends: BTreeMap<_, _> = parts.iter().map(|part| (&part.source, part.end)).collect();
        for (source, end) in ends {
            offsets.add_partition_offset(&source.topic, source.partition, Offset::Offset(end))?;
        }
        retried(|| self.producer.send_offsets_to_transaction(&offsets, metadata, REQUEST))?;
        crash::before_commit();
        retried(|| self.producer.commit_transaction(REQUEST))?;
        crash::after_commit();
        Ok(())
    }

    /// Queues a record; waits while the queue is full.
    fn send(&self, record: &Record, place: Place) -> Result<(), KafkaError> {
        let mut queued = base_record(record, place);
        loop {
            match self.producer.send(queued) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(Code::QueueFull), again)) => {
                    self.producer.poll(Duration::from_millis(100));
                    queued = again;
                }
                Err((error, _)) => {
                    self.producer.context().failed().push((place, error.clone()));
                    return Err(error);
                }
            }
        }
    }

    /// Waits until all queued records are delivered.
    fn deliver(&self) -> Result<(), KafkaError> {
        self.producer.flush(REQUEST)?;
        match self.producer.context().failed().first() {
            Some((_, error)) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Ends a failed transaction.
    ///
    /// # Errors
    /// That after which this producer can do nothing.
    fn abort(&self, error: &KafkaError) -> Result<(), KafkaError> {
        if let KafkaError::Transaction(cause) = error
            && cause.is_fatal()
        {
            return Err(error.clone());
        }
        // librdkafka purges the records, waits until the reports of all of them were taken, and leaves that to us.
        let take_reports = |_: &KafkaError| drop(self.producer.flush(ABORT));
        match retried(|| self.producer.abort_transaction(ABORT).inspect_err(take_reports)) {
            Ok(()) => {
                // It purges partitions in the background, and records of the next transaction must not be among them.
                std::thread::sleep(PAUSES[0]);
                Ok(())
            }
            // No transaction was open.
            Err(KafkaError::Transaction(cause)) if cause.code() == Code::State => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Connects, and ends what an older producer with the same id has begun.
fn connect(config: &ClientConfig) -> Result<BaseProducer<Deliveries>, StreamError> {
    let failed = |e: KafkaError| broken("begin transactions", &e);
    let producer: BaseProducer<Deliveries> = config.create_with_context(Deliveries::default()).map_err(failed)?;
    retried(|| producer.init_transactions(REQUEST)).map_err(failed)?;
    Ok(producer)
}

/// Repeats a request that the library calls retriable.
fn retried(request: impl Fn() -> Result<(), KafkaError>) -> Result<(), KafkaError> {
    loop {
        match request() {
            Err(KafkaError::Transaction(error)) if error.is_retriable() && !error.txn_requires_abort() => {
                std::thread::sleep(PAUSES[0]);
            }
            answer => return answer,
        }
    }
}

/// The error for a topic, or a group, that the brokers refuse.
fn refused(parts: &[Part], place: Option<Place>, error: &KafkaError) -> StreamError {
    let record = place.and_then(|(part, record)| parts.get(part)?.records.get(record));
    let what = record.map_or("write a transaction".to_owned(), |record| format!("write to topic {}", record.topic));
    let help = match error.rdkafka_error_code() {
        Some(Code::GroupAuthorizationFailed) => "grant READ on the group to this user",
        _ => "check that the topic exists and that the user may write to it",
    };
    let reason = crate::redact::redact(&error.to_string());
    StreamError::Broker { what, reason, help: Some(help.to_owned()) }
}

fn base_record(record: &Record, place: Place) -> BaseRecord<'_, [u8], [u8], Box<Place>> {
    let mut queued = BaseRecord::with_opaque_to(&record.topic, Box::new(place));
    queued.key = record.key.as_deref();
    queued.payload = record.value.as_deref();
    queued.timestamp = record.timestamp;
    let with = |headers: OwnedHeaders, (key, value): &(String, Option<Vec<u8>>)| {
        headers.insert(Header { key, value: value.as_deref() })
    };
    let headers = OwnedHeaders::new_with_capacity(record.headers.len());
    queued.headers = Some(record.headers.iter().fold(headers, with));
    queued
}

fn broken(what: &str, error: &KafkaError) -> StreamError {
    let reason = crate::redact::redact(&error.to_string());
    let help = match error.rdkafka_error_code() {
        Some(Code::TransactionalIdAuthorizationFailed) => {
            Some("grant WRITE and DESCRIBE on the transactional id to this user")
        }
        _ => None,
    };
    StreamError::Broker { what: what.to_owned(), reason, help: help.map(str::to_owned) }
}
