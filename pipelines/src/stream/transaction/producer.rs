//! Transactions of Kafka: rows and the offsets they came from become visible together, or not at all.
//!
//! A transaction begins when its rows are complete, so that it is short. When it must be aborted, the same rows are sent
//! again, which are kept until then: nothing is read or embedded twice.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig, ClientContext, Offset, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::ConsumerGroupMetadata,
    error::{KafkaError, RDKafkaErrorCode as Code},
    message::{DeliveryResult, Header, OwnedHeaders},
    metadata::MetadataTopic,
    producer::{BaseProducer, BaseRecord, Producer, ProducerContext},
};

use super::{
    limits::Limits,
    refusal::{Place, Verdict, is_of_size, is_unanswered, judge, judge_offsets, skips_numbers},
};
use crate::{
    crash::stream as crash,
    error::Fault as _,
    stream::{
        StreamError, TopicPartition,
        finished::Rows,
        metrics::{Metrics, TransactionEnd},
        source::{Epoch, Logs},
    },
};

/// How long one request of a transaction may take before it is tried again.
pub(super) const REQUEST: Duration = Duration::from_secs(30);
/// The same for the end of a failed one, between whose attempts the reports of its records are taken.
const ABORT: Duration = Duration::from_millis(500);
/// How long the broker keeps the transaction of a process that was killed, in milliseconds. Until then, the partitions of
/// that process cannot be read on. A transaction begins when its rows are complete, so it takes far less.
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(20);
/// The pause before an aborted transaction is repeated, doubled each time.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];
/// How often a transaction is repeated for an error of which it is not known whether it passes.
const REPEATS: u32 = 10;
/// After a transaction that was committed, batches may be larger again if they were far below what they may be: by this factor.
const FAR: usize = 8;
/// Bytes of a batch, if the user does not say otherwise: the default of librdkafka.
pub(super) const BATCH: usize = 1_000_000;

/// A message that is to be written.
#[derive(Debug, Clone)]
pub(in crate::stream) struct Record {
    pub(in crate::stream) topic: Arc<str>,
    pub(in crate::stream) key: Option<Vec<u8>>,
    pub(in crate::stream) value: Option<Vec<u8>>,
    pub(in crate::stream) headers: Vec<(String, Option<Vec<u8>>)>,
    pub(in crate::stream) timestamp: Option<i64>,
    /// Of the message that it was made of.
    pub(in crate::stream) offset: i64,
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
    /// What the records were made of; `None` in tests.
    pub(super) rows: Option<Arc<Rows>>,
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
    /// Nothing is: the transaction took longer than the broker allows. Fewer records take less time.
    Slow,
}

/// What becomes of offsets that an old producer may have left in an open transaction.
#[derive(Debug, Clone, Copy)]
enum Offsets {
    /// They are aborted, as its records are.
    Abort,
    Keep,
}

/// Collects which records were not delivered.
#[derive(Debug)]
pub(super) struct Deliveries {
    logs: Logs,
    failed: Mutex<Vec<(Place, KafkaError)>>,
}

impl Deliveries {
    fn failed(&self) -> MutexGuard<'_, Vec<(Place, KafkaError)>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientContext for Deliveries {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.logs.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.logs.error(error, reason);
    }
}

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
    logs: Logs,
    /// The same without transactions.
    plain: ClientConfig,
    producer: BaseProducer<Deliveries>,
    /// The brokers accept nothing more of the producer: its transaction took too long, another process has its id, or they
    /// refused records and now wait for their sequence numbers.
    spent: bool,
    /// The commit was requested, and its outcome is not known.
    in_doubt: bool,
    /// Offsets of the group are being added to the transaction.
    adds_offsets: bool,
    /// The brokers have to end the last transaction: it could not be aborted.
    is_open: bool,
    /// Topics that records were sent to.
    written: BTreeSet<Arc<str>>,
    metrics: Arc<Metrics>,
    /// How long a transaction may take.
    timeout: Duration,
    /// The group whose offsets are committed, for a client that is no member of it. Without it, no offsets are aborted.
    group: Option<ConsumerGroupMetadata>,
    limits: Limits,
    /// Bytes of a batch. A broker refuses a whole batch, for one of its records or because the batch is too large.
    batch: usize,
    /// The same where nothing is refused.
    usual_batch: usize,
    /// Bytes of records that can be committed in time, as far as is known.
    most: usize,
}

impl Transactions {
    /// Connects, and fences an older producer with the same transactional id. `left` are the topics in which a predecessor with
    /// this id may have an open transaction: whatever it left there, and in the offsets of `group`, is aborted. What librdkafka
    /// says goes to `logs`.
    ///
    /// # Errors
    /// [`StreamError::Broker`] when the brokers cannot be reached or refuse.
    pub(in crate::stream) fn new(
        config: &ClientConfig,
        logs: Logs,
        id: &str,
        left: BTreeSet<Arc<str>>,
        group: Option<ConsumerGroupMetadata>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StreamError> {
        let (plain, mut config) = (config.clone(), config.clone());
        let limits = Limits::new(&config);
        let number = |name: &str| config.get(name).and_then(|value| value.parse::<usize>().ok());
        let batch = [number("batch.size").unwrap_or(BATCH), number("message.max.bytes").unwrap_or(BATCH)];
        let batch = batch[0].min(batch[1]).max(1);
        let timeout = number("transaction.timeout.ms").and_then(|millis| u64::try_from(millis).ok());
        let timeout = timeout.map_or(TRANSACTION_TIMEOUT, Duration::from_millis);
        config.set("transactional.id", id).set("enable.idempotence", "true");
        config.set("transaction.timeout.ms", timeout.as_millis().to_string());
        let producer = connect(&config, &logs, batch)?;
        let (spent, usual_batch, most) = (false, batch, usize::MAX);
        let mut transactions = Self {
            config,
            logs,
            plain,
            producer,
            spent,
            in_doubt: false,
            adds_offsets: false,
            is_open: false,
            written: left,
            metrics,
            timeout,
            group,
            limits,
            batch,
            usual_batch,
            most,
        };
        transactions.close(Offsets::Abort)?;
        Ok(transactions)
    }

    /// Bytes of records that one transaction should have at most.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Writes the records of `parts` and commits their offsets in one transaction. Parts that no longer belong to this
    /// process are taken out, and their owners are added to `lost`: the new owner of the partition reads their messages.
    ///
    /// # Errors
    /// [`StreamError::Broker`] for an error that cannot heal.
    pub(super) fn commit(
        &mut self,
        parts: &mut Vec<Part>,
        lost: &mut Vec<usize>,
        group: &dyn Group,
    ) -> Result<Outcome, StreamError> {
        let (mut pause, mut repeats) = (PAUSES[0], 0);
        loop {
            // First, so that the offsets of a partition that is lost in between are refused with this generation.
            let metadata = group.metadata();
            take_lost(parts, lost, group);
            if parts.is_empty() {
                return Ok(Outcome::Committed);
            }
            if self.spent {
                self.replace(parts, lost, group)?;
                continue;
            }
            let exceeded = self.limits.exceeded(parts);
            if !exceeded.is_empty() {
                return Ok(Outcome::Refused(exceeded.into_iter().map(|at| (at, Code::MessageSizeTooLarge)).collect()));
            }
            // A member that the group has removed: its consumer joins again, and hears what became of the partitions.
            let Some(metadata) = metadata else {
                std::thread::sleep(PAUSES[0]);
                continue;
            };
            let began = Instant::now();
            let Err(error) = self.attempt(parts, &metadata) else {
                self.metrics.transaction(TransactionEnd::Committed);
                self.grow();
                return Ok(Outcome::Committed);
            };
            let aborted = self.abort(&error);
            let failed = std::mem::take(&mut *self.producer.context().failed());
            let verdict = if self.adds_offsets { judge_offsets(&error) } else { judge(&error, &failed) };
            let reason = crate::redact::redact(&error.to_string());
            if let Verdict::Final { place, error } = verdict {
                return Err(refused(parts, place, &error));
            }
            if aborted.is_err() {
                tracing::warn!(
                    reason,
                    "the producer of transactions is replaced, as the brokers ended its transaction"
                );
                (self.spent, self.is_open) = (true, true);
                let is_slow = began.elapsed() > self.timeout / 2;
                // If another process has our place in the group, the group says so by then.
                std::thread::sleep(PAUSES[1]);
                if is_slow {
                    // All parts together, since the transaction may have been committed after all.
                    self.replace(parts, lost, group)?;
                    self.most = (bytes(parts) / 2).max(1);
                    return Ok(if parts.is_empty() { Outcome::Committed } else { Outcome::Slow });
                }
                continue;
            }
            self.metrics.transaction(TransactionEnd::Aborted);
            // After a refusal it would lose one more transaction before it noticed. A commit whose outcome is not known may have
            // taken effect, whatever became of the attempt to abort it: the offsets of the group tell.
            self.spent = self.in_doubt || skips_numbers(&failed);
            match verdict {
                Verdict::Final { .. } => {}
                Verdict::Refused(records) => {
                    self.learn(parts, &records);
                    return Ok(Outcome::Refused(records));
                }
                Verdict::InDoubt(records) => {
                    let alone = self.narrow(parts, records);
                    if !alone.is_empty() {
                        self.learn(parts, &alone);
                        return Ok(Outcome::Refused(alone));
                    }
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
    /// it may not have heard of, and those that are lost meanwhile.
    fn replace(&mut self, parts: &mut Vec<Part>, lost: &mut Vec<usize>, group: &dyn Group) -> Result<(), StreamError> {
        // What the old one had begun is ended now, one way or the other.
        self.producer = connect(&self.config, &self.logs, self.batch)?;
        if std::mem::take(&mut self.is_open) {
            // A commit that was requested may have taken effect: then its offsets count, and the group is asked for them.
            self.close(if self.in_doubt { Offsets::Keep } else { Offsets::Abort })?;
        }
        self.spent = false;
        let mut said = false;
        while !parts.is_empty() {
            let sources: Vec<_> = parts.iter().map(|part| part.source.clone()).collect();
            match group.committed(&sources) {
                Ok(ends) => {
                    let mut ends = ends.into_iter();
                    parts.retain(|part| ends.next().flatten().is_none_or(|end| end < part.end));
                    break;
                }
                Err(error) if said => tracing::debug!(%error, "asking the group for its offsets again"),
                Err(error) => {
                    let help = error.help();
                    tracing::warn!(%error, help, "the group's offsets are not known; asking until they are");
                    said = true;
                }
            }
            std::thread::sleep(PAUSES[0]);
            take_lost(parts, lost, group);
        }
        Ok(())
    }

    /// Aborts a message in every partition that the old producer may have written to, and an offset of the group.
    ///
    /// A broker that restarts aborts a transaction that timed out, and may lose the marker for a partition that has no leader
    /// yet (Kafka 4.3: "trying to send transaction markers … likely deleted already"). The next marker of this producer id would
    /// then commit the records that were aborted, or their offsets: messages without rows. Until then, the offsets are unstable,
    /// and no process can begin to read.
    ///
    /// # Errors
    /// [`StreamError::Broker`] for an error that cannot heal.
    fn close(&mut self, offsets: Offsets) -> Result<(), StreamError> {
        let (mut repeats, mut said) = (0, false);
        loop {
            let error = match self.abort_in_all_partitions(offsets) {
                Ok(None) => return Ok(()),
                // While the partition of the offsets has no leader, it would miss this marker, too. To join the group, its coordinator
                // has to answer anyway.
                Ok(Some(error)) if is_unanswered(&error) => {
                    if !said {
                        tracing::warn!(%error, "the coordinator of the group does not answer; asking until it does");
                        said = true;
                    }
                    error
                }
                // Most producers have left nothing there, so a refusal must not keep a process from starting.
                Ok(Some(error)) => {
                    tracing::debug!(%error, "offsets that an old producer may have left stay");
                    return Ok(());
                }
                Err(error) => {
                    match judge(&error, &[]) {
                        Verdict::Final { place, error } => return Err(refused(&[], place, &error)),
                        // An outage lasts as long as it lasts.
                        Verdict::Passing => repeats = 0,
                        _ if repeats >= REPEATS => return Err(broken("abort a transaction", &error)),
                        _ => repeats += 1,
                    }
                    error
                }
            };
            tracing::debug!(%error, "aborting what the old producer left, again");
            std::thread::sleep(PAUSES[1]);
            // The error may have been fatal for this one, too.
            self.producer = connect(&self.config, &self.logs, self.batch)?;
        }
    }

    /// One attempt. Returns why the offsets could not be added, if everything else was aborted.
    fn abort_in_all_partitions(&self, offsets: Offsets) -> Result<Option<KafkaError>, KafkaError> {
        let Some(any) = self.written.first() else { return Ok(None) };
        self.producer.context().failed().clear();
        self.producer.begin_transaction()?;
        for topic in &self.written {
            let metadata = self.producer.client().fetch_metadata(Some(topic), REQUEST)?;
            for partition in metadata.topics().iter().flat_map(MetadataTopic::partitions) {
                // A compacted topic takes no message without a key.
                let small = BaseRecord::with_opaque_to(topic, Box::new((0, 0))).partition(partition.id());
                self.producer.send(small.key(&b"aborted"[..]).payload(&b""[..])).map_err(|(error, _)| error)?;
            }
        }
        self.deliver()?;
        // Last, as no record can be added to a transaction whose offsets were refused.
        let added = match (&self.group, offsets) {
            (Some(group), Offsets::Abort) => self.add_offset(any, group),
            (None, _) | (_, Offsets::Keep) => Ok(()),
        };
        retried(|| self.producer.abort_transaction(REQUEST))?;
        Ok(added.err())
    }

    /// Adds an offset of the group to a transaction that is to be aborted, so that its partition of `__consumer_offsets` gets
    /// the marker, too. The transaction has that partition (`AddOffsetsToTxn`) before the group gets the offset
    /// (`TxnOffsetCommit`), which it may refuse: to a user without READ on the topic, for example. librdkafka sends nothing for
    /// an empty list. A process does not read what it writes, so that nothing begins at this offset even if this marker is lost.
    fn add_offset(&self, topic: &str, group: &ConsumerGroupMetadata) -> Result<(), KafkaError> {
        let mut offsets = TopicPartitionList::with_capacity(1);
        offsets.add_partition_offset(topic, 0, Offset::Offset(0))?;
        // The broker would abort a transaction that waits for longer, and fence this producer.
        self.producer.send_offsets_to_transaction(&offsets, group, REQUEST.min(self.timeout / 2))
    }

    /// Draws the conclusions from records that were refused, each for itself.
    fn learn(&mut self, parts: &[Part], refused: &[(Place, Code)]) {
        for ((part, record), _) in refused.iter().filter(|(_, code)| is_of_size(*code)) {
            let record = &parts[*part].records[*record];
            self.limits.ask(&self.plain, &self.logs, &record.topic);
            self.limits.refused_alone(record);
        }
        self.batch = self.batch.min(self.limits.batch());
    }

    /// Makes batches smaller, after some were refused. Returns the records that were alone in theirs.
    fn narrow(&mut self, parts: &[Part], refused: Vec<(Place, Code)>) -> Vec<(Place, Code)> {
        let record = |(part, record): Place| &parts[part].records[record];
        for (place, _) in refused.iter().filter(|(_, code)| is_of_size(*code)) {
            self.limits.ask(&self.plain, &self.logs, &record(*place).topic);
        }
        if self.limits.batch() < self.batch {
            self.batch = self.limits.batch();
            return Vec::new();
        }
        let all: usize = refused.iter().map(|(place, _)| record(*place).alone()).sum();
        let alone: Vec<_> = refused.into_iter().filter(|(place, _)| record(*place).alone() >= self.batch).collect();
        if alone.is_empty() {
            self.batch = (all.min(self.batch) / 2).max(1);
        }
        alone
    }

    /// After a transaction that was committed, the next one may have more records, and larger batches.
    fn grow(&mut self) {
        self.most = self.most.saturating_mul(2);
        let wanted = self.usual_batch.min(self.limits.batch());
        if self.batch.saturating_mul(FAR) < wanted {
            self.batch = self.batch.saturating_mul(FAR * FAR).min(wanted);
            // Only a new producer has another size of batches.
            self.spent = true;
        }
    }

    fn attempt(&mut self, parts: &[Part], metadata: &ConsumerGroupMetadata) -> Result<(), KafkaError> {
        self.producer.context().failed().clear();
        (self.in_doubt, self.adds_offsets) = (false, false);
        crash::before_transaction();
        self.producer.begin_transaction()?;
        for (p, part) in parts.iter().enumerate() {
            for (r, record) in part.records.iter().enumerate() {
                if !self.written.contains(&record.topic) {
                    self.written.insert(Arc::clone(&record.topic));
                }
                self.send(record, (p, r))?;
            }
        }
        self.deliver()?;
        crash::in_transaction();
        let mut offsets = TopicPartitionList::new();
        let ends: BTreeMap<_, _> = parts.iter().map(|part| (&part.source, part.end)).collect();
        for (source, end) in ends {
            offsets.add_partition_offset(&source.topic, source.partition, Offset::Offset(end))?;
        }
        self.adds_offsets = true;
        retried(|| self.producer.send_offsets_to_transaction(&offsets, metadata, REQUEST))?;
        crash::before_commit();
        (self.in_doubt, self.adds_offsets) = (true, false);
        retried(|| self.producer.commit_transaction(REQUEST))?;
        crash::after_commit();
        self.in_doubt = false;
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
        retried(|| self.producer.abort_transaction(ABORT).inspect_err(take_reports))
    }
}

/// Takes out the parts that no longer belong to this process, and adds their owners to `lost`.
fn take_lost(parts: &mut Vec<Part>, lost: &mut Vec<usize>, group: &dyn Group) {
    lost.extend(parts.extract_if(.., |part| !group.owns(&part.source, part.epoch)).map(|part| part.owner));
}

/// Bytes of the records of parts.
pub(super) fn bytes(parts: &[Part]) -> usize {
    parts.iter().flat_map(|part| &part.records).map(Record::bytes).sum()
}

/// Connects, and ends what an older producer with the same id has begun. Its batches have so many bytes at most.
pub(super) fn connect(
    config: &ClientConfig,
    logs: &Logs,
    batch: usize,
) -> Result<BaseProducer<Deliveries>, StreamError> {
    let failed = |e: KafkaError| broken("begin transactions", &e);
    let mut config = config.clone();
    config.set("batch.size", batch.to_string());
    let deliveries = Deliveries { logs: logs.clone(), failed: Mutex::default() };
    let producer: BaseProducer<Deliveries> = config.create_with_context(deliveries).map_err(failed)?;
    retried(|| producer.init_transactions(REQUEST)).map_err(failed)?;
    Ok(producer)
}

/// Repeats a request that the library calls retriable.
pub(super) fn retried(request: impl Fn() -> Result<(), KafkaError>) -> Result<(), KafkaError> {
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
pub(super) fn refused(parts: &[Part], place: Option<Place>, error: &KafkaError) -> StreamError {
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

pub(super) fn broken(what: &str, error: &KafkaError) -> StreamError {
    let reason = crate::redact::redact(&error.to_string());
    let help = match error.rdkafka_error_code() {
        Some(Code::TransactionalIdAuthorizationFailed) => {
            Some("grant WRITE and DESCRIBE on the transactional id to this user")
        }
        _ => None,
    };
    StreamError::Broker { what: what.to_owned(), reason, help: help.map(str::to_owned) }
}
