//! Enriched messages to another topic, in transactions.
//!
//! The rows of all partitions go to one thread, whose transactions commit the rows together with the offsets of the
//! messages they came from. A reader of committed messages sees each row once. The offsets of the consumer group are the
//! record of what is done: a stream continues from them.
//!
//! | file | |
//! |---|---|
//! | `beginning` | where partitions begin |
//! | `encode` | rows to values |
//! | `records` | rows to messages, and what becomes of one that is refused |
//! | `producer` | one transaction: begin, send, commit, abort |
//! | `refusal` | what an error of a transaction means |
//! | `limits` | how large the batches of a topic may be |
//! | `thread` | batches of transactions |

mod beginning;
mod encode;
mod limits;
pub(super) mod producer;
mod records;
mod refusal;
#[cfg(test)]
mod tests;
mod thread;

use std::{collections::VecDeque, ops::ControlFlow};

use tokio::sync::oneshot;

pub(super) use self::beginning::begin;
pub use self::encode::ValueEncoding;
use self::records::Made;
#[cfg(test)]
pub(super) use self::thread::Manual;
pub(super) use self::{
    producer::{Group, Transactions},
    records::Records,
    thread::{Committer, Committing},
};
use super::{
    finished::Rows,
    output::{Output, Owned},
    rotation::CloseReason,
};
use crate::error::{Error, Result};

/// Batches of one partition that wait for a transaction.
const BATCHES: usize = 8;

/// The rows of one partition on their way to a topic.
pub(super) struct TopicOutput {
    owned: Owned,
    records: Records,
    committer: Committer,
    /// The oldest first.
    waiting: VecDeque<Waiting>,
    /// Sum of their bytes.
    waiting_bytes: u64,
    end: i64,
}

/// Rows that wait for a transaction.
struct Waiting {
    /// What becomes of them.
    committed: oneshot::Receiver<Result<()>>,
    /// Behind the last message.
    end: i64,
    /// Rows, messages and records.
    bytes: u64,
}

impl TopicOutput {
    /// Writes the rows of a partition that begins at `start`.
    pub(super) fn new(owned: Owned, start: i64, records: Records, committer: Committer) -> Self {
        owned.metrics.set_chain_end(start);
        Self { owned, records, committer, waiting: VecDeque::new(), waiting_bytes: 0, end: start }
    }
}

/// What became of rows.
fn answered(answer: Result<Result<()>, oneshot::error::RecvError>) -> Result<()> {
    answer.unwrap_or_else(|_| Err(Error::Failed("the thread of transactions has ended".to_owned())))
}

impl Output for TopicOutput {
    fn has_room(&self) -> bool {
        self.waiting.len() < BATCHES
    }

    fn waiting_bytes(&self) -> u64 {
        self.waiting_bytes
    }

    async fn write(&mut self, mut rows: Rows) -> Result<()> {
        let (done, committed) = oneshot::channel();
        let Made { records, end, refusal, tally } = self.records.of(&self.owned.source, &rows)?;
        rows.hold(records.iter().map(producer::Record::bytes).sum());
        let (source, epoch, bytes) = (self.owned.source.clone(), self.owned.epoch, rows.bytes());
        self.committer.send(Committing { source, epoch, rows, records, end, tally, done });
        self.waiting.push_back(Waiting { committed, end, bytes });
        self.waiting_bytes += bytes;
        let Some(refusal) = refusal else { return Ok(()) };
        // Everything before it is published first.
        self.committer.hurry();
        while !self.waiting.is_empty() {
            let _ = self.step().await?;
        }
        Err(refusal.into())
    }

    async fn step(&mut self) -> Result<ControlFlow<i64>> {
        let Some(Waiting { committed, end, bytes }) = self.waiting.front_mut() else {
            return std::future::pending().await;
        };
        let (end, bytes) = (*end, *bytes);
        let answer = answered(committed.await);
        // An answer is taken once, also one that says why the partition stops.
        self.waiting.pop_front();
        self.waiting_bytes -= bytes;
        answer?;
        self.end = end;
        self.owned.metrics.set_chain_end(end);
        Ok(ControlFlow::Continue(()))
    }

    fn close(&mut self, _: CloseReason) {
        if !self.waiting.is_empty() {
            self.committer.hurry();
        }
    }

    fn is_published(&self) -> bool {
        self.waiting.is_empty()
    }

    fn end(&self) -> i64 {
        self.end
    }

    fn counts_rows(&self) -> bool {
        true
    }
}
