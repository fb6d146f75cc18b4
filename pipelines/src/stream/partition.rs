//! One assigned partition: its messages are decoded, embedded in order and written.
//!
//! A task of its own runs from the assignment until the partition is drained, lost, or fails. What it takes from its inbox
//! is bounded by the stage and the output; messages in the inbox count against the memory budget, which pauses the
//! partition.

use std::{
    collections::VecDeque,
    ops::ControlFlow,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Instant,
};

use arrow::array::ArrayRef;
use tokio::sync::{mpsc, watch};

use super::{
    StreamError,
    expected::Expected,
    finished::{Finished, Finisher, Rows, Waiting},
    output::{Output, Owned, Preparing},
    rotation::CloseReason,
    source::{Batch, Budget},
    totals::{Tally, Totals},
};
use crate::{
    crash::stream as crash,
    error::{Error, Result},
    in_order::{InFlightLimit, InOrder},
    stage::{Pending, Stage},
};

/// Batches of one partition in flight: a single busy partition keeps the devices busy.
const BATCHES: usize = 16;
/// A batch has at most an eighth of the vectors that may be in flight, and half of those of its partition.
const OF_ALL: u64 = 8;
const OF_EACH: u64 = 2;
/// Bytes of the vectors of a batch, at most. Arrow counts the numbers of a column in 32 bits.
const MAX_VECTORS: u64 = 64 << 20;

/// What comes to a partition.
#[derive(Debug)]
pub(super) enum Inbox {
    /// Messages, which follow those before.
    Messages(Batch),
    /// There will be no more: the stream reads to the end that the partition had when it was assigned.
    End,
    /// The broker does not have the messages that follow.
    OutOfRange,
}

/// What a partition is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Write what comes. When the number changes, publish what was written, because memory is short.
    Run(u64),
    /// Take no more messages; publish those that were taken.
    Drain {
        /// Why, for the log.
        reason: CloseReason,
        /// When the task is cut.
        until: Instant,
    },
}

/// How a partition ended without an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ended {
    /// Everything that it had taken is published, up to this offset.
    Drained(i64),
    /// The partition was lost, or the time was over. What was not published is read again.
    Cut,
    /// Another process has written what this one was about to write.
    Overtaken,
    /// Everything that it had taken is published, up to this offset, and the broker does not have what follows.
    OutOfRange(i64),
    /// It was taken away, or the stream stops, before it had taken anything.
    NotBegun,
}

/// What all partitions share.
pub(super) struct Parts {
    pub(super) stage: Arc<dyn Stage>,
    pub(super) finisher: Finisher,
    pub(super) totals: Totals,
    /// Bytes of all partitions that may be on their way through the stage.
    pub(super) bytes_in_flight: u64,
    /// Partitions that share them.
    pub(super) owned: AtomicUsize,
}

/// Something that a partition waits for while it publishes.
type Task<'p, T> = Pin<Box<dyn Future<Output = T> + Send + 'p>>;

/// A batch that the stage has.
struct Submitted {
    waiting: Waiting,
    columns: elmo::Result<Pending>,
    bytes: u64,
}

/// A batch between the inbox and the queue of the stage. There is one at a time, so that batches stay in order.
#[derive(Default)]
struct Intake<'p> {
    /// Taken from the inbox, with the number of the first message that is in no batch for the stage.
    received: Option<(Batch, usize)>,
    /// A part of it, and the bytes that it is expected to take until it is written. The stage has no room for it.
    held: Option<(Batch, u64)>,
    /// A schema registry may not answer.
    decoding: Option<Task<'p, (ArrayRef, Waiting)>>,
    /// The queue of the stage may be full.
    submitting: Option<Task<'p, Submitted>>,
}

impl Intake<'_> {
    fn is_empty(&self) -> bool {
        self.holds_nothing() && self.decoding.is_none() && self.submitting.is_none()
    }

    /// Whether all that was taken from the inbox is on its way to the stage.
    fn holds_nothing(&self) -> bool {
        self.received.is_none() && self.held.is_none()
    }

    /// Cuts the next batch for the stage from what was received, unless there is one. Its vectors are expected to have
    /// `most` bytes at most.
    fn cut(&mut self, expected: &Expected, most: u64, owned: &Owned) {
        let Some((received, from)) = self.received.take_if(|_| self.held.is_none()) else { return };
        let (all, end) = (received.messages.len(), expected.cut(&received.messages, from, most));
        let batch = if from == 0 && end == all {
            received
        } else {
            let (messages, epoch) = (received.messages.part(from..end), received.epoch);
            let permit = owned.budget.permit(&owned.source, messages.size());
            self.received = (end < all).then_some((received, end));
            Batch { messages, epoch, permit }
        };
        let bytes = expected.bytes(&batch.messages);
        self.held = Some((batch, bytes));
    }
}

/// Rows between the stage and the output.
#[derive(Default)]
struct Outgoing {
    /// Their dead letters are sent.
    preparing: Option<Preparing>,
    /// They wait for room.
    ready: Option<Rows>,
    /// What was written and is not published, by its end.
    unpublished: VecDeque<(i64, Tally)>,
}

impl Outgoing {
    fn is_empty(&self) -> bool {
        self.preparing.is_none() && self.ready.is_none()
    }

    async fn write(&mut self, rows: Rows, output: &mut impl Output, totals: &Totals) -> Result<()> {
        if !output.counts_rows() {
            self.unpublished.push_back((rows.end, Tally::of(&rows)));
        }
        let written = output.write(rows).await;
        self.count(output, totals);
        written
    }

    /// Counts what was published.
    fn count(&mut self, output: &impl Output, totals: &Totals) {
        while let Some((_, tally)) = self.unpublished.pop_front_if(|(end, _)| *end <= output.end()) {
            totals.done(&tally);
        }
    }
}

/// Runs a partition, whose first message is at `next` or above, until it is drained or cannot go on.
///
/// While it waits for anything, what is complete is published.
///
/// # Errors
/// The stage's, the output's, or [`StreamError::Refused`] for the message that cannot be embedded, with on-error `fail`,
/// after everything before it was published.
pub(super) async fn run(
    parts: &Parts,
    owned: &Owned,
    mut next: i64,
    mut inbox: mpsc::UnboundedReceiver<Inbox>,
    mut orders: watch::Receiver<Order>,
    mut output: impl Output,
) -> Result<Ended> {
    let limit = InFlightLimit { batches: BATCHES, bytes: parts.bytes_in_flight };
    let mut queue: InOrder<'_, Waiting> = InOrder::new(parts.stage.as_ref(), limit);
    let (mut intake, mut outgoing) = (Intake::default(), Outgoing::default());
    let mut expected = parts.finisher.expected();
    let mut flushed = 0;
    let mut stop: Option<CloseReason> = None;
    let mut refused: Option<StreamError> = None;
    let mut out_of_range = false;
    loop {
        match *orders.borrow_and_update() {
            Order::Run(number) if number == flushed => {}
            Order::Run(number) => {
                flushed = number;
                output.close(CloseReason::Bytes);
            }
            // A drained partition gives up what it only holds: the next owner reads it.
            Order::Drain { reason, .. } => {
                stop = Some(reason);
                (intake.received, intake.held, intake.decoding) = (None, None, None);
            }
        }
        if let Some(rows) = outgoing.ready.take_if(|_| parts.may_write(&output)) {
            outgoing.write(rows, &mut output, &parts.totals).await?;
            if parts.is_full(&output) {
                output.close(CloseReason::Bytes);
            }
            continue;
        }
        // The part of this partition may have become smaller since it wrote the last rows.
        if outgoing.ready.is_some() && parts.is_full(&output) {
            output.close(CloseReason::Bytes);
        }
        if let Some(reason) = stop.filter(|_| queue.is_empty() && intake.is_empty() && outgoing.is_empty()) {
            crash::in_drain();
            output.close(reason);
            if output.is_published() {
                return match refused {
                    Some(refused) => Err(refused.into()),
                    None if out_of_range => Ok(Ended::OutOfRange(output.end())),
                    None => Ok(Ended::Drained(output.end())),
                };
            }
        }
        intake.cut(&expected, parts.vectors_of_batch(), owned);
        if intake.submitting.is_none() && intake.decoding.is_none() {
            let may_wait = queue.is_empty() && (!outgoing.is_empty() || !parts.may_write(&output));
            let admitted = intake.held.take_if(|(_, bytes)| parts.admits(&queue, &owned.budget, *bytes, may_wait));
            let decode = |(batch, bytes)| -> Task<'_, _> { Box::pin(parts.finisher.decode(batch, bytes)) };
            intake.decoding = admitted.map(decode);
        }
        tokio::select! {
            biased;
            changed = orders.changed() => if changed.is_err() {
                return Ok(Ended::Cut);
            },
            stepped = output.step() => match stepped? {
                ControlFlow::Continue(()) => outgoing.count(&output, &parts.totals),
                ControlFlow::Break(end) => {
                    tracing::info!(partition = %owned.source, end, "another process has written these messages; resuming after them");
                    return Ok(Ended::Overtaken);
                }
            },
            (texts, waiting) = wait(&mut intake.decoding) => {
                intake.decoding = None;
                intake.submitting = Some(Box::pin(submit(parts, texts, waiting)));
            }
            submitted = wait(&mut intake.submitting) => {
                intake.submitting = None;
                queue.add(submitted.waiting, submitted.columns, submitted.bytes);
                crash::in_embed();
            }
            prepared = wait(&mut outgoing.preparing) => {
                outgoing.preparing = None;
                outgoing.ready = Some(prepared?);
            }
            done = queue.next(), if !queue.is_empty() && outgoing.is_empty() && parts.may_write(&output) => {
                let Some(done) = done else { continue };
                let (waiting, columns) = done.map_err(|failed| Error::from(failed.error))?;
                let finished = parts.finisher.finish(&owned.source, waiting, columns)?;
                let Finished { rows, refused: reason } = finished;
                expected.learn(&rows.messages, rows.vectors);
                outgoing.preparing = Some(output.prepare(rows));
                if reason.is_some() {
                    queue.cancel();
                    (intake, refused) = (Intake::default(), reason);
                    stop.get_or_insert(CloseReason::Shutdown);
                }
            }
            received = inbox.recv(), if stop.is_none() && intake.holds_nothing() => match received {
                // What was read before a seek took effect comes again.
                Some(Inbox::Messages(batch)) if batch.messages.first_offset().is_none_or(|first| first < next) => {}
                Some(Inbox::Messages(batch)) => {
                    crash::after_poll();
                    next = batch.messages.end;
                    intake.received = Some((batch, 0));
                }
                Some(Inbox::End) => stop = Some(CloseReason::Shutdown),
                // What was read stands nowhere else any more, so it is published first.
                Some(Inbox::OutOfRange) => (stop, out_of_range) = (Some(CloseReason::Shutdown), true),
                None => return Ok(Ended::Cut),
            },
        }
    }
}

impl Parts {
    /// Whether a batch that is expected to take `bytes` may go to the stage: its vectors take memory, for which no partition
    /// is paused. All partitions together have `bytes_in_flight`, and each at least one batch. One that has nothing in the
    /// stage need not have another batch while its rows wait (`may_wait`) and memory is short.
    fn admits(&self, queue: &InOrder<'_, Waiting>, budget: &Budget, bytes: u64, may_wait: bool) -> bool {
        if queue.is_empty() {
            return !may_wait || budget.used() < budget.limit();
        }
        queue.has_room(bytes) && queue.bytes().saturating_add(bytes) <= self.share()
    }

    /// Whether rows may be written now.
    fn may_write(&self, output: &impl Output) -> bool {
        output.has_room() && !self.is_full(output)
    }

    /// Whether as many rows wait in the output as the partition may have in the stage.
    fn is_full(&self, output: &impl Output) -> bool {
        let waiting = output.waiting_bytes();
        waiting > 0 && waiting >= self.share()
    }

    /// The part of one partition in `bytes_in_flight`.
    fn share(&self) -> u64 {
        self.bytes_in_flight / (self.owned.load(Relaxed).max(1) as u64)
    }

    /// Bytes of the vectors of a batch, at most, unless it is a single message.
    fn vectors_of_batch(&self) -> u64 {
        vectors_of_batch(self.bytes_in_flight, self.share())
    }
}

/// See [`Parts::vectors_of_batch`]; `share` is the part of a partition.
fn vectors_of_batch(in_flight: u64, share: u64) -> u64 {
    (in_flight / OF_ALL).min(share / OF_EACH).min(MAX_VECTORS)
}

/// Submits the texts of a batch.
async fn submit(parts: &Parts, texts: ArrayRef, mut waiting: Waiting) -> Submitted {
    let bytes = waiting.bytes();
    parts.totals.submitted(&mut waiting);
    crash::after_decode();
    let columns = parts.stage.submit(&texts).await;
    Submitted { waiting, columns, bytes }
}

/// Waits for a task, for ever if there is none.
async fn wait<T>(task: &mut Option<Task<'_, T>>) -> T {
    match task {
        Some(task) => task.await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: 4,096 messages come at once, with vectors of 1,024 numbers 16 MiB. `elmo bench --constant` has four partitions
    /// and 1 GiB, of which a quarter is 256 MiB.
    #[test]
    fn a_vector_per_message_makes_no_small_batches() {
        let (in_flight, batch) = (256 << 20, 4096 * 4 * 1024);
        for partitions in 1..=8 {
            assert!(vectors_of_batch(in_flight, in_flight / partitions) >= batch, "{partitions} partitions");
        }
        assert_eq!(vectors_of_batch(in_flight, in_flight / 100), in_flight / 200);
        assert_eq!(vectors_of_batch(1 << 40, 1 << 40), 64 << 20);
    }
}
