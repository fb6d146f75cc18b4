//! Questions to the brokers while the stream runs.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rdkafka::{
    Offset,
    consumer::{Consumer as _, ConsumerGroupMetadata},
    error::{KafkaError, KafkaResult},
};

use super::{
    context::Shared, event::Hint, faults, member::membership, offsets, ownership::Consumer, permissions,
    scrub::Scrubber,
};
use crate::stream::{StreamError, TopicPartition};

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Asks the brokers. Each question runs on a thread for blocking work. Clones share the consumer.
#[derive(Clone)]
pub struct Client(pub(super) Arc<Shared>);

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("brokers", &self.0.brokers).finish_non_exhaustive()
    }
}

impl Client {
    /// What the group has committed for each of `partitions`.
    ///
    /// # Errors
    /// [`StreamError::Broker`], as for the other questions.
    pub async fn committed(&self, partitions: &[TopicPartition]) -> Result<Vec<Hint>, StreamError> {
        let wanted = partitions.to_vec();
        let question = move |consumer: &Consumer| offsets::committed(consumer, &wanted, TIMEOUT);
        self.ask_or(format!("offsets of group {}", self.0.group), question, faults::offsets).await
    }

    /// The offset that the group has committed for each of `partitions`. Blocks the thread, also while a transaction is open
    /// that may change it.
    ///
    /// # Errors
    /// [`StreamError::Broker`], as for the other questions.
    pub fn committed_now(&self, partitions: &[TopicPartition]) -> Result<Vec<Option<i64>>, StreamError> {
        let what = || format!("offsets of group {}", self.0.group);
        let broken = |reason: String| StreamError::Broker { what: what(), reason, help: None };
        let consumer = self.0.ownership.consumer().ok_or_else(|| broken("the consumer has stopped".into()))?;
        let hints = offsets::committed(&consumer, partitions, TIMEOUT);
        let hints = hints.map_err(|error| faults::offsets(what(), &error, &self.0.scrub))?;
        let offset = |hint| match hint {
            Hint::At { offset, .. } => Ok(Some(offset)),
            Hint::None => Ok(None),
            Hint::Unknown(reason) => Err(broken(reason)),
        };
        hints.into_iter().map(offset).collect()
    }

    /// The first offset of a partition, and the offset after its last message.
    ///
    /// # Errors
    /// [`StreamError::Broker`].
    pub async fn watermarks(&self, partition: &TopicPartition) -> Result<(i64, i64), StreamError> {
        let wanted = partition.clone();
        let ask = move |consumer: &Consumer| consumer.fetch_watermarks(&wanted.topic, wanted.partition, TIMEOUT);
        self.ask(format!("first and last offset of {partition}"), ask).await
    }

    /// The id of a topic, which no other topic has, also if it has the same name later; `None` when the brokers have none:
    /// those before Kafka 2.8.
    ///
    /// # Errors
    /// [`StreamError::Broker`].
    pub async fn topic_id(&self, topic: &str) -> Result<Option<String>, StreamError> {
        let name = topic.to_owned();
        self.ask(format!("topic {topic}"), move |consumer| permissions::id_of_topic(consumer, &name)).await
    }

    /// For each of `partitions`, the offset of its first message of `time` or later (milliseconds since 1970), if there
    /// is one.
    ///
    /// # Errors
    /// [`StreamError::Broker`].
    pub async fn offsets_for_time(
        &self,
        partitions: &[TopicPartition],
        time: i64,
    ) -> Result<Vec<Option<i64>>, StreamError> {
        let wanted = partitions.to_vec();
        self.ask("offsets for a time", move |consumer| offsets::at_time(consumer, &wanted, time, TIMEOUT)).await
    }

    /// Number of partitions of a topic.
    ///
    /// # Errors
    /// [`StreamError::Broker`].
    pub async fn partitions(&self, topic: &str) -> Result<usize, StreamError> {
        let name = topic.to_owned();
        let ask = move |consumer: &Consumer| {
            let metadata = consumer.fetch_metadata(Some(&name), TIMEOUT)?;
            Ok(metadata.topics().iter().filter(|t| t.name() == name).map(|t| t.partitions().len()).sum())
        };
        self.ask(format!("topic {topic}"), ask).await
    }

    /// The next offset of each assigned partition that has been read from.
    ///
    /// # Errors
    /// [`StreamError::Broker`].
    pub async fn positions(&self) -> Result<BTreeMap<TopicPartition, i64>, StreamError> {
        let ask = |consumer: &Consumer| {
            let list = consumer.position()?;
            let known = |offset| if let Offset::Offset(offset) = offset { Some(offset) } else { None };
            let elements = list.elements();
            let positions = elements
                .iter()
                .filter_map(|e| Some((TopicPartition::new(e.topic(), e.partition()), known(e.offset())?)));
            Ok(positions.collect())
        };
        self.ask("positions", ask).await
    }

    /// The membership in the group, which a transaction needs for its offsets. `None` while this process is no member: before
    /// it has joined, after the group has removed it, and after the consumer has stopped.
    pub fn group_metadata(&self) -> Option<ConsumerGroupMetadata> {
        let consumer = self.0.ownership.consumer()?;
        // rdkafka's metadata cannot be looked into. No generation returns, so between two equal answers there was no other.
        let before = membership(&consumer)?;
        let metadata = consumer.group_metadata()?;
        (membership(&consumer)? == before).then_some(metadata)
    }

    async fn ask<T: Send + 'static>(
        &self,
        what: impl Into<String>,
        question: impl FnOnce(&Consumer) -> KafkaResult<T> + Send + 'static,
    ) -> Result<T, StreamError> {
        self.ask_or(what, question, faults::kafka).await
    }

    /// As [`Client::ask`]; `fault` says what an error means.
    async fn ask_or<T: Send + 'static>(
        &self,
        what: impl Into<String>,
        question: impl FnOnce(&Consumer) -> KafkaResult<T> + Send + 'static,
        fault: fn(String, &KafkaError, &Scrubber) -> StreamError,
    ) -> Result<T, StreamError> {
        let (what, shared) = (what.into(), Arc::clone(&self.0));
        let stopped = |reason: &str| StreamError::Broker { what: what.clone(), reason: reason.into(), help: None };
        let Some(consumer) = shared.ownership.consumer() else { return Err(stopped("the consumer has stopped")) };
        let answer = tokio::task::spawn_blocking(move || question(&consumer)).await;
        let answer = answer.map_err(|_| stopped("the question was interrupted"))?;
        answer.map_err(|error| fault(what, &error, &self.0.scrub))
    }
}
