//! The producer of the dead-letter topic, for streams whose output is files.
//!
//! A dead letter is acknowledged by all replicas before the file that leaves its message out is written. After a crash it
//! may be there twice; topic, partition and offset in its headers tell.

use std::time::Duration;

use rdkafka::{
    ClientConfig,
    error::{KafkaError, RDKafkaErrorCode},
    message::{Header, OwnedHeaders},
    producer::{FutureProducer, FutureRecord},
};

use super::{
    StreamError, TopicPartition,
    decode::{DeadLetter, dead_letter},
    finished::Rows,
};
use crate::redact::redact;

/// Sends dead letters.
#[derive(Clone)]
pub(super) struct DeadLetters {
    producer: FutureProducer,
    topic: String,
}

impl std::fmt::Debug for DeadLetters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeadLetters").field("topic", &self.topic).finish_non_exhaustive()
    }
}

impl DeadLetters {
    /// Connects to the brokers of `config`.
    ///
    /// # Errors
    /// [`StreamError::Broker`] when the settings are refused.
    pub(super) fn new(config: &ClientConfig, topic: &str) -> Result<Self, StreamError> {
        let mut config = config.clone();
        // Zero means without a limit: a broker that is away is waited for, with the partition paused.
        config.set("enable.idempotence", "true").set("message.timeout.ms", "0");
        let producer = config.create().map_err(|e| broken(topic, &e))?;
        Ok(Self { producer, topic: topic.to_owned() })
    }

    /// Sends the dead letters of a batch, and waits until all are acknowledged.
    ///
    /// # Errors
    /// [`StreamError::Broker`] when the broker refuses one for good.
    pub(super) async fn send(&self, source: &TopicPartition, rows: &Rows) -> Result<(), StreamError> {
        let letters = rows.dead.iter().map(|(row, rejection)| {
            let letter = DeadLetter::new(source, rows.messages.get(*row), rejection);
            self.send_one(letter)
        });
        futures::future::try_join_all(letters).await.map(drop)
    }

    async fn send_one(&self, letter: DeadLetter<'_>) -> Result<(), StreamError> {
        match self.try_send(&letter).await {
            // Its headers say where the message is.
            Err(error) if is_too_large(&error) => {
                let mut headers = letter.headers;
                headers.push((dead_letter::DROPPED.to_owned(), Some(b"value".to_vec())));
                let letter = DeadLetter { value: Some(b""), headers, ..letter };
                self.try_send(&letter).await.map_err(|e| broken(&self.topic, &e))
            }
            sent => sent.map_err(|e| broken(&self.topic, &e)),
        }
    }

    async fn try_send(&self, letter: &DeadLetter<'_>) -> Result<(), KafkaError> {
        let with = |headers: OwnedHeaders, (key, value): &(String, Option<Vec<u8>>)| {
            headers.insert(Header { key, value: value.as_deref() })
        };
        let headers = letter.headers.iter().fold(OwnedHeaders::new_with_capacity(letter.headers.len()), with);
        let mut record: FutureRecord<'_, [u8], [u8]> = FutureRecord::to(&self.topic).headers(headers);
        (record.key, record.payload) = (letter.key, letter.value);
        self.producer.send(record, Duration::MAX).await.map(drop).map_err(|(error, _)| error)
    }
}

fn is_too_large(error: &KafkaError) -> bool {
    let code = error.rdkafka_error_code();
    matches!(code, Some(RDKafkaErrorCode::MessageSizeTooLarge | RDKafkaErrorCode::InvalidMessageSize))
}

fn broken(topic: &str, error: &KafkaError) -> StreamError {
    StreamError::Broker {
        what: format!("write to the dead-letter topic {topic}"),
        reason: redact(&error.to_string()),
        help: Some("check that the topic exists and that the user may write to it".to_owned()),
    }
}
