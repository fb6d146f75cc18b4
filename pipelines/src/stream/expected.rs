//! How much memory the vectors of messages will take.
//!
//! With a vector per message that is known. With one per token it depends on the texts, so it is learned from the vectors
//! that the messages before have got.

use std::ops::Range;

use super::Messages;
use crate::stage::Stage;

/// Tokens of a byte of a message, before any are known: words of one letter with a space. English has one in 5 bytes, but
/// too many messages in the stage take more memory than there is.
const FIRST: f64 = 0.5;
/// Lower bound of the estimate: the first batches of English text after messages without text exceed their bound by a factor of
/// two only.
const LEAST: f64 = 0.1;
/// A larger density counts at once, a smaller one as one of so many.
const SLOWNESS: f64 = 8.0;

/// What is expected of the messages of one partition.
#[derive(Debug, Clone)]
pub(super) struct Expected {
    /// Bytes of the vectors of a message, whatever its text.
    of_message: u64,
    /// Bytes of the vectors of a token.
    of_token: u64,
    /// Tokens of a byte of a message.
    density: f64,
}

impl Expected {
    /// Expects what `stage` says of its output.
    pub(super) fn new(stage: &dyn Stage) -> Self {
        Self { of_message: stage.output_bytes(1, 0), of_token: stage.output_bytes(0, 1), density: FIRST }
    }

    /// Bytes of the vectors of so many messages, whose values have so many bytes.
    fn vectors(&self, messages: usize, bytes: usize) -> u64 {
        let tokens = (bytes as f64 * self.density).ceil() as u64;
        (messages as u64).saturating_mul(self.of_message).saturating_add(tokens.saturating_mul(self.of_token))
    }

    /// Bytes that messages take until they are written: twice themselves, as they come and as columns, and their vectors.
    pub(super) fn bytes(&self, messages: &Messages) -> u64 {
        2 * messages.size() as u64 + self.vectors(messages.len(), value_bytes(messages, 0..messages.len()))
    }

    /// The end of a batch that begins with message `from`: as many messages as have vectors of at most `most` bytes, and at
    /// least one.
    pub(super) fn cut(&self, messages: &Messages, from: usize, most: u64) -> usize {
        let mut bytes = 0;
        let fits = |message: &usize| {
            bytes += value_bytes(messages, *message..message + 1);
            self.vectors(message + 1 - from, bytes) <= most
        };
        let fitting = (from..messages.len()).take_while(fits).count();
        from + fitting.max(1)
    }

    /// Learns from messages, whose vectors take so many bytes.
    pub(super) fn learn(&mut self, messages: &Messages, vectors: u64) {
        let bytes = value_bytes(messages, 0..messages.len());
        if self.of_token == 0 || bytes == 0 {
            return;
        }
        let of_messages = self.of_message.saturating_mul(messages.len() as u64);
        let density = vectors.saturating_sub(of_messages) as f64 / self.of_token as f64 / bytes as f64;
        let change = density - self.density;
        self.density = (self.density + if change > 0.0 { change } else { change / SLOWNESS }).max(LEAST);
    }
}

/// Bytes of the values of messages.
fn value_bytes(messages: &Messages, range: Range<usize>) -> usize {
    range.filter_map(|index| messages.get(index).value).map(<[u8]>::len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Message, TopicPartition};

    fn expected(of_message: u64, of_token: u64) -> Expected {
        Expected { of_message, of_token, density: FIRST }
    }

    fn messages(lengths: &[usize]) -> Messages {
        let mut messages = Messages::new(TopicPartition::new("t", 0), 0);
        for (offset, length) in (0..).zip(lengths) {
            let text = "a".repeat(*length);
            messages.push(Message { offset, timestamp: None, key: None, value: Some(text.as_bytes()), headers: &[] });
        }
        messages
    }

    /// The ends of all batches.
    fn cuts(expected: &Expected, messages: &Messages, most: u64) -> Vec<usize> {
        let mut ends = Vec::new();
        while ends.last() != Some(&messages.len()) {
            ends.push(expected.cut(messages, ends.last().copied().unwrap_or(0), most));
        }
        ends
    }

    /// By hand: ten vectors of 100 bytes are 1,000 bytes.
    #[test]
    fn with_a_vector_per_message_texts_do_not_count() {
        let (mut expected, messages) = (expected(100, 0), messages(&[1000; 10]));
        assert_eq!(cuts(&expected, &messages, 1000), [10]);
        assert_eq!(cuts(&expected, &messages, 450), [4, 8, 10]);
        assert_eq!(cuts(&expected, &messages, 0), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(expected.bytes(&messages), 2 * messages.size() as u64 + 1000);
        expected.learn(&messages, 7);
        assert_eq!(cuts(&expected, &messages, 1000), [10]);
    }

    /// By hand: at first 10 bytes are 5 tokens, with vectors of 500 bytes, and 100 bytes 50 tokens, more than a batch may have.
    #[test]
    fn with_vectors_per_token_batches_end_by_the_bytes_of_messages() {
        let (expected, messages) = (expected(0, 100), messages(&[10, 10, 10, 100, 10, 10]));
        assert_eq!(cuts(&expected, &messages, 7500), [6]);
        assert_eq!(cuts(&expected, &messages, 1000), [2, 3, 4, 6]);
        assert_eq!(expected.bytes(&messages), 2 * messages.size() as u64 + 7500);
    }

    /// By hand: 100 bytes with 80 tokens are 0.8 per byte at once, more than the half that was expected; with 24 tokens, 0.24,
    /// it is an eighth of the way there: 0.8 - 0.56 / 8 = 0.73.
    #[test]
    fn what_is_expected_follows_what_was_seen() {
        let (mut expected, messages) = (expected(0, 100), messages(&[50, 50]));
        expected.learn(&messages, 8000);
        assert_eq!(expected.vectors(2, 100), 8000);
        expected.learn(&messages, 2400);
        assert_eq!(expected.vectors(2, 100), 7300);
        (0..100).for_each(|_| expected.learn(&messages, 0));
        // A tenth of 100.
        assert_eq!(expected.vectors(2, 100), 1000);
    }
}
