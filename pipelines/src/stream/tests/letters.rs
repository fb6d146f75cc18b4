//! Dead letters that the broker refuses, against librdkafka's mock cluster.

use std::{sync::Arc, time::Duration};

use rdkafka::{
    ClientConfig, Message as _, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer as _},
    message::Headers as _,
    mocking::MockCluster,
    producer::DefaultProducerContext,
    types::{RDKafkaApiKey, RDKafkaRespErr as Raw},
};

use super::{
    process::finisher,
    world::{Constant, World, columns, partition},
};
use crate::stream::{
    Message, Messages, OnError,
    dead_letters::DeadLetters,
    finished::Rows,
    metrics::Metrics,
    source::{Batch, Budget, Given, Settings, testing::epoch},
};

const LIMIT: Duration = Duration::from_secs(30);

struct Case {
    mock: MockCluster<'static, DefaultProducerContext>,
    letters: DeadLetters,
    metrics: Arc<Metrics>,
}

impl Case {
    fn new() -> Self {
        let mock = MockCluster::new(1).unwrap();
        mock.create_topic("letters", 1, 1).unwrap();
        let brokers = mock.bootstrap_servers();
        let given = Given { brokers, topics: vec!["t".into()], group: "g".into(), ..Given::default() };
        let metrics = Arc::new(Metrics::new());
        let letters = DeadLetters::new(&Settings::new(given).unwrap(), "letters", Arc::clone(&metrics)).unwrap();
        Self { mock, letters, metrics }
    }

    /// Sends a message without a value, which no stream can embed.
    async fn send(&self, key: Option<&[u8]>, header: &[u8]) {
        let mut messages = Messages::new(partition(0), 7);
        let headers = [("own".to_owned(), Some(header.to_vec()))];
        messages.push(Message { offset: 7, timestamp: None, key, value: None, headers: &headers });
        self.letters.send(&partition(0), &rows(messages).await).await.unwrap();
    }

    /// The key, and the header about what was left out, of the last letter; and how many headers it has.
    fn last(&self) -> (Option<Vec<u8>>, Option<String>, usize) {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.mock.bootstrap_servers()).set("group.id", "g");
        let consumer: BaseConsumer = config.create().unwrap();
        let (_, high) = consumer.fetch_watermarks("letters", 0, LIMIT).unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition_offset("letters", 0, Offset::Offset(high - 1)).unwrap();
        consumer.assign(&list).unwrap();
        let message = consumer.poll(LIMIT).unwrap().unwrap();
        let headers = message.headers().unwrap();
        let dropped = headers.iter().find(|header| header.key == "elmo.dropped");
        let dropped = dropped.map(|header| String::from_utf8_lossy(header.value.unwrap()).into_owned());
        (message.key().map(<[u8]>::to_vec), dropped, headers.count())
    }

    fn refused(&self) -> bool {
        !self.metrics.encode().contains("elmo_stream_dead_letters_refused_total 0\n")
    }
}

async fn rows(messages: Messages) -> Rows {
    let stage = Constant::new(&World::new(1, 1));
    let finisher = finisher(OnError::DeadLetter, stage.as_ref());
    let permit = Budget::new(1 << 20).permit(&partition(0), 0);
    let (texts, waiting) = finisher.decode(Batch { messages, epoch: epoch(1), permit }, 0).await;
    finisher.finish(&partition(0), waiting, columns(&texts)).unwrap().rows
}

/// The headers of a letter that say where its message is and why it is one: topic, partition, offset, label, error.
const OURS: usize = 5;

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_too_large_without_its_value_leaves_a_trace() {
    // librdkafka takes a million bytes.
    let large = vec![b'x'; 2_000_000];
    let bare = (Some(b"t[0]@7".to_vec()), Some("key,headers,value".to_owned()), OURS + 1);
    let case = Case::new();
    case.send(Some(&large), b"small").await;
    assert_eq!(case.last(), bare);
    case.send(Some(b"small"), &large).await;
    assert_eq!(case.last(), bare);
    case.send(Some(b"small"), b"small").await;
    assert_eq!(case.last(), (Some(b"small".to_vec()), None, OURS + 1));
    assert!(!case.refused());
}

/// A compacted topic refuses messages without a key.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_the_broker_refuses_gets_a_key_or_is_counted() {
    let case = Case::new();
    let refuse = |times: usize| {
        case.mock.request_errors(RDKafkaApiKey::Produce, &vec![Raw::RD_KAFKA_RESP_ERR_INVALID_RECORD; times]);
    };
    // As it is, in a batch and alone.
    refuse(2);
    case.send(None, b"small").await;
    assert_eq!(case.last(), (Some(b"t[0]@7".to_vec()), None, OURS + 1));
    assert!(!case.refused());
    // With a key, and with the headers of a letter only.
    refuse(4);
    case.send(None, b"small").await;
    assert!(case.refused());
}
