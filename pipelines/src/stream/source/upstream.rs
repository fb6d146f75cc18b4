//! The consumer as the job sees it.

use std::{collections::HashSet, sync::Arc, time::Duration};

use async_trait::async_trait;

use super::{Epoch, Hint, NotCommitted, Source, Start, Statistics};
use crate::stream::{StreamError, TopicPartition};

/// What the job needs of a [`Source`]. Tests implement it without brokers.
#[async_trait]
pub trait Upstream: Send + Sync {
    /// As [`Source::seek`].
    fn seek(&self, partition: &TopicPartition, epoch: Epoch, start: Start);

    /// As [`Source::paused`].
    fn paused(&self) -> HashSet<TopicPartition>;

    /// The newest statistics.
    fn statistics(&self) -> Arc<Statistics>;

    /// Whether the consumer polls.
    fn is_alive(&self) -> bool;

    /// Whether the group has accepted this process without an event: brokers of KIP-848 have nothing to say to a member
    /// without partitions.
    fn joined_silently(&self) -> bool;

    /// How long the consumer waits for the answer to an event.
    fn patience(&self) -> Duration;

    /// As [`Ownership::commit`](super::Ownership::commit).
    ///
    /// # Errors
    /// [`NotCommitted`].
    fn commit(&self, partition: &TopicPartition, epoch: Epoch, offset: i64, metadata: &str)
    -> Result<(), NotCommitted>;

    /// The first offset of a partition, and the offset after its last message.
    ///
    /// # Errors
    /// [`StreamError::Broker`], as for the other questions.
    async fn watermarks(&self, partition: &TopicPartition) -> Result<(i64, i64), StreamError>;

    /// The id of a topic; `None` when the brokers have none.
    ///
    /// # Errors
    /// [`StreamError::Broker`], as for the other questions.
    async fn topic_id(&self, topic: &str) -> Result<Option<String>, StreamError>;

    /// What the group has committed.
    ///
    /// # Errors
    /// [`StreamError::Broker`].
    async fn committed(&self, partition: &TopicPartition) -> Result<Hint, StreamError>;

    /// As [`Source::stop`].
    async fn stop(&self, limit: Duration);
}

#[async_trait]
impl Upstream for Source {
    fn seek(&self, partition: &TopicPartition, epoch: Epoch, start: Start) {
        Self::seek(self, partition, epoch, start);
    }

    fn paused(&self) -> HashSet<TopicPartition> {
        Self::paused(self)
    }

    fn statistics(&self) -> Arc<Statistics> {
        Arc::clone(&Self::statistics(self).borrow())
    }

    fn is_alive(&self) -> bool {
        self.shared.ownership.is_alive()
    }

    fn joined_silently(&self) -> bool {
        let consumer = self.shared.consumer_protocol.then(|| self.shared.ownership.consumer()).flatten();
        consumer.is_some_and(|consumer| super::member::membership(&consumer).is_some())
    }

    fn patience(&self) -> Duration {
        self.shared.patience
    }

    fn commit(
        &self,
        partition: &TopicPartition,
        epoch: Epoch,
        offset: i64,
        metadata: &str,
    ) -> Result<(), NotCommitted> {
        self.shared.ownership.commit(partition, epoch, offset, metadata)
    }

    async fn watermarks(&self, partition: &TopicPartition) -> Result<(i64, i64), StreamError> {
        self.client().watermarks(partition).await
    }

    async fn topic_id(&self, topic: &str) -> Result<Option<String>, StreamError> {
        self.client().topic_id(topic).await
    }

    async fn committed(&self, partition: &TopicPartition) -> Result<Hint, StreamError> {
        let found = self.client().committed(std::slice::from_ref(partition)).await?;
        Ok(found.into_iter().next().unwrap_or(Hint::None))
    }

    async fn stop(&self, limit: Duration) {
        Self::stop(self, limit).await;
    }
}
