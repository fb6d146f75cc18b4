//! The producer of the dead-letter topic, for streams whose output is files.
//!
//! A dead letter is acknowledged by all replicas before the file that leaves its message out is written. After a crash it
//! may be there twice; topic, partition and offset in its headers tell.

use std::{sync::Arc, time::Duration};

use futures::future::{join_all, try_join_all};
use rdkafka::{
    ClientConfig,
    error::{KafkaError, RDKafkaErrorCode},
    message::{Header, OwnedHeaders},
    producer::{FutureProducer, FutureRecord},
};
use tokio::sync::OnceCell;

use super::{
    StreamError, TopicPartition,
    decode::DeadLetter,
    finished::Rows,
    metrics::Metrics,
    source::{Logs, Settings},
};
use crate::redact::redact;

/// Sends dead letters.
#[derive(Clone)]
pub(super) struct DeadLetters {
    producer: FutureProducer<Logs>,
    /// Sends each message in a batch of its own; made when it is needed.
    alone: Arc<OnceCell<FutureProducer<Logs>>>,
    config: Arc<ClientConfig>,
    logs: Logs,
    topic: String,
    metrics: Arc<Metrics>,
}

impl std::fmt::Debug for DeadLetters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeadLetters").field("topic", &self.topic).finish_non_exhaustive()
    }
}

impl DeadLetters {
    /// Connects to the brokers.
    ///
    /// # Errors
    /// [`StreamError::Broker`] when the settings are refused.
    pub(super) fn new(kafka: &Settings, topic: &str, metrics: Arc<Metrics>) -> Result<Self, StreamError> {
        let (mut config, logs) = (kafka.producer(), kafka.logs());
        // Zero means without a limit: a broker that is away is waited for, with the partition paused.
        config.set("enable.idempotence", "true").set("message.timeout.ms", "0");
        let producer = config.create_with_context(logs.clone()).map_err(|e| broken(topic, &e))?;
        config.set("batch.num.messages", "1");
        let (alone, config, topic) = (Arc::default(), Arc::new(config), topic.to_owned());
        Ok(Self { producer, alone, config, logs, topic, metrics })
    }

    /// Sends the dead letters of a batch, and waits until all are acknowledged.
    ///
    /// # Errors
    /// [`StreamError::Broker`] when the broker refuses one for good.
    pub(super) async fn send(&self, source: &TopicPartition, rows: &Rows) -> Result<(), StreamError> {
        let letters = rows.dead.iter().map(|(row, rejection)| async move {
            let letter = DeadLetter::new(source, rows.messages.get(*row), rejection);
            let sent = try_send(&self.producer, &self.topic, &letter).await;
            (letter, sent)
        });
        let again = join_all(letters).await.into_iter().map(|(letter, sent)| async move {
            match sent {
                // The limit of a topic is one of batches, and others were in the same batch.
                Err(error) if is_refused(&error) => self.send_alone(source, letter).await,
                sent => sent.map_err(|e| broken(&self.topic, &e)),
            }
        });
        try_join_all(again).await.map(drop)
    }

    /// Sends a letter that the broker refuses as it is, with less and less of the message. The headers of a letter say where
    /// the message is, and must not be missed.
    async fn send_alone(&self, source: &TopicPartition, letter: DeadLetter<'_>) -> Result<(), StreamError> {
        let create = || async { self.config.create_with_context(self.logs.clone()) };
        let producer = self.alone.get_or_try_init(create).await.map_err(|e| broken(&self.topic, &e))?;
        let (offset, key) = (letter.offset(), format!("{source}@{}", letter.offset()));
        let (keyed, less) = (letter.with_key(key.as_bytes()), letter.without_value());
        let bare = letter.bare(key.as_bytes());
        for letter in [Some(letter), keyed, less, Some(bare)].into_iter().flatten() {
            match try_send(producer, &self.topic, &letter).await {
                Err(error) if is_refused(&error) => {}
                sent => return sent.map_err(|e| broken(&self.topic, &e)),
            }
        }
        self.metrics.dead_letter_refused();
        let topic = &self.topic;
        tracing::error!(%source, offset, topic, "the dead-letter topic does not even take the headers of this message");
        Ok(())
    }
}

async fn try_send(producer: &FutureProducer<Logs>, topic: &str, letter: &DeadLetter<'_>) -> Result<(), KafkaError> {
    let with = |headers: OwnedHeaders, (key, value): &(String, Option<Vec<u8>>)| {
        headers.insert(Header { key, value: value.as_deref() })
    };
    let headers = letter.headers.iter().fold(OwnedHeaders::new_with_capacity(letter.headers.len()), with);
    let mut record: FutureRecord<'_, [u8], [u8]> = FutureRecord::to(topic).headers(headers);
    (record.key, record.payload) = (letter.key, letter.value);
    producer.send(record, Duration::MAX).await.map(drop).map_err(|(error, _)| error)
}

/// Whether a message is refused for what is in it: its size, or that it has no key, for a compacted topic.
fn is_refused(error: &KafkaError) -> bool {
    use RDKafkaErrorCode::{InvalidMessageSize, InvalidRecord, MessageSizeTooLarge};
    matches!(error.rdkafka_error_code(), Some(MessageSizeTooLarge | InvalidMessageSize | InvalidRecord))
}

fn broken(topic: &str, error: &KafkaError) -> StreamError {
    StreamError::Broker {
        what: format!("write to the dead-letter topic {topic}"),
        reason: redact(&error.to_string()),
        help: Some("check that the topic exists and that the user may write to it".to_owned()),
    }
}
