//! The thread of transactions: rows of all partitions, committed together.

use std::{
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use super::{
    producer::{Group, Outcome, Part, Record, Transactions},
    records::Records,
};
use crate::{
    error::{Error, Result},
    stream::{StreamError, TopicPartition, finished::Rows, source::Epoch},
};

/// Bytes of messages in one transaction.
const TRANSACTION_BYTES: usize = 16 << 20;

/// Rows that wait for a transaction.
pub(in crate::stream) struct Committing {
    pub(super) source: TopicPartition,
    pub(super) epoch: Epoch,
    pub(super) rows: Rows,
    pub(super) records: Vec<Record>,
    pub(super) end: i64,
    pub(super) done: oneshot::Sender<Result<()>>,
}

enum Work {
    Rows(Box<Committing>),
    /// Somebody waits for all rows before.
    Hurry,
}

/// The way to the thread. It ends when all of them are dropped.
#[derive(Clone)]
pub(in crate::stream) struct Committer(mpsc::Sender<Work>);

impl Committer {
    /// Starts the thread: rows wait for others for `max_wait` at most.
    ///
    /// # Errors
    /// As [`Transactions::new`]; [`Error::Failed`] when the system refuses a thread.
    pub(in crate::stream) fn start(
        config: &rdkafka::ClientConfig,
        id: &str,
        records: Records,
        max_wait: Duration,
        group: Box<dyn Group>,
    ) -> Result<Self> {
        let transactions = Transactions::new(config, id)?;
        let (sender, work) = mpsc::channel();
        let run = move || commit_all(&transactions, &work, &records, max_wait, group.as_ref());
        let spawned = thread::Builder::new().name("elmo transactions".to_owned()).spawn(run);
        spawned.map_err(|e| Error::Failed(format!("cannot start a thread: {e}")))?;
        Ok(Self(sender))
    }

    pub(super) fn send(&self, rows: Committing) {
        // If the thread has ended, the sender in the rows is dropped, which their owner notices.
        let _ = self.0.send(Work::Rows(Box::new(rows)));
    }

    pub(super) fn hurry(&self) {
        let _ = self.0.send(Work::Hurry);
    }
}

fn commit_all(
    transactions: &Transactions,
    work: &mpsc::Receiver<Work>,
    records: &Records,
    max_wait: Duration,
    group: &dyn Group,
) {
    while let Some(rows) = gather(work, max_wait) {
        if rows.is_empty() {
            continue;
        }
        if let Err(error) = commit(transactions, rows, records, group) {
            tracing::debug!(reason = %error, "the thread of transactions ends");
            return;
        }
    }
}

/// The rows of one transaction; `None` when there will be no more.
fn gather(work: &mpsc::Receiver<Work>, max_wait: Duration) -> Option<Vec<Committing>> {
    let (mut all, mut bytes) = (Vec::new(), 0);
    let mut until = None;
    loop {
        let next = match until {
            None => work.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(until) => work.recv_timeout(Instant::saturating_duration_since(&until, Instant::now())),
        };
        match next {
            Ok(Work::Rows(rows)) => {
                bytes += rows.records.iter().map(Record::bytes).sum::<usize>();
                all.push(*rows);
                until.get_or_insert_with(|| Instant::now() + max_wait);
                if bytes >= TRANSACTION_BYTES {
                    return Some(all);
                }
            }
            Ok(Work::Hurry) | Err(RecvTimeoutError::Timeout) => return Some(all),
            Err(RecvTimeoutError::Disconnected) => return (!all.is_empty()).then_some(all),
        }
    }
}

/// Commits rows, and tells their owners.
///
/// # Errors
/// [`StreamError`] when no transaction can follow; the owners were told.
fn commit(
    transactions: &Transactions,
    rows: Vec<Committing>,
    records: &Records,
    group: &dyn Group,
) -> Result<(), StreamError> {
    let mut parts = Vec::with_capacity(rows.len());
    let mut owners = Vec::with_capacity(rows.len());
    for (owner, Committing { source, epoch, rows, records, end, done }) in rows.into_iter().enumerate() {
        parts.push(Part { source, owner, epoch, records, end, rows });
        owners.push(done);
    }
    let (culprit, error) = loop {
        match transactions.commit(&mut parts, group) {
            // Rows of partitions that were lost count as done as well: nobody waits for them.
            Ok(Outcome::Committed) => {
                owners.into_iter().for_each(|done| drop(done.send(Ok(()))));
                return Ok(());
            }
            Ok(Outcome::TooLarge(part, record)) => {
                if let Err(error) = parts[part].replace(record, records) {
                    break (parts[part].owner, error);
                }
            }
            Err(error) => break (0, error.into()),
        }
    };
    let copy = || StreamError::Broker {
        what: "write a transaction".to_owned(),
        reason: error.to_string(),
        help: error.help(),
    };
    let ended = copy();
    let copies: Vec<Error> = owners.iter().map(|_| copy().into()).collect();
    let mut error = Some(error);
    for (index, (done, copy)) in owners.into_iter().zip(copies).enumerate() {
        let error = if index == culprit { error.take() } else { None };
        let _ = done.send(Err(error.unwrap_or(copy)));
    }
    Err(ended)
}

impl Part {
    /// Replaces a record that the broker refuses for its size.
    fn replace(&mut self, record: usize, records: &Records) -> Result<()> {
        let refused = self.records.remove(record);
        let other = match refused.row {
            Some(row) if !refused.last_resort => records.too_large(&self.source, &self.rows, row, refused.bytes())?,
            // A dead letter, or a row without its vector, that is too large as well keeps its key and its headers.
            _ if refused.value.as_ref().is_some_and(|value| !value.is_empty()) => {
                Some(Record { value: Some(Vec::new()), last_resort: true, ..refused })
            }
            _ => {
                let reason = "the key and the headers of a message are larger than the broker takes".to_owned();
                let what = format!("write to topic {}", refused.topic);
                return Err(StreamError::Broker { what, reason, help: None }.into());
            }
        };
        if let Some(other) = other {
            self.records.insert(record, other);
        }
        Ok(())
    }
}
