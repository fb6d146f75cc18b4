//! Transactions of Kafka: rows and the offsets they came from become visible together, or not at all.
//!
//! A transaction begins when its rows are complete, so that it is short. When it must be aborted, the same rows are sent
//! again, which are kept until then: nothing is read or embedded twice.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rdkafka::{
    ClientConfig, ClientContext, Offset, TopicPartitionList,
    consumer::ConsumerGroupMetadata,
    error::{KafkaError, RDKafkaErrorCode},
    message::{DeliveryResult, Header, OwnedHeaders},
    producer::{BaseProducer, BaseRecord, Producer, ProducerContext},
};

use crate::stream::{StreamError, TopicPartition, finished::Rows, source::Epoch};

/// How long one request of a transaction may take before it is tried again.
const REQUEST: Duration = Duration::from_secs(30);
/// How long the broker keeps the transaction of a process that was killed, in milliseconds. Until then, the partitions of
/// that process cannot be read on. A transaction begins when its rows are complete, so it takes far less.
const TRANSACTION_TIMEOUT: &str = "20000";
/// The pause before an aborted transaction is repeated, doubled each time.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];

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
    /// It already stands for a message that was too large.
    pub(in crate::stream) last_resort: bool,
}

/// The rows of one partition that are committed together.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) source: TopicPartition,
    /// Its place among the rows of the transaction, before those of lost partitions were taken out.
    pub(super) owner: usize,
    /// Of the assignment in which the rows were read.
    pub(super) epoch: Epoch,
    pub(super) records: Vec<Record>,
    /// What the records were made of.
    pub(super) rows: Rows,
    /// Behind the last message.
    pub(super) end: i64,
}

/// The consumer whose offsets are committed.
pub(in crate::stream) trait Group: Send {
    /// Its member and generation, by which the broker refuses the offsets of a member that was replaced.
    fn metadata(&self) -> Option<ConsumerGroupMetadata>;

    /// Whether the partition still belongs to this process, in this assignment.
    fn owns(&self, source: &TopicPartition, epoch: Epoch) -> bool;
}

/// What became of a transaction.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Everything is visible.
    Committed,
    /// Nothing is: the broker's limit is below the size of record `.1` of part `.0`.
    TooLarge(usize, usize),
}

/// The place of a record: its part, and its number in it.
type Place = (usize, usize);

/// Collects what became of each record.
#[derive(Debug, Default)]
struct Deliveries {
    failed: Mutex<Option<(Place, KafkaError)>>,
}

impl ClientContext for Deliveries {}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = Box<Place>;

    fn delivery(&self, result: &DeliveryResult<'_>, place: Self::DeliveryOpaque) {
        if let Err((error, _)) = result {
            let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
            // Those behind the first are purged.
            failed.get_or_insert_with(|| (*place, error.clone()));
        }
    }
}

/// A producer with transactions.
pub(super) struct Transactions {
    producer: BaseProducer<Deliveries>,
}

impl Transactions {
    /// Connects, and fences an older producer with the same transactional id.
    ///
    /// # Errors
    /// [`StreamError::Broker`] when the brokers cannot be reached or refuse.
    pub(super) fn new(config: &ClientConfig, id: &str) -> Result<Self, StreamError> {
        let mut config = config.clone();
        config.set("transactional.id", id).set("enable.idempotence", "true");
        if config.get("transaction.timeout.ms").is_none() {
            config.set("transaction.timeout.ms", TRANSACTION_TIMEOUT);
        }
        let failed = |e: KafkaError| broken("begin transactions", &e);
        let producer: BaseProducer<Deliveries> = config.create_with_context(Deliveries::default()).map_err(failed)?;
        let this = Self { producer };
        this.retried(|| this.producer.init_transactions(REQUEST)).map_err(failed)?;
        Ok(this)
    }

    /// Writes the records of `parts` and commits their offsets in one transaction. Parts that no longer belong to this
    /// process are taken out: their new owner reads their messages.
    ///
    /// # Errors
    /// [`StreamError::Broker`] when the producer was fenced by a newer one, or for another error that cannot heal.
    pub(super) fn commit(&self, parts: &mut Vec<Part>, group: &dyn Group) -> Result<Outcome, StreamError> {
        let mut pause = PAUSES[0];
        loop {
            // First, so that the offsets of a partition that is lost in between are refused with this generation.
            let metadata = group.metadata();
            parts.retain(|part| group.owns(&part.source, part.epoch));
            if parts.is_empty() {
                return Ok(Outcome::Committed);
            }
            let Some(metadata) = metadata else { return Err(broken("write a transaction", &KafkaError::Canceled)) };
            let Err(error) = self.attempt(parts, &metadata) else { return Ok(Outcome::Committed) };
            let failed = self.failure();
            if let Some((_, error)) = failed.as_ref().filter(|(_, error)| is_final(error)) {
                return Err(refused(&parts[0].records, error));
            }
            let place = failed.filter(|(_, error)| is_too_large(error)).map(|(place, _)| place);
            self.abort(&error)?;
            if let Some((part, record)) = place {
                return Ok(Outcome::TooLarge(part, record));
            }
            tracing::warn!(reason = %crate::redact::redact(&error.to_string()), "a transaction was aborted, and is repeated");
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES[1]);
        }
    }

    fn attempt(&self, parts: &[Part], metadata: &ConsumerGroupMetadata) -> Result<(), KafkaError> {
        *self.producer.context().failed.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.producer.begin_transaction()?;
        for (p, part) in parts.iter().enumerate() {
            for (r, record) in part.records.iter().enumerate() {
                self.send(record, (p, r))?;
            }
        }
        let mut offsets = TopicPartitionList::new();
        let ends: BTreeMap<_, _> = parts.iter().map(|part| (&part.source, part.end)).collect();
        for (source, end) in ends {
            offsets.add_partition_offset(&source.topic, source.partition, Offset::Offset(end))?;
        }
        self.retried(|| self.producer.send_offsets_to_transaction(&offsets, metadata, REQUEST))?;
        self.retried(|| self.producer.commit_transaction(REQUEST))
    }

    /// Queues a record; waits while the queue is full.
    fn send(&self, record: &Record, place: Place) -> Result<(), KafkaError> {
        let mut queued = base_record(record, place);
        loop {
            match self.producer.send(queued) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), again)) => {
                    self.producer.poll(Duration::from_millis(100));
                    queued = again;
                }
                Err((error, _)) => {
                    let mut failed = self.producer.context().failed.lock().unwrap_or_else(PoisonError::into_inner);
                    failed.get_or_insert_with(|| (place, error.clone()));
                    return Err(error);
                }
            }
        }
    }

    /// The first record that was not delivered, and why.
    fn failure(&self) -> Option<(Place, KafkaError)> {
        self.producer.poll(Duration::ZERO);
        self.producer.context().failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Repeats a request that the library calls retriable.
    fn retried(&self, request: impl Fn() -> Result<(), KafkaError>) -> Result<(), KafkaError> {
        loop {
            match request() {
                Err(KafkaError::Transaction(error)) if error.is_retriable() && !error.txn_requires_abort() => {
                    std::thread::sleep(PAUSES[0]);
                }
                answer => return answer,
            }
        }
    }

    /// Ends a failed transaction.
    fn abort(&self, error: &KafkaError) -> Result<(), StreamError> {
        if let KafkaError::Transaction(cause) = error
            && cause.is_fatal()
        {
            return Err(fenced(error));
        }
        match self.retried(|| self.producer.abort_transaction(REQUEST)) {
            Ok(()) => Ok(()),
            // No transaction was open.
            Err(KafkaError::Transaction(cause)) if cause.code() == RDKafkaErrorCode::State => Ok(()),
            Err(error) => Err(fenced(&error)),
        }
    }
}

/// Whether the brokers refuse the topic, which no repetition heals.
fn is_final(error: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(
        error.rdkafka_error_code(),
        Some(Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::InvalidTopic | Code::TopicAuthorizationFailed)
    )
}

fn refused(records: &[Record], error: &KafkaError) -> StreamError {
    let topic = records.first().map_or("", |record| &record.topic);
    StreamError::Broker {
        what: format!("write to topic {topic}"),
        reason: crate::redact::redact(&error.to_string()),
        help: Some("check that the topic exists and that the user may write to it".to_owned()),
    }
}

fn is_too_large(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(RDKafkaErrorCode::MessageSizeTooLarge | RDKafkaErrorCode::InvalidMessageSize)
    )
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

fn fenced(error: &KafkaError) -> StreamError {
    let mut broken = broken("write a transaction", error);
    if let StreamError::Broker { help, .. } = &mut broken {
        *help =
            Some("another process with the same group.instance.id writes this topic: stop one of the two".to_owned());
    }
    broken
}

fn broken(what: &str, error: &KafkaError) -> StreamError {
    let reason = crate::redact::redact(&error.to_string());
    StreamError::Broker { what: what.to_owned(), reason, help: None }
}
