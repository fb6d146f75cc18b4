//! Questions to the brokers about offsets. They wait for the answer.

use std::{collections::HashMap, time::Duration};

use rdkafka::{
    Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext},
    error::{KafkaError, KafkaResult},
};

use super::event::Hint;
use crate::stream::TopicPartition;

pub(super) fn partitions(list: &TopicPartitionList) -> Vec<TopicPartition> {
    list.elements().iter().map(|element| TopicPartition::new(element.topic(), element.partition())).collect()
}

pub(super) fn list(partitions: &[TopicPartition]) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for partition in partitions {
        list.add_partition(&partition.topic, partition.partition);
    }
    list
}

/// What the group has committed for each of `partitions`, one of which may be there several times.
pub(super) fn committed<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[TopicPartition],
    timeout: Duration,
) -> KafkaResult<Vec<Hint>> {
    let mut distinct = partitions.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let answers = consumer.committed_offsets(list(&distinct), timeout)?;
    let mut hints = HashMap::with_capacity(partitions.len());
    for (element, metadata) in answers.elements().iter().zip(metadata(&answers)) {
        let hint = match (element.error(), element.offset()) {
            (Err(error), _) => Hint::Unknown(error.to_string()),
            (Ok(()), Offset::Offset(offset)) => Hint::At { offset, metadata },
            (Ok(()), _) => Hint::None,
        };
        hints.insert(TopicPartition::new(element.topic(), element.partition()), hint);
    }
    Ok(partitions.iter().map(|partition| hints.get(partition).cloned().unwrap_or(Hint::None)).collect())
}

/// The texts that were committed with offsets. rdkafka's own way panics when one is not UTF-8.
fn metadata(list: &TopicPartitionList) -> Vec<String> {
    let (elements, count) = {
        // SAFETY: a list has `cnt` elements at `elems`, and lives as long as `list`.
        let list = unsafe { &*list.ptr() };
        (list.elems, usize::try_from(list.cnt).unwrap_or(0))
    };
    let text = |at: usize| {
        // SAFETY: as above; the metadata has `metadata_size` bytes.
        unsafe {
            let element = &*elements.add(at);
            if element.metadata.is_null() || element.metadata_size == 0 {
                return String::new();
            }
            let bytes = std::slice::from_raw_parts(element.metadata.cast::<u8>(), element.metadata_size);
            String::from_utf8_lossy(bytes).into_owned()
        }
    };
    (0..count).map(text).collect()
}

/// For each of `partitions`, the offset of its first message of `time` or later, in milliseconds since 1970.
pub(super) fn at_time<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[TopicPartition],
    time: i64,
    timeout: Duration,
) -> KafkaResult<Vec<Option<i64>>> {
    let mut times = TopicPartitionList::with_capacity(partitions.len());
    for partition in partitions {
        times.add_partition_offset(&partition.topic, partition.partition, Offset::Offset(time))?;
    }
    let answers = consumer.offsets_for_times(times, timeout)?;
    let offset = |partition: &TopicPartition| {
        let answer = answers.find_partition(&partition.topic, partition.partition);
        let answer = answer.ok_or(KafkaError::NoMessageReceived)?;
        answer.error()?;
        Ok(match answer.offset() {
            Offset::Offset(offset) => Some(offset),
            _ => None,
        })
    };
    partitions.iter().map(offset).collect()
}
