//! Questions of a process that is no member of its group.

use rdkafka::{
    consumer::{BaseConsumer, Consumer as _, ConsumerContext, ConsumerGroupMetadata},
    error::KafkaError,
};

use super::{
    describe::{self, TIMEOUT},
    event::{Hint, Start},
    faults,
    logs::Logs,
    offsets,
    settings::Settings,
};
use crate::stream::{StreamError, TopicPartition};

impl ConsumerContext for Logs {}

/// Settings of members, which librdkafka also checks against each other, by the protocol of the group.
const MEMBERSHIP: [&str; 6] = [
    "group.instance.id",
    "group.protocol",
    "group.remote.assignor",
    "session.timeout.ms",
    "heartbeat.interval.ms",
    "max.poll.interval.ms",
];

/// Asks for the offsets of a group, and never joins it. Questions block the thread.
pub(in crate::stream) struct Observer {
    consumer: BaseConsumer<Logs>,
    settings: Settings,
}

impl Observer {
    /// Connects when it is asked something.
    ///
    /// # Errors
    /// [`StreamError::Settings`] when librdkafka refuses the settings.
    pub(in crate::stream) fn new(settings: &Settings) -> Result<Self, StreamError> {
        // Offsets of a transaction that is open do not count yet, and nobody waits for its end.
        Ok(Self { consumer: consumer(settings, Some("read_uncommitted"))?, settings: settings.clone() })
    }

    /// What the group has committed for each of `partitions`.
    ///
    /// # Errors
    /// [`StreamError::Broker`] when the brokers refuse or do not answer.
    pub(super) fn hints(&self, partitions: &[TopicPartition]) -> Result<Vec<Hint>, StreamError> {
        let hints = describe::committed(&self.consumer, partitions);
        let failed = |error: KafkaError| {
            faults::kafka(format!("group {}", self.settings.group()), &error, &self.settings.scrubber())
        };
        hints.map_err(failed)
    }

    /// The offset that the group has committed for each of `partitions`.
    ///
    /// # Errors
    /// As [`Observer::hints`].
    pub(in crate::stream) fn committed(&self, partitions: &[TopicPartition]) -> Result<Vec<Option<i64>>, StreamError> {
        let offset = |hint| match hint {
            Hint::At { offset, .. } => Ok(Some(offset)),
            Hint::None => Ok(None),
            Hint::Unknown(reason) => Err(StreamError::Broker {
                what: format!("offsets of group {}", self.settings.group()),
                reason: self.settings.scrub(&reason),
                help: None,
            }),
        };
        self.hints(partitions)?.into_iter().map(offset).collect()
    }

    /// By this, brokers take the offsets of a transaction for those of a client that is no member of the group: they accept
    /// them whether the group has members or not.
    pub(in crate::stream) fn metadata(&self) -> Option<ConsumerGroupMetadata> {
        self.consumer.group_metadata()
    }
}

/// A consumer that has neither a member's id nor a name.
fn consumer(settings: &Settings, isolation: Option<&str>) -> Result<BaseConsumer<Logs>, StreamError> {
    let mut config = settings.consumer(0);
    config.set("statistics.interval.ms", "0");
    for name in MEMBERSHIP {
        config.remove(name);
    }
    if let Some(isolation) = isolation {
        config.set("isolation.level", isolation);
    }
    config.create_with_context(settings.logs()).map_err(|error| settings.refused(&error))
}

/// Asks where partitions begin, without joining the group.
///
/// # Errors
/// As [`describe()`](super::describe()).
pub async fn first_offsets(
    settings: &Settings,
    partitions: &[TopicPartition],
    start: Start,
) -> Result<Vec<i64>, StreamError> {
    let (settings, partitions) = (settings.clone(), partitions.to_vec());
    let asked = tokio::task::spawn_blocking(move || ask_first(&settings, &partitions, start)).await;
    asked.map_err(|_| StreamError::Broker {
        what: "the brokers".into(),
        reason: "the question was interrupted".into(),
        help: None,
    })?
}

fn ask_first(settings: &Settings, partitions: &[TopicPartition], start: Start) -> Result<Vec<i64>, StreamError> {
    let consumer = consumer(settings, None)?;
    let failed = |what: String, error: &KafkaError| faults::kafka(what, error, &settings.scrubber());
    let range = |partition: &TopicPartition| {
        let range = consumer.fetch_watermarks(&partition.topic, partition.partition, TIMEOUT);
        range.map_err(|error| failed(format!("first and last offset of {partition}"), &error))
    };
    // Before the times: what arrives in between is not skipped.
    let ranges = partitions.iter().map(range).collect::<Result<Vec<_>, _>>()?;
    let of_time = match start {
        Start::Timestamp(time) => offsets::at_time(&consumer, partitions, time, TIMEOUT)
            .map_err(|error| failed("offsets for a time".into(), &error))?,
        _ => vec![None; partitions.len()],
    };
    Ok(ranges.into_iter().zip(of_time).map(|(range, of_time)| start.offset(range, of_time)).collect())
}
