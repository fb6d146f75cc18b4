//! Transactions against librdkafka's mock cluster, which says nothing about what readers see: what errors lead to.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use rdkafka::{
    ClientConfig,
    consumer::{BaseConsumer, Consumer as _, ConsumerGroupMetadata},
    error::RDKafkaErrorCode as Code,
    mocking::MockCluster,
    producer::DefaultProducerContext,
    types::{RDKafkaApiKey as Api, RDKafkaRespErr as Raw},
};

use super::{
    producer::{Group, Outcome, Part, Record, Transactions},
    refusal::Place,
};
use crate::stream::{
    StreamError, TopicPartition,
    metrics::Metrics,
    source::{Epoch, Logs, testing::epoch},
};

const FINE: Raw = Raw::RD_KAFKA_RESP_ERR_NO_ERROR;

/// A consumer that owns everything, and is no member of its group for some time.
struct Owner {
    consumer: BaseConsumer,
    /// Questions for its membership that it has no answer to.
    outside: AtomicUsize,
    asked: Arc<AtomicUsize>,
    /// Questions after which it has lost its partitions.
    lost_after: usize,
    /// The offset of its group.
    committed: Option<i64>,
}

impl Group for Owner {
    fn metadata(&self) -> Option<ConsumerGroupMetadata> {
        self.asked.fetch_add(1, Relaxed);
        let is_outside = self.outside.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
        if is_outside { None } else { self.consumer.group_metadata() }
    }

    fn committed(&self, sources: &[TopicPartition]) -> Result<Vec<Option<i64>>, StreamError> {
        Ok(vec![self.committed; sources.len()])
    }

    fn owns(&self, _: &TopicPartition, _: Epoch) -> bool {
        self.asked.load(Relaxed) <= self.lost_after
    }
}

struct Case {
    mock: MockCluster<'static, DefaultProducerContext>,
    transactions: Transactions,
    metrics: Arc<Metrics>,
    owner: Owner,
    /// The owners of parts that were taken out.
    lost: Vec<usize>,
}

impl Case {
    fn new() -> Self {
        Self::after(BTreeSet::new(), &[])
    }

    /// After a predecessor that may have left a transaction in these topics. The first requests have these errors.
    fn after(left: BTreeSet<Arc<str>>, errors: &[(Api, Raw)]) -> Self {
        let mock = MockCluster::new(1).unwrap();
        for topic in ["in", "out"] {
            mock.create_topic(topic, 1, 1).unwrap();
        }
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", mock.bootstrap_servers());
        let consumer: BaseConsumer = config.clone().set("group.id", "g").create().unwrap();
        // Records wait for each other until they are flushed, so that batches are those of the program.
        config.set("linger.ms", "10000").set("transaction.timeout.ms", "60000");
        let metrics = Arc::new(Metrics::new());
        for (api, raw) in errors {
            mock.request_errors(*api, &[*raw]);
        }
        let group = consumer.group_metadata();
        let transactions =
            Transactions::new(&config, Logs::default(), "id", left, group, Arc::clone(&metrics)).unwrap();
        let (outside, lost_after, committed) = (AtomicUsize::new(0), usize::MAX, None);
        let owner = Owner { consumer, outside, asked: Arc::default(), lost_after, committed };
        Self { mock, transactions, metrics, owner, lost: Vec::new() }
    }

    /// Commits a part with so many records.
    fn commit(&mut self, records: usize) -> Result<Outcome, String> {
        let mut parts = vec![part(records)];
        self.transactions.commit(&mut parts, &mut self.lost, &self.owner).map_err(|error| error.to_string())
    }

    /// Transactions that were committed, and aborted.
    fn ends(&self) -> [u64; 2] {
        let shown = self.metrics.encode();
        ["committed", "aborted"].map(|end| {
            let name = format!("elmo_stream_transactions_total{{end=\"{end}\"}} ");
            shown.lines().find_map(|line| line.strip_prefix(&name)).unwrap().parse().unwrap()
        })
    }
}

fn part(records: usize) -> Part {
    let record = |number: usize| Record {
        topic: "out".into(),
        key: None,
        value: Some(vec![b'x'; 1000]),
        headers: Vec::new(),
        timestamp: Some(7),
        offset: i64::try_from(number).unwrap(),
        row: Some(number),
        last_resort: false,
    };
    Part {
        source: TopicPartition::new("in", 0),
        owner: 7,
        epoch: epoch(1),
        records: (0..records).map(record).collect(),
        rows: None,
        end: 9,
    }
}

/// The record that is aborted takes one offset in the log of the mock cluster, which writes no markers.
#[test]
fn what_a_predecessor_may_have_left_is_aborted_at_the_start() {
    let end = |case: &Case| case.owner.consumer.fetch_watermarks("out", 0, Duration::from_secs(30)).unwrap().1;
    assert_eq!(end(&Case::new()), 0);
    let mut case = Case::after(["out".into()].into(), &[]);
    assert_eq!((end(&case), case.commit(2), case.ends()), (1, Ok(Outcome::Committed), [1, 0]));
    assert_eq!(end(&case), 3);
}

/// The errors are those of the first transaction, as [`Case::commit`] meets none.
#[test]
fn a_start_succeeds_although_the_offsets_of_a_predecessor_are_refused() {
    for (api, raw) in [
        (Api::AddOffsetsToTxn, Raw::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED),
        (Api::TxnOffsetCommit, Raw::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED),
        (Api::TxnOffsetCommit, Raw::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID),
        // librdkafka repeats the request.
        (Api::TxnOffsetCommit, Raw::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS),
        // It repeats the start.
        (Api::AddOffsetsToTxn, Raw::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH),
    ] {
        let mut case = Case::after(["out".into()].into(), &[(api, raw)]);
        assert_eq!((case.commit(2), case.ends()), (Ok(Outcome::Committed), [1, 0]), "{raw:?}");
    }
}

/// The second error is for the transaction that follows a failed one, if that one has offsets; else it ends the stream.
#[test]
fn offsets_are_aborted_after_a_transaction_that_was_not_to_be_committed() {
    let fatal = Raw::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH;
    let denied = Raw::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED;
    let mut case = Case::new();
    case.mock.request_errors(Api::AddOffsetsToTxn, &[fatal, denied]);
    assert_eq!((case.commit(2), case.ends()), (Ok(Outcome::Committed), [1, 0]));

    let mut case = Case::new();
    case.mock.request_errors(Api::EndTxn, &[fatal]);
    case.mock.request_errors(Api::AddOffsetsToTxn, &[FINE, denied]);
    assert!(case.commit(2).unwrap_err().starts_with("write a transaction: "));
}

/// A broker refuses the offsets of a member whose group has gone on. Its records were sent by then.
#[test]
fn a_transaction_whose_offsets_are_refused_is_aborted_and_repeated() {
    let mut case = Case::new();
    case.mock.request_errors(Api::TxnOffsetCommit, &[Raw::RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION]);
    assert_eq!(case.commit(3), Ok(Outcome::Committed));
    assert_eq!(case.ends(), [1, 1]);
}

#[test]
fn a_record_that_is_refused_alone_is_named_whatever_the_reason() {
    for (raw, code) in [
        (Raw::RD_KAFKA_RESP_ERR_INVALID_TIMESTAMP, Code::InvalidTimestamp),
        (Raw::RD_KAFKA_RESP_ERR_INVALID_RECORD, Code::InvalidRecord),
        (Raw::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE, Code::MessageSizeTooLarge),
    ] {
        let mut case = Case::new();
        case.mock.request_errors(Api::Produce, &[raw]);
        assert_eq!(case.commit(1), Ok(Outcome::Refused(vec![((0, 0), code)])), "{code:?}");
        assert_eq!(case.ends(), [0, 1]);
    }
}

/// By hand: three records of 1,070 bytes in one batch, then each alone, as 1,605 bytes hold one.
#[test]
fn records_of_a_batch_that_is_refused_are_sent_in_smaller_ones() {
    let too_large = Raw::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE;
    let mut case = Case::new();
    case.mock.request_errors(Api::Produce, &[too_large]);
    assert_eq!(case.commit(3), Ok(Outcome::Committed));
    assert_eq!(case.ends(), [1, 1]);

    let mut case = Case::new();
    case.mock.request_errors(Api::Produce, &[too_large, FINE, too_large]);
    let second: Place = (0, 1);
    assert_eq!(case.commit(3), Ok(Outcome::Refused(vec![(second, Code::MessageSizeTooLarge)])));
    assert_eq!(case.ends(), [0, 2]);
}

/// What the group says counts, and not what became of the attempt to abort.
#[test]
fn a_transaction_whose_commit_failed_is_not_repeated_if_the_group_has_its_offsets() {
    for (committed, ends) in [(Some(9), [0, 1]), (Some(8), [1, 1]), (None, [1, 1])] {
        let mut case = Case::new();
        case.owner.committed = committed;
        case.mock.request_errors(Api::EndTxn, &[Raw::RD_KAFKA_RESP_ERR_UNKNOWN]);
        assert_eq!((case.commit(3), case.ends()), (Ok(Outcome::Committed), ends), "{committed:?}");
    }
}

#[test]
fn errors_that_no_repetition_heals_end_the_stream() {
    for (api, raw, words) in [
        (Api::Produce, Raw::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED, "write to topic out: "),
        (Api::Produce, Raw::RD_KAFKA_RESP_ERR_UNSUPPORTED_FOR_MESSAGE_FORMAT, "write to topic out: "),
        (Api::TxnOffsetCommit, Raw::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED, "write a transaction: "),
    ] {
        let mut case = Case::new();
        case.mock.request_errors(api, &[raw]);
        let error = case.commit(2).unwrap_err();
        assert!(error.starts_with(words), "{error}");
    }
}

#[test]
fn nothing_is_sent_while_the_process_is_no_member_of_its_group() {
    let mut case = Case::new();
    case.owner.outside = AtomicUsize::new(2);
    assert_eq!(case.commit(1), Ok(Outcome::Committed));
    assert_eq!((case.owner.asked.load(Relaxed), case.ends(), &case.lost[..]), (3, [1, 0], &[][..]));

    // It loses the partition before it is a member again: the next owner reads its messages.
    let mut case = Case::new();
    (case.owner.outside, case.owner.lost_after) = (AtomicUsize::new(usize::MAX), 2);
    assert_eq!(case.commit(1), Ok(Outcome::Committed));
    assert_eq!((case.owner.asked.load(Relaxed), case.ends(), &case.lost[..]), (3, [0, 0], &[7][..]));
}
