//! One assigned partition: its messages are decoded, embedded in order and written.
//!
//! A task of its own runs from the assignment until the partition is drained, lost, or fails. What it takes from its inbox
//! is bounded by the stage and the output; messages in the inbox count against the memory budget, which pauses the
//! partition.

use std::{ops::ControlFlow, sync::Arc};

use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use super::{
    StreamError,
    finished::{Finished, Finisher, Waiting},
    output::{Output, Owned},
    rotation::CloseReason,
    source::Batch,
    totals::Totals,
};
use crate::{
    crash::stream as crash,
    error::{Error, Result},
    in_order::{InFlightLimit, InOrder},
    stage::Stage,
};

/// Batches of one partition in flight: a single busy partition keeps the devices busy.
const BATCHES: usize = 16;

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
        /// When nobody waits any more.
        until: Instant,
    },
}

/// How a partition ended without an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ended {
    /// Everything that it had taken is published, up to this offset.
    Drained(i64),
    /// It was told to stop at once, or the time was over. What was not published is read again.
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
    /// Bytes of one partition that may be on their way through the stage.
    pub(super) bytes_in_flight: u64,
}

/// Runs a partition, whose first message is at `next` or above, until it is drained or cannot go on.
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
    let mut held: Option<Batch> = None;
    let mut flushed = 0;
    let mut stop: Option<CloseReason> = None;
    let mut until = None;
    let mut refused: Option<StreamError> = None;
    let mut out_of_range = false;
    loop {
        match *orders.borrow_and_update() {
            Order::Run(number) if number == flushed => {}
            Order::Run(number) => {
                flushed = number;
                output.close(CloseReason::Bytes);
            }
            Order::Drain { reason, until: time } => {
                (stop, until) = (Some(reason), Some(time));
            }
        }
        if let Some(reason) = stop.filter(|_| queue.is_empty() && held.is_none()) {
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
        // A drained partition gives up what it only holds: the next owner reads it.
        if until.is_some() {
            held = None;
        }
        if let Some(batch) = held.take_if(|batch| queue.has_room(parts.finisher.bytes(batch))) {
            submit(parts, &mut queue, batch).await?;
            continue;
        }
        tokio::select! {
            biased;
            changed = orders.changed() => if changed.is_err() {
                return Ok(Ended::Cut);
            },
            () = sleep_until(until) => return Ok(Ended::Cut),
            stepped = output.step() => if let ControlFlow::Break(end) = stepped? {
                tracing::info!(partition = %owned.source, end, "another process has written these messages; going on behind them");
                return Ok(Ended::Overtaken);
            },
            done = queue.next(), if !queue.is_empty() && output.has_room() => {
                let Some(done) = done else { continue };
                let (waiting, columns) = done.map_err(|failed| Error::from(failed.error))?;
                parts.totals.returned(&waiting);
                let finished = parts.finisher.finish(&owned.source, waiting, columns)?;
                let Finished { rows, refused: reason } = finished;
                parts.totals.done(&rows);
                output.write(rows).await?;
                if reason.is_some() {
                    queue.cancel();
                    (held, refused) = (None, reason);
                    stop.get_or_insert(CloseReason::Shutdown);
                }
            }
            received = inbox.recv(), if stop.is_none() && held.is_none() => match received {
                // What was read before a seek took effect comes again.
                Some(Inbox::Messages(batch)) if batch.messages.first_offset().is_none_or(|first| first < next) => {}
                Some(Inbox::Messages(batch)) => {
                    crash::after_poll();
                    next = batch.messages.end;
                    held = Some(batch);
                }
                Some(Inbox::End) => stop = Some(CloseReason::Shutdown),
                // What was read stands nowhere else any more, so it is published first.
                Some(Inbox::OutOfRange) => (stop, out_of_range) = (Some(CloseReason::Shutdown), true),
                None => return Ok(Ended::Cut),
            },
        }
    }
}

/// Decodes a batch and submits its texts.
async fn submit(parts: &Parts, queue: &mut InOrder<'_, Waiting>, batch: Batch) -> Result<()> {
    let bytes = parts.finisher.bytes(&batch);
    let (texts, waiting) = parts.finisher.decode(batch).await?;
    crash::after_decode();
    parts.totals.submitted(&waiting);
    if queue.push(waiting, &texts, bytes).await.is_err() {
        return Err(Error::Failed("a batch was submitted without room".to_owned()));
    }
    crash::in_embed();
    Ok(())
}

async fn sleep_until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
