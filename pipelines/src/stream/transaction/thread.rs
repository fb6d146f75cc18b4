//! The thread of transactions: rows of all partitions, committed together.

use std::{
    cmp::Reverse,
    collections::{HashSet, VecDeque},
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use rdkafka::error::RDKafkaErrorCode as Code;
use tokio::sync::oneshot;

use super::{
    producer::{Group, Outcome, Part, Record, Transactions, bytes},
    records::{Instead, Records, Refusal},
    refusal::{Place, is_of_size},
};
use crate::{
    error::{Error, Result},
    stream::{
        StreamError, TopicPartition,
        finished::Rows,
        source::Epoch,
        totals::{Tally, Totals},
    },
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
    /// What became of the messages.
    pub(super) tally: Tally,
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
        totals: Totals,
    ) -> Result<Self> {
        let (sender, work) = mpsc::channel();
        let mut thread = Thread { transactions, records, group, totals, stopped: HashSet::new() };
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
    totals: Totals,
    /// Partitions that end before a message that was refused. What follows it must not be committed.
    stopped: HashSet<(TopicPartition, Epoch)>,
}

/// Who waits for the rows of transactions, by the number of the part; `None` where nobody does any more.
type Owners = Vec<Option<Owner>>;

struct Owner {
    done: oneshot::Sender<Result<()>>,
    tally: Tally,
    /// Some of the rows were not committed, or nobody knows: the partition was lost.
    lost: bool,
    /// Why the partition stops behind the rows.
    refusal: Option<StreamError>,
}

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
        for (owner, Committing { source, epoch, mut rows, records, end, tally, done }) in rows.into_iter().enumerate() {
            // The producer copies them.
            rows.hold(records.iter().map(Record::bytes).sum());
            parts.push(Part { source, owner, epoch, records, rows: Some(Arc::new(rows)), end });
            owners.push(Some(Owner { done, tally, lost: false, refusal: None }));
        }
        match self.commit_all(parts, &mut owners) {
            Ok(()) => {
                self.answer(owners);
                Ok(())
            }
            Err((culprit, error)) => Err(fail(owners, culprit, error)),
        }
    }

    /// Commits parts, in several transactions where one would be too large.
    ///
    /// # Errors
    /// Why that cannot be done, and for whom.
    fn commit_all(&mut self, parts: Vec<Part>, owners: &mut Owners) -> Result<(), (usize, Error)> {
        let mut waiting = VecDeque::from([parts]);
        while let Some(mut parts) = waiting.pop_front() {
            if bytes(&parts) > self.transactions.most()
                && let Some(rest) = halve(&mut parts)
            {
                waiting.push_front(rest);
                waiting.push_front(parts);
                continue;
            }
            let mut lost = Vec::new();
            let outcome = self.transactions.commit(&mut parts, &mut lost, self.group.as_ref());
            for owner in lost {
                if let Some(owner) = &mut owners[owner] {
                    owner.lost = true;
                }
            }
            match outcome {
                Ok(Outcome::Committed) => {}
                // The next one has fewer records.
                Ok(Outcome::Slow) => waiting.push_front(parts),
                Ok(Outcome::Refused(refused)) => {
                    for (source, epoch) in self.replace(&mut parts, owners, refused)? {
                        for parts in &mut waiting {
                            parts.retain(|part| (&part.source, part.epoch) != (&source, epoch));
                        }
                    }
                    waiting.push_front(parts);
                }
                Err(error) => return Err((0, error.into())),
            }
        }
        Ok(())
    }

    /// Replaces records that the broker refuses. A partition that must stop before one ends there, with the refusal for its
    /// owner. Returns such partitions.
    ///
    /// # Errors
    /// Why that cannot be done, and for whom.
    fn replace(
        &mut self,
        parts: &mut Vec<Part>,
        owners: &mut Owners,
        mut refused: Vec<(Place, Code)>,
    ) -> Result<Vec<(TopicPartition, Epoch)>, (usize, Error)> {
        let (mut all_stopped, mut failed) = (Vec::new(), None);
        // From the last to the first: the numbers of those before a record stay.
        refused.sort_unstable_by_key(|(place, _)| Reverse(*place));
        for ((number, record), code) in refused {
            let part = &mut parts[number];
            let owner = part.owner;
            let tally = owners[owner].as_mut().map(|owner| &mut owner.tally);
            let replaced = part.replace(record, code, &self.records, tally);
            let refusal = match replaced {
                Ok(Some(refusal)) => refusal,
                Ok(None) => continue,
                // The first record counts.
                Err(error) => {
                    failed = Some((owner, error));
                    continue;
                }
            };
            let stopped = (part.source.clone(), part.epoch);
            for later in parts.extract_if(number + 1.., |part| (&part.source, part.epoch) == (&stopped.0, stopped.1)) {
                if later.owner != owner {
                    owners[later.owner] = None;
                }
            }
            if let Some(owner) = &mut owners[owner] {
                owner.refusal = Some(refusal);
            }
            self.stopped.insert(stopped.clone());
            all_stopped.push(stopped);
        }
        failed.map_or(Ok(all_stopped), Err)
    }

    /// Tells the owners of rows that these were committed, and counts them. Nobody waits for rows of partitions that were lost:
    /// their owners get the same answer, as they may not have heard of that, and the rows are not counted.
    fn answer(&self, owners: Owners) {
        for Owner { done, tally, lost, refusal } in owners.into_iter().flatten() {
            if !lost {
                self.totals.done(&tally);
            }
            // A receiver that is gone needs no answer.
            let _ = done.send(refusal.map_or(Ok(()), |refusal| Err(refusal.into())));
        }
    }
}

/// Tells the owners of rows why they cannot be committed. The culprit gets the error itself.
fn fail(owners: Owners, culprit: usize, error: Error) -> StreamError {
    let copy = || StreamError::Broker {
        what: "write a transaction".to_owned(),
        reason: error.to_string(),
        help: error.help(),
    };
    let ended = copy();
    let copies: Vec<Error> = owners.iter().map(|_| copy().into()).collect();
    let mut error = Some(error);
    for (index, (owner, copy)) in owners.into_iter().zip(copies).enumerate() {
        let error = if index == culprit { error.take() } else { None };
        owner.map(|owner| owner.done.send(Err(error.unwrap_or(copy))));
    }
    ended
}

/// The second half of parts, which stay in order; `None` if they are a single message.
fn halve(parts: &mut Vec<Part>) -> Option<Vec<Part>> {
    match parts.as_mut_slice() {
        [part] => Some(vec![part.halve()?]),
        _ => {
            let middle = parts.len() / 2;
            (middle > 0).then(|| parts.split_off(middle))
        }
    }
}

impl Part {
    /// The second half of the messages; `None` if it is a single one.
    fn halve(&mut self) -> Option<Self> {
        let mut offsets: Vec<i64> = self.records.iter().map(|record| record.offset).collect();
        offsets.sort_unstable();
        offsets.dedup();
        let cut = *offsets.get(offsets.len() / 2).filter(|_| offsets.len() > 1)?;
        let (rest, records) = std::mem::take(&mut self.records).into_iter().partition(|record| record.offset >= cut);
        self.records = records;
        let end = std::mem::replace(&mut self.end, cut);
        let (source, owner, epoch) = (self.source.clone(), self.owner, self.epoch);
        Some(Self { source, owner, epoch, records: rest, rows: self.rows.clone(), end })
    }

    /// Replaces a record that the broker refuses. Returns why the partition must stop before it, if it must.
    fn replace(
        &mut self,
        record: usize,
        code: Code,
        records: &Records,
        tally: Option<&mut Tally>,
    ) -> Result<Option<StreamError>> {
        let refused = self.records.remove(record);
        let refusal = match is_of_size(code) {
            true => Refusal::Size(refused.alone()),
            false => Refusal::Content(code),
        };
        let instead = match (refused.row, &self.rows) {
            (Some(row), Some(rows)) if !refused.last_resort => {
                let instead = records.instead(&self.source, rows, row, &refusal)?;
                if let Some(tally) = tally {
                    instead.count(tally, &refusal);
                }
                instead
            }
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
    _rows: Rows,
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
    /// The offsets of the messages whose rows the thread would commit next; `None` when there will be no more.
    pub(in crate::stream) fn gather(&self, max_wait: Duration) -> Option<Vec<i64>> {
        let rows = gather(&self.0, max_wait)?;
        Some(rows.iter().flat_map(|rows| &rows.records).map(|record| record.offset).collect())
    }

    /// The rows that were sent since; `None` when there will be no more.
    pub(in crate::stream) fn take(&mut self) -> Option<Vec<Taken>> {
        let mut all = Vec::new();
        loop {
            match self.0.try_recv() {
                Ok(Work::Rows(rows)) => {
                    let Committing { source, epoch, rows, records, end, tally: _, done } = *rows;
                    let kept = rows.kept();
                    let offset = |record: &Record| rows.messages.get(kept[record.row.unwrap_or_default()]).offset;
                    let offsets = records.iter().map(offset).collect();
                    all.push(Taken { source, epoch, offsets, end, done, _rows: rows });
                }
                Ok(Work::Hurry) => {}
                Err(mpsc::TryRecvError::Empty) => return Some(all),
                Err(mpsc::TryRecvError::Disconnected) => return (!all.is_empty()).then_some(all),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::source::testing::epoch;

    fn record(offset: i64) -> Record {
        let (topic, headers) = ("out".into(), Vec::new());
        Record { topic, key: None, value: None, headers, timestamp: None, offset, row: None, last_resort: false }
    }

    /// Dead letters follow the rows. By hand: of the messages 3, 4, 5 and 8 the first two are one half, so that the group goes
    /// on at 5.
    #[test]
    fn a_half_has_all_that_stands_for_its_messages() {
        let (source, records) = (TopicPartition::new("in", 0), [3, 5, 8, 4].map(record).into());
        let mut parts = vec![Part { source, owner: 7, epoch: epoch(1), records, rows: None, end: 10 }];
        let rest = halve(&mut parts).unwrap();
        let seen = |parts: &[Part]| -> Vec<(usize, Vec<i64>, i64)> {
            let offsets = |part: &Part| part.records.iter().map(|record| record.offset).collect();
            parts.iter().map(|part| (part.owner, offsets(part), part.end)).collect()
        };
        assert_eq!((seen(&parts), seen(&rest)), (vec![(7, vec![3, 4], 5)], vec![(7, vec![5, 8], 10)]));
        parts.extend(rest);
        let rest = halve(&mut parts).unwrap();
        assert_eq!((seen(&parts), seen(&rest)), (vec![(7, vec![3, 4], 5)], vec![(7, vec![5, 8], 10)]));
        let mut single = vec![Part { records: vec![record(3), record(3)], ..parts.remove(0) }];
        assert!(halve(&mut single).is_none());
    }
}
