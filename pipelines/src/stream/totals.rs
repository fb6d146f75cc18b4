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
    decode::OnError,
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
    /// Messages that were read and are done with, those without a row included.
    pub messages: u64,
    /// Rows that were written.
    pub rows: u64,
    /// Messages that could not be decoded or embedded, by the label of the reason.
    pub rejected: BTreeMap<&'static str, u64>,
    /// Files that were published.
    pub files: u64,
    /// Their size, in bytes.
    pub bytes: u64,
}

impl Totals {
    pub(super) fn new(metrics: Arc<Metrics>, on_error: OnError) -> Self {
        Self { metrics, on_error, counts: Arc::default() }
    }

    /// The stage has got a batch.
    pub(super) fn submitted(&self, batch: &Waiting) {
        self.metrics.submitted(batch.len());
    }

    /// The stage has returned a batch.
    pub(super) fn returned(&self, batch: &Waiting) {
        self.metrics.returned(batch.len());
    }

    /// Rows go to the output.
    pub(super) fn done(&self, rows: &Rows) {
        let rejected: u64 = rows.counts.values().sum();
        let (messages, written) = (rows.messages.len() as u64, rows.batch.num_rows() as u64);
        self.counts.messages.fetch_add(messages, Relaxed);
        self.counts.rows.fetch_add(written, Relaxed);
        let outcome = match self.on_error {
            OnError::Null | OnError::Fail => Outcome::Null,
            OnError::Skip => Outcome::Skipped,
            OnError::DeadLetter => Outcome::DeadLetter,
        };
        if rejected > 0 {
            self.metrics.done(outcome, rejected);
            let mut all = self.counts.rejected.lock();
            for (label, count) in &rows.counts {
                self.metrics.rejected(label, *count);
                *all.entry(label).or_default() += count;
            }
        }
        let without = if outcome == Outcome::Null { rejected } else { 0 };
        self.metrics.done(Outcome::Embedded, written.saturating_sub(without));
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
        let more = |now: u64, before: u64| now.saturating_sub(before);
        let (tokens, padded) = (more(work.tokens, before.tokens), more(work.padded_tokens, before.padded_tokens));
        self.metrics.computed(tokens, padded, work.device_time.saturating_sub(before.device_time));
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
