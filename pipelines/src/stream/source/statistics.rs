//! The statistics of librdkafka, as far as metrics need them.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;

use crate::stream::TopicPartition;

/// State of the consumer, every `statistics.interval.ms`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The partitions that are assigned to this process.
    pub partitions: BTreeMap<TopicPartition, PartitionStatistics>,
    /// Number of brokers that are connected.
    pub brokers_up: usize,
    /// State of the group membership: `up`, `wait-coord` and so on.
    pub group_state: String,
    /// Rebalances since the start, as librdkafka counts them.
    pub rebalances: u64,
    /// Bytes received from the brokers since the start.
    pub received_bytes: u64,
}

/// State of one partition. `None` is what is not known yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PartitionStatistics {
    /// Offset after the last message that is visible: with `read_committed` the last stable offset.
    pub end: Option<i64>,
    /// The first offset.
    pub low: Option<i64>,
    /// The next offset to be read by this process.
    pub position: Option<i64>,
    /// The next offset to be fetched from the broker.
    pub fetched: Option<i64>,
    /// The offset that the group has committed.
    pub committed: Option<i64>,
    /// Messages that are visible and not read.
    pub lag: Option<i64>,
    /// Messages that librdkafka has fetched ahead.
    pub queued_messages: u64,
    /// Bytes of them.
    pub queued_bytes: u64,
}

impl Statistics {
    /// Parses what librdkafka reports.
    ///
    /// # Errors
    /// When it is not the JSON of librdkafka's `STATISTICS.md`.
    pub(super) fn parse(json: &[u8]) -> serde_json::Result<Self> {
        let raw: Raw = serde_json::from_slice(json)?;
        let mut partitions = BTreeMap::new();
        for (topic, RawTopic { partitions: of_topic }) in raw.topics {
            // Partition -1 is librdkafka's own.
            for (number, partition) in of_topic.into_iter().filter(|(number, p)| *number >= 0 && p.desired) {
                partitions.insert(TopicPartition::new(topic.as_str(), number), partition.into());
            }
        }
        let group = raw.cgrp.unwrap_or_default();
        Ok(Self {
            partitions,
            // The others are connections of librdkafka's own: to find brokers, and to the group's coordinator.
            brokers_up: raw
                .brokers
                .values()
                .filter(|broker| broker.source == "learned" && broker.state == "UP")
                .count(),
            group_state: group.state,
            rebalances: group.rebalance_cnt,
            received_bytes: raw.rx_bytes,
        })
    }
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default)]
    brokers: HashMap<String, RawBroker>,
    #[serde(default)]
    topics: HashMap<String, RawTopic>,
    cgrp: Option<RawGroup>,
    #[serde(default)]
    rx_bytes: u64,
}

#[derive(Deserialize)]
struct RawBroker {
    source: String,
    state: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RawGroup {
    state: String,
    rebalance_cnt: u64,
}

#[derive(Deserialize)]
struct RawTopic {
    partitions: HashMap<i32, RawPartition>,
}

#[derive(Deserialize)]
#[serde(default)]
struct RawPartition {
    desired: bool,
    fetchq_cnt: u64,
    fetchq_size: u64,
    app_offset: i64,
    next_offset: i64,
    committed_offset: i64,
    lo_offset: i64,
    hi_offset: i64,
    ls_offset: i64,
}

impl Default for RawPartition {
    fn default() -> Self {
        Self {
            desired: false,
            fetchq_cnt: 0,
            fetchq_size: 0,
            app_offset: -1,
            next_offset: -1,
            committed_offset: -1,
            lo_offset: -1,
            hi_offset: -1,
            ls_offset: -1,
        }
    }
}

impl From<RawPartition> for PartitionStatistics {
    fn from(raw: RawPartition) -> Self {
        // Negative numbers are librdkafka's names for special offsets, such as unknown.
        let known = |offset: i64| (offset >= 0).then_some(offset);
        let end = known(raw.ls_offset).or(known(raw.hi_offset));
        let position = known(raw.app_offset);
        let lag = end.zip(position).map(|(end, position)| (end - position).max(0));
        Self {
            end,
            low: known(raw.lo_offset),
            position,
            fetched: known(raw.next_offset),
            committed: known(raw.committed_offset),
            lag,
            queued_messages: raw.fetchq_cnt,
            queued_bytes: raw.fetchq_size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_metrics_need_is_parsed() {
        // Shortened from the example in librdkafka's STATISTICS.md.
        let json =
            br#"{"name": "rdkafka#consumer-1", "rx_bytes": 37, "brokers": {"b:1/1": {"state": "UP", "source": "learned",
            "rtt": {"min": 1}}, "b:2/2": {"state": "DOWN", "source": "learned"},
            "GroupCoordinator": {"state": "UP", "source": "logical"}}, "topics": {"test": {"topic": "test", "partitions": {
            "0": {"partition": 0, "desired": true, "fetchq_cnt": 3, "fetchq_size": 40, "app_offset": 10, "next_offset": 13,
                "committed_offset": -1001, "lo_offset": 2, "hi_offset": 25, "ls_offset": 24, "consumer_lag": 9},
            "1": {"partition": 1, "desired": false}, "-1": {"partition": -1, "desired": true}}}},
            "cgrp": {"state": "up", "rebalance_cnt": 4, "assignment_size": 1}}"#;
        let statistics = Statistics::parse(json).unwrap();
        let partition = PartitionStatistics {
            end: Some(24),
            low: Some(2),
            position: Some(10),
            fetched: Some(13),
            committed: None,
            lag: Some(14),
            queued_messages: 3,
            queued_bytes: 40,
        };
        let expected = Statistics {
            partitions: [(TopicPartition::new("test", 0), partition)].into(),
            brokers_up: 1,
            group_state: "up".into(),
            rebalances: 4,
            received_bytes: 37,
        };
        assert_eq!(statistics, expected);
        assert!(Statistics::parse(b"{").is_err());
    }
}
