//! What a stream has done, for its report and its metrics.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use serde::Serialize;

use super::{
    decode::{self, OnError},
    finished::{Rows, Waiting},
    metrics::{Metrics, Outcome},
};
use crate::stage::{Stage, Work};

/// Counters of one process. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Totals {
    pub(super) metrics: Arc<Metrics>,
    on_error: OnError,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    messages: AtomicU64,
    rows: AtomicU64,
    files: AtomicU64,
    bytes: AtomicU64,
    rejected: Mutex<BTreeMap<&'static str, u64>>,
    /// Of the devices, when it was last looked at.
    work: Mutex<Work>,
}

/// What a stream has done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct StreamReport {
    /// Messages that are done: their rows are in the output, or they get none.
    pub messages: u64,
    /// Rows in the output.
    pub rows: u64,
    /// Messages that could not be decoded or embedded, by the label of the reason.
    pub rejected: BTreeMap<&'static str, u64>,
    /// Files that were published.
    pub files: u64,
    /// Their size, in bytes.
    pub bytes: u64,
}

/// Counts of rows that are not yet in the output.
#[derive(Debug, Default)]
pub(super) struct Tally {
    messages: u64,
    rows: u64,
    rejected: decode::Counts,
}

impl Tally {
    pub(super) fn of(rows: &Rows) -> Self {
        let (messages, written) = (rows.done() as u64, rows.batch.num_rows() as u64);
        Self { messages, rows: written, rejected: rows.counts.clone() }
    }

    /// The output refuses one of the rows. Another one may stand for it.
    pub(super) fn refused(&mut self, label: &'static str, has_row: bool) {
        *self.rejected.entry(label).or_default() += 1;
        self.rows = self.rows.saturating_sub(u64::from(!has_row));
    }
}

impl Totals {
    pub(super) fn new(metrics: Arc<Metrics>, on_error: OnError) -> Self {
        Self { metrics, on_error, counts: Arc::default() }
    }

    /// The stage gets a batch, which is counted until it comes back or is dropped.
    pub(super) fn submitted(&self, batch: &mut Waiting) {
        batch.queued = Some(self.metrics.submitted(batch.len()));
    }

    /// Rows are in the output.
    pub(super) fn done(&self, done: &Tally) {
        let rejected: u64 = done.rejected.values().sum();
        self.counts.messages.fetch_add(done.messages, Relaxed);
        self.counts.rows.fetch_add(done.rows, Relaxed);
        let outcome = match self.on_error {
            OnError::Null | OnError::Fail => Outcome::Null,
            OnError::Skip => Outcome::Skipped,
            OnError::DeadLetter => Outcome::DeadLetter,
        };
        if rejected > 0 {
            self.metrics.done(outcome, rejected);
            let mut all = self.counts.rejected.lock();
            for (label, count) in &done.rejected {
                self.metrics.rejected(label, *count);
                *all.entry(label).or_default() += count;
            }
        }
        let without = if outcome == Outcome::Null { rejected } else { 0 };
        self.metrics.done(Outcome::Embedded, done.rows.saturating_sub(without));
    }

    /// A file was published.
    pub(super) fn published(&self, bytes: u64) {
        self.counts.files.fetch_add(1, Relaxed);
        self.counts.bytes.fetch_add(bytes, Relaxed);
    }

    /// Updates the work of the devices.
    pub(super) fn look(&self, stage: &dyn Stage) {
        let Some(work) = stage.work() else { return };
        let before = std::mem::replace(&mut *self.counts.work.lock(), work);
        self.metrics.computed(&work.since(&before));
    }

    /// The sums so far.
    pub(super) fn report(&self) -> StreamReport {
        StreamReport {
            messages: self.counts.messages.load(Relaxed),
            rows: self.counts.rows.load(Relaxed),
            rejected: self.counts.rejected.lock().clone(),
            files: self.counts.files.load(Relaxed),
            bytes: self.counts.bytes.load(Relaxed),
        }
    }
}
