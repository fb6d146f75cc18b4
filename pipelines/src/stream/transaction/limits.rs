//! How large the batches of a topic may be. Brokers judge batches, by `max.message.bytes` of the topic, and refuse a whole
//! batch, without a word about which record is too large. So the limit is asked for after the first refusal; from then on,
//! records are judged before they are sent.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::executor::block_on;
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, ResourceSpecifier},
};

use super::{
    producer::{Part, Record},
    refusal::Place,
};
use crate::stream::source::Logs;

/// How long a limit holds. It may be raised while the stream runs.
const HOLDS: Duration = Duration::from_secs(60);
/// How long the brokers are asked for it.
const ASK: Duration = Duration::from_secs(5);

/// The limits of topics that have refused a record for its size.
pub(super) struct Limits {
    known: HashMap<Arc<str>, Limit>,
    /// The producer compresses: only the broker knows how large a record is.
    compressed: bool,
}

struct Limit {
    bytes: usize,
    since: Instant,
}

impl Limits {
    /// For a producer with this configuration.
    pub(super) fn new(config: &ClientConfig) -> Self {
        let codec = ["compression.type", "compression.codec"].into_iter().find_map(|name| config.get(name));
        Self { known: HashMap::new(), compressed: codec.is_some_and(|codec| codec != "none") }
    }

    /// The records that their topics would refuse.
    pub(super) fn exceeded(&self, parts: &[Part]) -> Vec<Place> {
        if self.compressed || self.known.is_empty() {
            return Vec::new();
        }
        let all = parts
            .iter()
            .enumerate()
            .flat_map(|(p, part)| part.records.iter().enumerate().map(move |(r, record)| ((p, r), record)));
        all.filter(|(_, record)| self.is_exceeded(record)).map(|(place, _)| place).collect()
    }

    fn is_exceeded(&self, record: &Record) -> bool {
        let limit = self.known.get(&record.topic).filter(|limit| limit.since.elapsed() < HOLDS);
        limit.is_some_and(|limit| record.alone() > limit.bytes)
    }

    /// A record of the topic was refused for its size, perhaps because of others in its batch: asks for the limit, unless it is
    /// known.
    pub(super) fn ask(&mut self, config: &ClientConfig, logs: &Logs, topic: &Arc<str>) {
        if self.known.get(topic).is_some_and(|limit| limit.since.elapsed() < HOLDS) {
            return;
        }
        match max_message_bytes(config, logs, topic) {
            Some(bytes) => self.set(topic, bytes),
            None => tracing::debug!(%topic, "max.message.bytes is not known; it is found by trial"),
        }
    }

    /// A record was refused alone, so that the limit is below its size.
    pub(super) fn refused_alone(&mut self, record: &Record) {
        let bytes = record.alone().saturating_sub(1);
        if self.known.get(&record.topic).is_none_or(|limit| limit.bytes > bytes || limit.since.elapsed() >= HOLDS) {
            self.set(&record.topic, bytes);
        }
    }

    fn set(&mut self, topic: &Arc<str>, bytes: usize) {
        tracing::info!(%topic, bytes, "the topic takes no larger batches");
        self.known.insert(Arc::clone(topic), Limit { bytes, since: Instant::now() });
    }

    /// Bytes that a batch for any of the topics may have, old limits included.
    pub(super) fn batch(&self) -> usize {
        self.known.values().map(|limit| limit.bytes.max(1)).min().unwrap_or(usize::MAX)
    }
}

/// The setting of a topic; `None` when the brokers do not tell it to this user.
fn max_message_bytes(config: &ClientConfig, logs: &Logs, topic: &str) -> Option<usize> {
    let admin: AdminClient<Logs> = config.create_with_context(logs.clone()).ok()?;
    let options = AdminOptions::new().request_timeout(Some(ASK));
    let answers = block_on(admin.describe_configs(&[ResourceSpecifier::Topic(topic)], &options)).ok()?;
    answers.into_iter().next()?.ok()?.get("max.message.bytes")?.value.as_ref()?.parse().ok()
}

impl Record {
    /// Bytes of a batch with this record alone, uncompressed:
    /// <https://kafka.apache.org/documentation/#messageformat>. The differences of time and offset are zero, a byte each.
    pub(super) fn alone(&self) -> usize {
        const BATCH: usize = 61;
        const ATTRIBUTES_AND_DIFFERENCES: usize = 3;
        let bytes = |bytes: &Option<Vec<u8>>| bytes.as_ref().map_or(1, |bytes| prefixed(bytes.len()));
        let headers: usize = self.headers.iter().map(|(name, value)| prefixed(name.len()) + bytes(value)).sum();
        let record = ATTRIBUTES_AND_DIFFERENCES + bytes(&self.key) + bytes(&self.value) + varint(self.headers.len());
        BATCH + prefixed(record + headers)
    }
}

/// So many bytes behind their number.
fn prefixed(bytes: usize) -> usize {
    varint(bytes) + bytes
}

/// Bytes of a number: zigzag, seven bits in each byte.
fn varint(number: usize) -> usize {
    let bits = (usize::BITS - number.leading_zeros()) as usize + 1;
    bits.div_ceil(7)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: 63 is 126 in zigzag, the last number of seven bits; 8191 is 16382, the last of fourteen.
    fn record(topic: &str, bytes: usize) -> Record {
        let (topic, value, headers) = (topic.into(), Some(vec![b'x'; bytes]), vec![("a".to_owned(), None)]);
        Record {
            topic,
            key: Some(vec![1; 3]),
            value,
            headers,
            timestamp: None,
            offset: 0,
            row: None,
            last_resort: false,
        }
    }

    /// By hand: 61 for the batch; 2 for the length of the record; 3 for attributes and differences; 1 + 3 for the key; 2 + 1000
    /// for the value; 1 for the number of headers; 1 + 1 + 1 for the header.
    #[test]
    fn a_batch_of_one_record_has_a_known_size() {
        assert_eq!(record("out", 1000).alone(), 61 + 2 + 3 + 4 + 1002 + 1 + 3);
    }

    #[test]
    fn a_record_that_was_refused_alone_says_which_others_would_be() {
        let part = |sizes: &[usize]| Part {
            source: crate::stream::TopicPartition::new("in", 0),
            owner: 0,
            epoch: crate::stream::source::testing::epoch(1),
            records: sizes.iter().map(|size| record("out", *size)).chain([record("letters", 9000)]).collect(),
            rows: None,
            end: 9,
        };
        let parts = [part(&[10, 500]), part(&[501, 499, 700])];
        for (codec, exceeded) in [("none", vec![(0, 1), (1, 0), (1, 2)]), ("zstd", Vec::new())] {
            let mut limits = Limits::new(ClientConfig::new().set("compression.type", codec));
            assert!(limits.exceeded(&parts).is_empty());
            limits.refused_alone(&record("out", 600));
            limits.refused_alone(&record("out", 500));
            assert_eq!((limits.exceeded(&parts), limits.batch()), (exceeded, record("out", 499).alone()), "{codec}");
        }
    }

    #[test]
    fn numbers_take_a_byte_for_seven_bits() {
        let sizes: Vec<usize> = [0, 63, 64, 8191, 8192].into_iter().map(varint).collect();
        assert_eq!(sizes, [1, 1, 2, 2, 3]);
    }
}
