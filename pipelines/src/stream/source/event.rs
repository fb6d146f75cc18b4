//! What the consumer tells the job, in order.

use std::{
    collections::HashMap,
    fmt,
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel},
    time::{Duration, Instant},
};

use super::{budget::Permit, ownership::Epoch};
use crate::stream::{Messages, StreamError, TopicPartition};

/// An event of the consumer.
#[derive(Debug)]
pub enum Event {
    /// Partitions were assigned to this process. The consumer waits for the offsets at which they start, up to 30 s;
    /// meanwhile no partition is read. Partitions without an answer by then, or without one in the answer, are paused.
    /// An answer that comes later still counts, and so does [`Source::seek`](super::Source::seek).
    Assign {
        /// The partitions.
        partitions: Vec<Assigned>,
        /// The epoch that they have from now on.
        epoch: Epoch,
        /// Takes their start offsets.
        reply: Reply<Starts>,
    },
    /// Partitions are about to be given away. Their offsets can be committed until the reply, for which the consumer
    /// waits up to 30 s. Messages of them that are still in the channel are to be dropped: the next owner reads them.
    Revoke {
        /// The partitions, with the epochs that end.
        partitions: Vec<(TopicPartition, Epoch)>,
        /// Another process may own them already. Nothing can be committed, and nobody waits for the reply.
        lost: bool,
        /// Says that the job is done with them.
        reply: Reply<()>,
    },
    /// Messages of one partition.
    Messages(Batch),
    /// A [`Source::seek`](super::Source::seek) took effect: the messages of the partition after this event begin at its
    /// new position, all those before it are to be dropped.
    Sought {
        /// The partition.
        partition: TopicPartition,
        /// Its epoch, which a seek does not change.
        epoch: Epoch,
        /// Where it was set.
        start: Start,
    },
    /// The broker no longer has the messages at the position of a partition, or does not have them yet because the topic
    /// was created again. The partition is not read until a [`Source::seek`](super::Source::seek).
    OutOfRange {
        /// The partition.
        partition: TopicPartition,
        /// Its epoch.
        epoch: Epoch,
        /// The offset that was asked for.
        position: i64,
        /// The first offset that the broker has, and the offset after the last one.
        range: (i64, i64),
    },
    /// What the user must know. Each is reported once until the brokers answer again.
    Error {
        /// The error, with what to check.
        error: StreamError,
        /// The consumer cannot go on.
        fatal: bool,
    },
    /// The brokers answer again, after an [`Event::Error`] that said that they do not.
    Connected,
}

/// A partition that was assigned to this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assigned {
    /// The partition.
    pub partition: TopicPartition,
    /// What the group has committed for it.
    pub committed: Hint,
}

/// What a group has committed for a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hint {
    /// Nothing.
    None,
    /// The next offset to read.
    At {
        /// The offset.
        offset: i64,
        /// The text that was committed with it, which may be of another program.
        metadata: String,
    },
    /// The group could not be asked, for this reason.
    Unknown(String),
}

/// Where a partition starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At this offset.
    At(i64),
    /// At the first offset that the broker has.
    Beginning,
    /// After the last message.
    End,
    /// At the first message of this time or later, in milliseconds since 1970; at the end if there is none.
    Timestamp(i64),
}

impl Start {
    /// The offset, in a partition of which the broker has the offsets from `low` to `high`, the high watermark, and
    /// `of_time` is that of the first message of the time or later.
    pub(in crate::stream) fn offset(self, (low, high): (i64, i64), of_time: Option<i64>) -> i64 {
        match self {
            Self::At(offset) => offset,
            Self::Beginning => low,
            Self::End => high,
            Self::Timestamp(_) => of_time.unwrap_or(high),
        }
    }
}

/// Start offsets of partitions.
pub type Starts = HashMap<TopicPartition, Start>;

/// Messages of one partition and the permit for their memory.
#[derive(Debug)]
pub struct Batch {
    /// The messages.
    pub messages: Messages,
    /// The epoch of their partition.
    pub epoch: Epoch,
    /// Returns the memory when dropped.
    pub permit: Permit,
}

/// Sends one answer to the consumer.
pub struct Reply<T>(SyncSender<T>);

impl<T> Reply<T> {
    /// Sends it. An answer that comes too late, or after the consumer has stopped, is not an error.
    pub fn send(self, answer: T) {
        let _ = self.0.try_send(answer);
    }
}

impl<T> fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reply")
    }
}

/// An answer that is awaited.
pub(in crate::stream) struct Answer<T>(Receiver<T>);

/// A reply and its answer.
pub(in crate::stream) fn reply<T>() -> (Reply<T>, Answer<T>) {
    let (sender, receiver) = sync_channel(1);
    (Reply(sender), Answer(receiver))
}

impl<T> Answer<T> {
    /// Waits for it, at most for `limit` and until `stopped`.
    pub(super) fn wait(&self, limit: Duration, stopped: impl Fn() -> bool) -> Option<T> {
        const SLICE: Duration = Duration::from_millis(20);
        let end = Instant::now() + limit;
        while !stopped() {
            let rest = end.saturating_duration_since(Instant::now());
            match self.0.recv_timeout(rest.min(SLICE)) {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Timeout) if rest.is_zero() => return None,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        None
    }

    /// The answer if it has come; an error when none can come any more.
    pub(in crate::stream) fn take(&self) -> Result<Option<T>, NoAnswer> {
        match self.0.try_recv() {
            Ok(answer) => Ok(Some(answer)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(NoAnswer),
        }
    }
}

/// The reply was dropped.
#[derive(Debug)]
pub(in crate::stream) struct NoAnswer;
