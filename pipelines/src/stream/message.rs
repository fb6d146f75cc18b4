//! Messages of one partition, as the consumer reads them.

use std::{fmt, ops::Range, sync::Arc};

/// A partition of a topic.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicPartition {
    /// Name of the topic.
    pub topic: Arc<str>,
    /// Number of the partition.
    pub partition: i32,
}

impl TopicPartition {
    /// Partition `partition` of `topic`.
    pub fn new(topic: impl Into<Arc<str>>, partition: i32) -> Self {
        Self { topic: topic.into(), partition }
    }
}

/// `reviews[3]`, as librdkafka writes it.
impl fmt::Display for TopicPartition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.topic, self.partition)
    }
}

/// A header: its name, and its value unless that is null.
pub type Header = (String, Option<Vec<u8>>);

/// Messages of one partition in the order of their offsets. Keys and values share one buffer.
#[derive(Debug, Clone)]
pub struct Messages {
    /// Where they are from.
    pub source: TopicPartition,
    /// The offset at which the next messages begin: above that of the last message, since compaction and transactions
    /// leave offsets out.
    pub end: i64,
    rows: Vec<Row>,
    bytes: Vec<u8>,
    header_bytes: usize,
}

#[derive(Debug, Clone)]
struct Row {
    offset: i64,
    timestamp: Option<i64>,
    key: Option<Range<usize>>,
    value: Option<Range<usize>>,
    headers: Box<[Header]>,
}

/// One message, borrowed from [`Messages`] or from the consumer.
#[derive(Debug, Clone, Copy)]
pub struct Message<'m> {
    /// Its offset.
    pub offset: i64,
    /// Its time in milliseconds since 1970, if the broker gave one.
    pub timestamp: Option<i64>,
    /// Its key.
    pub key: Option<&'m [u8]>,
    /// Its value; `None` for a tombstone.
    pub value: Option<&'m [u8]>,
    /// Its headers.
    pub headers: &'m [Header],
}

impl Messages {
    /// No messages yet: the first is at `start` or above.
    pub fn new(source: TopicPartition, start: i64) -> Self {
        Self { source, end: start, rows: Vec::new(), bytes: Vec::new(), header_bytes: 0 }
    }

    /// Adds a message, which comes after all others.
    pub fn push(&mut self, message: Message<'_>) {
        debug_assert!(message.offset >= self.end, "offsets go up");
        let key = message.key.map(|key| self.copy(key));
        let value = message.value.map(|value| self.copy(value));
        let headers: Box<[Header]> = message.headers.into();
        let size = |(name, value): &Header| name.len() + value.as_ref().map_or(0, Vec::len);
        self.header_bytes += headers.iter().map(size).sum::<usize>();
        self.rows.push(Row { offset: message.offset, timestamp: message.timestamp, key, value, headers });
        self.end = message.offset.saturating_add(1);
    }

    fn copy(&mut self, bytes: &[u8]) -> Range<usize> {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        start..self.bytes.len()
    }

    /// A copy of the messages in this range, which is not empty. It ends as the whole does if it has the last message.
    pub fn part(&self, range: Range<usize>) -> Self {
        let is_last = range.end == self.len();
        let mut part = Self::new(self.source.clone(), self.rows[range.start].offset);
        range.for_each(|index| part.push(self.get(index)));
        part.end = if is_last { self.end } else { part.end };
        part
    }

    /// The offset of the first message.
    pub fn first_offset(&self) -> Option<i64> {
        self.rows.first().map(|row| row.offset)
    }

    /// Number of messages.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Memory that they take, in bytes.
    pub fn size(&self) -> usize {
        self.bytes.len() + self.header_bytes + self.rows.len() * size_of::<Row>()
    }

    /// Message `index`.
    ///
    /// # Panics
    /// When there is no such message.
    pub fn get(&self, index: usize) -> Message<'_> {
        let row = &self.rows[index];
        Message {
            offset: row.offset,
            timestamp: row.timestamp,
            key: row.key.clone().map(|range| &self.bytes[range]),
            value: row.value.clone().map(|range| &self.bytes[range]),
            headers: &row.headers,
        }
    }

    /// All messages in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Message<'_>> {
        (0..self.len()).map(|index| self.get(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were_pushed() {
        let mut messages = Messages::new(TopicPartition::new("reviews", 3), 7);
        assert!(messages.is_empty() && messages.end == 7);
        let headers = [("trace".to_owned(), None), ("kind".to_owned(), Some(b"a".to_vec()))];
        let first = Message { offset: 7, timestamp: Some(12), key: Some(b"k"), value: None, headers: &headers };
        let second = Message { offset: 9, timestamp: None, key: None, value: Some(b""), headers: &[] };
        messages.push(first);
        messages.push(second);
        assert_eq!((messages.len(), messages.end, messages.source.to_string().as_str()), (2, 10, "reviews[3]"));
        let all: Vec<_> = messages.iter().map(|m| (m.offset, m.timestamp, m.key, m.value, m.headers.len())).collect();
        assert_eq!(all, [(7, Some(12), Some(&b"k"[..]), None, 2), (9, None, None, Some(&b""[..]), 0)]);
    }
}
