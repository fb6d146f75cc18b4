//! Records for the dead-letter topic: the message as it was, where it came from, and why it is there.

use super::rejection::Rejection;
use crate::stream::{Header, Message, TopicPartition};

/// Name of the header with the topic.
pub const TOPIC: &str = "elmo.source.topic";
/// Name of the header with the partition.
pub const PARTITION: &str = "elmo.source.partition";
/// Name of the header with the offset.
pub const OFFSET: &str = "elmo.source.offset";
/// Name of the header with the time in milliseconds since 1970.
pub const TIMESTAMP: &str = "elmo.source.timestamp";
/// Name of the header with the label of the rejection.
pub const LABEL: &str = "elmo.error.label";
/// Name of the header that says what was left out, because the broker does not take the message with it: `value`, or
/// `key,headers,value`.
pub const DROPPED: &str = "elmo.dropped";
/// Name of the header with the reason.
pub const ERROR: &str = "elmo.error";

/// A record to be produced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetter<'m> {
    /// Key of the message.
    pub key: Option<&'m [u8]>,
    /// Its value.
    pub value: Option<&'m [u8]>,
    /// Its headers, and after them those of this module. A message that came from a dead-letter topic has them twice: the
    /// last ones count.
    pub headers: Vec<Header>,
    /// Offset of the message.
    offset: i64,
    /// Number of headers of the message.
    own: usize,
}

impl<'m> DeadLetter<'m> {
    /// The record for a rejected message of `source`.
    pub fn new(source: &TopicPartition, message: Message<'m>, rejection: &Rejection) -> Self {
        let mut headers = message.headers.to_vec();
        let mut add = |name: &str, value: String| headers.push((name.to_owned(), Some(value.into_bytes())));
        add(TOPIC, source.topic.to_string());
        add(PARTITION, source.partition.to_string());
        add(OFFSET, message.offset.to_string());
        if let Some(timestamp) = message.timestamp {
            add(TIMESTAMP, timestamp.to_string());
        }
        add(LABEL, rejection.label().to_owned());
        add(ERROR, rejection.to_string());
        Self { key: message.key, value: message.value, headers, offset: message.offset, own: message.headers.len() }
    }

    /// Offset of the message.
    pub fn offset(&self) -> i64 {
        self.offset
    }

    /// The record with `key`, if it has none: a compacted topic takes no message without a key.
    #[must_use]
    pub fn with_key(&self, key: &'m [u8]) -> Option<Self> {
        self.key.is_none().then(|| Self { key: Some(key), ..self.clone() })
    }

    /// The record without the value; `None` where there is none.
    #[must_use]
    pub fn without_value(&self) -> Option<Self> {
        self.value.filter(|value| !value.is_empty())?;
        let dropped = (DROPPED.to_owned(), Some(b"value".to_vec()));
        let headers = self.headers.iter().cloned().chain([dropped]).collect();
        Some(Self { value: Some(b""), headers, ..self.clone() })
    }

    /// The record with `key`, and nothing of the message but where it is and why it was rejected.
    #[must_use]
    pub fn bare<'k>(&self, key: &'k [u8]) -> DeadLetter<'k> {
        let Self { offset, own, .. } = *self;
        let dropped = (DROPPED.to_owned(), Some(b"key,headers,value".to_vec()));
        let headers = self.headers[own..].iter().cloned().chain([dropped]).collect();
        DeadLetter { key: Some(key), value: Some(b""), headers, offset, own: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_letter_is_the_message_with_its_origin() {
        let own = [("trace".to_owned(), None)];
        let message = Message { offset: 42, timestamp: Some(7), key: Some(b"k"), value: Some(b"\xff"), headers: &own };
        let rejection = Rejection::NotUtf8 { valid_up_to: 0, bytes: 1 };
        let letter = DeadLetter::new(&TopicPartition::new("reviews", 3), message, &rejection);
        assert_eq!((letter.key, letter.value), (message.key, message.value));
        let shown: Vec<_> = letter.headers.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
        let expected: [(&str, Option<&[u8]>); 7] = [
            ("trace", None),
            ("elmo.source.topic", Some(b"reviews")),
            ("elmo.source.partition", Some(b"3")),
            ("elmo.source.offset", Some(b"42")),
            ("elmo.source.timestamp", Some(b"7")),
            ("elmo.error.label", Some(b"not_utf8")),
            ("elmo.error", Some(b"not UTF-8: invalid at byte 0 of 1")),
        ];
        assert_eq!(shown, expected);
        let tombstone = Message { value: None, timestamp: None, headers: &[], ..message };
        let letter = DeadLetter::new(&TopicPartition::new("reviews", 3), tombstone, &Rejection::Tombstone);
        assert_eq!((letter.value, letter.headers.len()), (None, 5));
    }
}
