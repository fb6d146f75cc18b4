//! What becomes of rows whose messages the broker refuses, against librdkafka's mock cluster. It refuses the second message of
//! three, after it has refused the batch of all three: by then each is sent alone.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use rdkafka::{
    ClientConfig, Message as _, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer as _, ConsumerGroupMetadata},
    message::Headers as _,
    mocking::MockCluster,
    producer::DefaultProducerContext,
    types::{RDKafkaApiKey, RDKafkaRespErr as Raw},
};

use super::{
    process::{Settings, finisher, records},
    world::{Constant, World, columns, messages, partition},
};
use crate::{
    error::Error,
    stream::{
        OnError, StreamError, TopicPartition,
        finished::Rows,
        metrics::Metrics,
        output::{Output as _, Owned},
        source::{Batch, Budget, Epoch, Logs, testing::epoch},
        totals::Totals,
        transaction::{Committer, Group, Records, TopicOutput, Transactions},
    },
};

const LIMIT: Duration = Duration::from_secs(30);

struct Owner(BaseConsumer);

impl Group for Owner {
    fn metadata(&self) -> Option<ConsumerGroupMetadata> {
        self.0.group_metadata()
    }

    fn committed(&self, sources: &[TopicPartition]) -> Result<Vec<Option<i64>>, StreamError> {
        Ok(vec![None; sources.len()])
    }

    fn owns(&self, _: &TopicPartition, _: Epoch) -> bool {
        true
    }
}

/// A message as a reader sees it: the offset that it stands for, whether it has a value, its time, and why it has none.
type Seen = (String, bool, Option<i64>, Option<String>);

struct Case {
    mock: MockCluster<'static, DefaultProducerContext>,
    config: ClientConfig,
    output: TopicOutput,
    budget: Budget,
    policy: OnError,
    totals: Totals,
}

impl Case {
    fn new(policy: OnError, max_bytes: usize) -> Self {
        let mock = MockCluster::new(1).unwrap();
        for topic in ["t", "out", "letters"] {
            mock.create_topic(topic, 1, 1).unwrap();
        }
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", mock.bootstrap_servers()).set("group.id", "g");
        let owner = Owner(config.create().unwrap());
        let mut producer = ClientConfig::new();
        producer.set("bootstrap.servers", mock.bootstrap_servers()).set("linger.ms", "10000");
        let metrics = Arc::new(Metrics::new());
        let logs = Logs::default();
        let transactions =
            Transactions::new(&producer, logs, "id", BTreeSet::new(), None, Arc::clone(&metrics)).unwrap();
        let letters = (policy == OnError::DeadLetter).then(|| "letters".into());
        let records = Records { on_error: policy, dead_letters: letters, max_bytes, ..records(&Settings::default()) };
        let totals = Totals::new(Arc::clone(&metrics), policy);
        let committer =
            Committer::start(transactions, records.clone(), Duration::from_millis(10), Box::new(owner), totals.clone());
        let budget = Budget::new(1 << 20);
        let partition_metrics = Arc::new(metrics.partition(partition(0)));
        let owned = Owned { source: partition(0), epoch: epoch(1), budget: budget.clone(), metrics: partition_metrics };
        Self { mock, config, output: TopicOutput::new(owned, 0, records, committer.unwrap()), budget, policy, totals }
    }

    /// The rows of messages.
    async fn rows(&self, offsets: &[i64]) -> Rows {
        let stage = Constant::new(&World::new(1, 1));
        let finisher = finisher(self.policy, stage.as_ref());
        let permit = self.budget.permit(&partition(0), 0);
        let batch = Batch { messages: messages(&partition(0), offsets), epoch: epoch(1), permit };
        let (texts, waiting) = finisher.decode(batch, 0).await;
        finisher.finish(&partition(0), waiting, columns(&texts)).unwrap().rows
    }

    /// Writes three rows, of which the broker refuses the second.
    async fn refused(&mut self) -> Result<(), Error> {
        let refused = Raw::RD_KAFKA_RESP_ERR_INVALID_TIMESTAMP;
        self.mock.request_errors(RDKafkaApiKey::Produce, &[refused, Raw::RD_KAFKA_RESP_ERR_NO_ERROR, refused]);
        let rows = self.rows(&[0, 1, 2]).await;
        self.output.write(rows).await.unwrap();
        self.output.step().await.map(drop)
    }

    /// Rows and refused ones of the report, and the metric of rows: embedded, null, skipped, dead letters.
    fn counted(&self) -> (u64, u64, [u64; 4]) {
        let (report, shown) = (self.totals.report(), self.totals.metrics.encode());
        let metric = |name: String| -> u64 {
            shown.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |count| count.trim().parse().unwrap())
        };
        let refused = report.rejected.get("refused").copied().unwrap_or(0);
        assert_eq!((report.messages, report.rejected.values().sum::<u64>()), (3, refused));
        assert_eq!(metric("elmo_stream_rejected_total{reason=\"refused\"} ".to_owned()), refused);
        let outcomes = ["embedded", "null", "skipped", "dead_letter"];
        (report.rows, refused, outcomes.map(|word| metric(format!("elmo_stream_rows_total{{outcome=\"{word}\"}} "))))
    }

    /// The last messages of a topic. The mock shows those of transactions that were aborted, too.
    fn last(&self, topic: &str, count: i64) -> Vec<Seen> {
        let consumer: BaseConsumer = self.config.create().unwrap();
        let (_, high) = consumer.fetch_watermarks(topic, 0, LIMIT).unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(topic, 0, Offset::Offset(high - count)).unwrap();
        consumer.assign(&list).unwrap();
        let seen = (0..count).map(|_| {
            let message = consumer.poll(LIMIT).unwrap().unwrap();
            let headers = message.headers().unwrap();
            let header = |name: &str| {
                let found = headers.iter().filter(|header| header.key == name).last()?;
                Some(String::from_utf8_lossy(found.value?).into_owned())
            };
            let has_value = message.payload().is_some_and(|value| !value.is_empty());
            let time = message.timestamp().to_millis().filter(|time| *time == 7);
            (header("elmo.source.offset").unwrap(), has_value, time, header("elmo.error"))
        });
        seen.collect()
    }
}

fn fine(offset: i64) -> Seen {
    (offset.to_string(), true, Some(7), None)
}

const REASON: &str = "the broker refuses the message: InvalidTimestamp (Broker: Invalid timestamp)";

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_refused_has_no_vector_and_no_time() {
    let mut case = Case::new(OnError::Null, 1 << 20);
    case.refused().await.unwrap();
    assert_eq!((case.output.end(), case.counted()), (3, (3, 1, [2, 1, 0, 0])));
    let without = ("1".to_owned(), false, None, Some(REASON.to_owned()));
    assert_eq!(case.last("out", 3), [fine(0), without, fine(2)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_refused_may_be_skipped() {
    let mut case = Case::new(OnError::Skip, 1 << 20);
    case.refused().await.unwrap();
    assert_eq!((case.output.end(), case.last("out", 2)), (3, vec![fine(0), fine(2)]));
    assert_eq!(case.counted(), (2, 1, [2, 0, 1, 0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_refused_may_become_a_dead_letter() {
    let mut case = Case::new(OnError::DeadLetter, 1 << 20);
    case.refused().await.unwrap();
    assert_eq!((case.output.end(), case.last("out", 2)), (3, vec![fine(0), fine(2)]));
    assert_eq!(case.counted(), (2, 1, [2, 0, 0, 1]));
    assert_eq!(case.last("letters", 1), [("1".to_owned(), true, None, Some(REASON.to_owned()))]);
}

/// What follows a message that was refused must not be committed, or it would never be read again.
#[tokio::test(flavor = "multi_thread")]
async fn everything_before_a_row_that_is_refused_is_committed_and_nothing_behind_it() {
    let mut case = Case::new(OnError::Fail, 1 << 20);
    let error = case.refused().await.unwrap_err();
    assert_eq!(error.to_string(), format!("t[0] at offset 1: {REASON}"));
    assert_eq!(case.last("out", 1), [fine(0)]);
    let rows = case.rows(&[3, 5]).await;
    case.output.write(rows).await.unwrap();
    assert!(case.output.step().await.is_err());
    assert_eq!(case.last("out", 1), [fine(0)]);
}

/// By hand: a message counts 512 bytes, 16 for each of its eight headers, their names and values, and 8 for its vector: more
/// than 800 and less than 900. The text of the third makes its header longer.
#[tokio::test(flavor = "multi_thread")]
async fn everything_before_a_row_that_is_too_large_is_committed() {
    let mut case = Case::new(OnError::Fail, 900);
    let long = [0, 1, 1_000_000_000_000_000_000];
    let mut rows = case.rows(&long).await;
    assert_eq!(rows.messages.len(), 3);
    rows.hold(0);
    let error = case.output.write(rows).await.unwrap_err();
    assert!(error.to_string().contains("at offset 1000000000000000000: a message of "), "{error}");
    assert_eq!((case.output.end(), case.last("out", 2)), (1_000_000_000_000_000_000, vec![fine(0), fine(1)]));
}
