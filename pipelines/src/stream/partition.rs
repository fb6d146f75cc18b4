//! One assigned partition: its messages are decoded, embedded in order and written.
//!
//! A task of its own runs from the assignment until the partition is drained, lost, or fails. Rows are bounded by what
//! the stage and the output take: messages wait in the inbox, whose bytes count against the memory budget, which pauses
//! the partition.

use std::{ops::ControlFlow, sync::Arc};

use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use super::{
    StreamError, TopicPartition,
    finished::{Finished, Finisher, Waiting},
    output::Output,
    rotation::CloseReason,
    source::Batch,
};
use crate::{
    crash::stream as crash,
    error::{Error, Result},
    in_order::{InFlightLimit, InOrder},
    stage::Stage,
};

/// Batches of one partition in flight: enough that a single busy partition keeps the devices busy.
const BATCHES: usize = 16;

/// What a partition is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Take messages.
    Run,
    /// Take no more messages; write and publish what is on its way, until the time.
    Drain {
        /// Why, which is recorded with the file.
        close: CloseReason,
        /// When the caller no longer waits.
        until: Instant,
    },
}

/// How a partition ended without an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ended {
    /// Everything that it had taken is published, up to this offset.
    Drained(i64),
    /// The time was over first; what was not published is read again.
    Cut,
    /// Another process has written what this one was about to write; this is where the output goes on.
    Overtaken(i64),
}

/// The parts that all partitions share.
pub(super) struct Parts {
    pub(super) stage: Arc<dyn Stage>,
    pub(super) finisher: Finisher,
    /// Bytes of one partition that may be on their way through the stage.
    pub(super) bytes_in_flight: u64,
}

/// Runs a partition until it is drained or cannot go on.
///
/// # Errors
/// The stage's, the output's, or [`StreamError::Refused`] for the message that cannot be embedded, with on-error `fail`,
/// after everything before it was published.
pub(super) async fn run<O: Output>(
    parts: &Parts,
    source: TopicPartition,
    mut inbox: mpsc::UnboundedReceiver<Batch>,
    mut orders: watch::Receiver<Order>,
    mut output: O,
) -> Result<Ended> {
    let stage = Arc::clone(&parts.stage);
    let limit = InFlightLimit { batches: BATCHES, bytes: parts.bytes_in_flight };
    let mut queue: InOrder<'_, Waiting> = InOrder::new(stage.as_ref(), limit);
    let mut refused: Option<StreamError> = None;
    let mut draining = None;
    let mut held: Option<Batch> = None;
    loop {
        if let Order::Drain { close, until } = *orders.borrow_and_update() {
            draining = Some((close, until));
        }
        let stopped = draining.is_some() || refused.is_some();
        if stopped && queue.is_empty() {
            let close = draining.map_or(CloseReason::Shutdown, |(close, _)| close);
            output.close(close);
            if output.is_published() {
                return match refused {
                    Some(refused) => Err(refused.into()),
                    None => Ok(Ended::Drained(output.end())),
                };
            }
        }
        // One batch may wait for room, so that its size is known.
        if let Some(batch) = held.take_if(|batch| queue.has_room(parts.finisher.bytes(batch))) {
            submit(parts, &mut queue, batch).await?;
            continue;
        }
        let expired = async {
            match draining {
                Some((_, until)) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            changed = orders.changed() => if changed.is_err() {
                return Ok(Ended::Cut);
            },
            () = expired => return Ok(Ended::Cut),
            stepped = output.step() => if let ControlFlow::Break(end) = stepped? {
                return Ok(Ended::Overtaken(end));
            },
            done = queue.next(), if !queue.is_empty() && output.has_room() => {
                let (waiting, columns) = done.expect("not empty").map_err(|failed| Error::from(failed.error))?;
                match parts.finisher.finish(&source, waiting, columns)? {
                    Finished { rows, refused: None } => output.write(rows).await?,
                    Finished { rows, refused: Some(reason) } => {
                        output.write(rows).await?;
                        refused = Some(reason);
                        queue.cancel();
                    }
                }
            }
            batch = inbox.recv(), if !stopped && held.is_none() => match batch {
                Some(batch) => held = Some(batch),
                None => return Ok(Ended::Cut),
            },
        }
    }
}

/// Decodes a batch and submits its texts.
async fn submit(parts: &Parts, queue: &mut InOrder<'_, Waiting>, batch: Batch) -> Result<()> {
    crash::after_poll();
    let bytes = parts.finisher.bytes(&batch);
    let (texts, waiting) = parts.finisher.decode(batch).await?;
    crash::after_decode();
    if queue.push(waiting, &texts, bytes).await.is_err() {
        return Err(Error::Failed("a batch was submitted without room".to_owned()));
    }
    crash::in_embed();
    Ok(())
}
