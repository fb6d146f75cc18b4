//! Ordered submission to a [`Stage`]: batches in, columns out in the same order, a bounded number of bytes in flight.
//!
//! A device is kept busy by several batches that are queued at once. [`InOrder`] submits them while it is polled, tags each one with
//! what the caller needs to know about it (slices of files, offsets of messages), and returns the columns in the order of
//! submission, whatever order the devices finish in. The batches belong to the value, and
//! dropping it cancels them.

use std::{
    collections::VecDeque,
    fmt,
    future::{poll_fn, ready},
    pin::Pin,
    task::{Context, Poll},
};

use arrow::array::ArrayRef;
use elmo::EmbeddedColumns;
use futures::future::{BoxFuture, MaybeDone, maybe_done};

use crate::stage::{Pending, Stage};

/// How much may be in flight at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InFlightLimit {
    /// Batches, at least 1.
    pub batches: usize,
    /// Sum of the sizes that callers of [`InOrder::push`] declare, in bytes. A single batch may exceed it.
    pub bytes: u64,
}

/// A batch that could not be embedded.
#[derive(Debug)]
pub struct FailedBatch<T> {
    /// The tag of the batch.
    pub tag: T,
    /// Why it failed; a row in it counts from the start of the batch.
    pub error: elmo::Error,
}

/// Batches in flight, in the order of submission.
pub struct InOrder<'s, T> {
    stage: &'s dyn Stage,
    limit: InFlightLimit,
    batches: VecDeque<Batch<'s, T>>,
    /// Sum of the declared sizes of `batches`.
    bytes: u64,
    /// The last submission failed. Nothing is submitted after it.
    failed: bool,
}

struct Batch<'s, T> {
    tag: T,
    bytes: u64,
    columns: MaybeDone<BoxFuture<'s, elmo::Result<EmbeddedColumns>>>,
}

impl<T> fmt::Debug for InOrder<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (batches, bytes) = (self.batches.len(), self.bytes);
        f.debug_struct("InOrder").field("batches", &batches).field("bytes", &bytes).finish_non_exhaustive()
    }
}

impl<'s, T> InOrder<'s, T> {
    /// Submits to `stage`, with at most `limit` in flight.
    pub fn new(stage: &'s dyn Stage, limit: InFlightLimit) -> Self {
        Self { stage, limit, batches: VecDeque::new(), bytes: 0, failed: false }
    }

    /// Whether a batch of `bytes` may be pushed now. An empty queue has room for a batch of any size.
    pub fn has_room(&self, bytes: u64) -> bool {
        let fits = self.batches.len() < self.limit.batches && self.bytes.saturating_add(bytes) <= self.limit.bytes;
        !self.failed && (self.batches.is_empty() || fits)
    }

    /// Adds a column of texts. [`next`](Self::next) and [`proceed`](Self::proceed) submit it, several at the same time, so that several
    /// are tokenised concurrently. In state `carry` each is submitted after the one before it is done. `bytes` is what the batch occupies until
    /// [`next`](Self::next) returns it: the texts, the tag and the expected vectors. An error of the submission is returned when it is
    /// the batch's turn.
    ///
    /// # Errors
    /// The tag, when there is no room for the batch.
    pub fn push(&mut self, tag: T, texts: ArrayRef, bytes: u64) -> Result<(), T> {
        if !self.has_room(bytes) {
            return Err(tag);
        }
        let stage = self.stage;
        self.queue(tag, Box::pin(async move { stage.submit(&texts).await?.await }), bytes);
        Ok(())
    }

    /// Adds a batch that the caller has submitted to the stage by itself, after those that were pushed. There must be room
    /// for it.
    pub fn add(&mut self, tag: T, submitted: elmo::Result<Pending>, bytes: u64) {
        let columns = submitted.unwrap_or_else(|error| {
            self.failed = true;
            Box::pin(ready(Err(error)))
        });
        self.queue(tag, columns, bytes);
    }

    fn queue(&mut self, tag: T, columns: BoxFuture<'s, elmo::Result<EmbeddedColumns>>, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.batches.push_back(Batch { tag, bytes, columns: maybe_done(columns) });
    }

    /// Waits for the oldest batch; `None` when none is in flight. If the future is dropped, the batch stays the oldest.
    ///
    /// # Errors
    /// [`FailedBatch`] when the batch failed. Later batches are cancelled, so that no result follows an error.
    pub async fn next(&mut self) -> Option<Result<(T, EmbeddedColumns), FailedBatch<T>>> {
        poll_fn(|context| self.poll_oldest(context)).await?;
        let Batch { tag, bytes, mut columns } = self.batches.pop_front()?;
        self.bytes -= bytes;
        Some(match Pin::new(&mut columns).take_output()? {
            Ok(columns) => Ok((tag, columns)),
            Err(error) => {
                self.cancel();
                Err(FailedBatch { tag, error })
            }
        })
    }

    /// Submits what was added, and lets it proceed; the task of `context` is woken when there is more to do.
    pub fn proceed(&mut self, context: &mut Context<'_>) {
        let _ = self.poll_oldest(context);
    }

    /// Ready when the oldest batch is done; `None` when there is none.
    fn poll_oldest(&mut self, context: &mut Context<'_>) -> Poll<Option<()>> {
        let in_turn = self.stage.spec().batch_rows.is_some();
        let polled = if in_turn { 1 } else { self.batches.len() };
        let mut is_done = None;
        for batch in self.batches.iter_mut().take(polled) {
            let done = Pin::new(&mut batch.columns).poll(context).is_ready();
            is_done.get_or_insert(done);
        }
        match is_done {
            None => Poll::Ready(None),
            Some(true) => Poll::Ready(Some(())),
            Some(false) => Poll::Pending,
        }
    }

    /// Cancels all batches in flight, as dropping the value does.
    pub fn cancel(&mut self) {
        self.batches.clear();
        self.bytes = 0;
        self.failed = false;
    }

    /// Batches in flight.
    pub fn len(&self) -> usize {
        self.batches.len()
    }

    /// Whether no batch is in flight.
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Declared size of the batches in flight, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    use arrow::{
        array::{Array, BooleanArray, StringArray, UInt32Array},
        datatypes::Field,
    };
    use async_trait::async_trait;
    use elmo::{ColumnStats, EmbedSpec};
    use futures::FutureExt;
    use proptest::prelude::*;
    use tokio::sync::oneshot;

    /// Completes a batch when the test says so; a dropped receiver is a cancelled batch.
    #[derive(Default)]
    struct Manual {
        spec: EmbedSpec,
        /// One sender per submitted batch.
        senders: Mutex<Vec<Option<oneshot::Sender<elmo::Result<()>>>>>,
        /// The submission with this number fails.
        fails: Option<usize>,
    }

    impl Manual {
        fn submitted(&self) -> usize {
            self.senders.lock().unwrap().len()
        }

        fn complete(&self, batch: usize, outcome: elmo::Result<()>) {
            let sender = self.senders.lock().unwrap()[batch].take().unwrap();
            sender.send(outcome).unwrap();
        }

        fn is_cancelled(&self, batch: usize) -> bool {
            self.senders.lock().unwrap()[batch].as_ref().is_some_and(oneshot::Sender::is_closed)
        }
    }

    fn failure(row: usize) -> elmo::Error {
        elmo::Error::Row { row, reason: elmo::RowError::NullToken { index: 0 } }
    }

    /// The texts come back in the column `error`.
    fn columns(texts: &ArrayRef) -> EmbeddedColumns {
        let rows = texts.len();
        EmbeddedColumns {
            vectors: Arc::clone(texts),
            truncated: BooleanArray::from(vec![false; rows]),
            error: StringArray::new_null(rows),
            row_errors: Vec::new(),
            tokens: UInt32Array::from(vec![0; rows]),
            keep: None,
            stats: ColumnStats { rows, ..ColumnStats::default() },
            cost: elmo::engine::Cost::default(),
        }
    }

    #[async_trait]
    impl Stage for Manual {
        fn spec(&self) -> &EmbedSpec {
            &self.spec
        }

        fn fields(&self) -> Vec<Field> {
            Vec::new()
        }

        fn metadata(&self) -> Vec<(String, String)> {
            Vec::new()
        }

        async fn submit(&self, texts: &ArrayRef) -> elmo::Result<Pending> {
            let (sender, receiver) = oneshot::channel();
            let number = {
                let mut senders = self.senders.lock().unwrap();
                senders.push(Some(sender));
                senders.len() - 1
            };
            if self.fails == Some(number) {
                return Err(failure(number));
            }
            let columns = columns(texts);
            Ok(Box::pin(async { receiver.await.unwrap().map(|()| columns) }))
        }
    }

    fn texts(number: usize) -> ArrayRef {
        Arc::new(StringArray::from(vec![number.to_string(); number % 3 + 1]))
    }

    /// Adds a batch and submits it.
    fn push(queue: &mut InOrder<'_, usize>, tag: usize, bytes: u64) -> Result<(), usize> {
        queue.push(tag, texts(tag), bytes)?;
        queue.proceed(&mut Context::from_waker(futures::task::noop_waker_ref()));
        Ok(())
    }

    const LIMIT: InFlightLimit = InFlightLimit { batches: 4, bytes: 100 };

    proptest! {
        /// Devices finish in any order. Expected by counting: the `n`th result has tag `n` and its own texts.
        #[test]
        fn batches_come_out_in_order_and_within_the_limit(
            steps in prop::collection::vec((0_u64..150, 0_usize..8, any::<bool>()), 1..60),
        ) {
            let stage = Manual::default();
            let mut queue = InOrder::new(&stage, LIMIT);
            let (mut pushed, mut taken, mut waiting, mut sizes) = (0, 0, Vec::<usize>::new(), Vec::<u64>::new());
            for (bytes, completes, takes) in steps {
                let had_room = queue.has_room(bytes);
                if push(&mut queue, pushed, bytes).is_ok() {
                    prop_assert!(had_room);
                    waiting.push(pushed);
                    sizes.push(bytes);
                    pushed += 1;
                } else {
                    prop_assert!(!had_room && !queue.is_empty());
                }
                prop_assert!(queue.len() <= LIMIT.batches);
                prop_assert!(queue.len() == 1 || queue.bytes() <= LIMIT.bytes);
                prop_assert_eq!(queue.bytes(), sizes[taken..].iter().sum::<u64>());
                if completes < waiting.len() {
                    stage.complete(waiting.remove(completes), Ok(()));
                }
                if takes {
                    let oldest_is_done = taken < pushed && !waiting.contains(&taken);
                    match queue.next().now_or_never() {
                        None => prop_assert!(!oldest_is_done && !queue.is_empty()),
                        Some(None) => prop_assert_eq!(taken, pushed),
                        Some(Some(done)) => {
                            let (tag, columns) = done.unwrap();
                            prop_assert_eq!((oldest_is_done, tag), (true, taken));
                            prop_assert_eq!(&columns.vectors, &texts(taken));
                            taken += 1;
                        }
                    }
                }
            }
            waiting.into_iter().rev().for_each(|batch| stage.complete(batch, Ok(())));
            while let Some(done) = queue.next().now_or_never().unwrap() {
                prop_assert_eq!(done.unwrap().0, taken);
                taken += 1;
            }
            prop_assert_eq!((taken, queue.bytes()), (pushed, 0));
        }
    }

    #[test]
    fn an_error_comes_in_its_turn_and_cancels_what_is_behind_it() {
        let stage = Manual::default();
        let mut queue = InOrder::new(&stage, LIMIT);
        (0..4).for_each(|tag| push(&mut queue, tag, 1).unwrap());
        stage.complete(1, Err(failure(7)));
        stage.complete(2, Ok(()));
        assert!(queue.next().now_or_never().is_none(), "the first batch is not done");
        stage.complete(0, Ok(()));
        assert_eq!(queue.next().now_or_never().unwrap().unwrap().unwrap().0, 0);
        let failed = queue.next().now_or_never().unwrap().unwrap().unwrap_err();
        assert_eq!((failed.tag, failed.error.to_string()), (1, failure(7).to_string()));
        assert!(queue.is_empty() && queue.bytes() == 0 && stage.is_cancelled(3));
        assert!(queue.next().now_or_never().unwrap().is_none());
        push(&mut queue, 4, 1).unwrap();
    }

    #[test]
    fn a_submission_that_fails_comes_in_its_turn_and_nothing_is_added_behind_it() {
        let stage = Manual::default();
        let mut queue = InOrder::new(&stage, LIMIT);
        push(&mut queue, 0, 1).unwrap();
        queue.add(1, Err(failure(1)), 1);
        assert_eq!(push(&mut queue, 2, 1), Err(2));
        assert_eq!(stage.submitted(), 1);
        assert!(queue.next().now_or_never().is_none(), "the first batch is not done");
        stage.complete(0, Ok(()));
        assert_eq!(queue.next().now_or_never().unwrap().unwrap().unwrap().0, 0);
        let failed = queue.next().now_or_never().unwrap().unwrap().unwrap_err();
        assert_eq!((failed.tag, failed.error.to_string()), (1, failure(1).to_string()));
        push(&mut queue, 3, 1).unwrap();
    }

    /// State `carry`: the results of a batch depend on all batches before it.
    #[test]
    fn in_state_carry_batches_are_submitted_one_after_the_other() {
        let spec = EmbedSpec { batch_rows: Some(4), ..EmbedSpec::default() };
        let stage = Manual { spec, fails: Some(1), ..Manual::default() };
        let mut queue = InOrder::new(&stage, LIMIT);
        (0..3).for_each(|tag| push(&mut queue, tag, 1).unwrap());
        assert_eq!(stage.submitted(), 1);
        stage.complete(0, Ok(()));
        assert_eq!(queue.next().now_or_never().unwrap().unwrap().unwrap().0, 0);
        let failed = queue.next().now_or_never().unwrap().unwrap().unwrap_err();
        assert_eq!((failed.tag, stage.submitted()), (1, 2), "nothing is submitted after a failure");
        assert!(queue.is_empty());
    }

    #[test]
    fn dropping_cancels() {
        let stage = Manual::default();
        let mut queue = InOrder::new(&stage, LIMIT);
        (0..3).for_each(|tag| push(&mut queue, tag, 1).unwrap());
        // Waiting for a batch and giving up does not cancel it.
        assert!(queue.next().now_or_never().is_none());
        assert!(!stage.is_cancelled(0));
        drop(queue);
        assert!((0..3).all(|batch| stage.is_cancelled(batch)));
    }
}
