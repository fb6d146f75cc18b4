//! The thread of transactions: rows of all partitions, committed together.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use rdkafka::error::RDKafkaErrorCode as Code;
use tokio::sync::oneshot;

use super::{
    producer::{Group, Outcome, Part, Record, Transactions},
    records::{Instead, Records, Refusal},
    refusal::{Place, is_of_size},
};
use crate::{
    error::{Error, Result},
    stream::{StreamError, TopicPartition, finished::Rows, output::Owned, source::Epoch},
};

/// Bytes of messages in one transaction.
const TRANSACTION_BYTES: usize = 16 << 20;

/// Rows that wait for a transaction.
pub(in crate::stream) struct Committing {
    pub(super) source: TopicPartition,
    pub(super) epoch: Epoch,
    /// `None` where a partition begins.
    pub(super) rows: Option<Rows>,
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
    /// [`Error::Failed`] when the system refuses a thread.
    pub(in crate::stream) fn start(
        transactions: Transactions,
        records: Records,
        max_wait: Duration,
        group: Box<dyn Group>,
    ) -> Result<Self> {
        let (sender, work) = mpsc::channel();
        let mut thread = Thread { transactions, records, group, stopped: HashSet::new() };
        let run = move || thread.run(&work, max_wait);
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

    /// Commits the offset at which a partition begins, and waits for that.
    ///
    /// # Errors
    /// As for rows.
    pub(in crate::stream) async fn begin(&self, owned: &Owned, at: i64) -> Result<()> {
        let (done, committed) = oneshot::channel();
        let (source, epoch) = (owned.source.clone(), owned.epoch);
        self.send(Committing { source, epoch, rows: None, records: Vec::new(), end: at, done });
        self.hurry();
        super::answered(committed.await)
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

struct Thread {
    transactions: Transactions,
    records: Records,
    group: Box<dyn Group>,
    /// Partitions that end before a message that was refused. What follows it must not be committed.
    stopped: HashSet<(TopicPartition, Epoch)>,
}

/// Who waits for the rows of a transaction, by the number of the part.
type Owners = Vec<Option<oneshot::Sender<Result<()>>>>;

impl Thread {
    fn run(&mut self, work: &mpsc::Receiver<Work>, max_wait: Duration) {
        while let Some(mut rows) = gather(work, max_wait) {
            rows.retain(|rows| !self.stopped.contains(&(rows.source.clone(), rows.epoch)));
            if rows.is_empty() {
                continue;
            }
            if let Err(error) = self.commit(rows) {
                tracing::debug!(reason = %error, "the thread of transactions ends");
                return;
            }
        }
    }

    /// Commits rows, and tells their owners.
    ///
    /// # Errors
    /// [`StreamError`] when no transaction can follow; the owners were told.
    fn commit(&mut self, rows: Vec<Committing>) -> Result<(), StreamError> {
        let (mut parts, mut owners): (_, Owners) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        for (owner, Committing { source, epoch, rows, records, end, done }) in rows.into_iter().enumerate() {
            parts.push(Part { source, owner, epoch, records, rows, end });
            owners.push(Some(done));
        }
        let mut refusals = HashMap::new();
        let (culprit, error) = loop {
            let replaced = match self.transactions.commit(&mut parts, self.group.as_ref()) {
                Ok(Outcome::Committed) => {
                    answer(owners, refusals);
                    return Ok(());
                }
                Ok(Outcome::Refused(refused)) => self.replace(&mut parts, &mut owners, refused),
                Err(error) => break (0, error.into()),
            };
            match replaced {
                Ok(refused) => refusals.extend(refused),
                Err(failed) => break failed,
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
            done.map(|done| done.send(Err(error.unwrap_or(copy))));
        }
        Err(ended)
    }

    /// Replaces records that the broker refuses. A partition that must stop before one ends there, with the refusal for its
    /// owner.
    ///
    /// # Errors
    /// Why that cannot be done, and for whom.
    fn replace(
        &mut self,
        parts: &mut Vec<Part>,
        owners: &mut Owners,
        mut refused: Vec<(Place, Code)>,
    ) -> Result<HashMap<usize, StreamError>, (usize, Error)> {
        let mut refusals = HashMap::new();
        // From the last to the first: the numbers of those before a record stay.
        refused.sort_unstable_by_key(|(place, _)| Reverse(*place));
        for ((number, record), code) in refused {
            let part = &mut parts[number];
            let Some(refusal) = part.replace(record, code, &self.records).map_err(|error| (part.owner, error))? else {
                continue;
            };
            refusals.insert(part.owner, refusal);
            let stopped = (part.source.clone(), part.epoch);
            for later in parts.extract_if(number + 1.., |part| (&part.source, part.epoch) == (&stopped.0, stopped.1)) {
                owners[later.owner] = None;
            }
            self.stopped.insert(stopped);
        }
        Ok(refusals)
    }
}

/// Tells the owners of rows that were committed. Rows of partitions that were lost count as such: nobody waits for them.
fn answer(owners: Owners, mut refusals: HashMap<usize, StreamError>) {
    for (number, done) in owners.into_iter().enumerate() {
        let answer = refusals.remove(&number).map_or(Ok(()), |refusal| Err(refusal.into()));
        done.map(|done| done.send(answer));
    }
}

impl Part {
    /// Replaces a record that the broker refuses. Returns why the partition must stop before it, if it must.
    fn replace(&mut self, record: usize, code: Code, records: &Records) -> Result<Option<StreamError>> {
        let refused = self.records.remove(record);
        let refusal = match is_of_size(code) {
            true => Refusal::Size(refused.bytes()),
            false => Refusal::Content(code),
        };
        let instead = match (refused.row, &self.rows) {
            (Some(row), Some(rows)) if !refused.last_resort => records.instead(&self.source, rows, row, &refusal)?,
            _ => records.last_resort(&self.source, refused, &refusal)?,
        };
        match instead {
            Instead::Record(other) => self.records.insert(record, *other),
            Instead::Nothing => {}
            Instead::Stop { offset, refusal } => {
                self.records.truncate(record);
                self.end = offset;
                return Ok(Some(refusal));
            }
        }
        Ok(None)
    }
}

/// What a test takes of a [`Committer`] instead of the thread.
#[cfg(test)]
pub(in crate::stream) struct Manual(mpsc::Receiver<Work>);

/// Rows that a test takes.
#[cfg(test)]
pub(in crate::stream) struct Taken {
    pub(in crate::stream) source: TopicPartition,
    pub(in crate::stream) epoch: Epoch,
    /// Of the messages that they were made of.
    pub(in crate::stream) offsets: Vec<i64>,
    pub(in crate::stream) end: i64,
    pub(in crate::stream) done: oneshot::Sender<Result<()>>,
    _rows: Option<Rows>,
}

#[cfg(test)]
impl Committer {
    pub(in crate::stream) fn manual() -> (Self, Manual) {
        let (sender, work) = mpsc::channel();
        (Self(sender), Manual(work))
    }
}

#[cfg(test)]
impl Manual {
    /// The rows that were sent since; `None` when there will be no more.
    pub(in crate::stream) fn take(&mut self) -> Option<Vec<Taken>> {
        let mut all = Vec::new();
        loop {
            match self.0.try_recv() {
                Ok(Work::Rows(rows)) => {
                    let Committing { source, epoch, rows, records, end, done } = *rows;
                    let number =
                        |record: &Record| rows.as_ref().map(|rows| rows.kept()[record.row.unwrap_or_default()]);
                    let offset = |number: usize| rows.as_ref().map(|rows| rows.messages.get(number).offset);
                    let offsets = records.iter().filter_map(|record| offset(number(record)?)).collect();
                    all.push(Taken { source, epoch, offsets, end, done, _rows: rows });
                }
                Ok(Work::Hurry) => {}
                Err(mpsc::TryRecvError::Empty) => return Some(all),
                Err(mpsc::TryRecvError::Disconnected) => return (!all.is_empty()).then_some(all),
            }
        }
    }
}
